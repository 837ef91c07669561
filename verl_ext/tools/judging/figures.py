"""Means over cases with bootstrap intervals, for all cases and by group."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl_ext.tools.judging.task import Scores

RESAMPLES = 2000


@dataclass(frozen=True)
class Figure:
    """A mean over cases with its 95 % bootstrap interval.

    Attributes:
        low: the interval's lower end; None for fewer than two cases.
        high: its upper end.
        cases: the number of cases in the mean.
    """

    mean: float
    low: float | None
    high: float | None
    cases: int


FiguresByGroup = Mapping[str, Mapping[str, Figure]]  # of each score by group, or of each group by model


def as_facts(figures: FiguresByGroup) -> dict[str, dict[str, Any]]:
    """Return figures as they are written to JSON."""
    return {group: {name: asdict(each) for name, each in of_group.items()} for group, of_group in figures.items()}


def figure(values: Sequence[float]) -> Figure:
    """Return a mean and its 95 % interval from `RESAMPLES` bootstrap samples.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return Figure(float(array.mean()), None, None, len(array))
    drawn = np.random.default_rng(0).integers(0, len(array), (RESAMPLES, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), [2.5, 97.5])
    return Figure(float(array.mean()), float(low), float(high), len(array))


def seed_figure(means: Sequence[float]) -> Figure:
    """Return the mean of several seeds' means and its 95 % t interval.

    Seeds are few, and a bootstrap of few values is too narrow. `cases` of the figure counts seeds.
    """
    from scipy.stats import t  # takes a second

    array = np.asarray(means, np.float64)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Figure(mean, None, None, count)
    half = float(t.ppf(0.975, count - 1)) * float(array.std(ddof=1)) / math.sqrt(count)
    return Figure(mean, mean - half, mean + half, count)


def figures(rows: Iterable[tuple[Mapping[str, str], Scores]]) -> dict[str, dict[str, Figure]]:
    """Return {group: {score: figure}}, groups being "all" and "kind name".

    rows: the groups of each case by kind, and its scores. No mean includes a score of None.
    """
    values: dict[str, dict[str, list[float]]] = {"all": {}}
    for groups, scores in rows:
        for group in ("all", *(f"{kind} {name}" for kind, name in groups.items())):
            of_group = values.setdefault(group, {})
            for name, score in scores.items():
                if score is not None:
                    of_group.setdefault(name, []).append(score)
    return {group: {name: figure(scores) for name, scores in of_group.items()} for group, of_group in values.items()}
