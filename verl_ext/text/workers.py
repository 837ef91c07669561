"""Run jobs in local processes or on Ray, with ordered results."""

import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from verl_ext.options import DataError, UsageError, must

JOBS_PER_WORKER = 4  # in flight: enough that no worker waits for the slowest one, few enough to bound memory
TRIES = 4  # attempts at a job on Ray whose worker or node dies

State = TypeVar("State")
Job = TypeVar("Job")
Result = TypeVar("Result")


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_results(
    make_state: Callable[[], State],
    work: Callable[[State, Job], Result],
    jobs: Iterable[Job],
    num_workers: int,
    *,
    name: str,
    key: str | None = "num_workers",
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield `work(state, job)` for every job, in order.

    The values are the same for any number of workers. `make_state` is called once in each process; a single worker is
    this process. Both functions, the jobs and the results must be picklable; `preload` names modules that workers
    import when they start. At most JOBS_PER_WORKER jobs per worker are taken ahead of the yielded result. `key` is the
    option that sets `num_workers`; None: the CPUs set it. Raises the error of the first failing job, and `DataError` if
    a worker, called `name`, dies.
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
    context = start_server([*preload, work.__module__])
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(make_state, work))

    def submit(job: Job) -> Any:
        with _without_main():
            return pool.submit(_do, job)

    try:
        yield from (future.result() for future in _submitted(jobs, submit, num_workers * JOBS_PER_WORKER))
    except BrokenProcessPool as error:
        less = f"a lower {key} needs less ({key}={num_workers} here)"
        if key is None:
            less = f"fewer CPUs, such as those of taskset, need less ({num_workers} workers here)"
        raise DataError(f"a {name} worker died, perhaps for want of memory; {less}") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_server(preload: Sequence[str]) -> Any:
    """Start the process that workers are forked from, unless it runs.

    Returns the context of their pool. It imports the modules of `preload`, which takes seconds, while this process goes
    on. This process itself is never forked, because its libraries may hold threads and locks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main program from new processes.

    They would run it once more for what it defines. That costs seconds, and a script without `if __name__ ==
    "__main__"` would start processes in each of them.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def ray_results(
    make_state: Callable[[], State],
    work: Callable[[State, Job], Result],
    jobs: Iterable[Job],
    num_workers: int | None,
    *,
    name: str,
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield the results of `ordered_results`, computed by the connected Ray cluster.

    num_workers: the number of tasks at a time; None: as many as the cluster has CPUs. A job whose worker or node is
    lost runs again, at most TRIES times in all.
    """
    import ray  # heavy

    # Tasks, not actors, because the jobs of a lost actor would wait until another one takes its place.
    task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_do_on_ray)
    common = ray.put((os.urandom(8).hex(), make_state, work, list(preload)))
    cpus = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    workers = min(num_workers or cpus, cpus)
    # If every CPU may work, one more task for each waits in Ray's queue, so that no CPU is idle before its next job.
    most_running = workers if workers < cpus else 2 * cpus
    running: list[Any] = []

    def submit(job: Job) -> tuple[Any, Any]:
        nonlocal running
        held = ray.put(job)  # kept until the result arrives, for a task that is done again
        running.append(task.remote(common, held))
        submitted = held, running[-1]
        if len(running) >= most_running:
            running = ray.wait(running)[1]
        return submitted

    try:
        for _, reference in _submitted(jobs, submit, workers * JOBS_PER_WORKER):
            result = ray.get(reference)
            if isinstance(result, (DataError, UsageError)):
                raise result
            yield result
    except ray.exceptions.RayTaskError as error:
        last = str(error).strip().rpartition("\n")[2]
        if last.startswith(("ModuleNotFoundError", "ImportError")):
            raise DataError(must("every node of the Ray cluster", "have the same packages", last)) from error
        raise
    except ray.exceptions.RayError as error:
        raise DataError(
            f"a {name} worker died {TRIES} times, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers or 'null'} here)"
        ) from error


def _submitted(jobs: Iterable[Job], submit: Callable[[Job], Result], most: int) -> Iterator[Result]:
    """Yield `submit(job)` for every job, in order, at most `most` pending."""
    pending: deque[Result] = deque()
    for job in jobs:
        pending.append(submit(job))
        if len(pending) >= most:
            yield pending.popleft()
    yield from pending


def _do_on_ray(common: tuple[str, Callable[[], Any], Callable[[Any, Any], Any], list[str]], job: Any) -> Any:
    """Return a job's result or error, which Ray would wrap in tracebacks."""
    run, make_state, work, preload = common
    try:
        for module in preload:
            import_module(module)
        return _do_with_state(run, make_state, work, job)
    except (DataError, UsageError) as error:
        return error


# The functions that a process of a pool was started with, and a worker's state by its run, because a Ray process may
# serve several runs.
_functions: tuple[Callable[[], Any], Callable[[Any, Any], Any]]
_states: dict[str, Any] = {}


def _do_with_state(run: str, make_state: Callable[[], Any], work: Callable[[Any, Any], Any], job: Any) -> Any:
    # The state is made with the first job and not at the start, so that its errors are reported as that job's.
    if run not in _states:
        _states.clear()
        _states[run] = make_state()
        gc.freeze()  # skipping permanent objects saves a tenth of the time if `work` makes many small objects
    return work(_states[run], job)


def _do(job: Any) -> Any:
    return _do_with_state("", *_functions, job)


def _start_worker(make_state: Callable[[], Any], work: Callable[[Any, Any], Any]) -> None:
    global _functions
    _functions = make_state, work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads inside each of the workers would only compete
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End a worker whose parent was killed, instead of waiting forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
