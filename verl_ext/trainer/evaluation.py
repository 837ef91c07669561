"""The validation of the whole set as one step: the configured loss, each category's mean, right answers.

If the data has questions (data=babilong) and the model generates (model=qwen_titans), right answers are counted:

    exact_match   every token of the target is the likeliest one, given those before it (teacher-forced)
    accuracy      what is generated, up to the tokenizer's EOS or `trainer.answer_tokens`, is right as the data has it
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tqdm import tqdm
from verl.utils.device import get_device_id

from verl_ext.checkpoint.layout import EVALUATION
from verl_ext.config.run import RunConfig
from verl_ext.data import PackDataset
from verl_ext.engines.chunked import rows, target_positions
from verl_ext.engines.step import StepEngine
from verl_ext.files import write_json
from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch, StepLoss
from verl_ext.trainer.loader import DataParallelRank
from verl_ext.trainer.setup import Run, Validation

_MORE = 4  # tokens that a generated answer may be longer than the longest target


class AnswerScores:
    """The counts of one rank: answers, exact ones, generated right ones, by category slot.

    float64[3, C + 1] on the engine's device; slot 0 is of no category.

    Args:
        dataset: the validation set.
        engine: generates the answers.
        tokens: to generate for an answer; 0 for none.
    """

    def __init__(self, dataset: PackDataset, engine: Any, tokens: int) -> None:
        device: Any = get_device_id()
        self.dataset, self.engine, self.tokens = dataset, engine, tokens
        self.counts = torch.zeros(3, len(dataset.categories.ids) + 1, dtype=torch.float64, device=device)

    @classmethod
    def for_run(cls, run: Run, dataset: PackDataset, engine: StepEngine) -> "AnswerScores | None":
        """Return the scores of a run; None if the data has no questions or the engine does not generate."""
        if not (dataset.has_questions and engine.generates):
            return None
        asked = run.config.trainer.answer_tokens
        return cls(dataset, engine, int(dataset.pack_targets().max()) + _MORE if asked is None else asked)

    def beside(self, loss: StepLoss) -> Callable[..., tuple[torch.Tensor, dict]]:
        """Wrap the loss function, so that it also counts the exact answers of each batch."""

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

    def report(self, prefix: str, names: Sequence[str], all_reduce: Callable[[torch.Tensor], None]) -> dict[str, float]:
        """Return shares of right answers over all data-parallel ranks, in all and by category."""
        kinds = {"exact_match": 1, "accuracy": 2} if self.tokens else {"exact_match": 1}
        total = self.counts.clone()
        all_reduce(total)
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
        tokenizer = self.engine.model_config.tokenizer
        answer = list(takewhile(lambda token: token != tokenizer.eos_token_id, generated))
        text = tokenizer.decode(answer, skip_special_tokens=True)
        return self.dataset.is_right_answer(pack, text)


def _categories(data: TensorDict) -> torch.Tensor:
    """Return int64[B], the category slot of each row's answer; 0 of a row without one."""
    return rows(data["category_index"]).amax(1).clamp(min=0)


class Evaluation:
    """The measurement of a validation set, each rank on its share."""

    def __init__(self, run: Run, validation: Validation, engine: StepEngine, rank: DataParallelRank) -> None:
        self.validation = validation
        self._run, self._engine, self._rank = run, engine, rank

    def measure(self) -> dict[str, float]:
        """Return the `val/…` metrics of the weights as they are; the same on every rank."""
        dataset = self.validation.dataset
        total: StepSums | None = None
        scores = AnswerScores.for_run(self._run, dataset, self._engine)
        size, flags = self._run.config.data.micro_batch_size_per_gpu, self._run.config.loss.head_flags
        with self._engine.eval_mode():
            for packs, batch in self._batches():
                sums = self._rank.sums(batch)
                loss = StepLoss(1.0, 1, sums)
                micro_batches = list(batch.micro_batches(size, head_measures=True, **flags))
                self._engine.evaluate(micro_batches, loss if scores is None else scores.beside(loss))
                if scores is not None:
                    first = 0
                    for micro_batch in micro_batches:
                        last = first + micro_batch.batch_size[0]
                        scores.generate(micro_batch, packs[first:last])
                        first = last
                total = sums if total is None else total + sums
        assert total is not None
        names = dataset.categories.names
        metrics = total.reduced(self._rank.all_reduce).report("val", names)
        if scores is not None:
            metrics |= scores.report("val", names, self._rank.all_reduce)
        return metrics

    def _batches(self) -> Iterator[tuple[list[int | None], StepBatch]]:
        """Give this rank's packs of every step, and their batch; with a bar if it takes long."""
        dataset, plan = self.validation.dataset, self.validation.plan
        batches = self._rank.batches(dataset, plan, 0, plan.steps_per_epoch)
        hidden = None if self._rank.rank == 0 else True  # None: unless stderr is a terminal
        bar = tqdm(batches, desc="validate", unit="step", delay=5, leave=False, disable=hidden)
        for step, batch in enumerate(bar):
            yield plan.rank_packs(step, self._rank.rank, self._rank.size), batch


def write_evaluation(metrics: dict[str, float], step: int, config: RunConfig) -> Path:
    """Write the metrics of `trainer.eval_only` as evaluation.json, in place of an earlier one."""
    path = Path(config.trainer.default_local_dir) / EVALUATION
    data = config.values["data"]
    measured = ("val_dir",) if config.data.val_dir is not None else (*config.dataset.data_keys, "train_ratio")
    facts: dict[str, Any] = {
        "model.path": config.model_options.path,
        "global_step": step,
        **{f"data.{name}": data[name] for name in measured if data.get(name) is not None},
        "data.max_tokens": config.max_tokens,
        **metrics,
    }
    write_json(path, facts)
    return path
