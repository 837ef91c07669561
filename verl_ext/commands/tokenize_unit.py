"""What a task of `tokenize backend=ray` does with a unit: count its records, tokenize it, write it anew.

A task returns its errors, so that the first in the order of the units is reported. Ray runs a task whose process died
again; `_begin` refuses one that died too often. What an earlier task has finished is left as it is.
"""

import contextlib
import json
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions, sampled
from verl_ext.files import OutputFolder, write_json
from verl_ext.nodes import differences, versions
from verl_ext.text import dataset_folder, units
from verl_ext.text.chat import ChatEncoder
from verl_ext.text.dataset_folder import DatasetWriter
from verl_ext.text.readers import ChunkSize
from verl_ext.text.sources import is_url
from verl_ext.text.tokenized import file_facts
from verl_ext.text.units import Unit
from verl_ext.values import DataError, UsageError, file_of, reason_of

UNIT = "unit.json"  # of a finished unit: what was counted, and whether it has weights
TRIES = 4  # of a unit whose worker dies


@dataclass(frozen=True)
class Job:
    """What the tasks of a run have in common.

    folder: of the units; run: of this run, in that folder; host, versions: the driver's; made_by: its encoder's
    fingerprint; module: loads tokenizers.
    """

    options: TokenizeOptions
    chunk_size: ChunkSize
    shard_bytes: int
    folder: Path
    run: str
    host: str
    versions: Mapping[str, str]
    made_by: str
    module: str


class Task(NamedTuple):
    """A unit, with its place in their order; limit: `sample_limit` of its source; facts: `file_facts` of its files."""

    number: int
    unit: Unit
    digest: str
    limit: int | None
    facts: list[Any]


class Done(NamedTuple):
    """What came of a task; error: why nothing, by a mistake on the command line if `is_usage`."""

    number: int
    num_bytes: int = 0
    records: int = 0
    tokens: int = 0
    error: str = ""
    is_usage: bool = False
    result: Any = None


class Rewrite(NamedTuple):
    """A unit to be written anew as folder `name`; see `dataset_folder.rewrite`."""

    number: int
    digest: str
    name: str
    weighted: bool
    numbers: list[int] | None


def read_json(file: Path) -> Any:
    """What a file holds; None where there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


# Of a worker process: none or one.
_workers: dict[str, "Worker"] = {}


class Worker:
    """What a process of a run keeps from one task to the next."""

    def __init__(self, job: Job) -> None:
        """Raises `DataError` where this node does not see the folder of the units, or has other packages."""
        self.job = job
        self.host = socket.gethostname()
        if not (job.folder / job.run).exists():  # a name that no node has looked for, and remembers as missing
            needed = "output_dir must be on a file system that every node of the Ray cluster sees"
            raise DataError(f"{needed}; got {job.options.output_dir}, which {self.host} does not")
        if lines := differences({job.host: job.versions, f"{self.host}, a worker": versions()}):
            raise DataError("; ".join(lines))

    @cached_property
    def encoder(self) -> ChatEncoder:
        """Raises `DataError` where the tokenizer is another than the driver's."""
        import_module(self.job.module)  # as in the process that started the command: without torch, or with it
        options = self.job.options
        encoder = ChatEncoder(options, list(options.sources), options.preview)
        if encoder.fingerprint() != self.job.made_by:
            key = options.model.tokenizer_key
            got = f"got {options.model.tokenizer}, which is another on {self.host} than on {self.job.host}"
            raise DataError(f"{key} must be the same tokenizer and template on every node; {got}")
        return encoder

    def check(self, task: Task) -> None:
        """Raises `DataError` for a source that this node sees otherwise than the driver did."""
        for file, facts in zip(task.unit.files, task.facts, strict=True):
            if is_url(file.path):
                continue
            try:
                is_same = file_facts([file.path]) == facts
            except FileNotFoundError as error:
                name = list(self.job.options.sources)[file.category_id - 1]
                needed = f"sources.{name} must be on a file system that every node of the Ray cluster sees"
                raise DataError(f"{needed}; got {file.path}, which {self.host} does not") from error
            if not is_same:
                raise DataError(
                    f"{file.path}: must not change while it is tokenized; it did, or differs on {self.host}"
                )


def run(work: Callable[[Worker, Any], Done], job: Job, row: Mapping[str, Any]) -> dict[str, bytes]:
    """A task's `Done`, errors included; nothing is done where a task before it has failed already."""
    task = pickle.loads(row["task"])
    done, failed = Done(task.number), job.folder / job.run / f"failed-{work.__name__}"
    try:
        if job.run not in _workers:
            _workers.clear()
            _workers[job.run] = Worker(job)
        if not failed.exists() or all(int(name) > task.number for name in os.listdir(failed)):
            done = work(_workers[job.run], task)
    except (UsageError, DataError) as error:
        done = Done(task.number, error=str(error), is_usage=isinstance(error, UsageError))
    except OSError as error:
        done = Done(task.number, error=f"{file_of(error) or job.folder}: {reason_of(error)}")
    if done.error:
        with contextlib.suppress(OSError):  # it only saves work
            failed.mkdir(exist_ok=True)
            (failed / str(task.number)).touch()
    return {"done": pickle.dumps(done)}


def count(worker: Worker, task: Task) -> Done:
    worker.check(task)
    return Done(task.number, result=units.count(task.unit.files[0]))


def write(worker: Worker, task: Task) -> Done:
    """Tokenize a unit, unless that is done."""
    job, folder = worker.job, worker.job.folder / task.digest
    unit = read_json(folder / UNIT)
    if unit is None or not dataset_folder.is_dataset(folder):
        worker.check(task)
        _begin(job, task)
        options, name = job.options, list(job.options.sources)[task.unit.files[0].category_id - 1]
        report = Report(options, list(options.sources), options.preview)
        with OutputFolder(str(folder), overwrite=True, named=options.output_dir) as output:
            writer = DatasetWriter(output.path, job.shard_bytes)
            try:
                for file, place in zip(task.unit.files, task.unit.places, strict=True):
                    for chunk in sampled(file, place, task.limit, options, report.read, job.chunk_size):
                        documents = worker.encoder.encode(chunk)
                        report.add(documents)
                        writer.add(documents)
                writer.close()
            finally:
                writer.abandon()
            unit = {"report": report.stored(name), "weighted": writer.weighted}
            write_json(output.path / UNIT, unit)
            output.publish()
    counts = unit["report"]["counts"]
    return Done(task.number, task.unit.num_bytes, counts["records"], counts["tokens"])


def _begin(job: Job, task: Task) -> None:
    """Raises `DataError` where the processes that began this unit have died too often."""
    with open(job.folder / job.run / task.digest, "ab") as tries:
        if tries.tell() >= TRIES:
            file, part = task.unit.files[0], task.unit.files[0].part
            where = f"{file.path}, from line or row {part.places + 1} on" if part else file.path
            raise DataError(
                f"a tokenize worker died {TRIES} times at {where}, perhaps for want of memory; a lower num_workers"
                f" needs less (num_workers={job.options.num_workers or 'null'} here)"
            )
        tries.write(b".")


def rewrite(worker: Worker, task: Rewrite) -> Done:
    folder = worker.job.folder
    if not dataset_folder.is_dataset(folder / task.name):
        with OutputFolder(str(folder / task.name), overwrite=True, named=worker.job.options.output_dir) as output:
            dataset_folder.rewrite(folder / task.digest, output.path, task.weighted, task.numbers)
            output.publish()
    return Done(task.number)
