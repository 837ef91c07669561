"""The run: tokenizer, background, samples, files."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from verl_ext.commands.output_folder import OutputFolder
from verl_ext.commands.progress import progress_bar
from verl_ext.commands.tokenizer import load_tokenizer, tokenizer_module
from verl_ext.commands.worker_pool import available_cpus, ordered_results
from verl_ext.data.babilong.background import Background, filler_background, filler_size, folder_background
from verl_ext.data.babilong.config import MARKER, BabilongConfig
from verl_ext.data.babilong.jobs import Job, Workshop, jobs_of, load_workshop
from verl_ext.data.babilong.tokens import TokenCounter

# Options that change no byte of a sample: left out, so that equal data lies beside an equal file.
NOT_WRITTEN = ("output_dir", "overwrite", "num_workers")
WORKER_TOKENS = 3_000_000  # that make a second process worth its start of a few seconds
FACT_TOKENS = 100  # what a sample of 0k counts as on the progress bar


def generate(config: BabilongConfig) -> str:
    """Write every file of `config`; return the closing line.

    Raises `UsageError` and `DataError`, each one line, and leaves `output_dir` as it was then.
    """
    started = time.monotonic()
    counter = TokenCounter(load_tokenizer(config.model))
    workshop = Workshop(counter, config.sample_options, _backgrounds(config, counter))
    jobs = [
        job
        for task in config.tasks
        for size in config.parsed_sizes
        for job in jobs_of(task, size, config.samples, size.target(config.reserve_tokens))
    ]
    tokens = sum(_tokens(config, job) for job in jobs)
    useful = min(available_cpus(), 1 + tokens // WORKER_TOKENS)
    num_workers = min(config.num_workers or useful, len(jobs))
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        _write_files(folder.path, config, jobs, _records(config, workshop, jobs, num_workers))
        options = {key: value for key, value in asdict(config).items() if key not in NOT_WRITTEN}
        OmegaConf.save(OmegaConf.create(options), folder.path / MARKER)
        folder.publish()
    seconds = time.monotonic() - started
    files = len(config.tasks) * len(config.sizes)
    return f"{files} files of {config.samples:,} samples, {tokens / 1e6:,.1f}M tokens in {seconds:,.0f} s"


def _records(config: BabilongConfig, workshop: Workshop, jobs: list[Job], num_workers: int) -> Iterator[list[str]]:
    """Every job's records, in order: made here, or by processes that load the tokenizer themselves."""
    if num_workers == 1:
        return map(workshop.records, jobs)
    make = partial(load_workshop, config.model, workshop.options, workshop.backgrounds)
    return ordered_results(make, Workshop.records, jobs, num_workers, name="generator", preload=[tokenizer_module()])


def _backgrounds(config: BabilongConfig, counter: TokenCounter) -> dict[str, Background]:
    """The background of every size with one; sizes whose background is the same share it."""
    targets = {size.label: size.target(config.reserve_tokens) for size in config.parsed_sizes if size.tokens}
    if config.background is not None and targets:
        background = folder_background(config.background, counter)
        background.check_room(max(targets.values()), config.background)
        return dict.fromkeys(targets, background)
    made: dict[int, Background] = {}
    for target in targets.values():
        number = filler_size(target)
        if number not in made:
            made[number] = filler_background(number, counter)
    return {label: made[filler_size(target)] for label, target in targets.items()}


def _write_files(folder: Path, config: BabilongConfig, jobs: list[Job], job_records: Iterable[list[str]]) -> None:
    """`<task>/<size>.json`, a JSON list with a sample a line, written as the samples come."""
    total = sum(_tokens(config, job) for job in jobs)
    with progress_bar("generate", total, unit="tokens", unit_scale=True) as bar:
        for job, records in zip(jobs, job_records, strict=True):
            path = folder / job.task / f"{job.size.label}.json"
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8", newline="\n") as file:
                file.write("[\n" if job.first == 0 else ",\n")
                file.write(",\n".join(records))
                if job.end == config.samples:
                    file.write("\n]\n")
                    file.flush()
                    os.fsync(file.fileno())
            bar.update(_tokens(config, job))


def _tokens(config: BabilongConfig, job: Job) -> int:
    return (job.end - job.first) * (job.size.target(config.reserve_tokens) or FACT_TOKENS)
