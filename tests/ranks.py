"""Start real ranks on gloo: ``run_ranks(function, world_size, *arguments)``.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_SECONDS = 240
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
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # as in a run
    torch.set_num_threads(1)
    try:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_SECONDS)
        )
        # Pickled here, because a queue would pass tensors as file descriptors, which die with this process.
        answers.put((rank, None, pickle.dumps(function(*arguments))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
