"""Jobs done by several processes, of this machine or of a Ray cluster, with the results in the order of the jobs."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import Any, TypeVar

from verl_ext.values import DataError, UsageError

JOBS_PER_WORKER = 4  # in flight: enough that none waits for the slowest, few enough to bound memory
TRIES = 4  # of a job on Ray whose worker or node dies

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
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield `work(state, job)` of every job, in order, with the same values for any number of workers.

    `make_state` is called once in each process; one worker is this process. Both functions, the jobs and the results
    must pickle; `preload` names modules that workers have from the start. At most JOBS_PER_WORKER jobs per worker are
    taken ahead of the result that is yielded. Raises what the first failing job raises, and `DataError` when a worker,
    called `name`, dies.
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
    # Workers are forks of a server that has imported what they need, which takes seconds. This process, whose libraries
    # may hold threads and locks, is never forked.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, work.__module__])
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(make_state, work))
    try:
        submitted = _submitted(jobs, lambda job: pool.submit(_do, job), num_workers * JOBS_PER_WORKER)
        yield from (future.result() for future in submitted)
    except BrokenProcessPool as error:
        raise DataError(
            f"a {name} worker died, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers} here)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ray_results(
    make_state: Callable[[], State],
    work: Callable[[State, Job], Result],
    jobs: Iterable[Job],
    num_workers: int | None,
    *,
    name: str,
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield what `ordered_results` yields, by tasks of the Ray cluster that this process is connected to.

    num_workers: tasks at a time; None: as many as the cluster has CPUs. A job whose worker or node is lost is done
    again, up to TRIES times.
    """
    import ray  # heavy

    # Tasks, not actors: the jobs of a lost actor would wait until another takes its place.
    task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_do_on_ray)
    common = ray.put((os.urandom(8).hex(), make_state, work, list(preload)))
    cpus = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    workers = min(num_workers or cpus, cpus)
    # Where every CPU may work, one task more for each waits in Ray's queue, so that none is idle before its next job.
    most_running = workers if workers < cpus else 2 * cpus
    running: list[Any] = []

    def submit(job: Job) -> tuple[Any, Any]:
        nonlocal running
        held = ray.put(job)  # kept until the result is here, for a task that is done again
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
            raise DataError(f"every node of the Ray cluster must have the same packages; got {last}") from error
        raise
    except ray.exceptions.RayError as error:
        raise DataError(
            f"a {name} worker died {TRIES} times, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers or 'null'} here)"
        ) from error


def _submitted(jobs: Iterable[Job], submit: Callable[[Job], Result], most: int) -> Iterator[Result]:
    """Yield `submit(job)` of each job, in order, with at most so many ahead.

    What `jobs` raises is raised after the jobs before it, so that the first mistake in their order is the one reported.
    """
    pending: deque[Result] = deque()
    failure: DataError | None = None
    remaining = iter(jobs)
    while failure is None:
        try:
            pending.append(submit(next(remaining)))
        except StopIteration:
            break
        except DataError as error:
            failure = error
        if len(pending) >= most:
            yield pending.popleft()
    while pending:
        yield pending.popleft()
    if failure is not None:
        raise failure


def _do_on_ray(common: tuple[str, Callable[[], Any], Callable[[Any, Any], Any], list[str]], job: Any) -> Any:
    """Return the result of a job, or the error that ends the run: Ray would put its own traceback around it."""
    run, make_state, work, preload = common
    try:
        for module in preload:
            import_module(module)
        return _do_with_state(run, make_state, work, job)
    except (DataError, UsageError) as error:
        return error


# The functions that a process of a pool was started with, and a worker's state by the run that it belongs to: a process
# of Ray may serve several runs.
_functions: tuple[Callable[[], Any], Callable[[Any, Any], Any]]
_states: dict[str, Any] = {}


def _do_with_state(run: str, make_state: Callable[[], Any], work: Callable[[Any, Any], Any], job: Any) -> Any:
    # The state is made with the first job and not at the start, so that an error arrives as this job's.
    if run not in _states:
        _states.clear()
        _states[run] = make_state()
        gc.freeze()  # not to look through what stays saves a tenth of the time, where work makes many small objects
    return work(_states[run], job)


def _do(job: Any) -> Any:
    return _do_with_state("", *_functions, job)


def _start_worker(make_state: Callable[[], Any], work: Callable[[Any, Any], Any]) -> None:
    global _functions
    _functions = make_state, work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End a worker whose parent was killed: it would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
