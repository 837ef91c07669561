"""The scores of answers at validation, of a dataset that `HasAnswers`.

exact_match   every target token is the most likely one, given the tokens before it (teacher forcing)
accuracy      the generated text, up to the tokenizer's EOS or `trainer.answer_tokens`, is right by the family's rule
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.metrics import ONE_BIN, LengthBins


@runtime_checkable
class HasAnswers(Protocol):
    """A dataset whose packs are questions with answers."""

    def is_right_answer(self, pack: int, answer: str) -> bool:
        """Return whether a text answers the question of a pack."""


class Question(NamedTuple):
    """The tokens before an answer, and its category ("": none)."""

    ids: list[int]
    category: str


class AnswerMeasure:
    """The scores of a dataset whose packs are questions with answers.

    Attributes:
        generated: the metric of generated answers; that of a category is CATEGORY_generated.
        counts: float64[2, bins·(C + 1)], the answers and the exact answers by slot, as in `StepSums`. `add` fills it;
            before `report`, the trainer sums it over the data-parallel ranks.
    """

    generated = "accuracy"

    def __init__(self, dataset: Any, device: Any, bins: LengthBins = ONE_BIN) -> None:
        """Begin to count a dataset's answers on a device."""
        self._dataset, self._bins = dataset, bins
        self._packs = np.flatnonzero(dataset.facts().targets)  # a truncated row may have no answer
        slots = len(bins) * (len(dataset.categories.ids) + 1)
        self.counts = torch.zeros(2, slots, dtype=torch.float64, device=device)

    def add(self, is_likeliest: torch.Tensor, is_target: torch.Tensor, slots: torch.Tensor) -> None:
        """Count rows [B, L] with an answer, and exact ones.

        is_likeliest, is_target: of each next token. slots: the category of a target, -1 elsewhere.
        """
        slots = slots.amax(1).clamp(min=0)  # int64[B]: 0 for a row without an answer
        is_answered = is_target.any(1)
        is_exact = is_answered & (is_likeliest | ~is_target).all(1)
        for counts, rows in zip(self.counts, (is_answered, is_exact), strict=True):
            counts.index_add_(0, slots, rows.double())

    def report(self) -> dict[str, float]:
        """Return shares of exact answers, in total, by category and length."""
        cells = self.counts.cpu().view(2, len(self._bins), -1)
        answers, exact = cells.sum(1).tolist()
        metrics: dict[str, float] = {"answers": int(sum(answers))}
        if any(answers):
            metrics["exact_match"] = sum(exact) / sum(answers)
        for name, right, asked in zip(self._dataset.categories.names, exact[1:], answers[1:], strict=True):
            if asked:
                metrics[f"{name}_exact_match"] = right / asked
        for name, asked, right in zip(self._bins.names, *cells.sum(2).tolist(), strict=bool(self._bins.edges)):
            metrics |= {f"exact_match_{name}": right / asked} if asked else {}
        return metrics

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each question with its answer, int64[Q]."""
        return self._dataset.facts().tokens[self._packs]

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self._packs)

    def question(self, number: int) -> Question:
        """Read a question."""
        row, table = self._dataset[int(self._packs[number])], self._dataset.categories
        first = int(row["loss_mask"].argmax())
        slot = int(table.index(row["category_ids"][first]))
        return Question(row["input_ids"][:first].tolist(), table.names[slot - 1] if slot else "")

    def score(self, number: int, answer: str) -> float:
        """Return 1 if a generated answer is right, else 0."""
        return float(self._dataset.is_right_answer(int(self._packs[number]), answer))
