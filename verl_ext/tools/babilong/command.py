"""The options of `verl-ext babilong`, and the sample files that it writes."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.data.babilong_answers import TASK_LABELS
from verl_ext.files import OutputFolder
from verl_ext.progress import progress_bar
from verl_ext.text.tokenizer import ModelOptions, load_tokenizer, tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results
from verl_ext.tools.babilong import babi
from verl_ext.tools.babilong.samples import (
    MIN_TOKENS,
    Background,
    SampleMaker,
    TokenCounter,
    filler_sentences,
    folder_background,
    size_tokens,
    target_tokens,
)
from verl_ext.tools.babilong.stories import TASKS, StoryOptions
from verl_ext.values import choice_problem, option, show

MARKER = "generator.yaml"  # the file with the options, beside the samples
NOT_WRITTEN = ("output_dir", "overwrite", "num_workers")  # in the marker: options that change no byte of a sample
FILLER_SENTENCES = 20_000  # the least number to generate: 0.5 M tokens, which take a second to count
JOB_TOKENS, JOB_SAMPLES = 500_000, 500  # the most of a job, a second or two of work
WORKER_TOKENS = 3_000_000  # that justify a second process, which takes a few seconds to start
FACT_TOKENS = 100  # the tokens of a 0k sample on the progress bar

Makers = Mapping[tuple[str, str], SampleMaker]  # by task and size


@dataclass(frozen=True)
class BabilongOptions(OutputOptions):
    """Generate BABILong samples, bAbI stories in background text, as OUTPUT_DIR/TASK/SIZE.json."""

    marker: ClassVar[str] = MARKER

    tasks: list[Any] = option(["qa1"], "of qa1 to qa5, with stories of qa1 to qa20", required=True)
    stories: str | None = option(
        None, "folder of bAbI's own files (en, en-10k, en-valid of v1.2), a sample per question; null: generated"
    )
    split: str = option("train", "the files of `stories` to use", choices=babi.SPLITS)
    sizes: list[Any] = option(
        ["0k"], "0k (facts alone), 1k, 32k, 1M or a number of tokens; k means 1,000, M 1,000,000", required=True
    )
    reserve_tokens: int = option(
        300, "tokens kept free: `input` has exactly size - reserve_tokens tokens (0k: any number)", least=0
    )
    samples: int = option(1000, "samples in each file", least=1)
    seed: int = option(42, "seed of the samples; sample i depends only on seed, task, size and i")
    model: ModelOptions = option(ModelOptions, "the tokenizer that counts the tokens")
    background: str | None = option(
        None, "folder of .txt files; a sample repeats text only after using all of it; null: generated prose"
    )
    facts_within: Any = option(
        None, "part of a sample that may hold facts; null: any; 0.25: its first quarter; [0,4096]: these tokens"
    )
    story: StoryOptions = option(StoryOptions, "length of generated stories")
    num_workers: int | None = option(
        None,
        "worker processes; null: chosen by CPUs and work. The output does not depend on it",
        least=1,
    )

    @property
    def targets(self) -> dict[str, int]:
        """{size: the tokens of an `input`}, 0 for facts alone."""
        return {str(size): target_tokens(size, self.reserve_tokens) for size in self.sizes}

    def problems(self) -> Iterator[str | None]:
        """Yield a line for every mistake that is visible without a tokenizer."""
        for key, values in (("tasks", self.tasks), ("sizes", self.sizes)):
            if len(set(map(str, values))) < len(values):
                yield f"{key} must name nothing twice; got {values}"
        yield from (choice_problem("tasks", task, babi.TASKS) for task in self.tasks)
        if self.stories is None and (others := sorted(set(self.tasks) & set(babi.TASKS[len(TASKS) :]))):
            yield f"tasks must be of {', '.join(TASKS)} unless stories names bAbI's own files; got {', '.join(others)}"
        elif self.stories is not None and not os.path.isdir(self.stories):
            yield f"stories must be a folder of bAbI's files that exists; got {show(self.stories)}"
        for size in self.sizes:
            tokens = size_tokens(size)
            if tokens is None:
                yield f"sizes must be like 0k, 32k, 1M or a number of tokens; got {show(size)}"
            elif 0 < tokens <= self.reserve_tokens:
                yield f"sizes must be above reserve_tokens ({self.reserve_tokens}), or 0k; got {size}"
        yield from self.output_problems(
            "background, stories, tokenizer", self.model.path, self.model.tokenizer_path, self.background, self.stories
        )
        yield from self.model.tokenizer_problems()
        if self.background is not None and not os.path.isdir(self.background):
            yield f"background must be a folder of .txt files that exists; got {show(self.background)}"
        within = self.facts_within
        if isinstance(within, list):
            is_range = len(within) == 2 and all(type(each) is int for each in within) and 0 <= within[0] < within[1]
        else:
            is_range = within is None or (type(within) in (int, float) and 0 < within <= 1)
        if not is_range:
            must = "facts_within must be null, a share above 0 and at most 1, or [first token, end token]"
            yield f"{must}; got {show(within)}"


class SampleRange(NamedTuple):
    """Samples first to end - 1 of a file, about `tokens` long."""

    task: str
    size: str
    first: int
    end: int
    tokens: int


def write_samples(
    options: BabilongOptions, *, filler_sentences: int = FILLER_SENTENCES, job_samples: int = JOB_SAMPLES
) -> str:
    """Write all files; return closing lines, or raise UsageError or DataError."""
    started = time.monotonic()
    counter = TokenCounter(load_tokenizer(options.model))
    backgrounds = _backgrounds(options, counter, filler_sentences)
    for maker in _makers(options, backgrounds, counter).values():  # A too small size ends the run now, not in hours.
        of_a_story = options.samples if maker.questions else options.story.questions_of(maker.task)
        maker.story_part(min(options.samples, of_a_story) - 1)
    jobs = _jobs(options, job_samples)
    tokens = sum(job.tokens for job in jobs)
    useful = min(available_cpus(), 1 + tokens // WORKER_TOKENS)
    num_workers = min(options.num_workers or useful, len(jobs))
    # Each worker loads its own tokenizer, because not every tokenizer can be sent to another process.
    make = partial(_makers, options, backgrounds, counter if num_workers == 1 else None)
    results = ordered_results(make, _records, jobs, num_workers, name="generator", preload=[tokenizer_module()])
    # Jobs end in order, so each file grows from its start and the folder appears only when all are whole.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        with progress_bar("generate", tokens, unit="tokens", unit_scale=True) as bar:
            for job, records in zip(jobs, results, strict=True):
                path = folder.path / job.task / f"{job.size}.json"  # a JSON list with one sample per line
                path.parent.mkdir(exist_ok=True)
                with open(path, "a", encoding="utf-8", newline="\n") as file:
                    begin, end = "[\n" if job.first == 0 else ",\n", "\n]\n" if job.end == options.samples else ""
                    file.write(begin + ",\n".join(records) + end)
                bar.update(job.tokens)
        written = {key: value for key, value in asdict(options).items() if key not in NOT_WRITTEN}
        OmegaConf.save(OmegaConf.create(written), folder.path / MARKER)
        folder.publish()
    seconds = time.monotonic() - started
    files = len(options.tasks) * len(options.sizes)
    done = f"{files} files of {options.samples:,} samples, {tokens / 1e6:,.1f}M tokens in {seconds:,.0f} s"
    if options.background is not None and backgrounds:
        done += f"\n{_background_line(options, next(iter(backgrounds.values())))}"
    return f"{done}\nwritten to {options.output_dir}"


def _backgrounds(options: BabilongOptions, counter: TokenCounter, number: int) -> dict[str, Background]:
    """Return each size's background; sizes with equal backgrounds share it."""
    targets = {size: target for size, target in options.targets.items() if target}
    if options.background is not None and targets:
        background = folder_background(options.background, counter)
        return dict.fromkeys(targets, background)
    generated = cache(lambda count: Background.from_sentences(filler_sentences(count), counter, is_prose=False))
    # The number of sentences depends on this size alone, so that other sizes do not change its samples.
    return {size: generated(max(number, target // MIN_TOKENS + 1)) for size, target in targets.items()}


def _background_line(options: BabilongOptions, background: Background) -> str:
    """Describe the background's tokens, and its sentences with a label."""
    shares = []
    for task in options.tasks:
        label = re.compile(rf"\b(?:{'|'.join(TASK_LABELS[task])})\b", re.IGNORECASE)
        shares.append(f"{task} {sum(bool(label.search(each)) for each in background.sentences):,}")
    tokens, most = int(background.tokens.sum()), max(options.targets.values())
    repeated = f", repeated up to {most / tokens:,.1f} times in a sample" if most > tokens else ""
    counted = f"with a label of the task: {', '.join(shares)}"
    return f"background of {tokens:,} tokens{repeated}; of {len(background.sentences):,} sentences {counted}"


def _makers(options: BabilongOptions, backgrounds: Mapping[str, Background], counter: TokenCounter | None) -> Makers:
    counter = counter or TokenCounter(load_tokenizer(options.model))
    given = {key: getattr(options, key) for key in ("seed", "reserve_tokens", "facts_within", "story")}
    read = partial(babi.read_samples, options.stories) if options.stories else lambda task, split: None
    questions = {task: read(task, options.split) for task in options.tasks}
    return {
        (task, size): SampleMaker(task, size, counter, backgrounds.get(size), questions=questions[task], **given)
        for task, size in product(options.tasks, options.targets)
    }


def _jobs(options: BabilongOptions, job_samples: int) -> list[SampleRange]:
    jobs = []
    for task, (size, target) in product(options.tasks, options.targets.items()):
        step = max(1, min(job_samples, JOB_TOKENS // max(target, 1)))
        for first in range(0, options.samples, step):
            end = min(first + step, options.samples)
            jobs.append(SampleRange(task, size, first, end, (end - first) * (target or FACT_TOKENS)))
    return jobs


def _records(makers: Makers, job: SampleRange) -> list[str]:
    """Return the samples of a job, each as one line of JSON."""
    maker = makers[job.task, job.size]
    return [json.dumps(maker.sample(number), ensure_ascii=False) for number in range(job.first, job.end)]


main = command(
    "babilong",
    BabilongOptions,
    write_samples,
    example="output_dir=DIR model.path=MODEL_OR_TOKENIZER 'tasks=[qa1]' 'sizes=[0k,32k]' samples=5000",
)
