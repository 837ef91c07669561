"""`verl-ext babilong`: its options, and the files of samples that it writes."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf

from verl_ext.commands.babilong.samples import (
    MIN_TOKENS,
    Background,
    SampleMaker,
    TokenCounter,
    filler_background,
    folder_background,
    least_size,
    most_facts,
    size_tokens,
    target_tokens,
)
from verl_ext.commands.babilong.stories import TASKS, StoryOptions
from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.files import OutputFolder
from verl_ext.progress import progress_bar
from verl_ext.text.tokenizer import ModelOptions, load_tokenizer, tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results
from verl_ext.values import choice_problem, option, show

MARKER = "generator.yaml"  # the options beside the files
NOT_WRITTEN = ("output_dir", "overwrite", "num_workers")  # there: options that change no byte of a sample
FILLER_SENTENCES = 20_000  # generated, at least: 0.5 M tokens, which are counted in a second
JOB_TOKENS, JOB_SAMPLES = 500_000, 500  # of a job, at most: a second or two of work
WORKER_TOKENS = 3_000_000  # that make a second process worth its start of a few seconds
FACT_TOKENS = 100  # what a sample of 0k counts as on the progress bar


@dataclass(frozen=True)
class BabilongOptions(OutputOptions):
    """BABILong samples of any size: bAbI stories (qa1-qa5) told inside background text, OUTPUT_DIR/TASK/SIZE.json."""

    marker: ClassVar[str] = MARKER

    tasks: list[Any] = option(["qa1"], f"of {', '.join(TASKS)}", required=True)
    sizes: list[Any] = option(
        ["0k"], "0k (facts alone), 1k, 32k, 1M, or a number of tokens; k is 1,000, M 1,000,000", required=True
    )
    reserve_tokens: int = option(
        300, "tokens kept free: `input` has exactly size - reserve_tokens tokens (0k: any number)", least=0
    )
    samples: int = option(1000, "samples in each file", least=1)
    seed: int = option(42, "sample i depends on seed, task, size and i alone")
    model: ModelOptions = option(ModelOptions, "the tokenizer that counts")
    background: str | None = option(
        None, "folder of .txt files, at least as many tokens as a sample; null: generated prose"
    )
    facts_within: Any = option(
        None, "where facts may be in a sample: null: anywhere; 0.25: its first quarter; [0,4096]: these tokens"
    )
    story: StoryOptions = option(StoryOptions, "how long stories are")
    num_workers: int | None = option(
        None,
        "worker processes; null: by CPUs and work. The output does not depend on it",
        least=1,
    )

    @property
    def targets(self) -> dict[str, int]:
        """{size: tokens of an `input`}, 0 for facts without background."""
        return {str(size): target_tokens(size, self.reserve_tokens) for size in self.sizes}

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without a tokenizer."""
        paths = (self.model.path, self.model.tokenizer_path, self.background)
        problems = [*self._list_problems(), *self.output_problems("background, tokenizer", *paths)]
        problems += self.model.tokenizer_problems()
        if self.background is not None and not os.path.isdir(self.background):
            problems.append(f"background must be a folder of .txt files that exists; got {show(self.background)}")
        if not _is_fact_range(self.facts_within):
            must = "facts_within must be null, a share above 0 and at most 1, or [first token, end token]"
            problems.append(f"{must}; got {show(self.facts_within)}")
        return problems or self._room_problems()

    def _list_problems(self) -> Iterator[str]:
        for key, values in (("tasks", self.tasks), ("sizes", self.sizes)):
            if len(set(map(str, values))) < len(values):
                yield f"{key} must name nothing twice; got {values}"
        yield from filter(None, (choice_problem("tasks", task, TASKS) for task in self.tasks))
        for size in self.sizes:
            tokens = size_tokens(size)
            if tokens is None:
                yield f"sizes must be like 0k, 32k, 1M or a number of tokens; got {show(size)}"
            elif 0 < tokens <= self.reserve_tokens:
                yield f"sizes must be above reserve_tokens ({self.reserve_tokens}), or 0k; got {size}"

    def _room_problems(self) -> list[str]:
        """Sizes with room for fewer facts than every story has; whether facts fit in tokens is found later."""
        last = {task: min(self.samples, self.story.questions_of(task)) - 1 for task in self.tasks}
        facts, task = max((self.story.fewest_facts(task, last[task]), task) for task in self.tasks)
        what = f"must leave room for the facts of question {last[task] + 1} of a {task} story, {facts} or more"
        if (most := self.story.max_facts) is not None:
            return [f"story.max_facts {what}; got {most}"] if most < facts else []
        least = least_size(facts, self.reserve_tokens)
        return [
            f"sizes {what}: {least} (reserve_tokens {self.reserve_tokens}); got {size}"
            for size, target in self.targets.items()
            if target and most_facts(target) < facts
        ]


def _is_fact_range(value: Any) -> bool:
    if isinstance(value, list):
        whole = len(value) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        return whole and 0 <= value[0] < value[1]
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1)


class Job(NamedTuple):
    """Samples first to end - 1 of one file, and about how many tokens they have together."""

    task: str
    size: str
    first: int
    end: int
    tokens: int


def generate(
    options: BabilongOptions, *, filler_sentences: int = FILLER_SENTENCES, job_samples: int = JOB_SAMPLES
) -> str:
    """Write every file of `options`; return the closing lines. Raises UsageError and DataError, each one line."""
    started = time.monotonic()
    counter = TokenCounter(load_tokenizer(options.model))
    backgrounds = _backgrounds(options, counter, filler_sentences)
    jobs = _jobs(options, job_samples)
    tokens = sum(job.tokens for job in jobs)
    useful = min(available_cpus(), 1 + tokens // WORKER_TOKENS)
    num_workers = min(options.num_workers or useful, len(jobs))
    # a process loads its own tokenizer: not every tokenizer can be sent to another process
    make = partial(_makers, options, backgrounds, counter if num_workers == 1 else None)
    records = ordered_results(make, _records, jobs, num_workers, name="generator", preload=[tokenizer_module()])
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        _write_files(folder.path, options.samples, jobs, records)
        written = {key: value for key, value in asdict(options).items() if key not in NOT_WRITTEN}
        OmegaConf.save(OmegaConf.create(written), folder.path / MARKER)
        folder.publish()
    seconds = time.monotonic() - started
    files = len(options.tasks) * len(options.sizes)
    done = f"{files} files of {options.samples:,} samples, {tokens / 1e6:,.1f}M tokens in {seconds:,.0f} s"
    return f"{done}\nwritten to {options.output_dir}"


def _backgrounds(options: BabilongOptions, counter: TokenCounter, filler_sentences: int) -> dict[str, Background]:
    """The background of every size with one; sizes whose background is the same share it."""
    targets = {size: target for size, target in options.targets.items() if target}
    if options.background is not None and targets:
        background = folder_background(options.background, counter, max(targets.values()))
        return dict.fromkeys(targets, background)
    # whose number follows from its own size, whatever else is generated
    generated = cache(lambda number: filler_background(number, counter))
    return {size: generated(max(filler_sentences, target // MIN_TOKENS + 1)) for size, target in targets.items()}


def _jobs(options: BabilongOptions, job_samples: int) -> list[Job]:
    jobs = []
    for task, (size, target) in product(options.tasks, options.targets.items()):
        step = max(1, min(job_samples, JOB_TOKENS // max(target, 1)))
        for first in range(0, options.samples, step):
            end = min(first + step, options.samples)
            jobs.append(Job(task, size, first, end, (end - first) * (target or FACT_TOKENS)))
    return jobs


def _makers(
    options: BabilongOptions, backgrounds: Mapping[str, Background], counter: TokenCounter | None
) -> dict[tuple[str, str], SampleMaker]:
    """By task and size."""
    counter = counter or TokenCounter(load_tokenizer(options.model))
    given = {key: getattr(options, key) for key in ("seed", "reserve_tokens", "facts_within", "story")}
    pairs = product(options.tasks, options.targets)
    return {(task, size): SampleMaker(task, size, counter, backgrounds.get(size), **given) for task, size in pairs}


def _records(makers: Mapping[tuple[str, str], SampleMaker], job: Job) -> list[str]:
    """The job's samples, each as one line of JSON."""
    maker = makers[job.task, job.size]
    return [json.dumps(maker.sample(number), ensure_ascii=False) for number in range(job.first, job.end)]


def _write_files(folder: Path, samples: int, jobs: Sequence[Job], job_records: Iterable[list[str]]) -> None:
    """`<task>/<size>.json`, a JSON list with a sample a line, written as the samples come."""
    with progress_bar("generate", sum(job.tokens for job in jobs), unit="tokens", unit_scale=True) as bar:
        for job, records in zip(jobs, job_records, strict=True):
            path = folder / job.task / f"{job.size}.json"
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8", newline="\n") as file:
                file.write("[\n" if job.first == 0 else ",\n")
                file.write(",\n".join(records))
                if job.end == samples:
                    file.write("\n]\n")
                    file.flush()
                    os.fsync(file.fileno())
            bar.update(job.tokens)


main = command(
    "babilong",
    BabilongOptions,
    generate,
    example="output_dir=DIR model.path=MODEL_OR_TOKENIZER 'tasks=[qa1]' 'sizes=[0k,32k]' samples=5000",
)
