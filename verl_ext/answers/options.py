"""The options of the evaluation by answers: the `eval` node."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_ext.answers.scores import BUILT_IN, scorer
from verl_ext.options import Options, must, option


@dataclass(frozen=True)
class AnswerOptions(Options):
    """The options for prompts, a model's answers, and their scores."""

    prefix: ClassVar[str] = "eval"

    prompts: Any = option(
        None,
        "chats whose last answer is generated, or texts to continue: files or folders of records, a "
        "tokenized folder, or {category: files}; null: none",
    )
    freq: int | None = option(None, "steps between two evaluations by answers; null: only at the end", least=1)
    score: str = option("exact", f"{', '.join(BUILT_IN)}, or your own module:function, (record, answer) -> float")
    max_samples: int | None = option(None, "number of first prompts to answer; null: all", least=1)
    category_field: str | None = option(None, "field that holds a record's category; null: its file's name")
    columns: dict[str, Any] | None = option(
        None, "{known field: its name in the records}, as in `verl-ext tokenize`; null: as the training data was made"
    )
    chat_template: str | None = option(
        None, "a Jinja template, or a file with one; null: that of the training data, or else the tokenizer's own"
    )
    apply_chat_template_kwargs: dict[str, Any] | None = option(
        None, "template arguments, e.g. {enable_thinking: false}; null: those of the training data"
    )
    chat_date: str | None = option(
        None, "day that the template prints as today's; null: that of the training data, or else the day of the run"
    )
    max_new_tokens: int = option(256, "maximum number of tokens of an answer", least=1)
    temperature: float = option(0.0, "sampling temperature; 0: always the most likely token", least=0)
    top_p: float = option(1.0, "total probability of the most likely tokens to sample from", above=0, most=1)
    batch_size: int = option(8, "prompts that a rank answers at a time", least=1)
    table_rows: int = option(8, "number of answers in answers.jsonl and in the trackers' tables", least=0)

    def problems(self) -> Iterable[str | None]:
        """Check the score, and options that need each other."""
        try:
            scorer(self.score)
        except ValueError as error:
            yield str(error)
        if self.prompts is None and self.freq is not None:
            yield f"eval.prompts is required with eval.freq={self.freq}; got null"
        if self.prompts is not None and not _are_paths(self.prompts):
            yield must("eval.prompts", "be a path, a list of paths or {category: paths}", self.prompts)


def _are_paths(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(not isinstance(paths, dict) and _are_paths(paths) for paths in value.values())
    paths = value if isinstance(value, list) else [value]
    return bool(paths) and all(isinstance(path, str) and path for path in paths)
