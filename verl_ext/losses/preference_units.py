"""The preferences of a pack: answers, pairs, and scales of targets.

document   0   1   2   3   4
unit       3   0   0   1   1       pairs (0, 1), (0, 2); document 3 has a label alone, document 4 is not an answer
answer     1  -1  -1  -1   0
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from verl_ext.losses.modes import Array

LENGTHS = ("sum", "mean", "common")


@dataclass(frozen=True)
class Units:
    """The answers among A documents: P pairs, S with a label alone.

    side: float64[A], 1 preferred, -1 rejected, 0 no answer. weight: float64[A], of the document's unit. targets:
    float64[A]. slot: int64[A], dense categories. reference: float64[A], sums of the reference model, 0 without one.
    chosen, rejected: int64[P], documents. pair_weight: float64[P]. alone: int64[S], documents; answers: those of both.
    """

    side: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    reference: torch.Tensor
    chosen: torch.Tensor
    rejected: torch.Tensor
    pair_weight: torch.Tensor
    alone: torch.Tensor
    answers: torch.Tensor
    slot: torch.Tensor

    @classmethod
    def of_rows(
        cls,
        unit: Array,
        answer: Array,
        pair_weight: Array,
        targets: Array,
        reference: Array | None = None,
        answers: str = "sum",
        slot: Array | None = None,
    ) -> "Units":
        """Return the units of documents with these columns, each unit whole.

        slot: the documents' dense categories, 0 if None. answers: of several rejected answers, `sum` gives each pair
        the unit's weight, `mean` divides it among them.
        """
        # A unit's documents follow each other; each rejected one makes a pair with the first.
        starts, rows = np.flatnonzero(unit), len(unit)
        sizes = np.diff(starts, append=rows)
        size_of, start_of = np.repeat(sizes, sizes), np.repeat(starts, sizes)
        weight = np.asarray(pair_weight, np.float64)[start_of]
        rejected = np.flatnonzero((answer == -1) & (size_of > 1))
        of_pair = weight[rejected] / (size_of[rejected] - 1 if answers == "mean" else 1)
        columns = {
            "side": np.asarray(answer, np.float64),
            "weight": weight,
            "targets": np.asarray(targets, np.float64),
            "reference": np.zeros(rows) if reference is None else np.asarray(reference, np.float64),
            "chosen": start_of[rejected].astype(np.int64),
            "rejected": rejected.astype(np.int64),
            "pair_weight": of_pair,
            "alone": np.flatnonzero((answer != 0) & (size_of == 1)).astype(np.int64),
            "answers": np.flatnonzero(answer).astype(np.int64),
            "slot": np.zeros(rows, np.int64) if slot is None else np.asarray(slot, np.int64),
        }
        return cls(**{name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()})

    def to(self, device: torch.device | str, pin: Callable[..., torch.Tensor]) -> "Units":
        """Return the units on a device, without waiting; `pin` page-locks a column."""
        columns = {field.name: pin(getattr(self, field.name), device) for field in fields(self)}
        return replace(self, **{name: values.to(device, non_blocking=True) for name, values in columns.items()})


def target_scales(targets: Array, unit: Array, length: str = "sum", tail_weight: float = 1.0) -> Array:
    """Return s_t of documents' targets, one after the other: float64[Σ targets].

    length=sum: 1. mean: 1 / the document's targets. common (LD-DPO): 1 for as many targets as the shortest answer of
    the unit has, `tail_weight` for those after them.
    """
    targets = np.asarray(targets, np.int64)
    if length == "sum":
        return np.ones(targets.sum())
    if length == "mean":
        return np.repeat(1.0 / np.maximum(targets, 1), targets)
    starts = np.flatnonzero(unit)
    shortest = np.repeat(np.minimum.reduceat(targets, starts), np.diff(starts, append=len(unit)))
    place = np.arange(targets.sum()) - np.repeat(np.cumsum(targets) - targets, targets)
    return np.where(place < np.repeat(shortest, targets), 1.0, tail_weight)


def row_coefficients(rows: torch.Tensor, coefficients: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return float32[tokens], the sum of float64[K] over the targets that each row predicts."""
    return coefficients.new_zeros(tokens).index_add_(0, rows, coefficients).float()


def target_coefficients(
    slopes: torch.Tensor, scales: torch.Tensor, document: torch.Tensor, nll: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a_t, float64[N]: Σ a_t·ℓ_t has the gradient of the loss.

    slopes: float64[A], the loss's derivative by each document's sum. scales: float64[N], s_t. document: int64[N]. nll:
    float64[N], coefficients of the likelihood terms, already divided by their normaliser.
    """
    of_pairs = -scales.double() * slopes[document]
    return of_pairs if nll is None else of_pairs + nll.double()
