"""The dataset class of a run: ours, or the one that `data.custom_cls` names.

The datasets of a run, opened from its config.

Everything that is settled before a model is loaded: configuration, data, packs, steps.

A mistake found here is told in one line that names the requirement, the dotted key and the value; no device has been
touched, and nothing has been written but what the next start need not do again: the memo of the scan beside the data,
tokenised texts and indices in data.cache_dir.
"""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from verl_ext.attention import gpu_capability
from verl_ext.config.attention import attention_notices
from verl_ext.config.check import check_categories, check_positions, check_run
from verl_ext.config.model import is_titans, router_notices
from verl_ext.config.output import OutputAction, check_output
from verl_ext.config.own_data import splits_validation
from verl_ext.config.resolve import resolve_config, resolve_device, resolve_logging
from verl_ext.config.schema import check_keys, loss_config
from verl_ext.data import MultiDocDataset, PackDataset, SFTDataSet, check_vocabulary
from verl_ext.data.mixture import mixture_notices
from verl_ext.losses import LossSpec, category_weight_table
from verl_ext.metrics import RESERVED
from verl_ext.packing import CostModel
from verl_ext.trainer.checkpoint import PlanState
from verl_ext.trainer.cost import cost_model
from verl_ext.trainer.distributed import accelerator, errors_told_once, share_scan, share_token_range
from verl_ext.trainer.report import data_facts, step_facts
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.trainer.tracking import refuse_running


def dataset_class(config: DictConfig) -> type[PackDataset]:
    """`SFTDataSet`, or the `PackDataset` that `data.custom_cls.path` and `data.custom_cls.name` are.

    Raises:
        ValueError: the class is no `PackDataset`: the trainer asks a dataset for its packs and categories.
    """
    custom = config.data.custom_cls
    if not custom.get("path"):
        return SFTDataSet
    from verl.utils.import_utils import load_extern_object

    named = load_extern_object(custom.path, custom.name)
    if not (isinstance(named, type) and issubclass(named, PackDataset)):
        raise ValueError(
            "data.custom_cls.name must name a subclass of verl_ext.data.PackDataset; got "
            f"{custom.name} of {custom.path}"
        )
    return named


def open_sets(config: DictConfig) -> tuple[PackDataset, PackDataset | None]:
    """The training and validation sets with their packs planned; None where there is no validation."""
    cls: Any = dataset_class(config)
    tokenizer = _tokenizer(config) if cls.needs_tokenizer else None

    def opened(which: str, paths: Any, limit: int, **options: Any) -> PackDataset:
        data = config.data.copy()
        if which == "val_dir":
            data.mixture = None  # a validation set is measured as it is
        key = f"data.{which}"
        return cls(parquet_files=paths, tokenizer=tokenizer, config=data, max_samples=limit, key=key, **options)

    data = config.data
    of_run, of_validation = _run_options(config) if issubclass(cls, MultiDocDataset) else ({}, {})
    train, val = OmegaConf.select(data, "train_dir"), data.val_dir
    train_limit, val_limit = data.train_max_samples, data.val_max_samples
    if config.trainer.eval_only and val is not None and train == val:
        measured = opened("val_dir", val, val_limit, **of_validation)  # it stands in for data.train_dir
        return measured, measured
    if splits_validation(config):
        part = opened("train_dir", train, train_limit, split="train", **of_run)
        return part, opened("train_dir", train, val_limit, split="val", **of_validation)
    train_set = opened("train_dir", train, train_limit, **of_run)
    return train_set, None if val is None else opened("val_dir", val, val_limit, **of_validation)


def read_together(dataset: PackDataset) -> None:
    """Give a dataset what only its tokens tell, on every rank; all ranks call it together."""
    if isinstance(dataset, SFTDataSet):
        share_scan(dataset)
    elif isinstance(dataset, MultiDocDataset):
        share_token_range(dataset)


def _run_options(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a stream of documents must know of the run: how long it is, and that it is measured."""
    steps = config.trainer.total_training_steps
    samples = config.data.num_samples or (steps and steps * config.data.train_batch_size)
    return {"num_samples": samples, "epochs": config.trainer.total_epochs}, {"validates": True}


def _tokenizer(config: DictConfig) -> Any:
    from verl.utils import hf_tokenizer

    from verl_ext.text.tokenizer import check_round_trip, check_tokenizer

    model = config.model
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=bool(model.trust_remote_code))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} must hold a tokenizer; got {path} ({str(error).splitlines()[0]})") from None
    check_tokenizer(tokenizer, path, key)
    check_round_trip(tokenizer, path, key)
    return tokenizer


# Keys below data that decide which packs a step has.
_OF_THE_PLAN = (
    *("max_tokens", "train_batch_size", "strategy", "over_length", "seed", "drop_last", "shuffle", "balance", "cost"),
    *("mixture", "train_ratio"),
)


@dataclass(frozen=True)
class Validation:
    """The validation set and the order of its packs."""

    dataset: PackDataset
    plan: StepPlan


@dataclass(frozen=True)
class Run:
    """A run that is sound as far as can be told without the model's weights."""

    config: DictConfig
    train_set: PackDataset
    plan: StepPlan
    pack_tokens: np.ndarray
    cost: CostModel
    data_parallel_size: int
    validation: Validation | None
    total_steps: int
    save_freq: int
    test_freq: int
    clear_output: bool
    notices: tuple[str, ...]
    memory: dict[str, Any] | None = None

    @property
    def steps_per_epoch(self) -> float:
        """Steps that see as many tokens as the training data has."""
        return _steps_per_epoch(self.plan, self.train_set)

    @property
    def output(self) -> Path:
        """`trainer.default_local_dir`."""
        return Path(self.config.trainer.default_local_dir)

    def plan_state(self) -> PlanState:
        """What this run's checkpoints say of it, and what one that it resumes must say."""
        return PlanState(self._fingerprint(), self.grouping, str(self.output))

    def _fingerprint(self) -> dict[str, Any]:
        """What makes a step number mean the same packs, and the weights the same model."""
        model = {} if self.memory is None else {"model.memory": self.memory, "model.train": self.config.model.train}
        if self.config.trainer.eval_only:
            return model  # what is measured may be other data than what was trained on
        given: Any = OmegaConf.to_container(self.config.data, resolve=True, throw_on_missing=False)
        return {
            **{f"data.{key}": given[key] for key in _OF_THE_PLAN if key in given},
            **self.train_set.plan_options(),
            "packs in data.train_dir": self.plan.num_packs,
            "the digest of the documents in data.train_dir": self.train_set.digest,
            **model,
        }

    @property
    def grouping(self) -> dict[str, Any]:
        """What groups packs of like cost: the packs of a group and the cost model; both follow from the layout."""
        if self.plan.costs is None:
            return {}
        return {"group_size": self.plan.group_size, "cost": list(astuple(self.cost))}

    def grouped(self, grouping: dict[str, Any]) -> "Run":
        """This run with the groups of a run that it resumes."""
        if grouping == self.grouping:
            return self
        cost = CostModel(*grouping["cost"])
        plan = replace(self.plan, costs=self.train_set.pack_costs(cost), group_size=grouping["group_size"])
        return replace(self, cost=cost, plan=plan)

    @property
    def lora_metadata(self) -> dict[str, Any] | None:
        """What verl writes beside a LoRA checkpoint."""
        model = self.config.model
        if not model.lora_rank and model.lora_adapter_path is None:
            return None
        return {"r": int(model.lora_rank), "lora_alpha": int(model.lora_alpha or 0), "task_type": "CAUSAL_LM"}

    def data_report(self) -> dict[str, dict[str, Any]]:
        """What the data became, for rank 0 to print and to write."""
        validated = {} if self.validation is None else {"val": data_facts(self.validation.dataset)}
        if self.config.trainer.eval_only:
            return validated
        report = {"train": data_facts(self.train_set), **validated}
        micro = self.config.data.micro_batch_size_per_gpu
        costs = self.train_set.pack_costs(self.cost)
        report["steps"] = step_facts(self.train_set, self.plan, costs, self.data_parallel_size, micro)
        return report

    def loss_for(self, dataset: PackDataset) -> LossSpec:
        """The configured loss over a dataset's category table."""
        loss = loss_config(self.config)
        weights = category_weight_table(loss.category_weights, dataset.categories.names)
        return LossSpec(loss.mode, weights, loss.documents_per_pack)


def prepare(config: DictConfig) -> Run:
    """Check the configuration, open the data, plan packs and steps; a mistake on any rank ends all of them.

    Each block is one that every rank leaves, with or without a mistake, before the ranks talk to each other again.
    """
    world_size, device = dist.get_world_size(), accelerator()
    with errors_told_once():
        check_keys(config)
        notices = resolve_config(config) + resolve_device(config, device) + resolve_logging(config, world_size)
        hf_config = check_run(config, world_size, device, capability=gpu_capability())
        notices += attention_notices(config, hf_config, device, gpu_capability())
        if dist.get_rank() == 0 and not (config.trainer.plan_only or config.trainer.eval_only):
            refuse_running(Path(config.trainer.default_local_dir))
        output = check_output(config, world_size)
        train_set, val_set = open_sets(config)
    for dataset in filter(None, (train_set, val_set)):
        read_together(dataset)
    with errors_told_once():
        for dataset in filter(None, (train_set, val_set)):
            check_vocabulary(dataset.token_range, hf_config.get_text_config().vocab_size, dataset.key)
            if not is_titans(config):  # whose positions restart with every chunk
                check_positions(dataset.longest_document, config.data.max_tokens, hf_config)
            _refuse_reserved_names(dataset)
        check_categories(loss_config(config), train_set.categories.names)
        data_parallel = world_size // config.engine.ulysses_sequence_parallel_size
        cost = cost_model(config.data.cost, hf_config, config.engine.ulysses_sequence_parallel_size)
        plan = _step_plan(config, train_set, train_set.pack_costs(cost), data_parallel)
        visits = 1 if train_set.is_ordered else config.trainer.total_epochs
        total_steps = config.trainer.total_training_steps or plan.steps_per_epoch * visits
        _refuse_steps_without_target(train_set, plan, total_steps)
        run = Run(
            config=config,
            train_set=train_set,
            plan=plan,
            pack_tokens=train_set.pack_tokens(),
            cost=cost,
            data_parallel_size=data_parallel,
            validation=None if val_set is None else _validation(config, val_set, cost, data_parallel),
            total_steps=total_steps,
            save_freq=_frequency(config.trainer.save_freq, plan, train_set),
            test_freq=_frequency(config.trainer.test_freq, plan, train_set),
            clear_output=output.action is OutputAction.REPLACE,
            notices=(*notices, *router_notices(hf_config), *_notices(config, train_set, plan)),
            memory=_memory(hf_config) if is_titans(config) else None,
        )
        if output.checkpoint is not None and not config.trainer.plan_only:
            run.plan_state().check_saved(output.checkpoint)
        return run


def _memory(hf_config: Any) -> dict[str, Any]:
    """What a memory's weights are of: how far gradients reach back is no part of it."""
    return {name: value for name, value in hf_config.memory.items() if name != "bptt_chunks"}


def _notices(config: DictConfig, train_set: PackDataset, plan: StepPlan) -> Iterator[str]:
    """What is allowed, and may not be what was meant."""
    yield from mixture_notices(train_set.mixture_report)
    if plan.num_packs < plan.batch_size:
        yield f"data.train_batch_size={plan.batch_size}, but data.train_dir makes only {plan.num_packs} packs"
    if plan.costs is not None and plan.group_size >= plan.batch_size > 1:
        yield (
            f"data.balance=sorted with data.train_batch_size={plan.batch_size}: every step is one group of packs of "
            "like cost; raise it for steps that mix costs, or set data.balance=none"
        )
    missing = [name for name in ("model", "optimizer", "extra") if name not in config.checkpoint.save_contents]
    if missing:
        yield f"checkpoint.save_contents lacks {', '.join(missing)}: this run's checkpoints cannot be resumed"


def _refuse_reserved_names(dataset: PackDataset) -> None:
    for name in dataset.categories.names:
        if name in RESERVED:
            raise ValueError(f"{dataset.key}: no category may be named {name}, which is a metric")


def _step_plan(config: DictConfig, train_set: PackDataset, costs: np.ndarray, data_parallel: int) -> StepPlan:
    data = config.data
    plan = StepPlan(
        num_packs=len(costs),
        batch_size=data.train_batch_size,
        seed=data.seed,
        drop_last=data.drop_last,
        shuffle=data.shuffle and not train_set.is_ordered,
        costs=costs if data.balance == "sorted" else None,
        group_size=data.balance_group or data_parallel,
    )
    if plan.steps_per_epoch == 0:
        raise ValueError(
            f"data.drop_last=true leaves no step: data.train_dir makes {plan.num_packs} packs, "
            f"data.train_batch_size={plan.batch_size}"
        )
    return plan


def _validation(config: DictConfig, dataset: PackDataset, cost: CostModel, data_parallel: int) -> Validation:
    batch, costs = data_parallel * config.data.micro_batch_size_per_gpu, dataset.pack_costs(cost)
    return Validation(dataset, StepPlan(len(dataset), batch, config.data.seed, shuffle=False, costs=costs))


def _refuse_steps_without_target(dataset: PackDataset, plan: StepPlan, total_steps: int) -> None:
    """A step whose packs hold no target token has no loss: Z would be 0."""
    targets = dataset.pack_targets()
    if targets.all():
        return
    for epoch in range(math.ceil(total_steps / plan.steps_per_epoch)):
        first = epoch * plan.steps_per_epoch
        for step in plan.steps_without_target(targets, epoch):
            if first + step >= total_steps:
                break
            packs = ", ".join(map(str, plan.packs(first + step)[:4].tolist()))
            raise ValueError(
                f"data.train_dir: step {step + 1} of epoch {epoch + 1} has no target token in its packs (pack {packs})"
                f"; raise data.train_batch_size={plan.batch_size} or remove documents without a target"
            )


def _frequency(value: int | str, plan: StepPlan, train_set: PackDataset) -> int:
    return round(_steps_per_epoch(plan, train_set)) or 1 if value == "after_each_epoch" else int(value)


def _steps_per_epoch(plan: StepPlan, train_set: PackDataset) -> float:
    """Steps that see as many tokens as the data has."""
    return plan.steps_per_epoch / train_set.epochs
