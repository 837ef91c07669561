"""The tokenise command's configuration: composed by Hydra from `conf/tokenize.yaml`, typed and checked here.

Which records of a source are tokenised where `sample` asks for a part of them.

Every record draws a 128-bit number from `seed`, its source's name, its file's place among the source's files and its
own place in the file. A fraction f keeps the records whose number is below f · 2^128, a count n those with the n lowest
numbers (a bottom-n sample: without replacement, each set of n records as likely as any other). So the same records
are drawn whatever the number of workers and the other sources, and a larger sample holds the smaller one. A count reads
its source once more.

The tokenise run: find the files, tokenise their chunks, write, publish.

The command `verl-ext tokenize`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from verl_ext.commands.command_line import least_problems, load_options, run_command
from verl_ext.files import output_problems
from verl_ext.packing import OVER_LENGTH_POLICIES
from verl_ext.text.json_records import ON_BAD_RECORD, ON_MEDIA, ON_UNPRINTED, SPECIAL_TOKENS_IN_TEXT, TURNS
from verl_ext.text.records import column_problems
from verl_ext.text.remote import local_path
from verl_ext.text.tokenizer import ModelConfig, is_template_text, leave_out_torch, read_template_file
from verl_ext.values import UsageError, choice_problem

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
    """Everything that `verl-ext tokenize` takes; the fields are described in `conf/tokenize.yaml`."""

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
        return [*source_problems, *self._output_problems(), *self.model.tokenizer_problems(), *self._option_problems()]

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


Sample = float | int | Mapping[str, float | int] | None


def sample_problems(sample: Any, sources: Sequence[str]) -> list[str]:
    """One line for every mistake in `sample`."""
    by_key = {f"sample.{name}": share for name, share in sample.items()} if isinstance(sample, dict) else {}
    problems = [
        f"sample.{name} must be one of sources ({', '.join(sources)}); got {name}"
        for name in (sample if isinstance(sample, dict) else ())
        if name not in sources
    ]
    for key, share in by_key.items() if isinstance(sample, dict) else [("sample", sample)]:
        fraction = isinstance(share, float) and 0 < share <= 1
        count = isinstance(share, int) and not isinstance(share, bool) and share >= 1
        if share is not None and not fraction and not count:
            problems.append(
                f"{key} must be a fraction above 0 and at most 1.0, or a number of records from 1; got {share}"
            )
    return problems


USAGE = (
    "usage: verl-ext tokenize 'sources={gsm8k:train.jsonl,code:code.json}' output_dir=DIR model.path=MODEL_OR_TOKENIZER"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 for unusable data, 2 for a mistake in the command."""
    return run_command(arguments, USAGE, CONFIG_NAME, _tokenize)


def _tokenize(arguments: Sequence[str]) -> str:
    config = load_config(arguments)
    leave_out_torch(config.model)
    # heavy: not for a command with a mistake in it
    from rich.console import Console

    from verl_ext.commands.tokenize_run import tokenize
    from verl_ext.text.counts import previews_text

    report = tokenize(config)
    parts = [report.table(), previews_text(report.previews, Console()), f"written to {config.output_dir}"]
    return "\n\n".join(part.strip("\n") for part in parts if part)
