"""The tokenise command's configuration: composed by Hydra from `conf/tokenize.yaml`, typed and checked here."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config.nearest import choice_problem, nearest_key
from verl_ext.config.writable import writable_problem
from verl_ext.packing import OVER_LENGTH_POLICIES
from verl_ext.tokenize.errors import UsageError, first_line

ON_BAD_RECORD = ("error", "skip")
REPORT = "report.json"
# Nodes whose keys are the user's own.
OPEN_NODES = ("sources", "apply_chat_template_kwargs")
# Arguments of `apply_chat_template` that this command sets itself.
RESERVED_TEMPLATE_KWARGS = (
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)


# Optional[...] and not `| None`: OmegaConf's structured configs read the annotations.
@dataclass
class ModelConfig:
    """Where the tokenizer comes from."""

    path: Optional[str] = None  # noqa: UP045
    tokenizer_path: Optional[str] = None  # noqa: UP045
    trust_remote_code: bool = False


@dataclass
class TokenizeConfig:
    """Everything that `python -m verl_ext.tokenize` takes; the fields are described in `conf/tokenize.yaml`."""

    sources: dict[str, Any] = field(default_factory=dict)
    output_dir: str = MISSING
    overwrite: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    chat_template: Optional[str] = None  # noqa: UP045
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    last_turn_only: bool = False
    max_tokens: Optional[int] = None  # noqa: UP045
    over_length: str = "error"
    on_bad_record: str = "error"
    num_workers: Optional[int] = None  # noqa: UP045

    @property
    def tokenizer_path(self) -> str:
        """The folder or Hub name that the tokenizer is loaded from."""
        path = self.model.tokenizer_path or self.model.path
        assert path is not None, "validate() has passed"
        return path

    def source_patterns(self) -> dict[str, list[str]]:
        """Every category's paths and globs, in the order of `sources`."""
        return {name: [value] if isinstance(value, str) else list(value) for name, value in self.sources.items()}

    def validate(self) -> None:
        """Raise `UsageError` with every mistake that can be seen without opening a source."""
        problems = [*self._source_problems(), *self._output_problems(), *self._tokenizer_problems()]
        problems += self._option_problems()
        if problems:
            raise UsageError("; ".join(problems))

    def _source_problems(self) -> list[str]:
        if not self.sources:
            return ["sources must name at least one category, e.g. 'sources={chat:train.jsonl}'; got {}"]
        problems = []
        for name, value in self.sources.items():
            values = [value] if isinstance(value, str) else value
            usable = isinstance(values, list) and values and all(isinstance(v, str) and v for v in values)
            if not usable:
                problems.append(f"sources.{name} must be a path, a glob or a list of them; got {value!r}")
        return problems

    def _output_problems(self) -> list[str]:
        if OmegaConf.is_missing(OmegaConf.structured(self), "output_dir") or not self.output_dir:
            return ["output_dir must name the folder to write; got nothing"]
        output = Path(self.output_dir)
        if problem := writable_problem("output_dir", self.output_dir):
            return [problem]
        if not self.overwrite and output.is_dir() and any(output.iterdir()):
            return [f"output_dir must be empty or new, or overwrite=true given to replace it; got {self.output_dir}"]
        keep = [Path.cwd(), *(Path(p) for p in (self.model.path, self.model.tokenizer_path) if p)]
        keep += [Path(p) for patterns in self._literal_patterns() for p in patterns]
        if self.overwrite and any(output.resolve() in (p.resolve(), *p.resolve().parents) for p in keep):
            return [f"output_dir must not hold a source, the tokenizer or the working folder; got {self.output_dir}"]
        if output.is_dir() and any(output.iterdir()) and not (output / REPORT).is_file():
            return [
                f"output_dir must be of this command to be replaced; got {self.output_dir}, which holds other files"
            ]
        return []

    def _literal_patterns(self) -> list[list[str]]:
        values = ([v] if isinstance(v, str) else v for v in self.sources.values())
        return [[p for p in value if isinstance(p, str)] for value in values if isinstance(value, list)]

    def _tokenizer_problems(self) -> list[str]:
        key = "model.tokenizer_path" if self.model.tokenizer_path else "model.path"
        path = self.model.tokenizer_path or self.model.path
        if not path:
            return ["model.path must name a model or tokenizer folder; got nothing"]
        hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)
        if not os.path.isdir(path) and not hub_name:
            return [f"{key} must be a folder that exists; got {path}"]
        return []

    def _option_problems(self) -> list[str]:
        problems = []
        if self.max_tokens is not None and self.max_tokens < 2:
            problems.append(f"max_tokens must be at least 2; got {self.max_tokens}")
        if self.num_workers is not None and self.num_workers < 1:
            problems.append(f"num_workers must be at least 1; got {self.num_workers}")
        choices = (("over_length", OVER_LENGTH_POLICIES), ("on_bad_record", ON_BAD_RECORD))
        problems += filter(None, (choice_problem(key, getattr(self, key), options) for key, options in choices))
        for name in self.apply_chat_template_kwargs:
            if name in RESERVED_TEMPLATE_KWARGS:
                problems.append(f"apply_chat_template_kwargs must not set {name}, which this command sets itself")
        return problems


def load_config(overrides: Sequence[str]) -> TokenizeConfig:
    """Compose `conf/tokenize.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    overrides = [_checked_override(text) for text in overrides]
    try:
        with initialize_config_module(version_base="1.3", config_module="verl_ext.conf"):
            node = compose("tokenize", overrides=list(overrides))
        merged = OmegaConf.merge(OmegaConf.structured(TokenizeConfig), node)
        OmegaConf.resolve(merged)
        if OmegaConf.is_missing(merged, "output_dir"):
            merged.output_dir = ""
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise UsageError(f"{key}: {first_line(error)}" if key else first_line(error)) from error
    except HydraException as error:
        cause = error.__cause__ or error
        raise UsageError(first_line(cause)) from error
    assert isinstance(config, TokenizeConfig)
    config.validate()
    return config


def _checked_override(text: str) -> str:
    """One override whose key is known, with `+` added where it opens a key of the user's own."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        hint = "key=value, with quotes around a value that holds spaces or '='"
        raise UsageError(f"an override must be {hint}; got {text!r}") from error
    key = override.key_or_group
    known = known_keys()
    is_open = key.partition(".")[0] in OPEN_NODES
    if not is_open and key not in known and not key.startswith("hydra."):
        raise UsageError(_unknown(key, known))
    return text if not is_open or text.startswith(("+", "~")) else f"++{text}"


def known_keys() -> list[str]:
    """Every dotted key of the command, in the order of the dataclass."""
    schema = OmegaConf.structured(TokenizeConfig)
    keys = []
    for name in schema:
        keys.append(name)
        if name == "model":
            keys += [f"model.{child}" for child in schema.model]
    return keys


def _unknown(key: str, known: Sequence[str]) -> str:
    nearest = nearest_key(key, known)
    return f"unknown key {key}; " + (f"nearest: {nearest}" if nearest else f"known keys: {', '.join(known)}")
