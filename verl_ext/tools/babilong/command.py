"""The options of `verl-ext babilong`, and the sample files that it writes."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain, islice, product
from typing import Any, ClassVar

from omegaconf import OmegaConf

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.data.families.babilong_answers import TASK_LABELS
from verl_ext.files import OutputFolder
from verl_ext.options import choice_problem, must, option
from verl_ext.progress import progress_bar
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer, tokenizer_module
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

MARKER = "generator.yaml"  # the file with the options, beside the samples
NOT_WRITTEN = ("output_dir", "overwrite", "num_workers")  # in the marker: options that change no byte of a sample
FILLER_SENTENCES = 20_000  # the least number to generate: 0.5 M tokens, which take a second to count
JOB_TOKENS = 100_000  # of the samples that a worker makes at once, if they are so short
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
        None, "worker processes; null: chosen by CPUs and work. The output does not depend on it", least=1
    )

    @property
    def targets(self) -> dict[str, int]:
        """{size: the tokens of an `input`}, 0 for facts alone."""
        return {str(size): target_tokens(size, self.reserve_tokens) for size in self.sizes}

    def problems(self) -> Iterator[str | None]:
        """Yield a line for every mistake that is visible without a tokenizer."""
        for key, values in (("tasks", self.tasks), ("sizes", self.sizes)):
            if len(set(map(str, values))) < len(values):
                yield must(key, "name nothing twice", values)
        yield from (choice_problem("tasks", task, babi.TASKS) for task in self.tasks)
        if self.stories is None and (others := sorted(set(self.tasks) & set(babi.TASKS[len(TASKS) :]))):
            yield must("tasks", f"be of {', '.join(TASKS)} unless stories names bAbI's own files", ", ".join(others))
        for key, folder, of in (("stories", self.stories, "bAbI's"), ("background", self.background, ".txt")):
            if folder is not None and not os.path.isdir(folder):
                yield must(key, f"be a folder of {of} files that exists", folder)
        for size in self.sizes:
            tokens = size_tokens(size)
            if tokens is None:
                yield must("sizes", "be like 0k, 32k, 1M or a number of tokens", size)
            elif 0 < tokens <= self.reserve_tokens:
                yield must("sizes", f"be above reserve_tokens ({self.reserve_tokens}), or 0k", size)
        yield from self.output_problems(
            "background, stories, tokenizer", self.model.path, self.model.tokenizer_path, self.background, self.stories
        )
        yield from self.model.tokenizer_problems()
        within = self.facts_within
        is_range = within is None or (type(within) in (int, float) and 0 < within <= 1)
        if isinstance(within, list) and len(within) == 2:
            is_range = all(type(token) is int for token in within) and 0 <= within[0] < within[1]
        if not is_range:
            yield must("facts_within", "be null, a share above 0 and at most 1, or [first token, end token]", within)


def write_samples(options: BabilongOptions) -> str:
    """Write all files; return closing lines, or raise UsageError or DataError."""
    started = time.monotonic()
    counter = TokenCounter(load_tokenizer(options.model))
    backgrounds = _backgrounds(options, counter)
    for maker in _makers(options, backgrounds, counter).values():  # A too small size ends the run now, not in hours.
        of_a_story = options.samples if maker.questions else options.story.questions_of(maker.task)
        maker.story_part(min(options.samples, of_a_story) - 1)
    # A job holds many short samples or a long one, so that workers wait for each other little.
    jobs = [
        (task, size, range(options.samples)[first : first + step])
        for task, (size, target) in product(options.tasks, options.targets.items())
        for step in [max(1, JOB_TOKENS // (target or FACT_TOKENS))]
        for first in range(0, options.samples, step)
    ]
    tokens = sum(len(numbers) * (options.targets[size] or FACT_TOKENS) for _, size, numbers in jobs)
    useful = min(available_cpus(), 1 + tokens // WORKER_TOKENS)
    num_workers = min(options.num_workers or useful, len(jobs))
    # Each worker loads its own tokenizer, because not every tokenizer can be sent to another process.
    make = partial(_makers, options, backgrounds, counter if num_workers == 1 else None)
    results = ordered_results(make, _records, jobs, num_workers, name="generator", preload=[tokenizer_module()])
    records = chain.from_iterable(results)  # in the order of the files
    # Write the files in turn while workers are ahead; the folder appears when all of it is there.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        with progress_bar("generate", tokens, unit="tokens", unit_scale=True) as bar:
            for task, (size, target) in product(options.tasks, options.targets.items()):
                path = folder.path / task / f"{size}.json"  # a JSON list with one sample per line
                path.parent.mkdir(exist_ok=True)
                with open(path, "w", encoding="utf-8", newline="\n") as file:
                    for number, record in enumerate(islice(records, options.samples)):
                        file.write((",\n" if number else "[\n") + record)
                        bar.update(target or FACT_TOKENS)
                    file.write("\n]\n")
        settings = {key: value for key, value in asdict(options).items() if key not in NOT_WRITTEN}
        OmegaConf.save(OmegaConf.create(settings), folder.path / MARKER)
        folder.publish()
    files, seconds = len(options.tasks) * len(options.sizes), time.monotonic() - started
    done = f"{files} files of {options.samples:,} samples, {tokens / 1e6:,.1f}M tokens in {seconds:,.0f} s"
    if options.background is not None and backgrounds:
        done += f"\n{_background_line(options, next(iter(backgrounds.values())))}"
    return f"{done}\nwritten to {options.output_dir}"


def _backgrounds(options: BabilongOptions, counter: TokenCounter) -> dict[str, Background]:
    """Return each size's background; sizes with equal backgrounds share it."""
    targets = {size: target for size, target in options.targets.items() if target}
    if options.background is not None and targets:
        return dict.fromkeys(targets, folder_background(options.background, counter))
    generated = cache(lambda count: Background(filler_sentences(count), counter, is_prose=False))
    # The number of sentences depends on this size alone, so that other sizes do not change its samples.
    return {size: generated(max(FILLER_SENTENCES, target // MIN_TOKENS + 1)) for size, target in targets.items()}


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
    settings = {key: getattr(options, key) for key in ("seed", "reserve_tokens", "facts_within", "story")}
    folder, split = options.stories, options.split
    questions = {task: babi.read_samples(folder, task, split) if folder else None for task in options.tasks}
    return {
        (task, size): SampleMaker(task, size, counter, backgrounds.get(size), questions=questions[task], **settings)
        for task, size in product(options.tasks, options.targets)
    }


def _records(makers: Makers, job: tuple[str, str, range]) -> list[str]:
    """Return the samples of these numbers, each as a line of JSON."""
    task, size, numbers = job
    return [json.dumps(makers[task, size].sample(number), ensure_ascii=False) for number in numbers]


main = command(
    "babilong",
    BabilongOptions,
    write_samples,
    example="output_dir=DIR model.path=MODEL_OR_TOKENIZER 'tasks=[qa1]' 'sizes=[0k,32k]' samples=5000",
)
