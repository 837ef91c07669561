"""The set-up of a run before a model is loaded: configuration, data, packs and steps.

A mistake found here gives one line with the requirement, the dotted key and the value. At that time no device has been
used, and only caches have been written, which the next start reuses: scans of the data, tokenized texts and indices.
"""

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from omegaconf import DictConfig
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.answers import Prompts
from verl_ext.attention import gpu_capability
from verl_ext.checkpoint import resume
from verl_ext.checkpoint.copies import check_copies
from verl_ext.checkpoint.layout import refuse_locked, saved_run_state, step_of
from verl_ext.config.check import check_categories, check_positions, check_run
from verl_ext.config.model import ModelFacts
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine, RunConfig, TrainerOptions, is_due
from verl_ext.config.schema import check_keys
from verl_ext.config.upstream import select
from verl_ext.config.weights import digest_of_weights, revision
from verl_ext.data import PackDataset, check_vocabulary
from verl_ext.data.chats import TrainedChats
from verl_ext.data.content import CONTENT, DataFiles
from verl_ext.data.dataset import DIGEST, DataOptions
from verl_ext.data.mixture import mixture_notices
from verl_ext.engines.activations import check_host_memory
from verl_ext.engines.schedule import ScheduleOptions, keeps_rates, schedule_problems
from verl_ext.losses import LossSpec
from verl_ext.metrics import RESERVED
from verl_ext.nodes import content as digest_of_folder
from verl_ext.nodes import differences, versions
from verl_ext.packing import CostModel
from verl_ext.text.tokenizer import TRUSTED
from verl_ext.trainer.cost import cost_model
from verl_ext.trainer.distributed import RunRanks, accelerator, user_errors_end_the_run
from verl_ext.trainer.inputs import open_prompts, open_sets
from verl_ext.trainer.report import data_facts, step_facts, what_runs
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.values import leaves, refuse, show

_TOTAL = "trainer.total_training_steps"
_SCHEDULE = f"the length of the learning rate's schedule ({_TOTAL})"


@dataclass(frozen=True)
class Validation:
    """The validation set and the order of its packs."""

    dataset: PackDataset
    plan: StepPlan


@dataclass(frozen=True)
class Run:
    """A run that is valid as far as checks without the model's weights can tell.

    Attributes:
        files: the data files of the training set.
        content: the digest of these files; None if the run does not train.
        base: the digest of the weights in model.path, which distinguishes models of the same shape.
        cost: the cost of a document to the model.
        model: the facts of the model; the built module may need another head than `model.head`.
        prompts: the prompts of `eval.prompts`; None without them.
        chats: the chat template and the ends of turns of the training data.
        checkpoint: the checkpoint to resume from; None for a new run.
        schedule_steps: the steps that the schedule of the learning rate spans.
        extends: whether the first packs are those of the resumed run, which had fewer or more packs.
        keeps_rates: whether the finished steps had this schedule's learning rates, despite another schedule.
    """

    config: RunConfig
    train_set: PackDataset
    files: DataFiles
    content: str | None
    base: str | None
    plan: StepPlan
    cost: CostModel
    model: ModelFacts
    validation: Validation | None
    total_steps: int
    schedule_steps: int
    replaces_output: bool
    notices: tuple[str, ...]
    checkpoint: Path | None = None
    extends: bool = False
    keeps_rates: bool = False
    prompts: Prompts | None = None
    chats: TrainedChats = field(default_factory=TrainedChats)

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in which as many tokens are seen as the training data has."""
        return self.plan.steps_per_epoch / self.train_set.epochs

    @property
    def output(self) -> Path:
        """The folder of the run's files."""
        return Path(self.config.trainer.default_local_dir)

    def is_due(self, step: int, frequency: Any) -> bool:
        """Tell whether `step` is the last one, or due by `frequency`: steps, after_each_epoch, or a list of these."""
        return step == self.total_steps or is_due(frequency, step, self.steps_per_epoch)

    @property
    def memory(self) -> dict[str, Any] | None:
        """The settings of the model's memory, to which its weights belong; None without a memory."""
        return self.config.model.memory_settings(self.model.hf_config)

    def run_state(self) -> resume.RunState:
        """Return the facts that this run's checkpoints hold and that a resumed checkpoint must share."""
        allowed = list(self.config.trainer.allow_resume_mismatch)
        if self.extends:  # PackDataset.extends compares the rest
            allowed += resume.options_that("may_grow", [DataOptions, self.config.dataset_class.Options])
        if self.keeps_rates:
            allowed += [_TOTAL, *resume.options_that("ahead", [ScheduleOptions])]
        return resume.RunState(self._fingerprint(), self.grouping, str(self.output), allowed)

    def _fingerprint(self) -> dict[str, Any]:
        """Return the values that determine the packs of each step, and the model of the weights."""
        config, values = self.config, self.config.values
        model = {f"model.config.{key}": value for key, value in resume.model_shape(self.model.hf_config).items()}
        if self.memory is not None:
            model.pop("model.config.memory", None)  # contains settings that another run of the same weights may change
            model["model.memory"] = self.memory
        model |= resume.shared_options(values, [config.model])
        if self.base is not None:
            model[resume.BASE] = self.base
        if config.trainer.eval_only:
            return model  # a measurement may use other data than the training
        optim = values["optim"]
        if optim["lr_scheduler_type"] != "constant" or optim["lr_warmup_steps_ratio"]:
            model[_SCHEDULE] = self.schedule_steps
        return {
            **resume.shared_options(values, [DataOptions, config.dataset_class.Options]),
            **resume.upstream_options(values),
            **resume.shared_options(values, [TrainerOptions, ScheduleOptions]),
            **resume.shared_options(values, [ScheduleOptions], "ahead"),
            **config.loss.fingerprint,
            **self.train_set.plan_options(),
            "packs in data.train_dir": self.plan.num_packs,
            DIGEST: self.train_set.digest,
            **({} if self.content is None else {CONTENT: self.content}),
            **model,
        }

    @property
    def grouping(self) -> dict[str, Any]:
        """The grouping of packs by cost: the group size and the cost model, which depend on the layout."""
        if self.plan.costs is None:
            return {}
        return {"group_size": self.plan.group_size, "cost": list(astuple(self.cost))}

    def grouped(self, grouping: dict[str, Any]) -> "Run":
        """Return this run with the pack groups of the run that it resumes."""
        if grouping == self.grouping:
            return self
        cost = CostModel(*grouping["cost"])
        plan = replace(self.plan, costs=self.train_set.pack_costs(cost), group_size=grouping["group_size"])
        return replace(self, cost=cost, plan=plan)

    def data_report(self) -> dict[str, dict[str, Any]]:
        """Describe the packs and steps of the data, for rank 0 to print and write."""
        validated = {} if self.validation is None else {"val": data_facts(self.validation.dataset)}
        if self.config.trainer.eval_only:
            return validated
        costs, micro = self.train_set.pack_costs(self.cost), self.config.data.micro_batch_size_per_gpu
        if self.config.model.runs_longest:
            costs = np.ones(len(costs))  # no rank waits for another's longer row, because it computes as much itself
        steps = step_facts(self.train_set, self.plan, costs, self.config.data_parallel_size, micro)
        return {"train": data_facts(self.train_set), **validated, "steps": steps}

    def facts(self) -> dict[str, Any]:
        """Describe the run for later inspection: its config, versions, machine and step plan."""
        plan = {entry.name: getattr(self.plan, entry.name) for entry in fields(self.plan) if entry.name != "costs"}
        return {
            "config": self.config.values,
            "working_folder": os.getcwd(),
            "versions": versions(),
            "runs_on": what_runs(self.config, self.model.backend, self.model.head),
            "plan": {**plan, "is_balanced": self.plan.costs is not None},
            "cost": astuple(self.cost),
            "runs_longest": self.config.model.runs_longest,
            "digest": self.train_set.digest,
            "data_parallel_size": self.config.data_parallel_size,
            "total_steps": self.total_steps,
        }

    def loss_for(self, dataset: PackDataset) -> LossSpec:
        """Return the configured loss for a dataset's category table."""
        return self.config.loss.spec(dataset.categories.names)


def prepare(composed: DictConfig) -> Run:
    """Check the configuration, open the data, and plan packs and steps; a mistake ends all ranks.

    Every rank leaves each block, with or without a mistake, before the ranks communicate again.
    """
    ranks, is_rank0 = RunRanks(), dist.get_rank() == 0
    with user_errors_end_the_run():
        check_keys(composed)
        if composed.model.trust_remote_code and is_rank0:  # printed before remote code runs
            print(f"note: {TRUSTED}", file=sys.stderr, flush=True)
        config = resolve_run(composed, Machine(ranks.size, accelerator(), gpu_capability()))
        model = check_run(config)
        plans = config.trainer.plan_only
        trains = not (plans or config.trainer.eval_only)
        notices = [*config.notices, *model.notices]
        if is_rank0:
            print(what_runs(config, model.backend, model.head), flush=True)
            if config.plan.gpu_memory is None:  # else only the config is needed to predict memory
                notices += config.model.check_weights(config, model.hf_config)
            print("reading the data …", flush=True)
            if trains:
                refuse_locked(Path(config.trainer.default_local_dir))
                check_copies(config.trainer)
        output = resume.check_output(composed, config.machine.world_size)
        train_set, val_set = open_sets(config)
        prompts = open_prompts(config, model.hf_config, train_set.folders)
    with user_errors_end_the_run():  # every rank reads its share of the files
        checkpoint = None if plans else resume.verified(output, ranks)
    datasets = [dataset for dataset in (train_set, val_set) if dataset is not None]
    with user_errors_end_the_run():
        _check_nodes(config, output, datasets)
        if config.model_options.activation_offload and not plans:
            text, dtype = model.hf_config.get_text_config(), PrecisionType.to_dtype(config.param_dtype)
            tokens = config.data.micro_batch_size_per_gpu * train_set.max_tokens // config.sequence_parallel_size
            on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            check_host_memory(text.num_hidden_layers, text.hidden_size, dtype, tokens, on_node)
        files = DataFiles(train_set.data_files, train_set.key)
    for dataset in datasets:
        dataset.read_together(ranks)
    content = files.digest(ranks) if trains else None
    # Without adapters, a measurement takes all weights from the checkpoint.
    reads_base = trains or (config.trainer.eval_only and config.model_options.lora_rank and not plans)
    with user_errors_end_the_run():
        base = digest_of_weights(config.model_folder) if reads_base and is_rank0 else None
    base = ranks.broadcast(base)
    with user_errors_end_the_run():
        for dataset in datasets:
            check_vocabulary(dataset.token_range, model.hf_config.get_text_config().vocab_size, dataset.key)
            if config.model.needs_positions:
                check_positions(dataset.longest_document, dataset.max_tokens, model.hf_config)
            if reserved := [name for name in dataset.categories.names if name in RESERVED]:
                raise ValueError(f"{dataset.key}: no category may be named {reserved[0]}, which is a metric")
        check_categories(config.loss, train_set.categories.names)
        chats = TrainedChats.of_folders(train_set.folders)
        refuse([chats.template_problem(config.model_options.custom_chat_template, train_set.key)])
        cost = cost_model(config.data.cost, model.hf_config, config.engine.ulysses_sequence_parallel_size)
        plan = _step_plan(config, train_set, train_set.pack_costs(cost))
        length = config.trainer.total_epochs, config.trainer.total_training_steps, config.optim.lr_schedule_span
        total_steps, schedule_steps = plan.run_steps(*length, train_set.epochs if train_set.is_ordered else None)
        refuse(schedule_problems(config.optim, schedule_steps))
        if checkpoint is None:  # else `_resumed` checks the plan of the groups that the run keeps
            plan.check_targets(train_set.pack_targets(), total_steps)
        validation = None
        if val_set is not None:
            batch, costs = config.data_parallel_size * config.data.micro_batch_size_per_gpu, val_set.pack_costs(cost)
            steps = StepPlan(len(val_set), batch, config.dataset.seed, shuffle=False, costs=costs)
            validation = Validation(val_set, steps)
        run = Run(
            config=config,
            train_set=train_set,
            plan=plan,
            cost=cost,
            model=model,
            validation=validation,
            total_steps=total_steps,
            schedule_steps=schedule_steps,
            replaces_output=output.action is resume.OutputAction.REPLACE,
            notices=(*notices, *_notices(config, train_set, plan), *chats.notices(train_set.key)),
            checkpoint=checkpoint,
            files=files,
            content=content,
            base=base,
            prompts=prompts,
            chats=chats,
        )
        if not config.trainer.eval_only:  # whose fingerprint has fewer keys
            run.run_state().check_allowed()
        return run if run.checkpoint is None else _resumed(run, run.checkpoint)


def _resumed(run: Run, checkpoint: Path) -> Run:
    """Resume from a checkpoint. Raises ValueError if the checkpoint's fingerprint differs from this run's."""
    saved = saved_run_state(checkpoint)
    loaded, evaluates = run.config.checkpoint.load_contents, run.config.trainer.eval_only
    if anew := list(resume.begins_anew(loaded, evaluates)):
        notice = f"checkpoint.load_contents={show(list(loaded))}: from {checkpoint.name} on, {' and '.join(anew)}"
        run = replace(run, notices=(*run.notices, notice))
    seen = step_of(checkpoint) * run.plan.batch_size
    is_same = saved.get(CONTENT, run.content) == run.content
    if not run.config.trainer.eval_only and is_same and run.train_set.extends(saved, seen):
        notice = f"the {seen:,} samples seen stay the same, and {run.plan.num_packs:,} are now planned"
        run = replace(run, extends=True, notices=(*run.notices, notice))
    if keeps_rates(run.config.optim, run.schedule_steps, saved, saved.get(_SCHEDULE), step_of(checkpoint)):
        run = replace(run, keeps_rates=True)
    state = run.run_state()
    if run.config.trainer.eval_only:
        state.check(saved)
        return run
    state.load_state_dict(saved)
    plan = run.grouped(state.grouping).plan  # the groups that the run keeps
    plan.check_targets(run.train_set.pack_targets(), run.total_steps)
    return run


def _check_nodes(config: RunConfig, output: resume.OutputDecision, datasets: Sequence[PackDataset]) -> None:
    """Refuse nodes that differ in options, packages, data or model.

    The ranks share the scan of the data and the plan. Collective; on one node there is nothing to compare.
    """
    if dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())):
        return
    facts: dict[str, str] = {}
    if os.environ["LOCAL_RANK"] == "0":
        stated = {**dict(leaves(config.values)), **config.loss.fingerprint}  # includes the code of a custom loss mode
        facts |= {key: show(value) for key, value in stated.items()} | versions()
        resumed = next((path.name for path in output.checkpoints), "no checkpoint")
        facts["what trainer.default_local_dir holds"] = f"{resumed} ({output.action.value})"
        for dataset in datasets:
            facts |= {
                f"the content of {dataset.key}, folder {n}": digest_of_folder(p)
                for n, p in enumerate(dataset.folders, start=1)
            }
        facts["the content of model.path"] = revision(config.model_folder)
    gathered = RunRanks().gather((socket.gethostname(), facts))
    nodes = [(host, facts) for host, facts in gathered if facts]
    refuse(differences({f"node {number} ({host})": facts for number, (host, facts) in enumerate(nodes)}))


def _notices(config: RunConfig, train_set: PackDataset, plan: StepPlan) -> Iterator[str]:
    """Warn about settings that are allowed but may be unintended."""
    yield from mixture_notices(train_set.mixture_report)
    if plan.num_packs < plan.batch_size:
        yield f"data.train_batch_size={plan.batch_size}, but data.train_dir makes only {plan.num_packs} packs"
    if plan.costs is not None and plan.group_size >= plan.batch_size > 1:
        yield (
            f"data.balance=sorted with data.train_batch_size={plan.batch_size}: every step is one group of packs of "
            "like cost; raise it for steps that mix costs, or set data.balance=none"
        )
    if config.trainer.profile_interval[1] > 0 and not select(config.values, "profiler.enable"):
        interval = show(list(config.trainer.profile_interval))
        yield f"trainer.profile_interval={interval} needs profiler.enable=true, which is false: no profile is written"
    if missing := [name for name in ("model", "optimizer", "extra") if name not in config.checkpoint.save_contents]:
        yield f"checkpoint.save_contents lacks {', '.join(missing)}: this run's checkpoints cannot be resumed"


def _step_plan(config: RunConfig, train_set: PackDataset, costs: np.ndarray) -> StepPlan:
    data = config.data
    plan = StepPlan(
        num_packs=len(costs),
        batch_size=data.train_batch_size,
        seed=config.dataset.seed,
        drop_last=data.drop_last,
        shuffle=data.shuffle and not train_set.is_ordered,
        costs=costs if data.balance == "sorted" else None,
        group_size=data.balance_group or config.data_parallel_size,
    )
    if plan.steps_per_epoch == 0:
        raise ValueError(
            f"data.drop_last=true leaves no step: data.train_dir makes {plan.num_packs} packs, "
            f"data.train_batch_size={plan.batch_size}"
        )
    return plan
