"""Time one rank's work on a dataset before a model is loaded, in a process of its own.

    python benchmarks/start_up.py FOLDER MAX_TOKENS

prints one line of JSON: seconds to open and check the folder, to plan its packs and to get its scan, and the added
private memory (RssAnon of /proc/self/status, in bytes) afterwards and at its peak.
"""

import json
import re
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

SAMPLE_SECONDS = 0.005


def private_bytes() -> int:
    """Return this process's private memory in bytes, without pages of mapped files."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


class PrivatePeak:
    """A sampler of private memory while a block runs; ``bytes`` is the highest sample."""

    def __enter__(self) -> "PrivatePeak":
        self.bytes, self._stop = private_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, private_bytes())


def start(folder: str, max_tokens: int) -> dict:
    """Open, plan and scan inside a process group of one rank."""
    import datasets

    from verl_ext.data import SFTDataSet
    from verl_ext.data.arrow import TokenizedData
    from verl_ext.trainer.distributed import RunRanks

    datasets.disable_progress_bars()
    before, seconds = private_bytes(), {}
    with PrivatePeak() as peak:
        began = time.perf_counter()
        TokenizedData([folder])
        seconds["open"] = time.perf_counter() - began
        began = time.perf_counter()
        dataset = SFTDataSet(folder, max_tokens)
        seconds["plan"] = time.perf_counter() - began - seconds["open"]
        began = time.perf_counter()
        dataset.read_together(RunRanks())
        seconds["scan"] = time.perf_counter() - began
    held = private_bytes() - before
    return {
        "seconds": seconds,
        "private": {"held": held, "peak": peak.bytes - before},
        "documents": len(dataset.spans),
        "tokens": int(dataset.pack_tokens().sum()),
        "packs": len(dataset),
        "targets": int(dataset.scan.targets.sum()),
    }


def main() -> None:
    """Measure in a process group of one rank, as the trainer does."""
    from verl_ext.trainer.distributed import process_group

    with process_group():
        print(json.dumps(start(sys.argv[1], int(sys.argv[2]))))


if __name__ == "__main__":
    main()
