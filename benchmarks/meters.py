"""Clocks and peaks of memory, of a block and of a command."""

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cells import ROOT

MIB = 2**20
_PRIVATE_EVERY, _COMMAND_EVERY = 0.005, 0.2  # seconds between two samples


def on_gpu() -> bool:
    """Return whether torch is loaded and has a GPU."""
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_available()


def wait_for_gpu() -> None:
    if on_gpu():
        sys.modules["torch"].cuda.synchronize()


def seconds(function: Callable[[], Any]) -> float:
    """Return the wall seconds of a call, the GPU's work included."""
    wait_for_gpu()
    began = time.perf_counter()
    function()
    wait_for_gpu()
    return time.perf_counter() - began


@contextlib.contextmanager
def measured(private: bool = False) -> Iterator[dict[str, float]]:
    """Measure a block's processor `seconds`, and the `peak_mib` that it adds.

    The memory is the process's resident one, or on a GPU that of its tensors. private: the process's memory without
    mapped files, with `held_mib` at the end of the block.
    """
    figures: dict[str, float] = {}
    end = (_sampled_memory if private else _counted_memory)()
    began = time.process_time()
    yield figures
    figures["seconds"] = time.process_time() - began
    figures |= end()


def _counted_memory() -> Callable[[], dict[str, float]]:
    if on_gpu():
        cuda = sys.modules["torch"].cuda
        cuda.reset_peak_memory_stats()
        before, peak = cuda.memory_allocated(), cuda.max_memory_allocated
    else:
        Path("/proc/self/clear_refs").write_text("5")  # makes the present value the peak
        before, peak = _status("VmRSS"), partial(_status, "VmHWM")
    return lambda: {"peak_mib": (peak() - before) / MIB}


def _sampled_memory() -> Callable[[], dict[str, float]]:
    """Sample the private memory, of which the kernel keeps no peak."""
    samples, ended = [_status("RssAnon")], threading.Event()

    def sample() -> None:
        while not ended.wait(_PRIVATE_EVERY):
            samples.append(_status("RssAnon"))

    def end() -> dict[str, float]:
        ended.set()
        thread.join()
        samples.append(_status("RssAnon"))
        return {"held_mib": (samples[-1] - samples[0]) / MIB, "peak_mib": (max(samples) - samples[0]) / MIB}

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    return end


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run_command(command: Sequence[str]) -> dict[str, float]:
    """Run a command; return its seconds, those of its processors, its and any worker's peak MiB."""
    import psutil

    began = time.perf_counter()
    run = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peaks = {"own_mib": 0.0, "worker_mib": 0.0}
    cpu: dict[int, float] = {}  # by worker, at its last sample
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    while run.poll() is None:
        for process in (run, *run.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if process == run or "ray::" in words or "multiprocessing" in words:
                    key = "own_mib" if process == run else "worker_mib"
                    peaks[key] = max(peaks[key], process.memory_info().rss / MIB)
                    cpu[process.pid] = 0.0 if process == run else sum(process.cpu_times()[:2])
        with contextlib.suppress(psutil.TimeoutExpired):
            run.wait(_COMMAND_EVERY)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    own = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - sum(before[:2])
    return {"seconds": time.perf_counter() - began, "cpu": own + sum(cpu.values()), **peaks}
