"""The command's configuration: composed by Hydra from `conf/babilong.yaml`, typed and checked here."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config.nearest import choice_problem, nearest_key, show
from verl_ext.config.writable import writable_problem
from verl_ext.data.babilong.samples import SampleOptions
from verl_ext.data.babilong.sizes import Size
from verl_ext.data.babilong.stories import TASKS
from verl_ext.tokenize.config import ModelConfig
from verl_ext.tokenize.errors import UsageError, first_line

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
        assert all(sizes), "validate() has passed"
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

    def validate(self) -> None:
        """Raise `UsageError` with every mistake that can be seen without a tokenizer."""
        problems = [*self._list_problems(), *self._output_problems(), *self._source_problems()]
        problems += self._number_problems()
        if problems:
            raise UsageError("; ".join(problems))

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

    def _output_problems(self) -> list[str]:
        if not self.output_dir:
            return ["output_dir must name the folder to write; got nothing"]
        output = Path(self.output_dir)
        if problem := writable_problem("output_dir", self.output_dir):
            return [problem]
        is_full = output.is_dir() and any(output.iterdir())
        if not self.overwrite and is_full:
            return [f"output_dir must be empty or new, or overwrite=true given to replace it; got {self.output_dir}"]
        keep = [Path(p) for p in (".", self.model.path, self.model.tokenizer_path, self.background) if p]
        if self.overwrite and any(output.resolve() in (p.resolve(), *p.resolve().parents) for p in keep):
            return [f"output_dir must not hold background, tokenizer or the working folder; got {self.output_dir}"]
        if is_full and not (output / MARKER).is_file():
            return [
                f"output_dir must be of this command to be replaced; got {self.output_dir}, which holds other files"
            ]
        return []

    def _source_problems(self) -> list[str]:
        problems = []
        key = "model.tokenizer_path" if self.model.tokenizer_path else "model.path"
        path = self.model.tokenizer_path or self.model.path
        if not path:
            problems.append("model.path must name a model or tokenizer folder; got nothing")
        elif not os.path.isdir(path) and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
            problems.append(f"{key} must be a folder that exists; got {path}")
        if self.background is not None and not os.path.isdir(self.background):
            problems.append(f"background must be a folder of .txt files that exists; got {show(self.background)}")
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
        problems = [
            f"{key} must be at least {least}; got {value}"
            for key, (value, least) in lowest.items()
            if value is not None and value < least
        ]
        if not _is_fact_range(self.facts_within):
            must = "facts_within must be null, a share above 0 and at most 1, or [first token, end token]"
            problems.append(f"{must}; got {show(self.facts_within)}")
        return problems


def _is_fact_range(value: Any) -> bool:
    if isinstance(value, list):
        whole = len(value) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        return whole and 0 <= value[0] < value[1]
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1)


def load_config(overrides: Sequence[str]) -> BabilongConfig:
    """Compose `conf/babilong.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    for text in overrides:
        _check_override(text)
    try:
        with initialize_config_module(version_base="1.3", config_module="verl_ext.conf"):
            node = compose("babilong", overrides=list(overrides))
        merged = OmegaConf.merge(OmegaConf.structured(BabilongConfig), node)
        OmegaConf.resolve(merged)
        if OmegaConf.is_missing(merged, "output_dir"):
            merged.output_dir = ""
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise UsageError(f"{key}: {first_line(error)}" if key else first_line(error)) from error
    except HydraException as error:
        raise UsageError(first_line(error.__cause__ or error)) from error
    assert isinstance(config, BabilongConfig)
    config.validate()
    return config


def _check_override(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        key = OverridesParser.create().parse_override(text).key_or_group
    except HydraException as error:
        hint = "key=value, with quotes around a value that holds spaces or '='"
        raise UsageError(f"an override must be {hint}; got {text!r}") from error
    known = known_keys()
    if key not in known and not key.startswith("hydra."):
        nearest = nearest_key(key, known)
        raise UsageError(f"unknown key {key}; " + (f"nearest: {nearest}" if nearest else f"known: {', '.join(known)}"))


def known_keys() -> list[str]:
    """Every dotted key of the command, in the order of the dataclass."""
    schema = OmegaConf.structured(BabilongConfig)
    keys = []
    for name in schema:
        children = schema[name] if name in ("model", "story") else ()
        keys += [name, *(f"{name}.{child}" for child in children)]
    return keys
