"""Start real ranks on gloo: ``run_ranks(function, world_size, *arguments)``, or ``run_cases`` for all of a file.

A test's function runs on every rank inside a process group and returns a picklable value; the results form a list in
rank order. The ranks fork from a server process that has imported verl once (rank_server.py), so a start takes
milliseconds.
"""

import multiprocessing
import os
import pickle
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

_ROOT = Path(__file__).parents[1]
_SECONDS = 240
Name = TypeVar("Name")
# A process that has queried a GPU cannot fork ranks that use it.
_context = multiprocessing.get_context("forkserver" if os.environ.get("VERL_PLATFORM") == "cpu" else "spawn")
if _context.get_start_method() == "forkserver":
    _context.set_forkserver_preload(["tests.rank_server"])


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run ``function(*arguments)`` on ``world_size`` gloo ranks; raise with the traceback of the first that failed."""
    calls = len(arguments[0]) if function is in_turn else 1
    with started_ranks(function, world_size, *arguments) as (_, answers):
        return _collect(answers, world_size, calls * _SECONDS)


def in_turn(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call functions, each with its arguments, one after the other on ranks that start once; return their results."""
    return [function(*arguments) for function, *arguments in calls]


def run_cases(cases: Mapping[Name, tuple[Any, ...]]) -> dict[Name, tuple[Any, ...]]:
    """Run a function of each case ``{name: (ranks, function, *arguments)}``; return its results in rank order by name.

    The ranks start once, and form the largest group first, then smaller ones; so the ranks of a group are alike.
    """
    groups: dict[int, dict[Name, list[Any]]] = {}
    for name, (ranks, *call) in cases.items():
        groups.setdefault(ranks, {})[name] = call
    with (
        tempfile.TemporaryDirectory() as folder,
        started_ranks(_in_groups, max(groups), groups, folder) as (_, answers),
    ):
        of_ranks = _collect(answers, max(groups), len(cases) * _SECONDS)
    return {name: tuple(found[name] for found in of_ranks[: case[0]]) for name, case in cases.items()}


def _in_groups(groups: dict[int, dict[Name, list[Any]]], folder: str) -> dict[Name, Any]:
    """Make the calls of each group that this rank is in."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), {}
    for ranks in sorted(groups, reverse=True):
        if rank < ranks:
            _leave_group()
            _join_group(rank, ranks, f"{folder}/{ranks}")
            found |= {name: function(*arguments) for name, (function, *arguments) in groups[ranks].items()}
    return found


def _join_group(rank: int, ranks: int, store: str) -> None:
    import torch.distributed as dist

    os.environ["WORLD_SIZE"] = str(ranks)
    limit = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)


def _leave_group() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def only_rank() -> Iterator[None]:
    """Make this process the only rank of a process group during the block."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def started_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Iterator[tuple[list[Any], Any]]:
    """Start the processes of :func:`run_ranks`, which end with the block; yield them and the queue of their answers."""
    _start_server()
    answers = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_rank, args=(function, rank, world_size, folder, answers, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            yield ranks, answers
        finally:
            for process in ranks:
                process.kill()  # also ends a stopped rank, or one that takes signals as requests
                process.join()


def _start_server() -> None:
    """Start the server, unless it is running, in the folder from which it can import this package."""
    before = os.getcwd()
    os.chdir(_ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)


def _collect(answers: Any, world_size: int, seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < world_size:
        try:
            rank, failure, result = answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(results))} did not answer") from None
        if failure is not None:
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        results[rank] = pickle.loads(result)
    return [results[rank] for rank in range(world_size)]


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, answers: Any, arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # as in a run
    torch.set_num_threads(1)
    try:
        _join_group(rank, world_size, f"{folder}/store")
        # Pickled here, because a queue would pass tensors as file descriptors, which die with this process.
        answers.put((rank, None, pickle.dumps(function(*arguments))))
        _leave_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
