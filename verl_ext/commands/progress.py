"""Progress bars: a terminal gets one that moves, a log file a line now and then."""

import sys
import time
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm


def progress_bar(description: str, total: int | None, **looks: Any) -> tqdm:
    """A tqdm bar over `total` units, redrawn as often as where it is shown bears; `looks` are tqdm's own options."""
    return tqdm(total=total, desc=description, mininterval=0.2 if sys.stderr.isatty() else 10, **looks)


class Done(Protocol):
    """Records that are done: how many, their tokens, and the bytes of input that they were."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def tokens(self) -> int: ...


class Progress:
    """A bar in bytes of input, with records/s, tokens/s and the time left; without an end where the bytes to read are
    not known (None)."""

    def __init__(self, total_bytes: int | None, description: str = "tokenise") -> None:
        self.records = self.tokens = 0
        self.started = time.monotonic()
        looks = "{desc}: {percentage:3.0f}%|{bar:24}| {postfix} [{elapsed}, {remaining} left]"
        if total_bytes is None:
            looks = "{desc}: {postfix} [{elapsed}]"
        self.bar = progress_bar(description, total_bytes, bar_format=looks)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.bar.total is not None:
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
