"""LongBench-Chat: questions about documents of 10k to 100k tokens.

Source: LongAlign (arXiv 2401.18058) and LongBench_Chat/ in its repository. The judge sees the question, the reference
and the three shots, never the document. The paper shuffles the shots and rates twice; the published code does neither.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from verl_ext.options import DataError, Options, option
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.endpoint.quality import read_rating
from verl_ext.tools.judging.task import Case, Messages, Scores, Task, read_rows, token_ends
from verl_ext.tools.word_count import language_of

SYSTEM = "You're a good assistant at evaluating the quality of texts."
_SHOT = "\n[Answer begins]\n{answer}\n[Answer ends]\n\nRating: [[{score}]]\n"


@dataclass(frozen=True)
class ChatBenchOptions(Options):
    """The options of LongBench-Chat."""

    prefix: ClassVar[str] = "chat"

    shots: str | None = option(None, "few_shots.json, with three {answer, score} for each idx")
    shuffle_shots: bool = option(False, "true: shuffle the three shots in each request, as in the paper")
    ratings: int = option(1, "number of ratings per answer, which are averaged; the paper has 2", least=1)
    max_prompt_tokens: int | None = option(
        None, "maximum tokens of a prompt, cut in its middle; published figures: 64,000; null: no limit", least=2
    )

    @property
    def counts_tokens(self) -> bool:
        """Whether prompts are cut by tokens."""
        return self.max_prompt_tokens is not None


class LongBenchChat(Task):
    """Questions about long documents, rated beside three rated answers."""

    options: ChatBenchOptions
    node: ClassVar[str] = "chat"
    needed: ClassVar[Mapping[str, str]] = {"shots": "be the benchmark's few_shots.json"}
    prompt_file: ClassVar[str] = "chat.txt"
    sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=1.0, max_tokens=1024)
    asks_judge: ClassVar[bool] = True
    worst: ClassVar[Any] = 1.0
    needs_judge: ClassVar[bool] = True
    headlines: ClassVar[tuple[str, ...]] = ("rating",)

    def cases(self) -> Iterator[Case]:
        """Yield cases with shots; raise DataError unless each has three."""
        fields = {"idx": int, "prompt": str, "query": str, "answer": str}
        shots = read_rows(str(self.options.shots), "chat.shots", {})
        for row in read_rows(self.path, "cases", fields):
            name = row["idx"]
            own = shots[name - 1] if 0 < name <= len(shots) else None
            if not isinstance(own, list) or len(own) != 3 or not all({"answer", "score"} <= set(shot) for shot in own):
                needed = f"chat.shots must hold three of {{answer, score}} for idx {name}"
                raise DataError(f"{needed}; {self.options.shots} has not")
            facts = {"query": row["query"], "reference": row["answer"], "shots": own}
            facts |= {"length": str(row["length"])} if "length" in row else {}
            yield Case(str(name), self._cut(row["prompt"]), facts)

    def _cut(self, prompt: str) -> str:
        """Cut an over-long prompt's middle as the published code does."""
        most = self.options.max_prompt_tokens
        if most is None:
            return prompt
        ends = token_ends(self.tokenizer, prompt)
        half = most // 2
        return prompt if len(ends) <= most else prompt[: ends[half - 1]] + prompt[ends[-half - 1] :]

    def groups(self, case: Case) -> dict[str, str]:
        """Return the language of the question and, if the cases name it, the length of the text."""
        length = {"length": case.facts["length"]} if "length" in case.facts else {}
        return {"language": language_of(case.facts["query"]), **length}

    def questions(self, case: Case, answer: str) -> list[Messages]:
        """Return `ratings` requests; case and number determine the shots' order."""
        requests = []
        for number in range(self.options.ratings):
            shots = list(case.facts["shots"])
            if self.options.shuffle_shots:
                digest = blake2b(f"{case.name} {number}".encode(), digest_size=8).digest()
                random.Random(int.from_bytes(digest, "big")).shuffle(shots)
            parts = {
                "$QUESTION$": case.facts["query"],
                "$REFERENCE$": case.facts["reference"],
                "$SHOTS$": "".join(_SHOT.format(**shot) for shot in shots),
                "$ANSWER$": answer,
            }
            requests.append([{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.filled(parts)}])
        return requests

    def verdict(self, text: str) -> float:
        """Return the first number of the last [[…]], from 1 to 10."""
        return read_rating(text)

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return the mean and, of several, the spread of the ratings; None if one is missing."""
        if None in verdicts or not verdicts:
            return {"rating": None}
        spread = {"rating_spread": max(verdicts) - min(verdicts)} if len(verdicts) > 1 else {}
        return {"rating": sum(verdicts) / len(verdicts), **spread}
