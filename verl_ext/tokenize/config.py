"""The tokenise command's configuration: composed by Hydra from `conf/tokenize.yaml`, typed and checked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from verl_ext.commands.errors import UsageError
from verl_ext.commands.output_check import output_problems
from verl_ext.commands.tokenizer import ModelConfig, is_template_text, read_template_file
from verl_ext.commands.typed_options import least_problems, load_options
from verl_ext.config.nearest import choice_problem
from verl_ext.packing import OVER_LENGTH_POLICIES
from verl_ext.tokenize.bad_record import ON_BAD_RECORD, ON_MEDIA, ON_UNPRINTED, SPECIAL_TOKENS_IN_TEXT, TURNS
from verl_ext.tokenize.records import column_problems
from verl_ext.tokenize.remote_files import local_path
from verl_ext.tokenize.sample import sample_problems

CONFIG_NAME = "tokenize"
REPORT = "report.json"
# Nodes whose keys are the user's own, and what they map; `sample` may be a single value.
OPEN_NODES = {
    "sources": "a category to files",
    "apply_chat_template_kwargs": "an argument to its value",
    "columns": "a field to a column",
    "sample": "",
}
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
class TokenizeConfig:
    """Everything that `python -m verl_ext.tokenize` takes; the fields are described in `conf/tokenize.yaml`."""

    sources: dict[str, Any] = field(default_factory=dict)
    output_dir: str = MISSING
    overwrite: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    chat_template: Optional[str] = None  # noqa: UP045
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    end_of_turn: Optional[str] = None  # noqa: UP045
    turns: str = "all"
    on_unprinted: str = "warn"
    last_turn_only: bool = False
    special_tokens_in_text: str = "encode"
    max_tokens: Optional[int] = None  # noqa: UP045
    over_length: str = "error"
    on_bad_record: str = "error"
    media: str = "error"
    columns: dict[str, Any] = field(default_factory=dict)
    category_field: Optional[str] = None  # noqa: UP045
    sample: Any = None
    seed: int = 42
    preview: int = 2
    num_workers: Optional[int] = None  # noqa: UP045

    def source_patterns(self) -> dict[str, list[str]]:
        """Every category's paths and globs, in the order of `sources`."""
        return {name: [value] if isinstance(value, str) else list(value) for name, value in self.sources.items()}

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without opening a source."""
        source_problems = self._source_problems()
        return [*source_problems, *self._output_problems(), *self.model.problems(), *self._option_problems()]

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
        values = ([value] if isinstance(value, str) else value for value in self.sources.values())
        sources = [path for value in values if isinstance(value, list) for path in value if isinstance(path, str)]
        keep = [self.model.path, self.model.tokenizer_path, *map(local_path, sources)]
        return output_problems(self.output_dir, self.overwrite, REPORT, keep, kept="a source, the tokenizer")

    def _option_problems(self) -> list[str]:
        least = {"max_tokens": (self.max_tokens, 2), "num_workers": (self.num_workers, 1), "preview": (self.preview, 0)}
        problems = [*least_problems(least), *column_problems(self.columns)]
        problems += sample_problems(self.sample, list(self.sources))
        if self.category_field == "":
            problems.append("category_field must name a field of the records, or be null; got ''")
        choices = (
            ("turns", TURNS),
            ("on_unprinted", ON_UNPRINTED),
            ("media", ON_MEDIA),
            ("special_tokens_in_text", SPECIAL_TOKENS_IN_TEXT),
            ("over_length", OVER_LENGTH_POLICIES),
            ("on_bad_record", ON_BAD_RECORD),
        )
        problems += filter(None, (choice_problem(key, getattr(self, key), options) for key, options in choices))
        if self.last_turn_only and self.turns == "each":
            problems.append("last_turn_only must not be set beside turns; got true beside turns=each")
        if self.end_of_turn == "":
            problems.append("end_of_turn must be a text that ends a turn, or null; got ''")
        for name in self.apply_chat_template_kwargs:
            if name in RESERVED_TEMPLATE_KWARGS:
                problems.append(f"apply_chat_template_kwargs must not set {name}, which this command sets itself")
        if self.chat_template is not None and not is_template_text(self.chat_template):
            try:
                read_template_file(self.chat_template, "chat_template")
            except UsageError as error:
                problems.append(str(error))
        return problems


def load_config(overrides: Sequence[str]) -> TokenizeConfig:
    """Compose `conf/tokenize.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    return load_options(CONFIG_NAME, TokenizeConfig, overrides, OPEN_NODES)
