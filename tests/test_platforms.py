"""What is only on Linux is not needed to import the package: macOS has the rest."""

import subprocess
import sys

# Every module, where the functions are gone that only Linux has.
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
