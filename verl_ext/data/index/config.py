"""The index command's configuration: composed by Hydra from `conf/index.yaml`, typed and checked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

from verl_ext.commands.output_check import output_problems
from verl_ext.commands.tokenizer import ModelConfig
from verl_ext.commands.typed_options import least_problems, load_options
from verl_ext.config.nearest import choice_problem
from verl_ext.tokenize.bad_record import ON_BAD_RECORD, SPECIAL_TOKENS_IN_TEXT
from verl_ext.tokenize.remote_files import local_path

CONFIG_NAME = "index"
REPORT = "report.json"
# Nodes whose keys are the user's own.
OPEN_NODES = {"sources": "a source to its files"}


# Optional[...] and not `| None`: OmegaConf's structured configs read the annotations.
@dataclass
class IndexConfig:
    """Everything that `python -m verl_ext.data.index` takes; the fields are described in `conf/index.yaml`."""

    sources: dict[str, Any] = field(default_factory=dict)
    output_dir: str = MISSING
    overwrite: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    text_key: Any = "text"
    add_eos: bool = True
    add_bos: bool = False
    special_tokens_in_text: str = "encode"
    max_corpus_tokens: Optional[int] = None  # noqa: UP045
    on_bad_record: str = "error"
    num_workers: Optional[int] = None  # noqa: UP045

    def source_patterns(self) -> dict[str, list[str]]:
        """Every source's paths and globs, in the order of `sources`."""
        return {name: _as_list(value) for name, value in self.sources.items()}

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without opening a source."""
        source_problems = self._source_problems()
        return [*source_problems, *self._output_problems(), *self.model.problems(), *self._option_problems()]

    def _source_problems(self) -> list[str]:
        if not self.sources:
            return ["sources must name at least one source, e.g. 'sources={books:books/}'; got {}"]
        problems = []
        for name, value in self.sources.items():
            if not name or name.startswith(".") or set(name) & set("/\\\0"):
                problems.append(f"sources.{name} must be a file's name, that of {name}.bin and {name}.idx")
            if not _is_names(value):
                problems.append(f"sources.{name} must be a path, a glob or a list of them; got {value!r}")
        return problems

    def _output_problems(self) -> list[str]:
        sources = [path for value in self.sources.values() if _is_names(value) for path in _as_list(value)]
        keep = [self.model.path, self.model.tokenizer_path, *map(local_path, sources)]
        problems = output_problems(self.output_dir, self.overwrite, REPORT, keep, kept="a source, the tokenizer")
        output = Path(self.output_dir)
        # A tokenised dataset has a report.json as well.
        if not problems and output.is_dir() and any(output.iterdir()) and not any(output.glob("*.idx")):
            return [f"output_dir must be of this command to be replaced; got {output}, which holds other files"]
        return problems

    def _option_problems(self) -> list[str]:
        least = {"max_corpus_tokens": (self.max_corpus_tokens, 1), "num_workers": (self.num_workers, 1)}
        problems = least_problems(least)
        choices = (("special_tokens_in_text", SPECIAL_TOKENS_IN_TEXT), ("on_bad_record", ON_BAD_RECORD))
        problems += filter(None, (choice_problem(key, getattr(self, key), options) for key, options in choices))
        if not _is_names(self.text_key):
            problems.append(f"text_key must be a field or a list of fields; got {self.text_key!r}")
        return problems


def _is_names(value: Any) -> bool:
    """A name, or a list of at least one."""
    values = [value] if isinstance(value, str) else value
    return isinstance(values, list) and bool(values) and all(isinstance(name, str) and name for name in values)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def load_config(overrides: Sequence[str]) -> IndexConfig:
    """Compose `conf/index.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    return load_options(CONFIG_NAME, IndexConfig, overrides, OPEN_NODES)
