"""`verl-ext tokenize backend=ray`: units of the sources, tokenized by tasks of a Ray cluster, joined to one dataset.

    driver   finds the files, makes units of them, counts lines where units begin inside a file (tasks)
    tasks    tokenize a unit each, and write it as a dataset of its own, whole or not at all:
        .NAME.units/                    beside output_dir, on a file system that all nodes see
            <digest>/                   a unit: shards, and unit.json with what was counted
            <digest>.<digest>/          the same with the run's category numbers or with loss_weight
            counts.json                 records and lines of parts of files
            run.json, lock, run-*/      of the run that is at it: who it is; which units were begun, and failed
    driver   merges the counts in the order of the units, links their shards into output_dir, publishes it

A unit's digest is of all that its content follows from: its files' sizes and times of change, the options, the
tokenizer. What is there is not done again: after a restart, or by a task that Ray runs anew because its node was lost.
"""

import contextlib
import logging
import os
import pickle
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_ext.commands import tokenize_unit
from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions, sample_limit
from verl_ext.commands.tokenize_unit import UNIT, Done, Job, Rewrite, Task, read_json
from verl_ext.files import OutputFolder, write_json
from verl_ext.nodes import versions
from verl_ext.progress import Progress
from verl_ext.ray_cluster import ray_cluster
from verl_ext.text.chat import ChatEncoder
from verl_ext.text.dataset_folder import join
from verl_ext.text.readers import ChunkSize
from verl_ext.text.sources import SourceFile, find_source_files, total_bytes
from verl_ext.text.tokenized import digest, file_facts
from verl_ext.text.tokenizer import tokenizer_module
from verl_ext.text.units import Unit, numbered, unit_bytes, units_of
from verl_ext.text.workers import available_cpus
from verl_ext.values import DataError, UsageError

FORMAT = 1  # to be raised when the same unit is written as something else
COUNTS, RUN = "counts.json", "run.json"


def tokenize_on_ray(
    options: TokenizeOptions, chunk_size: ChunkSize, shard_bytes: int, size: int | None = None
) -> Report:
    """Tokenize the sources into a dataset at `output_dir`; return what was counted. size: bytes of a unit, about.

    Raises `UsageError` and `DataError`, each one line: of the first unit that fails.
    """
    files = find_source_files(options.patterns)
    made_by = ChatEncoder(options, list(options.sources), options.preview).fingerprint()
    with OutputFolder(options.output_dir, options.overwrite) as output, _unit_folder(output, options) as folder:
        run, host = f"run-{os.urandom(8).hex()}", socket.gethostname()
        (folder / run).mkdir()
        job = Job(options, chunk_size, shard_bytes, folder, run, host, versions(), made_by, tokenizer_module())
        with ray_cluster(options.num_workers or available_cpus()):
            tasks = _tasks(job, files, units_of(files, size or unit_bytes(files)))
            with Progress(total_bytes(files)) as progress:
                for done in _on_ray(job, tokenize_unit.write, tasks):
                    progress.add(done)
            report = Report(options, list(options.sources), options.preview)
            parts, weighted = _merged(job, tasks, report)
        report.write(output.path)
        join(output.path, parts, weighted)
        output.publish()
        shutil.rmtree(folder, ignore_errors=True)
    return report


@contextlib.contextmanager
def _unit_folder(output: OutputFolder, options: TokenizeOptions) -> Iterator[Path]:
    """The folder of the units, for one run at a time; where the block fails it stays, if it has finished units."""
    from filelock import FileLock, Timeout  # not for a command with a mistake in it

    folder = output.output.with_name(f".{output.output.name}.units")
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        run = read_json(folder / RUN) or {"pid": "?", "host": "?"}  # just begun
        other = f"which process {run['pid']} on {run['host']} writes"
        raise DataError(
            f"output_dir must be written by one run at a time; got {options.output_dir}, {other}"
        ) from error
    try:
        for left in (*folder.glob(".*"), *folder.glob("run-*")):  # what killed tasks wrote is hidden
            shutil.rmtree(left, ignore_errors=True)
        write_json(folder / RUN, {"host": socket.gethostname(), "pid": os.getpid()})
        yield folder
    except BaseException:
        if units := len([*folder.glob(f"*/{UNIT}")]):
            print(f"{units:,} finished parts stay in {folder}: the same command goes on from there", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


def _tasks(job: Job, files: Sequence[SourceFile], units: Sequence[Unit]) -> list[Task]:
    """The units with the numbers of their first lines and records, what is drawn of them, and their digests.

    A unit that begins inside a JSONL file, and every file of a source of which a number of records is drawn, is
    counted first; counts are kept for a restart.
    """
    options, names = job.options, list(job.options.sources)
    facts = {path: file_facts([path]) for path in dict.fromkeys(file.path for file in files)}
    sample = options.sample if isinstance(options.sample, Mapping) else dict.fromkeys(names, options.sample)
    drawn = {number for number, name in enumerate(names, start=1) if isinstance(sample.get(name), int)}
    counted, keys = read_json(job.folder / COUNTS) or {}, {}
    for unit in units:
        if any(file.category_id in drawn or (file.part and file.kind == "jsonl") for file in unit.files):
            keys.update({file: digest([facts[file.path], repr(file.part)]) for file in unit.files})
    to_count = [
        Task(number, Unit((file,), (0,)), key, None, [facts[file.path]])
        for number, (file, key) in enumerate(keys.items())
        if key not in counted
    ]
    by_number = {task.number: task.digest for task in to_count}
    for done in _on_ray(job, tokenize_unit.count, to_count):
        counted[by_number[done.number]] = done.result
    write_json(job.folder / COUNTS, counted)
    counts = {file: counted[key] for file, key in keys.items()}
    in_files = {number: Counter[int]() for number in range(1, len(names) + 1)}
    for unit in units:
        for file, place in zip(unit.files, unit.places, strict=True):
            in_files[file.category_id][place] += counts.get(file, (0, 0))[0]
    limits = [sample_limit(options, name, in_files[number].values()) for number, name in enumerate(names, start=1)]
    tasks = []
    for number, unit in enumerate(numbered(units, counts)):
        source, own = unit.files[0].category_id - 1, [facts[file.path] for file in unit.files]
        drawn_by = None if limits[source] is None else [limits[source], options.seed, unit.places]
        made_of = [own, [repr(file.part) for file in unit.files], names[source], source, drawn_by]
        made_by = [FORMAT, job.made_by, job.versions, job.shard_bytes]
        tasks.append(Task(number, unit, digest([made_by, made_of]), limits[source], own))
    return tasks


def _merged(job: Job, tasks: Sequence[Task], report: Report) -> tuple[list[Path], bool]:
    """The datasets of the units, in order, with the same columns and categories' numbers; whether they have weights.

    What the units have counted is added to `report`. Raises `DataError` where nothing could be used.
    """
    numbers, weights = [], []
    for task in tasks:
        unit = read_json(job.folder / task.digest / UNIT)
        numbers.append(report.add_stored(unit["report"]))
        weights.append(unit["weighted"])
    report.check(job.options.sources)
    weighted, parts, rewrites = any(weights), [], []
    for task, own, has_weights in zip(tasks, numbers, weights, strict=True):
        parts.append(job.folder / task.digest)
        if own is not None or has_weights != weighted:
            name = f"{task.digest}.{digest([own, weighted])}"
            parts[-1] = job.folder / name
            rewrites.append(Rewrite(task.number, task.digest, name, weighted, own))
    for _ in _on_ray(job, tokenize_unit.rewrite, rewrites):
        pass
    return parts, weighted


def _on_ray(job: Job, work: Callable[[Any, Any], Done], tasks: Sequence[Any]) -> Iterator[Done]:
    """`work(worker, task)` of each task, as they end, by Ray's tasks, which Ray runs anew where a node is lost.

    Tasks, and no actors: what a lost actor had been given waits for another in its place. The process of a task is
    used for the next one too, and has its tokenizer. Raises the error of the first task that has one.
    """
    import ray.data  # heavy

    if not tasks:
        return
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1 << 20  # by which Ray guesses what a task's result takes
    for name, level in (("ray.data", logging.WARNING), ("ray.data._internal.progress", logging.ERROR)):
        logging.getLogger(name).setLevel(level)  # not: how a plan is executed, and that it has no bars
    cpus = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    rows = [{"task": pickle.dumps(task)} for task in tasks]
    compute = ray.data.TaskPoolStrategy(size=min(job.options.num_workers or cpus, len(tasks)))
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    first: Done | None = None
    try:
        for row in dataset.map(partial(tokenize_unit.run, work, job), compute=compute, num_cpus=1).iter_rows():
            done: Done = pickle.loads(row["done"])
            if done.error and (first is None or done.number < first.number):
                first = done
            yield done
    except ray.exceptions.RayTaskError as error:
        last = str(error).strip().rpartition("\n")[2]
        if last.startswith(("ModuleNotFoundError", "ImportError")):
            raise DataError(
                f"every node of the Ray cluster must have the same packages; a worker got {last}"
            ) from error
        raise
    if first is not None:
        raise (UsageError if first.is_usage else DataError)(first.error)
