"""The scores of answers to BABILong's questions at validation, with a model that reads rows (model=qwen_titans).

exact_match   every target token is the most likely one, given the tokens before it (teacher forcing)
accuracy      the generated text, up to the tokenizer's EOS or `trainer.answer_tokens`, is right by the task's rule
"""

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from verl_ext.data.babilong_answers import is_right_answer
from verl_ext.data.measure import AnswerMeasure, Question

if TYPE_CHECKING:
    from verl_ext.data.babilong import BABILongDataset


class BABILongMeasure(AnswerMeasure):
    """The answers and the exact answers of one rank by category slot, counts float64[2, C + 1]; slot 0: none."""

    generated: ClassVar[str] = "accuracy"

    def __init__(self, dataset: "BABILongDataset", device: Any) -> None:
        self._dataset = dataset
        self._packs = np.flatnonzero(dataset.pack_targets())  # a truncated row may have no answer
        self.counts = torch.zeros(2, len(dataset.categories.ids) + 1, dtype=torch.float64, device=device)

    @override
    def add(self, is_likeliest: torch.Tensor, is_target: torch.Tensor, categories: torch.Tensor) -> None:
        slots = categories.amax(1).clamp(min=0)  # int64[B]: 0 for a row without an answer
        is_answered = is_target.any(1)
        is_exact = is_answered & (is_likeliest | ~is_target).all(1)
        for counts, rows in zip(self.counts, (is_answered, is_exact), strict=True):
            counts.index_add_(0, slots, rows.double())

    @override
    def report(self) -> dict[str, float]:
        answers, exact = self.counts.tolist()
        metrics: dict[str, float] = {"answers": int(sum(answers))}
        if any(answers):
            metrics["exact_match"] = sum(exact) / sum(answers)
        for name, right, asked in zip(self._dataset.categories.names, exact[1:], answers[1:], strict=True):
            if asked:
                metrics[f"{name}_exact_match"] = right / asked
        return metrics

    @override
    def __len__(self) -> int:
        return len(self._packs)

    @override
    def question(self, number: int) -> Question:
        row, table = self._dataset[int(self._packs[number])], self._dataset.categories
        first = int(row["loss_mask"].argmax())
        slot = int(table.index(row["category_ids"][first]))
        return Question(row["input_ids"][:first].tolist(), table.names[slot - 1] if slot else "")

    @override
    def score(self, number: int, answer: str) -> float:
        category, question, target = self._dataset.question(int(self._packs[number]))
        return float(is_right_answer(answer, target, question, category))
