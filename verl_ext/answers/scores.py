"""Scores of answers, by a rule or the user's own function.

| score | an answer is right (1) if |
|---|---|
| `exact` | its text equals the expected text, apart from white space around it |
| `number` | its number equals the number of the expected answer |
| `contains` | it contains the expected answer, in upper or lower case |

The number of a text is the first one after its last `####`, as in GSM8K, or else its last one; 1,234.50 is 1234.5. A
model's reasoning is not part of its answer (verl_ext.text.records.reasoning), for a function of the user's own either.
"""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from verl_ext.custom import named_object
from verl_ext.options import choice_problem, first_line, must, refuse
from verl_ext.text.records.reasoning import split_reasoning

Scorer = Callable[[Mapping[str, Any], str | None, str], float | None]  # (record, expected answer or None, answer)

_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")


class ScoreFailed(ValueError):
    """The one-line error of a user's own scorer that gives no score."""


def number_of(text: str) -> Decimal | None:
    """Return the number that a text gives as its result, or None."""
    _, mark, result = text.rpartition("####")
    numbers = _NUMBER.findall(result)
    return Decimal(numbers[0 if mark else -1].replace(",", "")) if numbers else None


BUILT_IN: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda expected, answer: answer.strip() == expected.strip(),
    "number": lambda expected, answer: number_of(answer) is not None and number_of(answer) == number_of(expected),
    "contains": lambda expected, answer: expected.strip().casefold() in answer.casefold(),
}


def scorer(name: str) -> Scorer:
    """Return the scorer of `eval.score`; raise ValueError if there is none."""
    if rule := BUILT_IN.get(name):

        def by_rule(record: Mapping[str, Any], expected: str | None, answer: str) -> float | None:
            return None if expected is None else float(rule(_without_thought(expected), _without_thought(answer)))

        return by_rule
    if ":" not in name:
        refuse([choice_problem("eval.score", name, [*BUILT_IN, "module:function"])])
    if not callable(function := named_object("eval.score", name)):
        raise ValueError(must("eval.score", "name a function", name))

    def by_user(record: Mapping[str, Any], expected: str | None, answer: str) -> float:
        try:
            score = float(function(record, _without_thought(answer)))
        except Exception as error:  # the user's code can raise any exception
            got = f"{type(error).__name__}: {first_line(error)}"
            raise ScoreFailed(must(f"eval.score={name}", "give a number", got)) from error
        if not math.isfinite(score):
            raise ScoreFailed(must(f"eval.score={name}", "give a finite number", score))
        return score

    return by_user


def expected_problem(score: str, expected: str) -> str | None:
    """Return why `eval.score` cannot compare any answer with an expected one, or None."""
    text, needs = _without_thought(expected), "number" if score == "number" else "words"
    if score not in BUILT_IN or (text.strip() and (needs == "words" or number_of(text) is not None)):
        return None
    return f"the last assistant turn has no {needs} that eval.score={score} compares"


def _without_thought(text: str) -> str:
    return split_reasoning(text)[1]
