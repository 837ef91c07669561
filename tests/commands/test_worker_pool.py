"""The commands' worker pool: order, one state for each process, errors, a worker that dies."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.errors import refused
from verl_ext.data.families.pretrain import TextDocumentOptions
from verl_ext.options import DataError, UsageError
from verl_ext.text.encoder import Encoder
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokenizing import tokenize_files
from verl_ext.text.workers import JOBS_PER_WORKER, ordered_results


class Counter:
    """A state that knows its process and its number of finished jobs."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.done = 0

    def add(self, job: int) -> tuple[int, int, int]:
        self.done += 1
        return job + self.step, os.getpid(), self.done

    def die_at_three(self, job: int) -> int:
        if job == 3:
            os._exit(1)
        return job


def without_a_tokenizer() -> Counter:
    raise UsageError("model.path must hold a tokenizer; got nothing")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_order_from_one_state_in_each_process(num_workers: int) -> None:
    results = list(ordered_results(partial(Counter, 10), Counter.add, range(30), num_workers, name="test"))
    assert [value for value, _, _ in results] == list(range(10, 40))
    by_process: dict[int, list[int]] = {}
    for _, process, done in results:
        by_process.setdefault(process, []).append(done)
    assert (os.getpid() in by_process) == (num_workers == 1)
    assert len(by_process) <= num_workers
    assert all(sorted(done) == list(range(1, len(done) + 1)) for done in by_process.values())


def test_jobs_are_taken_only_a_bounded_number_ahead_of_the_results() -> None:
    taken = []

    def jobs() -> Iterator[int]:
        for job in range(100):
            taken.append(job)
            yield job

    results = ordered_results(partial(Counter, 0), Counter.add, jobs(), 2, name="test")
    next(results)
    assert len(taken) == 2 * JOBS_PER_WORKER
    results.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_state_that_cannot_be_made_raises_its_own_error(num_workers: int) -> None:
    with refused("model.path", "nothing", error=UsageError):
        list(ordered_results(without_a_tokenizer, Counter.add, range(9), num_workers, name="test"))


def test_a_dead_worker_is_told_in_one_line() -> None:
    with refused("test worker", "memory", "num_workers=2", error=DataError):
        list(ordered_results(partial(Counter, 0), Counter.die_at_three, range(9), 2, name="test"))


class DyingEncoder(Encoder):
    """An encoder whose process dies with its first chunk."""

    tokenizer = None

    def fingerprint(self) -> str:
        return ""

    def encode(self, chunk: Any) -> Any:
        os._exit(1)


@pytest.mark.parametrize(
    ("options", "advice"),
    [(SimpleNamespace(num_workers=2), ("num_workers=2",)), (TextDocumentOptions(), ("CPUs", "2 workers"))],
)
def test_a_dead_workers_message_advises_the_callers_key_if_it_has_one(
    options: Any, advice: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    files, writer = find_source_files({"a": [str(tmp_path / "a.jsonl")]}), SimpleNamespace(abandon=lambda: None)
    with refused("tokenize worker", *advice, error=DataError):
        tokenize_files(files, DyingEncoder(options), lambda documents: documents, writer, num_workers=2)
