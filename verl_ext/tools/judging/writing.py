"""LongBench-Write and LongWrite-Ruler: length and quality of requested long texts.

Source: LongWriter (arXiv 2408.07055) and evaluation/ in its repository, whose rules apply here with all their quirks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from verl_ext.options import DataError, must
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.endpoint.quality import DIMENSIONS, QUALITY_SCHEMA, quality_prompt, quality_score, read_quality
from verl_ext.tools.judging.task import Case, Messages, Scores, Task, read_rows
from verl_ext.tools.word_count import count_words, language_of, length_score

IMPUTED = 3  # EvalScope's score in each dimension of an answer whose verdict cannot be read
_RANGES = ((0, 500), (500, 2000), (2000, 4000), (4000, None))  # ranges of required lengths in the paper's table


class LongBenchWrite(Task):
    """Texts of a required length, judged by length and six dimensions."""

    sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.5, max_tokens=32768)
    judge_sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.5, max_tokens=1024)
    asks_judge: ClassVar[bool] = True
    worst: ClassVar[Any] = dict.fromkeys(DIMENSIONS, 1.0)
    verdict_schema: ClassVar[Mapping[str, Any] | None] = QUALITY_SCHEMA
    headlines: ClassVar[tuple[str, ...]] = ("S_bar", "S_l", "S_q")

    def cases(self) -> Iterator[Case]:
        """Yield a case per line, with `length` even if prompts omit it."""
        rows = read_rows(self.path, "cases", {"prompt": str, "type": str, "length": int})
        for number, row in enumerate(rows, start=1):
            if row["length"] < 1:
                got = f"{row['length']} in row {number} of {self.path}"
                raise DataError(must("cases", "have a length of at least 1 word in every row", got))
            yield Case(str(number), row["prompt"], {"type": row["type"], "length": row["length"]})

    def questions(self, case: Case, answer: str) -> list[Messages]:
        """Return one request: the user's request and the answer."""
        return [[{"role": "user", "content": self.filled({"$INST$": case.prompt, "$RESPONSE$": answer})}]]

    def own_prompt(self) -> str:
        """Return our own prompt for the judge."""
        return quality_prompt()

    def verdict(self, text: str) -> dict[str, float]:
        """Return the six dimensions, each from 1 to 5."""
        return read_quality(text)

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return S_l, S_q, its dimensions and S_q_imputed, where missing ones count 3, and their mean S_bar."""
        of_length = length_score(case.facts["length"], count_words(answer))
        if not verdicts:  # there is no judge
            return {"S_l": of_length}
        (verdict,) = verdicts
        found = verdict or {}
        dimensions = {name: quality_score(found[name]) if verdict else None for name in DIMENSIONS}
        imputed = [quality_score(found.get(name, IMPUTED)) for name in DIMENSIONS]
        known = [score for score in dimensions.values() if score is not None]
        quality = sum(known) / len(known) if known else None
        overall = None if quality is None else (of_length + quality) / 2
        scores: Scores = {"S_l": of_length, "S_q": quality, "S_q_imputed": sum(imputed) / len(imputed)}
        return {**scores, "S_bar": overall, **dimensions}

    def groups(self, case: Case) -> dict[str, str]:
        """Return the case's language, type and range of required length."""
        low, high = next(ends for ends in _RANGES if ends[1] is None or case.facts["length"] < ends[1])
        length = f"{low}-{high}" if high else f"≥{low}"
        return {"language": language_of(case.prompt), "length": length, "type": case.facts["type"]}

    def published(self, case: Case, answer: str) -> dict[str, Any]:
        """Return the row of LongWriter's and EvalScope's pred.jsonl."""
        return {"prompt": case.prompt, **case.facts, "response_length": count_words(answer), "response": answer}


class LongWriteRuler(LongBenchWrite):
    """The same requests at growing lengths, scored by our own rule: no scorer was published."""

    asks_judge: ClassVar[bool] = False
    headlines: ClassVar[tuple[str, ...]] = ("words", "S_l")
    against: ClassVar[tuple[str, str] | None] = ("length", "words")

    def questions(self, case: Case, answer: str) -> list[Messages]:
        """Return no requests, because no judge is asked."""
        return []

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return the words, their ratio to those required, and S_l."""
        required, written = case.facts["length"], count_words(answer)
        return {"words": written, "share": written / required, "S_l": length_score(required, written)}

    def groups(self, case: Case) -> dict[str, str]:
        """Return the language and the required length."""
        return {"language": language_of(case.prompt), "length": str(case.facts["length"])}
