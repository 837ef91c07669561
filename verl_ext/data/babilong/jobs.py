"""Runs of samples, made in this process or by several, results in the order of the jobs."""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from verl_ext.data.babilong.background import Background
from verl_ext.data.babilong.samples import SampleMaker, SampleOptions
from verl_ext.data.babilong.sizes import Size
from verl_ext.data.babilong.tokens import TokenCounter
from verl_ext.tokenize.config import ModelConfig, TokenizeConfig
from verl_ext.tokenize.errors import DataError

JOB_TOKENS = 500_000  # of a job, about: a second or two of work
MOST_SAMPLES = 500
JOBS_PER_WORKER = 3  # in flight: enough that none waits, few enough to bound memory


@dataclass(frozen=True)
class Job:
    """Samples first to end - 1 of one file."""

    task: str
    size: Size
    first: int
    end: int


@dataclass
class Workshop:
    """What samples are made with, the same in every process; backgrounds by size label."""

    model: ModelConfig
    options: SampleOptions
    backgrounds: dict[str, Background] = field(default_factory=dict)
    counter: TokenCounter | None = None
    _makers: dict[tuple[str, Size], SampleMaker] = field(default_factory=dict)

    def records(self, job: Job) -> list[str]:
        """The job's samples, each as one line of JSON."""
        maker = self._makers.get((job.task, job.size))
        if maker is None:
            counter = self.loaded_counter()
            maker = SampleMaker(job.task, job.size, self.options, counter, self.backgrounds.get(job.size.label))
            self._makers[job.task, job.size] = maker
        return [json.dumps(maker.sample(number), ensure_ascii=False) for number in range(job.first, job.end)]

    def loaded_counter(self) -> TokenCounter:
        """The tokenizer, loaded on first use; `UsageError` where there is none."""
        if self.counter is None:
            from verl_ext.tokenize.worker import load_tokenizer

            self.counter = TokenCounter(load_tokenizer(TokenizeConfig(model=self.model)))
        return self.counter


def jobs_of(task: str, size: Size, samples: int, target: int) -> list[Job]:
    """A file's samples cut into jobs of about JOB_TOKENS tokens."""
    step = max(1, min(MOST_SAMPLES, JOB_TOKENS // max(target, 1)))
    return [Job(task, size, first, min(first + step, samples)) for first in range(0, samples, step)]


def run_jobs(workshop: Workshop, jobs: Iterable[Job], num_workers: int) -> Iterator[tuple[Job, list[str]]]:
    """Yield every job with its records, in order, with the same records for any `num_workers` (1: in this process).

    Raises what the first failing job raises, and `DataError` when a worker dies.
    """
    if num_workers == 1:
        for job in jobs:
            yield job, workshop.records(job)
        return
    sent = Workshop(workshop.model, workshop.options, workshop.backgrounds)
    pool = ProcessPoolExecutor(num_workers, mp_context=_context(), initializer=_start_worker, initargs=(sent,))
    pending: deque[tuple[Job, Future[list[str]]]] = deque()
    try:
        for job in jobs:
            pending.append((job, pool.submit(_records, job)))
            if len(pending) >= num_workers * JOBS_PER_WORKER:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a generator worker died, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers} here)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_workshop: Workshop | None = None


def _context() -> multiprocessing.context.BaseContext:
    """A start method that never forks this process, whose libraries may hold threads and locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verl_ext.tokenize.worker", "transformers.models.auto.tokenization_auto"])
    return context


def _start_worker(workshop: Workshop) -> None:
    global _workshop
    _workshop = workshop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent is gone, killed included: a worker would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _records(job: Job) -> list[str]:
    assert _workshop is not None
    return _workshop.records(job)
