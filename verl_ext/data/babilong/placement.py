"""Between which background sentences the facts lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FactRange:
    """The tokens of a sample, [first, end), inside which every fact lies whole. `is_all`: anywhere."""

    first: int
    end: int
    is_all: bool = False

    @classmethod
    def of(cls, facts_within: object, target: int) -> "FactRange":
        """From `facts_within`: null, a share of the sample from its start on, or [first token, end token]."""
        if facts_within is None:
            return cls(0, target, is_all=True)
        if isinstance(facts_within, (list, tuple)):
            return cls(facts_within[0], min(facts_within[1], target))
        assert isinstance(facts_within, (int, float)), facts_within
        return cls(0, int(facts_within * target))

    def gaps(self, before: np.ndarray, fact_tokens: int) -> np.ndarray:
        """Numbers of the gaps where facts may lie. before[G]: background tokens before each gap, ascending.

        In the last gap all facts stand before the last one, in the first gap none: both must fit.
        """
        if self.is_all:
            return np.arange(len(before))
        return np.flatnonzero((before >= self.first) & (before + fact_tokens <= self.end))


def fact_gaps(draws: Sequence[float], gaps: np.ndarray) -> list[int]:
    """For every fact the number of its gap: independent draws in [0, 1), sorted, so that facts keep their order."""
    return [int(gaps[int(draw * len(gaps))]) for draw in sorted(draws)]


def interleave(facts: Sequence[str], gaps: Sequence[int], sentences: Sequence[str]) -> list[str]:
    """Facts and sentences as one list; gap g lies before sentence g, the last one after all sentences."""
    parts: list[str] = []
    done = 0
    for fact, gap in zip(facts, gaps, strict=True):
        parts += sentences[done:gap]
        parts.append(fact)
        done = gap
    return [*parts, *sentences[done:]]
