"""The validation of the whole set as one step.

It measures the loss and category means. Answers are scored if the dataset has a rule for them (`HasAnswers`), and the
engine tells which tokens are the most likely ones (`tells_greedy`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id

from verl_ext.answers import Prompt
from verl_ext.answers.generation import Sampling
from verl_ext.checkpoint.layout import EVALUATION
from verl_ext.config.run import RunConfig
from verl_ext.data import PackDataset
from verl_ext.data.families.measure import AnswerMeasure, HasAnswers
from verl_ext.engines.step import StepEngine
from verl_ext.files import write_json
from verl_ext.metrics import StepSums
from verl_ext.progress import terminal_bar
from verl_ext.trainer.answers import engine_texts, mean_scores, scored_answers, scores_by_length
from verl_ext.trainer.batch import rows, target_slots
from verl_ext.trainer.loader import run_batches
from verl_ext.trainer.loss import StepLoss
from verl_ext.trainer.objective import Objective
from verl_ext.trainer.rank import DataParallelRank
from verl_ext.trainer.run import Run, Validation

_MORE = 4  # a generated answer may be so many tokens longer than the longest target


class _Prompts:
    """The questions of a measure as prompts, which are read on demand."""

    def __init__(self, measure: AnswerMeasure) -> None:
        self._measure = measure

    def __len__(self) -> int:
        return len(self._measure)

    def __getitem__(self, number: int) -> Prompt:
        question = self._measure.question(number)
        return Prompt(question.ids, "", question.category, {"number": number})


def measured_names(config: RunConfig, objective: Objective, dataset: PackDataset) -> list[str]:
    """Return the `val/…` metrics of a dataset that may improve: what sums without a zero report, but counts."""
    names, bins = dataset.categories.names, config.trainer.bins
    sums = StepSums.zeros(len(bins) * (len(names) + 1), "cpu", objective.measures)
    metrics = replace(sums, values=torch.ones_like(sums.values), has_stats=True).report("val", names, bins)
    if isinstance(dataset, HasAnswers):
        measure = AnswerMeasure(dataset, "cpu", bins)
        measure.counts += 1
        scores = [name for name, value in measure.report().items() if isinstance(value, float)]
        kinds = [name.replace("exact_match", measure.generated) for name in scores]
        metrics |= dict.fromkeys((f"val/{name}" for name in (*scores, *kinds)), 0.0)
    return [name for name, value in metrics.items() if isinstance(value, float) and not name.endswith("_length")]


class Evaluation:
    """The measurement of a validation set, which the ranks share."""

    def __init__(self, run: Run, validation: Validation, engine: StepEngine, rank: DataParallelRank) -> None:
        self.validation = validation
        self._run, self._engine, self._rank = run, engine, rank

    def measure(self) -> dict[str, float]:
        """Return the current weights' `val/…` metrics, equal on every rank."""
        dataset, rank = self.validation.dataset, self._rank
        total: StepSums | None = None
        device: Any = get_device_id()
        is_scored = self._engine.tells_greedy and isinstance(dataset, HasAnswers)
        bins = self._run.config.trainer.bins
        answers = AnswerMeasure(dataset, device, bins) if is_scored else None
        whole = self._run, rank, dataset, self.validation.plan, 0, self.validation.plan.steps_per_epoch
        batches = run_batches(*whole, bins)
        with self._engine.eval_mode():
            of_whole = self._run.objective.begin(run_batches(*whole), rank)
            for batch in terminal_bar("validate", rank.rank == 0, batches, unit="step", leave=False):
                sums = rank.sums(batch)
                loss = replace(of_whole, sums=sums)
                micro_batches = rank.micro_batches(batch, loss, token_stats=True)
                self._engine.evaluate(micro_batches, loss if answers is None else _counting(answers, loss))
                total = sums if total is None else total + sums
        assert total is not None
        metrics = total.reduced(rank.all_reduce).report("val", dataset.categories.names, bins)
        if answers is not None:
            rank.all_reduce(answers.counts)
            scores = answers.report() | self._generated(answers)
            metrics |= {f"val/{name}": score for name, score in scores.items()}
        return metrics

    def _generated(self, measure: AnswerMeasure) -> dict[str, float]:
        """Return the mean scores of generated answers, in total and by category."""
        config, tokenizer = self._run.config, self._engine.model_config.tokenizer
        tokens = config.trainer.answer_tokens
        if tokens is None:
            tokens = int(self.validation.dataset.facts().targets.max()) + _MORE
        if tokens == 0:
            return {}
        stops = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        answer = engine_texts(self._engine, tokenizer, Sampling(tokens, stops))

        def score(record: Mapping[str, Any], expected: str | None, text: str) -> float:
            return measure.score(record["number"], text)

        prompts, size = _Prompts(measure), config.data.micro_batch_size_per_gpu
        with self._engine.eval_mode():
            scored = scored_answers(prompts, range(len(prompts)), answer, score, size)
        kind = measure.generated
        scores = {f"{name}_{kind}" if name else kind: mean for name, mean in mean_scores(scored).items()}
        by_length = scores_by_length(scored, measure.lengths, config.trainer.bins)
        return scores | {f"{kind}_{name}": mean for name, mean in by_length.items()}


def _counting(measure: AnswerMeasure, loss: StepLoss) -> Callable[..., tuple[torch.Tensor, dict]]:
    """Wrap the loss function to count each batch's rows, too."""

    def counting(model_output: dict, data: TensorDict, dp_group: object = None) -> tuple[torch.Tensor, dict]:
        slots = target_slots(data)
        measure.add(rows(model_output["is_greedy"]), slots >= 0, slots)
        return loss(model_output, data, dp_group)

    return counting


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
