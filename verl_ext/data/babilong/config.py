"""The command's configuration: composed by Hydra from `conf/babilong.yaml`, typed and checked here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from verl_ext.commands.output_check import output_problems
from verl_ext.commands.tokenizer import ModelConfig
from verl_ext.commands.typed_options import least_problems, load_options
from verl_ext.config.nearest import choice_problem, show
from verl_ext.data.babilong.samples import SampleOptions, least_size, most_facts
from verl_ext.data.babilong.sizes import Size
from verl_ext.data.babilong.stories import TASKS, fewest_facts, questions_of

CONFIG_NAME = "babilong"
MARKER = "generator.yaml"  # the options beside the files, by which an output folder of this command is known


# Optional[...] and not `| None`: OmegaConf's structured configs read the annotations.
@dataclass
class StoryConfig:
    """How long stories are."""

    questions: int = 5
    facts_per_question: Optional[int] = None  # noqa: UP045
    max_facts: Optional[int] = None  # noqa: UP045


@dataclass
class BabilongConfig:
    """Everything that `python -m verl_ext.data.babilong` takes; the fields are described in `conf/babilong.yaml`."""

    output_dir: str = MISSING
    overwrite: bool = False
    tasks: Any = field(default_factory=lambda: ["qa1"])
    sizes: Any = field(default_factory=lambda: ["0k"])
    reserve_tokens: int = 300
    samples: int = 1000
    seed: int = 42
    model: ModelConfig = field(default_factory=ModelConfig)
    background: Optional[str] = None  # noqa: UP045
    facts_within: Any = None
    story: StoryConfig = field(default_factory=StoryConfig)
    num_workers: Optional[int] = None  # noqa: UP045

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
        problems += self.model.problems()
        if self.background is not None and not os.path.isdir(self.background):
            problems.append(f"background must be a folder of .txt files that exists; got {show(self.background)}")
        problems += self._number_problems()
        return problems or self._room_problems()

    def _list_problems(self) -> list[str]:
        problems = []
        for key, what in (("tasks", f"tasks such as {TASKS[0]}"), ("sizes", "sizes such as 32k")):
            value = getattr(self, key)
            if not isinstance(value, list) or not value:
                problems.append(f"{key} must be a list of {what}; got {show(value)}")
            elif len(set(map(str, value))) < len(value):
                problems.append(f"{key} must name nothing twice; got {value}")
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
        lowest = {
            "samples": (self.samples, 1),
            "reserve_tokens": (self.reserve_tokens, 0),
            "story.questions": (self.story.questions, 1),
            "story.facts_per_question": (self.story.facts_per_question, 1),
            "story.max_facts": (self.story.max_facts, 1),
            "num_workers": (self.num_workers, 1),
        }
        problems = least_problems(lowest)
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


def load_config(overrides: Sequence[str]) -> BabilongConfig:
    """Compose `conf/babilong.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    return load_options(CONFIG_NAME, BabilongConfig, overrides)
