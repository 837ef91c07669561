"""Chats of your own, scored as `eval.prompts` is in a run: any model answers them, also one behind a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.options import DataError, Options, UsageError, option
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import file_name, find_source_files, without_compression
from verl_ext.text.records.records import category_of, column_problems, parse_record
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.judging.task import Case, Scores, Task


@dataclass(frozen=True)
class EvalOptions(Options):
    """How records are read and answers scored, by the keys of a run."""

    prefix: ClassVar[str] = "eval"

    score: str = option("exact", "exact, number, contains, or your own module:function, (record, answer) -> float")
    category_field: str | None = option(None, "field that holds a record's category; null: its file's name")
    columns: dict[str, Any] = option({}, "{known field: its name in the records}, as in `verl-ext tokenize`")

    def problems(self) -> Iterator[str]:
        """Yield a line for each mistake in `columns`."""
        yield from (line.replace("columns", "eval.columns", 1) for line in column_problems(self.columns))


class EvalPrompts(Task):
    """Chats, whose last answer is expected."""

    options: EvalOptions
    node: ClassVar[str] = "eval"
    sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.0, max_tokens=256)
    headlines: ClassVar[tuple[str, ...]] = ("score",)

    def cases(self) -> Iterator[Case]:
        """Yield the records' chats up to their last answer; raise DataError for a record without one."""
        from verl_ext.answers.scores import scorer  # its package imports torch, which --help does not need

        try:
            self._scorer = scorer(self.options.score)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._records: dict[str, dict[str, Any]] = {}
        for file in find_source_files({"": [self.path]}, "cases"):
            name = Path(without_compression(file_name(file.path))).stem
            for place, raw in (placed for chunk in read_chunks(file) for placed in chunk.records):
                try:
                    self._records[place] = read_record(raw)
                    yield self._case(self._records[place], name, place)
                except BadRecord as error:
                    raise DataError(f"cases must hold chats with an answer; {place}: {error}") from error

    def _case(self, record: dict[str, Any], name: str, place: str) -> Case:
        field = self.options.category_field
        category = category_of(record, field) if field else None
        if (chat := parse_record(record, self.options.columns).content.chat) is None:
            raise BadRecord("no_chat", "the record is not a chat")
        from verl_ext.answers.scores import expected_problem  # as in `cases`

        chat = chat.with_argument_texts()  # as servers take them
        last = max(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
        if not last:
            raise BadRecord("no_prompt", "nothing stands before the answer")
        messages, expected = chat.messages[:last], chat.messages[last]["content"]
        if problem := expected_problem(self.options.score, expected):
            raise BadRecord("empty", problem)
        kwargs = {"chat_template_kwargs": chat.template_kwargs} if chat.template_kwargs else {}
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        facts = {"expected": expected, "category": name if category is None else category}
        return Case(place, prompt, facts, messages, {"tools": chat.tools or (), "extra_body": kwargs})

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return the score of `eval.score`; raise UsageError if your own function fails."""
        try:
            return {"score": self._scorer(self._records[case.name], case.facts["expected"], answer)}
        except ValueError as error:
            raise UsageError(str(error)) from error

    def groups(self, case: Case) -> dict[str, str]:
        """Return the record's category."""
        return {"category": case.facts["category"]}
