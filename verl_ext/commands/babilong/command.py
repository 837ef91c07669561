"""The command's configuration: composed by Hydra from `conf/babilong.yaml`, typed and checked here.

Runs of samples: how a file is cut into jobs, and what a process does with one.

The run: tokenizer, background, samples, files.

The command `verl-ext babilong`.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf

from verl_ext.commands.babilong.background import (
    Background,
    TokenCounter,
    filler_background,
    filler_size,
    folder_background,
)
from verl_ext.commands.babilong.samples import SampleMaker, SampleOptions, Size, least_size, most_facts
from verl_ext.commands.babilong.stories import TASKS, fewest_facts, questions_of
from verl_ext.commands.command_line import run_command
from verl_ext.files import OutputFolder, output_problems
from verl_ext.progress import progress_bar
from verl_ext.text.tokenizer import ModelOptions, leave_out_torch, load_tokenizer, tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results
from verl_ext.values import REQUIRED, Options, choice_problem, option, show

MARKER = "generator.yaml"  # the options beside the files, by which an output folder of this command is known


@dataclass(frozen=True)
class StoryOptions(Options):
    """How long stories are."""

    prefix: ClassVar[str] = "story"

    questions: int = option(5, "of a story, a sample each, which has the facts before it (qa4: always 1)", least=1)
    facts_per_question: int | None = option(
        None, "qa1: moves before each question (null: 2); qa2, qa3: facts at least (null: 3)", least=1
    )
    max_facts: int | None = option(
        None, "of a sample; null: the benchmark's, one for every 8 tokens (0k: any number)", least=1
    )


@dataclass(frozen=True)
class BabilongOptions(Options):
    """BABILong samples of any size: bAbI stories (qa1-qa5) told inside background text, OUTPUT_DIR/TASK/SIZE.json."""

    output_dir: str = option(REQUIRED, "folder of the files; it appears only when complete", required=True)
    overwrite: bool = option(False, "true: an output_dir that this command wrote is replaced as a whole")
    tasks: list[Any] = option(["qa1"], f"of {', '.join(TASKS)}", required=True)
    sizes: list[Any] = option(
        ["0k"], "0k (facts alone), 1k, 32k, 1M, or a number of tokens; k is 1,000, M 1,000,000", required=True
    )
    reserve_tokens: int = option(
        300, "kept free of a size: `input` has exactly size - reserve_tokens tokens (0k: any number)", least=0
    )
    samples: int = option(1000, "in each file", least=1)
    seed: int = option(42, "sample i follows from seed, task, size and i, whatever else is asked for")
    model: ModelOptions = option(ModelOptions, "whose tokens count")
    background: str | None = option(
        None, "folder of .txt files, at least as many tokens as a sample; null: generated prose"
    )
    facts_within: Any = option(
        None,
        "where in the sample facts may lie: null anywhere; 0.25 its first quarter; [0,4096] those tokens",
    )
    story: StoryOptions = option(StoryOptions, "how long stories are")
    num_workers: int | None = option(
        None, "processes; null: one for every CPU where there is work for it. The output is the same for any", least=1
    )

    @property
    def parsed_sizes(self) -> list[Size]:
        """The sizes asked for, in order."""
        sizes = [Size.parse(value) for value in self.sizes]
        assert all(sizes), "problems() is empty"
        return [size for size in sizes if size]

    @property
    def sample_options(self) -> SampleOptions:
        """What the samples follow from."""
        return SampleOptions(
            seed=self.seed,
            reserve_tokens=self.reserve_tokens,
            facts_within=self.facts_within,
            questions=self.story.questions,
            facts_per_question=self.story.facts_per_question,
            max_facts=self.story.max_facts,
        )

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without a tokenizer."""
        keep = [self.model.path, self.model.tokenizer_path, self.background]
        problems = self._list_problems()
        problems += output_problems(self.output_dir, self.overwrite, MARKER, keep, kept="background, tokenizer")
        problems += self.model.tokenizer_problems()
        if self.background is not None and not os.path.isdir(self.background):
            problems.append(f"background must be a folder of .txt files that exists; got {show(self.background)}")
        problems += self._number_problems()
        return problems or self._room_problems()

    def _list_problems(self) -> list[str]:
        problems = [
            f"{key} must name nothing twice; got {value}"
            for key, value in (("tasks", self.tasks), ("sizes", self.sizes))
            if len(set(map(str, value))) < len(value)
        ]
        if problems:
            return problems
        problems += filter(None, (choice_problem("tasks", task, TASKS) for task in self.tasks))
        for value in self.sizes:
            size = Size.parse(value)
            if size is None:
                problems.append(f"sizes must be like 0k, 32k, 1M or a number of tokens; got {show(value)}")
            elif size.tokens and size.target(self.reserve_tokens) < 1:
                problems.append(f"sizes must be above reserve_tokens ({self.reserve_tokens}), or 0k; got {value}")
        return problems

    def _number_problems(self) -> list[str]:
        problems = []
        if not _is_fact_range(self.facts_within):
            must = "facts_within must be null, a share above 0 and at most 1, or [first token, end token]"
            problems.append(f"{must}; got {show(self.facts_within)}")
        return problems

    def _room_problems(self) -> list[str]:
        """Sizes with room for fewer facts than every story has; of facts that fit, only a tokenizer tells."""
        last = {task: min(self.samples, questions_of(task, self.story.questions)) - 1 for task in self.tasks}
        needs = [(fewest_facts(task, last[task], self.story.facts_per_question), task) for task in self.tasks]
        facts, task = max(needs)
        what = f"the facts of question {last[task] + 1} of a {task} story, {facts} or more"
        most, reserve = self.story.max_facts, self.reserve_tokens
        if most is not None:
            return [f"story.max_facts must leave room for {what}; got {most}"] if most < facts else []
        least = least_size(facts, reserve)
        return [
            f"sizes must leave room for {what}: {least} (reserve_tokens {reserve}); got {size.label}"
            for size in self.parsed_sizes
            if size.tokens and most_facts(size.target(reserve)) < facts
        ]


def _is_fact_range(value: Any) -> bool:
    if isinstance(value, list):
        whole = len(value) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        return whole and 0 <= value[0] < value[1]
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1)


JOB_TOKENS = 500_000  # of a job, about: a second or two of work
MOST_SAMPLES = 500


@dataclass(frozen=True)
class Job:
    """Samples first to end - 1 of one file."""

    task: str
    size: Size
    first: int
    end: int


class Workshop:
    """What samples are made with, the same in every process; backgrounds by size label."""

    def __init__(self, counter: TokenCounter, options: SampleOptions, backgrounds: Mapping[str, Background]) -> None:
        self.counter = counter
        self.options = options
        self.backgrounds = backgrounds
        self._makers: dict[tuple[str, Size], SampleMaker] = {}

    def records(self, job: Job) -> list[str]:
        """The job's samples, each as one line of JSON."""
        maker = self._makers.get((job.task, job.size))
        if maker is None:
            background = self.backgrounds.get(job.size.label)
            maker = SampleMaker(job.task, job.size, self.options, self.counter, background)
            self._makers[job.task, job.size] = maker
        return [json.dumps(maker.sample(number), ensure_ascii=False) for number in range(job.first, job.end)]


def load_workshop(model: ModelOptions, options: SampleOptions, backgrounds: Mapping[str, Background]) -> Workshop:
    """A workshop with a tokenizer of its own: not every tokenizer can be sent to another process."""
    return Workshop(TokenCounter(load_tokenizer(model)), options, backgrounds)


def jobs_of(task: str, size: Size, samples: int, target: int) -> list[Job]:
    """A file's samples cut into jobs of about JOB_TOKENS tokens."""
    step = max(1, min(MOST_SAMPLES, JOB_TOKENS // max(target, 1)))
    return [Job(task, size, first, min(first + step, samples)) for first in range(0, samples, step)]


# Options that change no byte of a sample: left out, so that equal data lies beside an equal file.
NOT_WRITTEN = ("output_dir", "overwrite", "num_workers")
WORKER_TOKENS = 3_000_000  # that make a second process worth its start of a few seconds
FACT_TOKENS = 100  # what a sample of 0k counts as on the progress bar


def generate(config: BabilongOptions) -> str:
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


def _records(config: BabilongOptions, workshop: Workshop, jobs: list[Job], num_workers: int) -> Iterator[list[str]]:
    """Every job's records, in order: made here, or by processes that load the tokenizer themselves."""
    if num_workers == 1:
        return map(workshop.records, jobs)
    make = partial(load_workshop, config.model, workshop.options, workshop.backgrounds)
    return ordered_results(make, Workshop.records, jobs, num_workers, name="generator", preload=[tokenizer_module()])


def _backgrounds(config: BabilongOptions, counter: TokenCounter) -> dict[str, Background]:
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


def _write_files(folder: Path, config: BabilongOptions, jobs: list[Job], job_records: Iterable[list[str]]) -> None:
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


def _tokens(config: BabilongOptions, job: Job) -> int:
    return (job.end - job.first) * (job.size.target(config.reserve_tokens) or FACT_TOKENS)


def run(options: BabilongOptions) -> str:
    """Do what `verl-ext babilong` does; the closing lines."""
    leave_out_torch(options.model)
    return f"{generate(options)}\nwritten to {options.output_dir}"


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code."""
    example = "output_dir=DIR model.path=MODEL_OR_TOKENIZER 'tasks=[qa1]' 'sizes=[0k,32k]' samples=5000"
    return run_command(arguments, "babilong", BabilongOptions, run, example)
