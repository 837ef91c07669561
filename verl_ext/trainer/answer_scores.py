"""Right answers of a validation set, by category: teacher-forced and generated.

A generated answer ends at the tokenizer's EOS, else after as many tokens as were asked for. In categories of qa1 to qa5
it is right by the benchmark's rule (`compare_answers`); in all others its first line must be the target, but for case,
white space at the ends and a full stop (`is_same_text`), which takes a model that ends its answers (data.append_eos).
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id

from verl_ext.data import BABILongDataset
from verl_ext.data.babilong.answers import is_right_answer
from verl_ext.engines.chunked import ChunkedEngine, rows, target_positions
from verl_ext.trainer.step_loss import StepLoss

_MORE = 4  # tokens that a generated answer may be longer than the longest target


class AnswerScores:
    """Counts of one rank: float64[3, C + 1] on the engine's device: answers, exact ones, generated right ones, by
    category slot; slot 0 is of no category.

    Args:
        dataset: the validation set.
        engine: what generates.
        tokens: generated for an answer; 0 for none.
    """

    def __init__(self, dataset: BABILongDataset, engine: ChunkedEngine, tokens: int) -> None:
        device: Any = get_device_id()
        self.dataset, self.engine, self.tokens = dataset, engine, tokens
        self.counts = torch.zeros(3, len(dataset.categories.ids) + 1, dtype=torch.float64, device=device)

    @classmethod
    def for_run(cls, run: Any, dataset: Any, engine: Any) -> "AnswerScores | None":
        """None where the data has no questions or the engine does not generate."""
        if not (isinstance(dataset, BABILongDataset) and isinstance(engine, ChunkedEngine)):
            return None
        asked = run.config.trainer.answer_tokens
        return cls(dataset, engine, int(dataset.pack_targets().max()) + _MORE if asked is None else asked)

    def beside(self, loss: StepLoss) -> Callable[..., tuple[torch.Tensor, dict]]:
        """The loss function, which also counts the exact answers of what it is called with."""

        def scored(model_output: dict, data: TensorDict, dp_group: object = None) -> tuple[torch.Tensor, dict]:
            self._count_exact(rows(model_output["is_greedy"]), data)
            return loss(model_output, data, dp_group)

        return scored

    def generate(self, micro_batch: TensorDict, packs: Sequence[int | None]) -> None:
        """Generate an answer for every row and count the right ones; collective."""
        if self.tokens == 0:
            return
        ids, targets = rows(micro_batch["input_ids"]), target_positions(micro_batch)
        prompts = torch.where(targets.any(1), targets.long().argmax(1) + 1, 1)  # int64[B]: tokens before the answer
        generated = self.engine.generate_answers(ids, prompts, self.tokens)
        categories = _categories(micro_batch)
        for row, pack in enumerate(packs):
            if pack is not None and targets[row].any():
                self.counts[2, categories[row]] += self._is_right(pack, generated[row])

    def report(self, prefix: str, names: Sequence[str], add_up: Callable[[torch.Tensor], None]) -> dict[str, float]:
        """Shares of right answers over all data-parallel ranks, of all and by category; `add_up` sums over them."""
        kinds = {"exact_match": 1, "accuracy": 2} if self.tokens else {"exact_match": 1}
        total = self.counts.clone()
        add_up(total)
        answers, *_ = counts = total.tolist()
        metrics: dict[str, float] = {f"{prefix}/answers": int(sum(answers))}
        for kind, at in kinds.items():
            metrics[f"{prefix}/{kind}"] = sum(counts[at]) / sum(answers)
            for name, right, asked in zip(names, counts[at][1:], answers[1:], strict=True):
                if asked:
                    metrics[f"{prefix}/{name}_{kind}"] = right / asked
        return metrics

    def _count_exact(self, is_greedy: torch.Tensor, data: TensorDict) -> None:
        targets, categories = target_positions(data), _categories(data)
        answered = targets.any(1)
        self.counts[0].index_add_(0, categories, answered.double())
        exact = answered & (is_greedy | ~targets).all(1)
        self.counts[1].index_add_(0, categories, exact.double())

    def _is_right(self, pack: int, generated: Sequence[int]) -> bool:
        sample, tokenizer = self.dataset.sample(pack), self.engine.model_config.tokenizer
        answer = list(takewhile(lambda token: token != tokenizer.eos_token_id, generated))
        text = tokenizer.decode(answer, skip_special_tokens=True)
        return is_right_answer(text, sample.target, sample.question, sample.category)


def _categories(data: TensorDict) -> torch.Tensor:
    """int64[B]: the category slot of each row's answer; 0 of a row without one."""
    return rows(data["category_index"]).amax(1).clamp(min=0)
