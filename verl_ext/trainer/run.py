"""The three results of a run's set-up, each with all that the one before it has.

Checked has the typed configuration and the facts of the model, Opened the data and the plan of packs and steps, Run
where the run begins and the facts that its checkpoints hold.
"""

import os
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.answers import Prompts
from verl_ext.checkpoint.identity import Identity
from verl_ext.checkpoint.layout import Checkpoint
from verl_ext.checkpoint.resume import OutputAction
from verl_ext.config.model import ModelFacts
from verl_ext.config.run import RunConfig, is_due
from verl_ext.data import PackDataset, PackFacts
from verl_ext.data.packs.usage import DataUse
from verl_ext.data.tokenized.files_in_use import DataFiles
from verl_ext.data.tokenized.reports import TrainedChats
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


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A configuration that passed all checks that need no data.

    Attributes:
        model: the facts of the model; the built module may need another head than `model.head`.
        notices: what the user should know so far.
    """

    config: RunConfig
    model: ModelFacts
    notices: tuple[str, ...]

    def parts(self) -> dict[str, Any]:
        """Return the fields by name, for the next stage; notices are its own."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "notices"}

    @property
    def trains(self) -> bool:
        """Whether the run trains, rather than measures alone."""
        return not self.config.trainer.eval_only

    @property
    def output(self) -> Path:
        """The folder of the run's files."""
        return Path(self.config.trainer.default_local_dir)

    @cached_property
    def objective(self) -> Objective:
        """What the run minimizes."""
        return objective_of(self.config.loss)


@dataclass(frozen=True, kw_only=True)
class Opened(Checked):
    """A checked configuration with its data, its packs and its steps.

    Attributes:
        packs: the facts of the training set's packs, with their cost to the model.
        files: the data files of the training set.
        cost: the cost of a document to the model, by which packs are grouped.
        schedule_steps: the steps that the schedule of the learning rate spans.
        prompts: the prompts of `eval.prompts`; None without them.
        chats: the chat template and the ends of turns of the training data.
        use: how often the run reads documents, by source and length.
    """

    train_set: PackDataset
    packs: PackFacts
    files: DataFiles
    plan: StepPlan
    cost: CostModel
    validation: Validation | None
    total_steps: int
    schedule_steps: int
    prompts: Prompts | None
    chats: TrainedChats
    use: tuple[DataUse, ...]

    @property
    def steps_per_epoch(self) -> float:
        """The steps that see as many tokens as the training data has."""
        return self.plan.steps_per_epoch / self.packs.epochs

    @property
    def grouping(self) -> dict[str, Any]:
        """The packs' group size and cost model; {} if they are not grouped."""
        if self.plan.costs is None:
            return {}
        return {"group_size": self.plan.group_size, "cost": list(astuple(self.cost))}

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


@dataclass(frozen=True, kw_only=True)
class Run(Opened):
    """A run that passed all checks that need no model weights.

    Attributes:
        action: what happens to the folder of the run's files.
        checkpoint: the checkpoint to resume from; None for a new run.
        content: the digest of `files`; None if the run does not train.
        base: the digest of the weights in model.path, which distinguishes models of the same shape.
        reference: that of the reference, if its weights are others than those in model.path alone.
        identity: the facts that its checkpoints hold.
    """

    action: OutputAction
    checkpoint: Checkpoint | None
    content: str | None
    base: str | None
    reference: str | None
    identity: Identity

    def is_due(self, step: int, frequency: Any, per_epoch: int | None = None) -> bool:
        """Tell whether `step` is the last, or due by frequency or times an epoch."""
        return step == self.total_steps or is_due(frequency, step, self.steps_per_epoch, per_epoch)

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
