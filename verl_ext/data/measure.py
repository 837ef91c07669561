"""The scores of answers at validation, which a dataset family may declare (`PackDataset.answer_measure`)."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch


class Question(NamedTuple):
    """The tokens before an answer, and the name of its category ("" for none)."""

    ids: list[int]
    category: str


class AnswerMeasure(ABC):
    """The scores of a family's answers in one validation: of the rows that a model reads, and of texts it generates.

    Attributes:
        generated: the metric of generated answers; that of a category is CATEGORY_generated.
        counts: a tensor that `add` fills. Before `report`, the trainer sums it over the data-parallel ranks.
    """

    generated: ClassVar[str]
    counts: torch.Tensor

    @abstractmethod
    def add(self, is_likeliest: torch.Tensor, is_target: torch.Tensor, categories: torch.Tensor) -> None:
        """Count the rows of a batch.

        Args:
            is_likeliest: bool[B, L], whether the next token is the model's most likely one.
            is_target: bool[B, L], whether the next token is a target.
            categories: int64[B, L], the slots of the targets' categories; 0 or less means none.
        """

    @abstractmethod
    def report(self) -> dict[str, float]:
        """Return the metrics of `counts` by name."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of questions."""

    @abstractmethod
    def question(self, number: int) -> Question:
        """Read a question."""

    @abstractmethod
    def score(self, number: int, answer: str) -> float:
        """Return the score of a generated answer."""
