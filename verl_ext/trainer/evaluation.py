"""The validation of the whole set as one step: loss, category means and right answers.

If the data has questions (data=babilong) and the model generates (model=qwen_titans), it also counts right answers:

    exact_match   every target token is the most likely one, given the tokens before it (teacher forcing)
    accuracy      the generated text, up to the tokenizer's EOS or `trainer.answer_tokens`, is right by the data's rule
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tqdm import tqdm
from verl.utils.device import get_device_id

from verl_ext.answers import Prompt
from verl_ext.answers.generation import Sampling
from verl_ext.checkpoint.layout import EVALUATION
from verl_ext.config.run import RunConfig
from verl_ext.data import PackDataset
from verl_ext.engines.chunked import rows, target_positions
from verl_ext.engines.step import StepEngine
from verl_ext.files import write_json
from verl_ext.metrics import StepSums
from verl_ext.trainer.answers import engine_texts, mean_scores, scored_answers
from verl_ext.trainer.batch import StepLoss
from verl_ext.trainer.loader import DataParallelRank
from verl_ext.trainer.setup import Run, Validation

_MORE = 4  # a generated answer may be so many tokens longer than the longest target


class ExactMatches:
    """One rank's counts of answers and of exact answers by category slot.

    They are float64[2, C + 1] on the engine's device; slot 0 means no category.
    """

    def __init__(self, categories: int) -> None:
        device: Any = get_device_id()
        self.counts = torch.zeros(2, categories + 1, dtype=torch.float64, device=device)

    def beside(self, loss: StepLoss) -> Callable[..., tuple[torch.Tensor, dict]]:
        """Wrap the loss function so that it also counts the exact answers of each batch."""

        def scored(model_output: dict, data: TensorDict, dp_group: object = None) -> tuple[torch.Tensor, dict]:
            is_greedy, targets = rows(model_output["is_greedy"]), target_positions(data)
            categories = rows(data["category_index"]).amax(1).clamp(min=0)  # int64[B]: 0 for a row without an answer
            answered = targets.any(1)
            exact = answered & (is_greedy | ~targets).all(1)
            for counts, of_rows in zip(self.counts, (answered, exact), strict=True):
                counts.index_add_(0, categories, of_rows.double())
            return loss(model_output, data, dp_group)

        return scored

    def report(self, prefix: str, names: Sequence[str], all_reduce: Callable[[torch.Tensor], None]) -> dict[str, float]:
        """Return the shares of exact answers over all data-parallel ranks, in total and by category."""
        total = self.counts.clone()
        all_reduce(total)
        answers, exact = total.tolist()
        metrics: dict[str, float] = {f"{prefix}/answers": int(sum(answers))}
        if any(answers):
            metrics[f"{prefix}/exact_match"] = sum(exact) / sum(answers)
        for name, right, asked in zip(names, exact[1:], answers[1:], strict=True):
            if asked:
                metrics[f"{prefix}/{name}_exact_match"] = right / asked
        return metrics


class Questions:
    """The questions of a dataset as prompts: the tokens before each row's answer."""

    def __init__(self, dataset: PackDataset) -> None:
        self._dataset = dataset
        self._asked = np.flatnonzero(dataset.pack_targets())  # a truncated row may have no answer

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, number: int) -> Prompt:
        pack = int(self._asked[number])
        row, table = self._dataset[pack], self._dataset.categories
        first = int(row["loss_mask"].argmax())
        category = int(table.index(row["category_ids"][first]))
        name = table.names[category - 1] if category else ""
        return Prompt(row["input_ids"][:first].tolist(), "", name, {"pack": pack})

    def score(self, record: Mapping[str, Any], expected: str | None, answer: str) -> float:
        """Return 1 if the data accepts the answer as right, else 0."""
        return float(self._dataset.is_right_answer(record["pack"], answer))


class Evaluation:
    """The measurement of a validation set, which the ranks share."""

    def __init__(self, run: Run, validation: Validation, engine: StepEngine, rank: DataParallelRank) -> None:
        self.validation = validation
        self._run, self._engine, self._rank = run, engine, rank

    def measure(self) -> dict[str, float]:
        """Return the `val/…` metrics of the current weights, which are equal on every rank."""
        dataset = self.validation.dataset
        total: StepSums | None = None
        has_answers = dataset.has_questions and self._engine.tells_greedy
        exact = ExactMatches(len(dataset.categories.ids)) if has_answers else None
        size, flags = self._run.config.data.micro_batch_size_per_gpu, self._run.config.loss.head_flags
        plan = self.validation.plan
        batches = self._rank.batches(dataset, plan, 0, plan.steps_per_epoch)
        hidden = None if self._rank.rank == 0 else True  # None: unless stderr is a terminal
        with self._engine.eval_mode():
            for batch in tqdm(batches, desc="validate", unit="step", delay=5, leave=False, disable=hidden):
                sums = self._rank.sums(batch)
                loss = StepLoss(1.0, 1, sums)
                micro_batches = list(batch.micro_batches(size, head_measures=True, **flags))
                self._engine.evaluate(micro_batches, loss if exact is None else exact.beside(loss))
                total = sums if total is None else total + sums
        assert total is not None
        names = dataset.categories.names
        metrics = total.reduced(self._rank.all_reduce).report("val", names)
        if exact is not None:
            metrics |= exact.report("val", names, self._rank.all_reduce) | self._accuracy()
        return metrics

    def _accuracy(self) -> dict[str, float]:
        """Return the shares of generated answers that are right, in total and by category."""
        dataset, config = self.validation.dataset, self._run.config
        asked = config.trainer.answer_tokens
        tokens = int(dataset.pack_targets().max()) + _MORE if asked is None else asked
        if tokens == 0:
            return {}
        questions, tokenizer = Questions(dataset), self._engine.model_config.tokenizer
        stops = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        answer = engine_texts(self._engine, tokenizer, Sampling(tokens, stops))
        size = config.data.micro_batch_size_per_gpu
        with self._engine.eval_mode():
            scored = scored_answers(questions, range(len(questions)), answer, questions.score, size)
        means = mean_scores(scored)
        return {f"val/{name}_accuracy" if name else "val/accuracy": mean for name, mean in means.items()}


def write_evaluation(metrics: dict[str, float], step: int, config: RunConfig) -> Path:
    """Write the metrics of `trainer.eval_only` to evaluation.json, replacing an earlier file."""
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
