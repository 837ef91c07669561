"""A rank that hangs, or no longer answers, ends the run on every rank and is named.

Each rank marks its progress: a batch that arrives, a micro-batch's forward pass. A thread of each rank watches the
marks from the end of its first step on, and writes now and then into the store of the ranks how far it is. Where one
rank makes none, the others soon wait for it in a collective, and one of them looks who it is:

    0   [beat, 41, "step 12", waits, "torch/distributed/… (all_reduce), from verl_ext/trainer/trainer.py:180 (…)"]
    1   [beat, 40, "step 12", does not, "verl_ext/trainer/loader.py:173 (__iter__)"]    behind the others: it hangs
    2   no new beat                                                                     stopped, dead or out of reach

Not watched, because they may take hours: everything before the first step and the step itself, which compiles, and
checkpoints. There a collective's own limit counts (`trainer.nccl_timeout`).
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from verl_ext.trainer.distributed import TRAINING_FAILED, exit_this_rank, leave, let_the_first_speak

_PACKAGE = Path(__file__).parent.parent
_NAMED = 4  # ranks that the line names


@dataclass(frozen=True)
class RankState:
    """How far a rank was when it made no more progress.

    Attributes:
        paused: it does what may take as long as it likes.
        marks: of progress, so far; phase: "step 12".
        waits: it is inside a collective; where: the place in the code.
    """

    paused: bool
    marks: int
    phase: str
    waits: bool
    where: str


def verdict(states: Sequence[RankState | None], processes: Sequence[str]) -> str | None:
    """Which ranks the others wait for, and where those are; None where one may take its time.

    Args:
        states: of each rank; None: it does not answer.
        processes: "process 4711 on host-b" of each rank.
    """
    if silent := [rank for rank, state in enumerate(states) if state is None]:
        return f"{_named(silent, processes)} does not answer: stopped, dead or out of reach"
    known = [state for state in states if state is not None]
    if any(state.paused for state in known):
        return None
    least = min(state.marks for state in known)
    behind = [rank for rank, state in enumerate(known) if state.marks == least]
    behind = [rank for rank in behind if not known[rank].waits] or behind
    first = known[behind[0]]
    if len(behind) == len(known) > 1:
        return f"no rank is behind the others in {first.phase}; rank 0 is at {first.where}"
    return f"{_named(behind, processes)} hangs in {first.phase} at {first.where}"


def _named(ranks: Sequence[int], processes: Sequence[str]) -> str:
    names = ", ".join(f"rank {rank} ({processes[rank]})" for rank in ranks[:_NAMED])
    return names + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")


class HangWatch:
    """The watch over this process's progress."""

    def __init__(self) -> None:
        self._marks, self._at, self._phase = 0, time.monotonic(), ""
        self._paused = False
        self._answered = self._at  # when the store did
        self._ended = threading.Event()

    def mark(self, phase: str | None = None) -> None:
        """There is progress; `phase`: a new step or the like has begun."""
        self._phase = phase or self._phase
        self._marks, self._at = self._marks + 1, time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While something is done that may take as long as it likes."""
        self._paused = True
        try:
            yield
        finally:
            self.mark()
            self._paused = False

    def start(self, seconds: int) -> None:
        """End the run after so many seconds without a mark; collective, 0: never. Until :meth:`end`."""
        self._ended = threading.Event()
        if not seconds:
            return
        self.mark()
        # A connection of its own: another thread may wait in the ranks' one.
        store: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=seconds))
        store = dist.PrefixStore("verl_ext/hang", store)
        store.set(f"process {dist.get_rank()}", f"process {os.getpid()} on {socket.gethostname()}")
        self._answered = time.monotonic()
        tick = min(5.0, seconds / 10)
        self._tell(store, 0)
        dist.barrier()  # a rank that has not told yet would be taken for one that hangs
        for target in (self._compare, self._give_up):
            threading.Thread(target=target, args=(store, seconds, tick, self._ended), daemon=True).start()

    def end(self) -> None:
        """No longer watch."""
        self._ended.set()

    def _stalled(self) -> float:
        return 0.0 if self._paused else time.monotonic() - self._at

    def _tell(self, store: dist.Store, beat: int) -> None:
        store.set(f"state {dist.get_rank()}", json.dumps([beat, *self._state()]))

    def _compare(self, store: dist.Store, seconds: int, tick: float, ended: threading.Event) -> None:
        """Say how far this rank is; where it makes no progress, one rank compares them all."""
        with suppress(RuntimeError):  # the store is gone: _give_up counts on
            for beat in itertools.count(1):
                if ended.wait(tick):
                    return
                self._tell(store, beat)
                if store.check(["verdict"]):
                    self._end(store.get("verdict").decode(), seconds, store)
                self._answered = time.monotonic()
                if self._stalled() > seconds - 4 * tick:
                    is_first = store.add("judges", 1) == 1
                    if is_first or self._stalled() > seconds:  # by then the first has ended while it looked
                        self._judge(store, seconds, tick)
                    store.add("judges", -1)

    def _judge(self, store: dist.Store, seconds: int, tick: float) -> None:
        """End the run, unless there is progress after all, or a rank that may take its time."""
        marks, before = self._marks, _states(store)
        time.sleep(2.5 * tick)
        states = [
            None if now is None or (then is not None and now[0] <= then[0]) else RankState(*now[1:])
            for then, now in zip(before, _states(store), strict=True)
        ]
        states[dist.get_rank()] = RankState(*self._state())
        told = verdict(states, [store.get(f"process {rank}").decode() for rank in range(len(states))])
        if told is not None and self._marks == marks:
            store.set("verdict", told)
            self._end(told, seconds, store)

    def _end(self, told: str, seconds: int, store: dist.Store) -> None:
        """End this rank; one of each node says why."""
        if store.add(f"told on {socket.gethostname()}", 1) == 1:
            exit_this_rank(
                f"no progress for {seconds} s (trainer.hang_timeout): {told}; the same command resumes from the last "
                "checkpoint",
                TRAINING_FAILED,
                of_another=True,
            )
        time.sleep(1)  # the line is to be out before torchrun ends the node
        leave(TRAINING_FAILED)

    def _give_up(self, store: dist.Store, seconds: int, tick: float, ended: threading.Event) -> None:
        """End this rank where the store does not answer."""
        while not ended.wait(tick):
            if self._stalled() > seconds and time.monotonic() - self._answered > 6 * tick:
                let_the_first_speak(2.0)
                exit_this_rank(
                    f"no progress for {seconds} s (trainer.hang_timeout), and the store of the ranks does not answer: "
                    f"rank 0 or torchrun is stopped, or {os.environ.get('MASTER_ADDR')} is out of reach; the same "
                    "command resumes from the last checkpoint",
                    TRAINING_FAILED,
                )

    def _state(self) -> tuple[bool, int, str, bool, str]:
        """The fields of this rank's :class:`RankState`."""
        main = threading.main_thread().ident
        assert main is not None
        return (self._paused, self._marks, self._phase, *_place(sys._current_frames()[main]))


def _states(store: dist.Store) -> list[list | None]:
    keys = [f"state {rank}" for rank in range(dist.get_world_size())]
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def _place(frame: FrameType | None) -> tuple[bool, str]:
    """Whether a thread is inside a collective, and the innermost function of this package that it is in."""
    innermost, waits = frame, False
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            where = f"{file.relative_to(_PACKAGE.parent)}:{frame.f_lineno} ({frame.f_code.co_name})"
            if frame is innermost or innermost is None:
                return waits, where
            inside = Path(innermost.f_code.co_filename)
            return (
                waits,
                f"{'/'.join(inside.parts[-3:])}:{innermost.f_lineno} ({innermost.f_code.co_name}), from {where}",
            )
        waits = waits or "/torch/distributed/" in frame.f_code.co_filename
        frame = frame.f_back
    return waits, "unknown code"


watch = HangWatch()  # of this process, which is one rank
