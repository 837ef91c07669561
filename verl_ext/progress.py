"""Progress bars over files and over steps, and rows as a text table.

A terminal gets a bar that moves, a log file a line now and then.
"""

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm


def progress_bar(description: str, total: int | None, **options: Any) -> tqdm:
    """A tqdm bar over `total` units, redrawn often on a terminal and seldom in a log; `options`: tqdm's."""
    return tqdm(total=total, desc=description, mininterval=0.2 if sys.stderr.isatty() else 10, **options)


class Done(Protocol):
    """Records that are done: how many, their tokens, and the bytes of input that they were."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def tokens(self) -> int: ...


class Progress:
    """A bar over the bytes of input files, with records/s, tokens/s and the time left.

    total_bytes: None where it is not known; the bar has no end then.
    """

    def __init__(self, total_bytes: int | None, description: str = "tokenize") -> None:
        self.records = self.tokens = 0
        self.started = time.monotonic()
        bar_format = "{desc}: {percentage:3.0f}%|{bar:24}| {postfix} [{elapsed}, {remaining} left]"
        if total_bytes is None:
            bar_format = "{desc}: {postfix} [{elapsed}]"
        self.bar = progress_bar(description, total_bytes, bar_format=bar_format)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None and self.bar.total is not None:
            self.bar.n = self.bar.total
        self.bar.close()

    def add(self, done: Done) -> None:
        """Count records that are written."""
        self.records += done.records
        self.tokens += done.tokens
        seconds = max(time.monotonic() - self.started, 1e-9)
        rates = f"{self.records / seconds:,.0f} records/s, {self.tokens / seconds:,.0f} tokens/s"
        self.bar.set_postfix_str(f"{self.records:,} records, {rates}", refresh=False)
        total = self.bar.total
        self.bar.update(done.num_bytes if total is None else min(done.num_bytes, total - self.bar.n))


class StepProgress:
    """A bar over optimizer steps; silent on other ranks.

    Args:
        first_step: steps done before this process.
        total_steps: steps of the whole run.
        visible: True on rank 0.
    """

    def __init__(self, first_step: int, total_steps: int, visible: bool) -> None:
        self.visible = visible
        self.bar = tqdm(initial=first_step, total=total_steps, desc="train", unit="step", disable=not visible)
        self.started = self._since = time.perf_counter()
        self.total_tokens = self._tokens = 0  # of the run, and since the rate was last asked for

    def step(self, tokens: int) -> None:
        """One optimizer step over `tokens` tokens of all ranks has ended."""
        self._tokens += tokens
        self.total_tokens += tokens
        self.bar.update(1)

    def tokens_per_second(self) -> float:
        """Rate since this was last asked."""
        now = time.perf_counter()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._since, self._tokens = now, 0
        return rate

    def show(self, metrics: Mapping[str, float]) -> None:
        """Put the loss and the rate beside the bar."""
        rate = metrics["train/tokens_per_second"]
        self.bar.set_postfix_str(f"loss {metrics['train/loss']:.4f}, {rate:,.0f} tokens/s")

    def pause(self) -> float:
        """A moment from which :meth:`resume` takes time that is no training (validation, checkpoints)."""
        return time.perf_counter()

    def resume(self, paused: float) -> None:
        """Leave the time since `paused` out of the rate."""
        self._since += time.perf_counter() - paused

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self.visible:
            tqdm.write(line)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Clear the bar around code that prints, so that lines do not run into it.

        tqdm's own form holds its lock all the while: a thread that opens a bar, and that is waited for, would hang.
        """
        self.bar.clear()
        try:
            yield
        finally:
            self.bar.refresh()

    def close(self) -> None:
        """End the bar and print the run's totals."""
        self.bar.close()
        seconds = time.perf_counter() - self.started
        self.say(f"trained on {self.total_tokens:,} tokens in {seconds:.1f} s")


Row = dict[str, str]


def aligned(rows: Sequence[Row], left: Collection[str]) -> str:
    """Rows of the same keys as lines under a header: the columns named in `left` to the left, numbers to the right."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}

    def line(cells: Row) -> str:
        padded = (cells[k].ljust(w) if k in left else cells[k].rjust(w) for k, w in widths.items())
        return "  ".join(padded).rstrip()

    return "\n".join([line({key: key for key in widths}), *map(line, rows)])
