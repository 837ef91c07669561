"""The watch over hanging ranks, which names one and ends the run.

Each rank marks its progress: a batch that arrives, or the forward pass of a micro-batch. After the model is built, a
thread of each rank reads the marks and regularly writes them into the store of the ranks. If one rank makes no
progress, the others soon wait for it in a collective, and one of them finds out which rank it is:

    0   [beat, 41, "step 12", waits, "torch/distributed/… (all_reduce), from verl_ext/trainer/trainer.py:180 (…)"]
    1   [beat, 40, "step 12", does not, "verl_ext/trainer/loader.py:173 (__iter__)"]    behind the others: it hangs
    2   no new beat                                                                     stopped, dead or out of reach

The limit without progress is an option of the phase: `trainer.first_step_timeout` up to the end of the first step,
which compiles; then `trainer.hang_timeout`; and `trainer.save_timeout` while training waits for a checkpoint.
"""

import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from verl_ext.launch.protocol import Ending
from verl_ext.trainer.distributed import end, wait_unless_local_rank0

_PACKAGE = Path(__file__).parent.parent
_NAMED = 4  # the number of ranks that the line names
_RESUMES = "the same command resumes from the last checkpoint"


@dataclass(frozen=True)
class RankState:
    """The progress of a rank when it was last recorded.

    Attributes:
        in_time: whether it has made progress within the limit of its phase.
        marks: the number of progress marks so far.
        phase: the name of its phase, such as "step 12".
        waits: whether it is inside a collective.
        where: its place in the code.
        collectives: the number of collectives begun, if it is not in time and torch's flight recorder counts them.
    """

    in_time: bool
    marks: int
    phase: str
    waits: bool
    where: str
    collectives: int | None = None


def diagnosis(states: Sequence[RankState | None], processes: Sequence[str]) -> str | None:
    """Name the ranks that others wait for; None if some rank works.

    Args:
        states: the state of each rank; None if it does not answer.
        processes: the process of each rank, such as "process 4711 on host-b".
    """

    def named(ranks: Sequence[int]) -> str:
        names = ", ".join(f"rank {rank} ({processes[rank]})" for rank in ranks[:_NAMED])
        return names + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")

    if silent := [rank for rank, state in enumerate(states) if state is None]:
        return f"{named(silent)} does not answer: stopped, dead or out of reach"
    known = [state for state in states if state is not None]
    if any(state.in_time and not state.waits for state in known):
        return None
    least = min(state.marks for state in known)
    behind = [rank for rank, state in enumerate(known) if state.marks == least]
    behind = [rank for rank in behind if not known[rank].waits] or behind
    begun = [count for rank in behind if (count := known[rank].collectives) is not None]
    if len(begun) == len(behind):  # On a GPU, all ranks wait for the device and are in no collective of the host.
        behind = [rank for rank, count in zip(behind, begun, strict=True) if count == min(begun)]
    first = known[behind[0]]
    if len(behind) == len(known) > 1:
        return f"no rank is behind the others in {first.phase}; rank 0 is at {first.where}"
    return f"{named(behind)} hangs in {first.phase} at {first.where}"


class HangWatch:
    """The watch over this process's progress."""

    def __init__(self) -> None:
        self._marks, self._at, self._phase = 0, time.monotonic(), ""
        self._limits: Mapping[str, int] = {}
        self._option = ""
        self._thread = threading.main_thread()
        self._answered = self._at  # the time of the store's last answer
        self._folder = Path()
        self._ended = threading.Event()

    def mark(self, phase: str | None = None, option: str | None = None) -> None:
        """Mark progress; name a new phase and the option of its limit."""
        self._phase, self._option = phase or self._phase, option or self._option
        self._marks, self._at = self._marks + 1, time.monotonic()

    @contextmanager
    def within(self, option: str, phase: str) -> Iterator[None]:
        """Watch the block as a phase under another option's limit."""
        before = self._phase, self._option
        self.mark(phase, option)
        try:
            yield
        finally:
            self.mark(*before)

    def join(self, thread: threading.Thread) -> None:
        """Wait for a saving thread, and watch it as this rank's phase."""
        with self.within("trainer.save_timeout", thread.name):
            self._thread = thread
            try:
                thread.join()
            finally:
                self._thread = threading.main_thread()

    def start(self, limits: Mapping[str, int], phase: str, option: str, folder: Path) -> None:
        """Watch the ranks until :meth:`end`; collective.

        Args:
            limits: by option, the seconds without a mark after which the run ends; 0: never.
            phase: the phase that begins now.
            option: the option with the limit of that phase.
            folder: receives the content of each rank's flight recorder if the watch ends the run.
        """
        self.end()
        self._folder, self._limits, self._ended = folder, limits, threading.Event()
        self.mark(phase, option)
        if not any(limits.values()):
            return
        least = min(filter(None, limits.values()))
        # The watch has its own connection, because another thread may wait in the ranks' connection.
        store: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=least))
        store = dist.PrefixStore("verl_ext/hang", store)
        store.set(f"process {dist.get_rank()}", f"process {os.getpid()} on {socket.gethostname()}")
        self._answered = time.monotonic()
        tick = min(5.0, least / 10)
        self._write_state(store, 0, tick)
        dist.barrier()  # a rank that has not written yet would seem to hang
        for target in (self._compare, self._give_up):
            threading.Thread(target=target, args=(store, tick, self._ended), daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _overdue(self, slack: float = 0) -> bool:
        """Tell whether progress is missing for the phase's limit less `slack` seconds."""
        limit = self._limits.get(self._option, 0)
        return limit > 0 and time.monotonic() - self._at > limit - slack

    def _write_state(self, store: dist.Store, beat: int, tick: float) -> None:
        store.set(f"state {dist.get_rank()}", json.dumps([beat, *astuple(self._state(tick))]))

    def _state(self, tick: float) -> RankState:
        overdue, frame = self._overdue(4 * tick), sys._current_frames().get(self._thread.ident or 0)
        begun = None  # collectives in all groups of this process
        if overdue and (recorded := _recorded(False)) and (groups := pickle.loads(recorded).get("pg_status")):
            begun = sum(group["last_enqueued_collective"] for group in groups.values())
        return RankState(not overdue, self._marks, self._phase, *_place(frame), begun)

    def _compare(self, store: dist.Store, tick: float, ended: threading.Event) -> None:
        """Write this rank's state; let one overdue rank compare all ranks."""
        with suppress(RuntimeError):  # the store is gone; _give_up continues
            for beat in itertools.count(1):
                if ended.wait(tick):
                    return
                self._write_state(store, beat, tick)
                if store.check(["diagnosis"]):
                    self._end(store.get("diagnosis").decode(), store, tick)
                self._answered = time.monotonic()
                if self._overdue(4 * tick):
                    is_first = store.add("comparing", 1) == 1
                    if is_first or self._overdue():  # by now the first one has ended during its comparison
                        self._diagnose(store, tick)
                    store.add("comparing", -1)

    def _diagnose(self, store: dist.Store, tick: float) -> None:
        """End the run, unless there is progress or a working rank."""
        marks, before = self._marks, _states(store)
        time.sleep(2.5 * tick)
        states = [
            None if now is None or (then is not None and now[0] <= then[0]) else RankState(*now[1:])
            for then, now in zip(before, _states(store), strict=True)
        ]
        states[dist.get_rank()] = self._state(tick)
        found = diagnosis(states, [store.get(f"process {rank}").decode() for rank in range(len(states))])
        if found is not None and self._marks == marks:
            line = f"{self._no_progress()}: {found}; {_RESUMES}"
            line += f"; the last collectives of each rank are in {self._folder}" if _recorded(False) else ""
            store.set("diagnosis", line)
            self._end(line, store, tick)

    def _no_progress(self) -> str:
        return f"no progress for {self._limits[self._option]} s ({self._option})"

    def _end(self, line: str, store: dist.Store, tick: float) -> None:
        """Write the flight recorder and end this rank; each node prints once."""
        is_first = store.add(f"printed on {socket.gethostname()}", 1) == 1
        threading.Thread(target=self._write_recorded, daemon=True).start()  # A device that hangs may block it.
        time.sleep(1.5 * tick)  # The other ranks write theirs before torchrun ends them.
        if is_first:
            end(Ending(line, scope="other"))
        time.sleep(1)  # the line must be printed before torchrun ends the node
        end(Ending(scope="rank"))

    def _write_recorded(self) -> None:
        with suppress(OSError):
            if recorded := _recorded(True):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / f"rank_{dist.get_rank()}").write_bytes(recorded)

    def _give_up(self, store: dist.Store, tick: float, ended: threading.Event) -> None:
        """End this rank if it is overdue and the store is silent."""
        while not ended.wait(tick):
            if self._overdue() and time.monotonic() - self._answered > 6 * tick:
                wait_unless_local_rank0(2.0)
                line = (
                    f"{self._no_progress()}, and the store of the ranks does not answer: rank 0 or torchrun is "
                    f"stopped, or {os.environ.get('MASTER_ADDR')} is out of reach; {_RESUMES}"
                )
                end(Ending(line, scope="rank"))


def _recorded(entries: bool) -> bytes:
    """Return torch's flight recorder, pickled; empty if there is none."""
    name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return dump(includeCollectives=entries, includeStackTraces=entries, onlyActive=False) if dump else b""


def _states(store: dist.Store) -> list[list | None]:
    keys = [f"state {rank}" for rank in range(dist.get_world_size())]
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def _place(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread is in a collective, and where it is."""
    innermost, waits = frame, False
    while frame is not None and innermost is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            where = f"{file.relative_to(_PACKAGE.parent)}:{frame.f_lineno} ({frame.f_code.co_name})"
            if frame is not innermost:
                inside = "/".join(Path(innermost.f_code.co_filename).parts[-3:])
                where = f"{inside}:{innermost.f_lineno} ({innermost.f_code.co_name}), from {where}"
            return waits, where
        waits = waits or any(name in frame.f_code.co_filename for name in ("/torch/distributed/", "/torch/futures/"))
        frame = frame.f_back
    return waits, "unknown code"


watch = HangWatch()  # of this process, which is one rank
