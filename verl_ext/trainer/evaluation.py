"""The validation set, whole, as one step: the configured loss, every category's mean, and right answers.

An answer is counted twice where the data has questions (data=babilong) and the model generates (model=qwen_titans):

    exact_match   every token of the target is the likeliest one, given those before it (teacher-forced)
    accuracy      what is generated says the target and no other label of its task (BABILong's `compare_answers`; of
                  data that is none of its qa1 to qa5: is the target)
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from tqdm import tqdm

from verl_ext.config.output import EVALUATION
from verl_ext.engines.step import StepEngine
from verl_ext.metrics import StepSums
from verl_ext.trainer.answer_scores import AnswerScores
from verl_ext.trainer.preparation import Run, Validation
from verl_ext.trainer.rank_share import RankShare
from verl_ext.trainer.step_batch import StepBatch
from verl_ext.trainer.step_loss import StepLoss
from verl_ext.trainer.whole_json import write_json


class Evaluation:
    """Measures a validation set on every rank's share of it."""

    def __init__(self, run: Run, validation: Validation, engine: StepEngine, share: RankShare) -> None:
        self.validation = validation
        self._run, self._engine, self._share = run, engine, share

    def measure(self) -> dict[str, float]:
        """`val/…` metrics of the weights as they are; the same on every rank."""
        dataset = self.validation.dataset
        total: StepSums | None = None
        scores = AnswerScores.for_run(self._run, dataset, self._engine)
        with self._engine.eval_mode():
            for packs, batch in self._batches():
                sums = self._share.sums(batch)
                loss = StepLoss(1.0, 1, sums)
                micro_batches = list(batch.micro_batches(self._run.config.data.micro_batch_size_per_gpu))
                self._engine.evaluate(micro_batches, loss if scores is None else scores.beside(loss))
                if scores is not None:
                    self._generate(scores, micro_batches, packs)
                total = sums if total is None else StepSums(total.values + sums.values, sums.slots)
        assert total is not None
        names = dataset.categories.names
        metrics = total.reduced(self._share.add_up).report("val", names)
        if scores is not None:
            metrics |= scores.report("val", names, self._share.add_up)
        return metrics

    def _batches(self) -> Iterator[tuple[list[int | None], StepBatch]]:
        """This rank's packs of every step of the validation set, and their batch; with a bar where it takes long."""
        dataset, plan = self.validation.dataset, self.validation.plan
        batches = self._share.batches(dataset, plan, 0, plan.steps_per_epoch)
        leads = self._share.rank == 0
        bar = tqdm(batches, desc="validate", unit="step", delay=5, leave=False, disable=None if leads else True)
        for step, batch in enumerate(bar):
            yield plan.rank_packs(step, self._share.rank, self._share.ranks), batch

    def _generate(self, scores: AnswerScores, micro_batches: Sequence[TensorDict], packs: list[int | None]) -> None:
        first = 0
        for micro_batch in micro_batches:
            rows = micro_batch.batch_size[0]
            scores.generate(micro_batch, packs[first : first + rows])
            first += rows


def write_evaluation(metrics: dict[str, float], step: int, config: DictConfig) -> Path:
    """The metrics of `trainer.eval_only` as evaluation.json in the run's folder, in place of an earlier one's."""
    path = Path(config.trainer.default_local_dir) / EVALUATION
    data: Any = OmegaConf.to_container(config.data, resolve=True, throw_on_missing=False)
    measured = ("val_dir",) if data["val_dir"] is not None else ("train_dir", "blend", "train_ratio")
    facts: dict[str, Any] = {
        "model.path": config.model.path,
        "global_step": step,
        **{f"data.{name}": data[name] for name in measured if data.get(name) is not None},
        "data.max_tokens": config.data.max_tokens,
        **metrics,
    }
    write_json(path, facts)
    return path
