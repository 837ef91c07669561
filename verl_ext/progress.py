"""Progress bars over files and over steps.

On a terminal, a bar moves; a log file gets a line now and then.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from verl_ext import __version__
from verl_ext.options import one_line

_LINE = 80  # columns of the bar in a log
_HEADLINES = ("loss", "reward_margin", "reward_accuracy", "exact_match", "accuracy", "answer", "perplexity")


def announce(work: str) -> None:
    """Print on rank 0 that `work` begins, without a process group."""
    if os.environ.get("RANK", "0") == "0":
        print(f"verl-ext {__version__}: {work} …", flush=True)


class _LineBar(tqdm):
    """A bar that prints whole lines to a file or pipe."""

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        return lambda line: print(line, file=file, flush=True)

    def close(self) -> None:
        if not self.disable:
            self.display()
            self.delay = math.inf  # tqdm then has nothing to clear
        super().close()


def progress_bar(description: str, total: int | None, **options: Any) -> tqdm:
    """Return a tqdm bar, frequent on a terminal, rare in logs."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, mininterval=0.2, **options)
    return _LineBar(total=total, desc=description, mininterval=10, ncols=_LINE, delay=10, **options)


def terminal_bar(description: str, visible: bool, over: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Return a delayed bar for a terminal; logs and ranks where it is not `visible` have none."""
    hidden = None if visible else True  # None: unless stderr is a terminal
    return tqdm(over, desc=description, disable=hidden, **{"delay": 3, "mininterval": 0.2, **options})


def four_digits(value: float) -> str:
    """Return four significant digits: 2.134, 987.0, 12.34k, 1.235M, 1.000e-05, nan."""
    value = float(f"{value:.4g}")
    for unit in ("", "k", "M", "G"):
        if not 1e4 <= abs(value) < math.inf or unit == "G":
            break
        value /= 1000
    return f"{value:#.4g}".rstrip(".") + unit


class Progress:
    """A bar over input bytes, with records, tokens/s and time left.

    It appears with the first tokens. total_bytes: None if it is unknown; the bar then has no end.
    """

    def __init__(self, total_bytes: int | None, description: str = "tokenize") -> None:
        self.num_bytes = self.records = self.tokens = 0
        self.started = time.monotonic()
        self.bar: tqdm | None = None
        self._total, self._description = total_bytes, description

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self.bar is not None:
            if error_type is None and self._total is not None:
                self.bar.n = self._total
            self.bar.close()

    def add(self, num_bytes: int, records: int, tokens: int) -> None:
        """Count written records, and the bytes that they take in the input."""
        self.num_bytes += num_bytes
        self.records += records
        self.tokens += tokens
        if not self.tokens:  # an early mistake is told without a bar
            return
        start = "{desc}: " if self._total is None else "{desc}: {percentage:3.0f}%|{bar}| "
        if self.bar is None:
            self.bar = progress_bar(self._description, self._total, bar_format=f"{start}starting")
        left = ", {remaining} left" if self._total and num_bytes else ""
        rate = four_digits(self.tokens / max(time.monotonic() - self.started, 1e-9))
        self.bar.bar_format = f"{start}{self.records:,} records, {rate} tokens/s [{{elapsed}}{left}]"
        reached = self.num_bytes if self._total is None else min(self.num_bytes, self._total)
        self.bar.update(reached - self.bar.n)


class StepProgress:
    """A bar over optimizer steps, and a logger for verl's tracking.

    The logger prints one line for the metrics of each step, once :meth:`flush` says that all are there:

        step  20/400 | loss 2.138  maths_loss 2.718 | val loss 2.201 … | lr 1e-05  epoch 0.1 … 00:18 left

    Other ranks than rank 0 print nothing.

    Args:
        first_step: the number of steps before this process.
        total_steps: the number of steps of the whole run.
        visible: True on rank 0.
    """

    def __init__(self, first_step: int, total_steps: int, visible: bool) -> None:
        self.visible, self.total_steps = visible, total_steps
        self.bar = terminal_bar("train", visible, total=total_steps, initial=first_step, unit=" step", delay=0)
        self.started = self._since = self._first_ended = time.perf_counter()
        self.total_tokens = self._tokens = 0  # of the run, and since the last call of `rates`
        self._flops: float | None = 0.0  # since that call
        self._steps = 0
        self._pending: dict[str, float] = {}  # the metrics of a step whose line is not printed
        self._pending_step = 0

    def step(self, tokens: int, flops: float | None = None) -> None:
        """Count a step's tokens and FLOPs (None: unknown) of all ranks."""
        self._tokens += tokens
        self._flops = None if flops is None or self._flops is None else self._flops + flops
        self.total_tokens += tokens
        self._steps += 1
        if self._steps == 1:
            self._first_ended = time.perf_counter()
        self.bar.update(1)

    def rates(self) -> tuple[float, float | None]:
        """Return tokens and FLOPs (None: unknown) per second since the last call.

        They are those of all ranks; the time in :meth:`paused` does not count.
        """
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        rates = self._tokens / seconds, None if self._flops is None else self._flops / seconds
        self._since, self._tokens, self._flops = now, 0, 0.0
        return rates

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show the loss and the rate beside the bar."""
        loss, rate = (four_digits(metrics[f"train/{name}"]) for name in ("loss", "tokens_per_second"))
        self.bar.set_postfix_str(f"loss {loss}, {rate} tokens/s")

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Keep a step's metrics for :meth:`flush`; print a save at once."""
        if (pause := data.get("train/save_pause")) is not None:
            print(f"{self._count(step)}  saved, training waited {four_digits(pause)} s", flush=True)
            return
        if self._pending and step != self._pending_step:
            self.flush()
        self._pending, self._pending_step = {**self._pending, **data}, step

    def flush(self) -> None:
        """Print a step's metrics of training and validation.

        A terminal of fewer columns gets it in several rows; a file or a pipe gets one line with every category.
        """
        if not self._pending:
            return
        data, step, self._pending = self._pending, self._pending_step, {}
        groups = [[self._count(step)], _losses(data, "train"), _losses(data, "val"), self._pace(data, step)]
        with self.aside():
            print(_rows([group for group in groups if group]), flush=True)

    def _count(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _pace(self, data: Mapping[str, float], step: int) -> list[str]:
        """Return the schedule, gradient, speed, memory and time left."""
        values = {name.partition("/")[2]: value for name, value in data.items() if not name.startswith("val/")}
        parts = [f"{name} {values[name]:.4g}" for name in ("lr", "epoch", "grad_norm") if name in values]
        if (rate := values.get("tokens_per_second")) is None:
            return parts
        parts.append(f"{four_digits(rate)} tokens/s")
        of_rank = values.get("tokens_per_second_per_gpu", rate)
        if (mfu := values.get("mfu")) is not None:
            parts.append(f"MFU {mfu:.1%}")
        elif of_rank < rate:
            parts.append(f"{four_digits(of_rank)}/rank")
        # The estimate leaves out the first step, which compiles, and includes validations and checkpoints.
        now = time.perf_counter()
        seconds = (now - self._first_ended) / (self._steps - 1) if self._steps > 1 else now - self.started
        left = tqdm.format_interval(seconds * (self.total_steps - step))
        return [*parts, f"{four_digits(values['memory_gib'])} GiB", f"{left} left"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block (validation, checkpoints) from the rate."""
        since = time.perf_counter()
        try:
            yield
        except BaseException:
            self.flush()  # the step is trained, though its validation fails
            raise
        finally:
            self._since += time.perf_counter() - since

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.visible:
            tqdm.write(line)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Clear the bar around code that prints its own lines.

        tqdm's own context manager holds its lock all the time, so waiting for a thread that opens a bar would hang.
        """
        self.bar.clear()
        try:
            yield
        finally:
            self.bar.refresh()

    def close(self) -> None:
        """End the bar and print the run's totals, if anything was trained."""
        self.flush()
        self.bar.close()
        seconds = time.perf_counter() - self.started
        if self.total_tokens:
            self.say(f"trained on {self.total_tokens:,} tokens in {seconds:.1f} s")


def _losses(data: Mapping[str, float], kind: str) -> list[str]:
    """Return the losses, headlines and answers' scores of `train` or `val`."""
    values = {name.removeprefix(f"{kind}/"): value for name, value in data.items() if name.startswith(f"{kind}/")}
    names = [name for name in _HEADLINES if name in values]
    names += [name for name in values if name.endswith("_loss") and f"{name.removesuffix('_loss')}_tokens" in values]
    names += [name for name in values if name.startswith(("answer/", "answer_", "loss_"))]
    parts = [f"{one_line(name)} {four_digits(values[name])}" for name in names]
    return [f"{kind} {parts[0]}", *parts[1:]] if parts and kind == "val" else parts


def _rows(groups: Sequence[Sequence[str]]) -> str:
    """Join groups into one line, or rows that fit a terminal."""
    width = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else math.inf
    text, used = "", 0
    for group in groups:
        for number, part in enumerate(group):
            mark = "" if not text else "  " if number else " | "
            if text and used + len(mark) + len(part) > width:
                text, used, mark = f"{text}\n", 0, "    "
            text, used = f"{text}{mark}{part}", used + len(mark) + len(part)
    return text
