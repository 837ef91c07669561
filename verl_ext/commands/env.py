"""The command `verl-ext env`: what a bug report needs to know about this machine."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from verl_ext import __version__
from verl_ext.redaction import redacted_text

_USAGE = """usage: verl-ext env

Prints the versions, GPUs and settings that a bug report needs, without secrets."""
_PACKAGES = (
    *("verl", "torch", "transformers", "datasets", "peft", "hydra-core", "ray", "numpy", "pyarrow"),
    *("flash-attn", "flash-linear-attention", "liger-kernel", "bitsandbytes", "triton"),
)
# Variables that change how a run behaves. Their values should hold no secrets, and are redacted all the same.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "SLURM_JOB_ID", "RAY_ADDRESS")
_FAMILIES = ("NCCL_", "TORCH_NCCL_", "PYTORCH_", "TORCH_LOGS", "VERL_", "GLOO_")


def facts() -> Iterator[tuple[str, str]]:
    """Yield (name, value) of everything that is reported."""
    yield "verl-ext", f"{__version__}{_commit()}"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield from _torch()
    yield "CPU", f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    yield "free disk", f"{shutil.disk_usage('.').free / 2**30:.0f} GiB in the working directory"
    for name, value in sorted(os.environ.items()):
        if name in _VARIABLES or name.startswith(_FAMILIES):
            yield name, redacted_text(f"{name}={value}").partition("=")[2]


def _torch() -> Iterator[tuple[str, str]]:
    """Yield what torch knows of the GPUs."""
    try:
        import torch
    except Exception as error:  # a broken install is what a report is about
        yield "torch cannot be imported", f"{type(error).__name__}: {error}"
        return
    yield "CUDA of torch", torch.version.cuda or "none"
    if not torch.cuda.is_available():
        yield "GPU", "none"
        return
    yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))
    yield "driver", _driver()
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"


def _driver() -> str:
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _commit() -> str:
    """Return the commit of a checkout, marked if it has changes; nothing for an installed package."""
    folder = Path(__file__).resolve().parent.parent.parent
    if not (folder / ".git").exists():
        return ""
    try:
        words = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=10)
        return f" ({done.stdout.strip()})" if done.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def main(words: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    if words:
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(words) else 2
    rows = list(facts())
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return 0
