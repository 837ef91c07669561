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
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tests.lib.project import ROOT

_SECONDS = 240
Name = TypeVar("Name")
# A process that has queried a GPU cannot fork ranks that use it.
_context = multiprocessing.get_context("forkserver" if os.environ.get("VERL_PLATFORM") == "cpu" else "spawn")
if _context.get_start_method() == "forkserver":
    _context.set_forkserver_preload(["tests.lib.rank_server"])


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run ``function(*arguments)`` on ``world_size`` gloo ranks; raise with the traceback of the first that failed."""
    calls = len(arguments[0]) if function is in_turn else 1
    with started_ranks(function, world_size, *arguments) as (_, answers):
        return _collect(answers, world_size, calls * _SECONDS)


def in_turn(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call functions, each with its arguments, one after the other on ranks that start once; return their results."""
    return [function(*arguments) for function, *arguments in calls]


def run_cases(*stages: Mapping[Name, tuple[Any, ...]]) -> dict[Name, tuple[Any, ...]]:
    """Run a function of each case ``{name: (ranks, function, *arguments)}``; return its results in rank order by name.

    The ranks start once. In a stage they form the largest group first, then smaller ones; so the ranks of a group are
    alike. A later stage may use what an earlier one wrote.
    """
    groups: list[tuple[int, dict[Name, list[Any]]]] = []
    for cases in stages:
        of_stage: dict[int, dict[Name, list[Any]]] = {}
        for name, (ranks, *call) in cases.items():
            of_stage.setdefault(ranks, {})[name] = call
        groups += sorted(of_stage.items(), reverse=True)
    sizes = {name: ranks for ranks, calls in groups for name in calls}
    most, seconds = max(sizes.values()), len(sizes) * _SECONDS
    with (
        tempfile.TemporaryDirectory() as folder,
        started_ranks(_in_groups, most, groups, folder, seconds) as (_, answers),
    ):
        of_ranks = _collect(answers, most, seconds)
    return {name: tuple(found[name] for found in of_ranks[:ranks]) for name, ranks in sizes.items()}


def _in_groups(groups: Sequence[tuple[int, dict[Name, list[Any]]]], folder: str, seconds: float) -> dict[Name, Any]:
    """Make the calls of each group that this rank is in."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), {}
    for number, (ranks, calls) in enumerate(groups):
        if rank < ranks:
            _leave_group()
            _join_group(rank, ranks, f"{folder}/{number}", seconds)  # while others may be in another group
            for name, (function, *arguments) in calls.items():
                try:
                    found[name] = function(*arguments)
                except BaseException as error:
                    raise AssertionError(f"case {name!r} failed") from error
    return found


def _join_group(rank: int, ranks: int, store: str, seconds: float = _SECONDS) -> None:
    import torch.distributed as dist

    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # which verl's workers of an earlier group have set
    limit = timedelta(seconds=seconds)
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
    answers = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [forked(_rank, function, rank, world_size, folder, answers, arguments) for rank in range(world_size)]
        try:
            yield ranks, answers
        finally:
            for process in ranks:
                process.kill()  # also ends a stopped rank, or one that takes signals as requests
                process.join()


def forked(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a function in a process that forks from the server: a program whose start is not what is tested."""
    _start_server()
    process = _context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def _start_server() -> None:
    """Start the server, unless it is running, in the folder from which it can import this package."""
    before = os.getcwd()
    os.chdir(ROOT)
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
