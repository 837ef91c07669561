"""Jobs done by several processes, with the results in the order of the jobs."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from verl_ext.values import DataError

JOBS_PER_WORKER = 4  # in flight: enough that none waits for the slowest, few enough to bound memory

State = TypeVar("State")
Job = TypeVar("Job")
Result = TypeVar("Result")


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_results(
    make_state: Callable[[], State],
    work: Callable[[State, Job], Result],
    jobs: Iterable[Job],
    num_workers: int,
    *,
    name: str,
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield `work(state, job)` of every job, in order, with the same values for any `num_workers` (1: in this process).

    `make_state` is called once in each process. Both functions, the jobs and the results must pickle; `preload` names
    modules that workers have from the start. At most JOBS_PER_WORKER jobs per worker are taken ahead of the result
    that is yielded. Raises what the first failing job raises, and `DataError` when a worker, called `name`, dies.
    """
    if num_workers == 1:
        state = make_state()
        gc.freeze()
        try:
            for job in jobs:
                yield work(state, job)
        finally:
            gc.unfreeze()
        return
    # Forks of a server that has imported what they need, which takes seconds; this process, whose libraries may hold
    # threads and locks, is never forked.
    is_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if is_server else "spawn")
    context.set_forkserver_preload([*preload, work.__module__])
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(make_state, work))
    pending: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(_do, job))
            if len(pending) >= num_workers * JOBS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a {name} worker died, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers} here)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# Of a worker process.
_make_state: Callable[[], Any]
_work: Callable[[Any, Any], Any]
_states: list[Any] = []  # none or one


def _start_worker(make_state: Callable[[], Any], work: Callable[[Any, Any], Any]) -> None:
    global _make_state, _work
    _make_state, _work = make_state, work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End a worker whose parent is gone, also where it was killed: it would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _do(job: Any) -> Any:
    # Made with the first job and not at the start: an error then arrives as this job's, not as a broken pool.
    if not _states:
        _states.append(_make_state())
        gc.freeze()  # what stays is not looked through again: a tenth of the time, where work makes many small objects
    return _work(_states[0], job)
