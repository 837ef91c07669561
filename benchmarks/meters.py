"""Clocks and peaks of memory: of a block, of private memory, of a whole command."""

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import ROOT

MIB = 2**20
_PRIVATE_EVERY, _COMMAND_EVERY = 0.005, 0.2  # seconds between two samples


def on_gpu() -> bool:
    """Return whether torch is loaded and has a GPU."""
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_available()


def wait_for_gpu() -> None:
    """Wait for the GPU, if there is one."""
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
def measured() -> Iterator[dict[str, float]]:
    """Measure a block's processor seconds, and the MiB of its peak above the memory before it.

    The memory is the process's resident one, or on a GPU that of its tensors.
    """
    figures: dict[str, float] = {}
    before = _memory(reset=True)
    began = time.process_time()
    yield figures
    figures["seconds"] = time.process_time() - began
    figures["peak_mib"] = (_memory(reset=False) - before) / MIB


def _memory(reset: bool) -> float:
    """Return the peak in bytes; `reset` makes the present value the peak, and returns that."""
    if on_gpu():
        cuda = sys.modules["torch"].cuda
        if reset:
            cuda.reset_peak_memory_stats()
        return cuda.memory_allocated() if reset else cuda.max_memory_allocated()
    if sys.platform == "darwin":  # counts bytes, and has no reset
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS" if reset else "VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class PrivatePeak:
    """The bytes of private memory that a block adds: `held` at its end, `peak` at most; without mapped files."""

    def __enter__(self) -> "PrivatePeak":
        self._before = self._highest = _status("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        now = _status("RssAnon")
        self.held, self.peak = now - self._before, max(now, self._highest) - self._before

    def _watch(self) -> None:
        while not self._stop.wait(_PRIVATE_EVERY):
            self._highest = max(self._highest, _status("RssAnon"))


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run a command; return its seconds, processor seconds, and peak MiB of its process and of any worker.

    The processor seconds include those of its children. Workers are those of multiprocessing and of Ray.
    """
    import psutil

    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = psutil.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peaks = {"own_mib": 0.0, "worker_mib": 0.0}
    while run.poll() is None:
        for process in (run, *run.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if process == run or "ray::" in words or "multiprocessing" in words:
                    key = "own_mib" if process == run else "worker_mib"
                    peaks[key] = max(peaks[key], process.memory_info().rss / MIB)
        with contextlib.suppress(psutil.TimeoutExpired):
            run.wait(_COMMAND_EVERY)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"seconds": time.perf_counter() - began, "processor_seconds": processor, **peaks}
