"""What rank 0 shows while a run goes on: one bar with loss, rate and time left, and what has to be said."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from tqdm import tqdm


class Progress:
    """A bar over optimizer steps; silent on other ranks.

    Args:
        first_step: steps done before this process.
        total_steps: steps of the whole run.
        visible: True on rank 0.
    """

    def __init__(self, first_step: int, total_steps: int, visible: bool) -> None:
        self.visible = visible
        self.bar = tqdm(initial=first_step, total=total_steps, desc="train", unit="step", disable=not visible)
        self._since = time.perf_counter()
        self._tokens = 0
        self.total_tokens = 0
        self.started = self._since

    def step(self, tokens: int) -> None:
        """One optimizer step over ``tokens`` tokens of all ranks has ended."""
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
        """Leave the time since ``paused`` out of the rate."""
        self._since += time.perf_counter() - paused

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self.visible:
            tqdm.write(line)

    def aside(self) -> AbstractContextManager:
        """While upstream prints: the bar is off the screen, so that lines do not run into it."""
        return tqdm.external_write_mode() if self.visible else nullcontext()

    def close(self) -> None:
        """End the bar and tell the run's totals."""
        self.bar.close()
        seconds = time.perf_counter() - self.started
        self.say(f"trained on {self.total_tokens:,} tokens in {seconds:.1f} s")
