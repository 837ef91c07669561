"""A benchmark as a table of cases, and scores of answers.

    cases ──► answers of a model ──► requests to the judge ──► verdicts ──► scores of a case ──► figures
              (judging/under_test)   (none for a rule)        (or none)                       (judging/figures)

A benchmark defines these steps in a subclass of :class:`Task`; :mod:`verl_ext.tools.judging.run` runs them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.options import DataError, UsageError, must
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.endpoint.quality import filled_names

Messages = list[dict[str, str]]
Scores = dict[str, float | None]


@dataclass(frozen=True)
class Case:
    """A question to the model under test.

    Attributes:
        name: the unique name of the case in the benchmark.
        prompt: the user's message, or the text that a page shows of `messages`.
        facts: the values beside the answer that the scores need; they are written beside the answer.
        messages: the chat before the answer; empty: `prompt` as the user's message.
        request: further arguments of :meth:`Client.ask`, `tools` and `extra_body`.
    """

    name: str
    prompt: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    request: Mapping[str, Any] = field(default_factory=dict)


class Task:
    """The base class of benchmarks, which define questions and scores.

    Attributes:
        node: the option of the command that holds the benchmark's own options; "" if it has none.
        needed: those of its own options that must be given, and what they must be.
        prompt_file: our own prompt for the judge, in the folder prompts.
        sampling: how the model under test draws its answers, as published.
        judge_sampling: how the judge draws its verdicts, as published.
        asks_judge: whether a judge reads answers; else a rule scores them.
        worst: the verdict on an empty answer, which no judge is asked about.
        verdict_schema: of the JSON that the judge's prompt asks for; None: the prompt asks for words.
        needs_judge: whether there are no scores without a judge.
        headlines: the scores that a page draws by group, if the answers have them.
        heat_map: two kinds of groups and the score of a heat map as (columns, rows, score); None for no heat map.
        against: a fact of a case and a score in the same unit, drawn as points around the line on which they are equal.
    """

    node: ClassVar[str] = ""
    needed: ClassVar[Mapping[str, str]] = {}
    prompt_file: ClassVar[str] = ""
    sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.0, max_tokens=512)
    judge_sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.0, max_tokens=1024)
    asks_judge: ClassVar[bool] = False
    worst: ClassVar[Any] = None
    verdict_schema: ClassVar[Mapping[str, Any] | None] = None
    needs_judge: ClassVar[bool] = False
    headlines: ClassVar[tuple[str, ...]] = ()
    heat_map: ClassVar[tuple[str, str, str] | None] = None
    against: ClassVar[tuple[str, str] | None] = None

    def __init__(self, path: str, options: Any = None, tokenizer: Any = None, judge_prompt: str | None = None) -> None:
        """Keep the sources of the cases.

        Args:
            path: the benchmark's file or folder.
            options: the benchmark's own options, if it has any.
            tokenizer: counts tokens if the benchmark has lengths or limits in tokens.
            judge_prompt: a file that replaces our own prompt for the judge.
        """
        self.path, self.options, self.tokenizer, self._judge_prompt = path, options, tokenizer, judge_prompt

    def filled(self, parts: Mapping[str, str]) -> str:
        """Replace the $NAMES$ of the judge's prompt, in one pass."""
        given = self._judge_prompt
        prompt = self.own_prompt() if given is None else Path(given).read_text(encoding="utf-8")
        return filled_names(prompt, parts)

    def own_prompt(self) -> str:
        """Return our own prompt for the judge."""
        folder = resources.files("verl_ext.tools.judging") / "prompts"
        return (folder / self.prompt_file).read_text(encoding="utf-8")

    def cases(self) -> Iterator[Case]:
        """Yield the cases. Raises DataError if the file is not the benchmark's."""
        raise NotImplementedError

    def questions(self, case: Case, answer: str) -> list[Messages]:
        """Return the requests to the judge; none for a rule."""
        return []

    def verdict(self, text: str) -> Any:
        """Return the verdict in a judge's text; raise Unparsable without one."""
        raise NotImplementedError

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return an answer's scores by name, None where a verdict is missing."""
        raise NotImplementedError

    def groups(self, case: Case) -> dict[str, str]:
        """Return a case's groups by kind, which get their own figures."""
        return {}

    def published(self, case: Case, answer: str) -> dict[str, Any] | None:
        """Return a case's row for the benchmark's own predictions file, or None."""
        return None


def token_ends(tokenizer: Any, text: str) -> list[int]:
    """Return each token's end in characters; raise UsageError for slow tokenizers."""
    if not tokenizer.is_fast:
        raise UsageError(must("model.path", "hold a fast tokenizer to cut texts by", type(tokenizer).__name__))
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [end for _, end in offsets]


def read_rows(path: str, key: str, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file or JSON list.

    Args:
        path: the file.
        key: the option that names it.
        fields: the fields that every row must have, and their types.

    Raises:
        DataError: the file is missing, a line is not an object, or a field is missing or of another type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(must(key, "be a readable file of JSON", f"{path}: {error}")) from error
    try:
        # Not by `splitlines`: a text may hold U+2028 and others that end no line of JSON.
        lines = (line for line in text.split("\n") if line.strip())
        rows = json.loads(text) if text.lstrip().startswith("[") else list(map(json.loads, lines))
    except json.JSONDecodeError as error:
        raise DataError(must(key, "hold an object in every line, or a list of them", f"{path}: {error}")) from error
    for number, row in enumerate(rows, start=1):
        for name, kind in fields.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind) or isinstance(row[name], bool):
                raise DataError(
                    f"{key} must have {name} ({kind.__name__}) in every row; row {number} of {path} has not"
                )
    if not rows:
        raise DataError(f"{key} must hold a case; {path} is empty")
    return rows
