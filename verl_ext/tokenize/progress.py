"""One progress bar over all sources: records/s, tokens/s and the time left."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

from verl_ext.tokenize.worker import ChunkResult


class Progress:
    """A bar in bytes of input, which are known before a record is read."""

    def __init__(self, total_bytes: int) -> None:
        self.records = self.tokens = 0
        self.started = time.monotonic()
        self.bar = tqdm(
            total=total_bytes,
            desc="tokenise",
            bar_format="{desc}: {percentage:3.0f}%|{bar:24}| {postfix} [{elapsed}, {remaining} left]",
            # A log file gets a line now and then, a terminal a bar that moves.
            mininterval=0.2 if sys.stderr.isatty() else 10,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.bar.n = self.bar.total
        self.bar.close()

    def add(self, result: ChunkResult) -> None:
        """Count a chunk that is written."""
        self.records += result.tally.records
        self.tokens += result.tally.tokens
        seconds = max(time.monotonic() - self.started, 1e-9)
        rates = f"{self.records / seconds:,.0f} records/s, {self.tokens / seconds:,.0f} tokens/s"
        self.bar.set_postfix_str(f"{self.records:,} records, {rates}", refresh=False)
        self.bar.update(min(result.num_bytes, self.bar.total - self.bar.n))
