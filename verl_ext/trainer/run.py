"""A prepared run: what passed all checks that need no model weights."""

import os
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.answers import Prompts
from verl_ext.checkpoint.identity import REFERENCE_WEIGHTS, RunState, allowed_changes, run_facts
from verl_ext.config.model import ModelFacts
from verl_ext.config.run import RunConfig, is_due
from verl_ext.data import PackDataset, PackFacts
from verl_ext.data.chats import TrainedChats
from verl_ext.data.files_in_use import DataFiles
from verl_ext.data.usage import DataUse
from verl_ext.environment import versions
from verl_ext.packing import CostModel
from verl_ext.trainer.objective import Objective, objective_of
from verl_ext.trainer.report import data_facts, step_facts, what_runs
from verl_ext.trainer.step_plan import StepPlan


@dataclass(frozen=True)
class Validation:
    """The validation set and the order of its packs."""

    dataset: PackDataset
    plan: StepPlan


@dataclass(frozen=True)
class Run:
    """A run that passed all checks that need no model weights.

    Attributes:
        packs: the facts of the training set's packs, with their cost to the model.
        files: the data files of the training set.
        cost: the cost of a document to the model.
        model: the facts of the model; the built module may need another head than `model.head`.
        schedule_steps: the steps that the schedule of the learning rate spans.
        content: the digest of `files`; None if the run does not train.
        base: the digest of the weights in model.path, which distinguishes models of the same shape.
        reference: that of the reference, if its weights are others than those in model.path alone.
        replaces_output: whether the run begins by removing the run in its folder.
        checkpoint: the checkpoint to resume from; None for a new run.
        extends: whether the first packs are those of the resumed run, which had fewer or more packs.
        keeps_rates: whether the finished steps had this schedule's learning rates, despite another schedule.
        prompts: the prompts of `eval.prompts`; None without them.
        chats: the chat template and the ends of turns of the training data.
        use: how often the run reads documents, by source and length.
    """

    config: RunConfig
    train_set: PackDataset
    packs: PackFacts
    files: DataFiles
    plan: StepPlan
    cost: CostModel
    model: ModelFacts
    validation: Validation | None
    total_steps: int
    schedule_steps: int
    notices: tuple[str, ...]
    content: str | None = None
    base: str | None = None
    reference: str | None = None
    replaces_output: bool = False
    checkpoint: Path | None = None
    extends: bool = False
    keeps_rates: bool = False
    prompts: Prompts | None = None
    chats: TrainedChats = field(default_factory=TrainedChats)
    use: tuple[DataUse, ...] = ()

    @property
    def steps_per_epoch(self) -> float:
        """The steps that see as many tokens as the training data has."""
        return self.plan.steps_per_epoch / self.packs.epochs

    @property
    def output(self) -> Path:
        """The folder of the run's files."""
        return Path(self.config.trainer.default_local_dir)

    def is_due(self, step: int, frequency: Any, per_epoch: int | None = None) -> bool:
        """Tell whether `step` is the last, or due by frequency or times an epoch."""
        return step == self.total_steps or is_due(frequency, step, self.steps_per_epoch, per_epoch)

    def run_state(self) -> RunState:
        """Return the facts that a checkpoint holds and a resume must share."""
        facts = run_facts(
            *(self.config, self.model.hf_config, self.train_set, self.schedule_steps, self.content, self.base)
        )
        if self.objective.has_reference and not self.config.trainer.eval_only:
            facts[REFERENCE_WEIGHTS] = self.reference or self.base
        allowed = allowed_changes(self.config, self.extends, self.keeps_rates)
        return RunState(facts, self.grouping, str(self.output), allowed)

    @property
    def grouping(self) -> dict[str, Any]:
        """The packs' group size and cost model, which depend on the layout."""
        if self.plan.costs is None:
            return {}
        return {"group_size": self.plan.group_size, "cost": list(astuple(self.cost))}

    def grouped(self, grouping: dict[str, Any]) -> "Run":
        """Return this run with the pack groups of the resumed run."""
        if grouping == self.grouping:
            return self
        cost = CostModel(*grouping["cost"])
        packs = self.train_set.facts(cost)
        plan = replace(self.plan, costs=packs.costs, group_size=grouping["group_size"])
        return replace(self, cost=cost, packs=packs, plan=plan)

    def check_targets(self) -> None:
        """Raise ValueError if a step of the run has no target token."""
        self.plan.check_targets(self.packs.targets, self.total_steps)

    def data_report(self) -> dict[str, dict[str, Any]]:
        """Describe the packs and steps of the data, for rank 0."""
        validated = {} if self.validation is None else {"val": data_facts(self.validation.dataset)}
        if self.config.trainer.eval_only:
            return validated
        packs, micro = self.packs, self.config.data.micro_batch_size_per_gpu
        if self.model.kind.runs_longest:  # no rank waits for another's longer row, because it computes as much itself
            packs = replace(packs, costs=np.ones(len(packs.costs)))
        steps = step_facts(packs, self.plan, self.config.data_parallel_size, micro)
        use = {"use": [vars(row) for row in self.use]}
        return {**self.model.new_token_facts, "train": data_facts(self.train_set) | use, **validated, "steps": steps}

    def facts(self) -> dict[str, Any]:
        """Describe the run for later: config, versions, machine and step plan."""
        plan = {entry.name: getattr(self.plan, entry.name) for entry in fields(self.plan) if entry.name != "costs"}
        return {
            "config": self.config.values,
            "working_folder": os.getcwd(),
            "versions": versions(),
            "runs_on": what_runs(self.config, self.model.backend, self.model.head),
            "plan": {**plan, "is_balanced": self.plan.costs is not None},
            "cost": astuple(self.cost),
            "runs_longest": self.model.kind.runs_longest,
            "digest": self.train_set.digest,
            "data_parallel_size": self.config.data_parallel_size,
            "total_steps": self.total_steps,
        }

    @cached_property
    def objective(self) -> Objective:
        """What the run minimizes."""
        return objective_of(self.config.loss)
