"""The configuration of a run as typed options.

    composed DictConfig ──resolved──► RunConfig ──► checks, datasets, trainer, verl's worker

It is typed once: after `RunConfig.from_composed` there is no DictConfig, except in verl's use of `values`.
"""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

from hydra.utils import get_class
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig

from verl_ext.answers import AnswerOptions
from verl_ext.attention import AttentionOptions
from verl_ext.config.best import EARLY_STOP, KEEP_BEST, BestOptions, EarlyStopOptions, RunCheckpointConfig
from verl_ext.config.upstream import upstream_problems
from verl_ext.config.weights import ModelNode
from verl_ext.custom import custom_object
from verl_ext.data import PackDataset, SFTDataSet
from verl_ext.data.families.collated import CollatedDataset, is_collated
from verl_ext.data.packs.options import DataOptions, DatasetOptions
from verl_ext.engines.schedule import OptimOptions, StepOptimizerConfig
from verl_ext.losses import LossOptions, PreferenceOptions, ReferenceOptions
from verl_ext.metrics import LengthBins
from verl_ext.options import Options, choice_problem, must, option, plain, refuse
from verl_ext.parallel.shards import ParallelOptions

AFTER_EACH_EPOCH = "after_each_epoch"
_HANG_TIMEOUT = 1200


@dataclass(frozen=True)
class TrainerOptions(Options):
    """The keys of the trainer node: verl's, from `device` on ours. Frequencies are in steps."""

    prefix: ClassVar[str] = "trainer"

    default_local_dir: str = option(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "folder of the run's files", required=True
    )
    default_hdfs_dir: str | None = option(None, "folder or URL (hdfs://, s3://) that also gets each global_step_N")
    project_name: str = option("verl_ext", "project name for trackers")
    experiment_name: str = option("sft", "experiment name for trackers")
    logger: Any = option(["console"], "trackers: console, file, wandb, swanlab, tensorboard or another of verl's")
    total_epochs: int | None = option(None, "passes over the data; null: 1, or those of total_training_steps", least=1)
    total_training_steps: int | None = option(
        None, "number of steps, at most those of total_epochs if that is given; null: those of total_epochs", least=1
    )
    seed: int = option(1, "seed of dropout and of new adapters", least=0, most=2**63 - 1, resume="same")
    save_freq: Any = option(-1, f"steps between checkpoints, {AFTER_EACH_EPOCH}, or a list; 0, -1: only at the end")
    test_freq: Any = option(-1, f"steps between validations, {AFTER_EACH_EPOCH}, or a list; 0, -1: only at the end")
    saves_per_epoch: int | None = option(
        None, "checkpoints an epoch, evenly spaced, with save_freq; null: none", least=1
    )
    tests_per_epoch: int | None = option(
        None, "validations an epoch, evenly spaced, with test_freq; null: none", least=1
    )
    early_stop: EarlyStopOptions = option(EarlyStopOptions, "an end before the last step")
    val_before_train: bool = option(True, "true: validate and answer eval.prompts before step 1 of a new run")
    length_bins: list[int] = option(
        [], "ascending document lengths in tokens, between which validation's loss and answers have a mean of their own"
    )
    max_ckpt_to_keep: int | None = option(None, "number of checkpoints to keep; null: all", least=1)
    resume_mode: str = option("auto", "auto: resume the last checkpoint", choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = option(None, "the global_step_N folder for resume_mode=resume_path")
    allow_resume_mismatch: list[str] = option([], "config keys that may differ from the resumed run's")
    balance_batch: bool = option(True, "verl's key, without effect on packs; see data.balance")
    nnodes: int = option(1, "number of nodes on Ray; not used under torchrun", least=1)
    n_gpus_per_node: int = option(1, "ranks per node on Ray, also on CPU; not used under torchrun", least=1)
    profile_interval: Any = option([-1, -1], "[first step, last step] that verl's profiler records; [-1, -1]: none")
    device: str = option("auto", "auto: a GPU if one is visible", choices=("auto", "cpu", "cuda"))
    log_freq: int = option(1, "steps between logged metrics", least=1)
    log_experts: bool = option(False, "true: write each expert's share of its layer's choices into experts.jsonl")
    log_every_batches: int | None = option(None, "a rank's micro-batches between logs, in place of log_freq", least=1)
    gpu_peak_tflops: float | None = option(
        None, "peak TFLOP/s of a GPU, for perf/mfu; null: from the GPU's name; no perf/mfu if it is unknown", above=0
    )
    max_skipped_steps: int = option(10, "non-finite gradients in a row that a run survives; one more ends it", least=0)
    max_loss: float | None = option(
        None, "a loss above this in max_loss_steps steps in a row ends the run as a failure; null: no limit", above=0
    )
    max_loss_steps: int = option(3, "consecutive steps with a loss above max_loss that end the run", least=1)
    spike_factor: float | None = option(
        None, "a loss above this multiple of the last 64 losses' median is written to spikes.jsonl; null: none", above=1
    )
    hang_timeout: int = option(_HANG_TIMEOUT, "seconds without progress after which a run ends; 0: no limit", least=0)
    first_step_timeout: int = option(
        2 * _HANG_TIMEOUT, "hang_timeout up to the end of the first step, never shorter; 0: no limit", least=0
    )
    save_timeout: int = option(7200, "seconds that training may wait for a checkpoint; 0: no limit", least=0)
    nccl_timeout: int | None = option(
        None, "timeout in seconds of training's collectives (gloo on CPU); null: hang_timeout + 600", least=1
    )
    overwrite: bool = option(False, "true: replace a default_local_dir that holds files")
    eval_only: bool = option(False, "true: measure data.val_dir with the run's last checkpoint, or with model.path")
    hooks: list[str] = option(
        [], "hooks of your own, module:Class or file.py:Class, subclasses of verl_ext.trainer.hooks.Hook, in call order"
    )
    answer_tokens: int | None = option(
        None, "tokens to generate for an answer of data=babilong; null: the longest answer + 4; 0: none", least=0
    )

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each wrong frequency, profiler interval or logger."""
        for name in ("save_freq", "test_freq"):
            value = getattr(self, name)
            kinds = {type(every) for every in frequencies(value) if every != AFTER_EACH_EPOCH}
            if not frequencies(value) or kinds - {int}:
                needed = f"be a whole number of steps or {AFTER_EACH_EPOCH}, or a list of both"
                yield must(f"trainer.{name}", needed, value)
        interval = self.profile_interval
        is_pair = isinstance(interval, list) and len(interval) == 2 and all(isinstance(step, int) for step in interval)
        if not is_pair or interval[0] > interval[1] or interval[0] < 0 <= interval[1]:
            yield must("trainer.profile_interval", "be [first step, last step], or [-1, -1] for none", interval)
        edges = self.length_bins
        if any(type(edge) is not int for edge in edges) or any(low >= high for low, high in pairwise((0, *edges))):
            needed = "be ascending whole numbers of tokens above 0, e.g. [2048, 8192]"
            yield must("trainer.length_bins", needed, edges)
        yield from _logger_problems(self.logger)

    @property
    def bins(self) -> LengthBins:
        """The bins of document lengths of which validation gives a mean each."""
        return LengthBins(tuple(self.length_bins))

    @property
    def progress_limits(self) -> dict[str, int]:
        """The seconds without progress, by each phase's option; 0: no limit."""
        first = self.hang_timeout and self.first_step_timeout and max(self.first_step_timeout, self.hang_timeout)
        names = ("trainer.first_step_timeout", "trainer.hang_timeout", "trainer.save_timeout")
        return dict(zip(names, (first, self.hang_timeout, self.save_timeout), strict=True))

    def collective_timeout(self, first_step: bool = False) -> int:
        """Return a collective's timeout in seconds; the hang watch ends before it."""
        limit = self.progress_limits[f"trainer.{'first_step' if first_step else 'hang'}_timeout"]
        return self.nccl_timeout or (limit or _HANG_TIMEOUT) + 600

    @property
    def watches_loss(self) -> bool:
        """Whether every step's loss is needed."""
        return self.spike_factor is not None or self.max_loss is not None

    @property
    def loggers(self) -> list[str]:
        """The names in `logger`."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)


@dataclass(frozen=True)
class RayOptions(Options):
    """The options of `verl_ext.fsdp_sft_trainer_ray` for missing ranks or nodes."""

    prefix: ClassVar[str] = "ray"

    max_restarts: int = option(0, "most restarts from the last checkpoint after ranks were lost or failed", least=0)
    min_nodes: int = option(1, "minimum number of nodes for a restart if fewer than trainer.nnodes are left", least=1)
    timeout: float = option(600, "seconds to wait for trainer.nnodes nodes; after that a restart takes fewer", least=0)


# The options that have a node of their own.
NODES: tuple[type[Options], ...] = (
    *(LossOptions, AttentionOptions, ParallelOptions, TrainerOptions),
    *(ReferenceOptions, RayOptions, AnswerOptions),
)
# Besides those, the ones that share a node with options of a dataset family, or with verl's own keys.
OF_EVERY_RUN: tuple[type[Options], ...] = (DataOptions, *NODES, OptimOptions, BestOptions, ModelNode)
_READERS: dict[str, type] = {DataOptions.prefix: DataOptions, **{options.prefix: options for options in NODES}}
_READERS |= {"optim": StepOptimizerConfig, "checkpoint": RunCheckpointConfig}


def frequencies(value: Any) -> list[Any]:
    """Return a frequency's entries: numbers of steps, or after_each_epoch."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_due(frequency: Any, step: int, steps_per_epoch: float, per_epoch: int | None = None) -> bool:
    """Tell whether a period of a frequency ends with `step` (from 1).

    per_epoch: further periods, so many in an epoch.
    """
    periods = [steps_per_epoch if every == AFTER_EACH_EPOCH else every for every in frequencies(frequency)]
    periods += [] if per_epoch is None else [steps_per_epoch / per_epoch]
    # An epoch of a stream may end within a step; the tolerance is for the rounding of whole quotients.
    return any(int(step / every + 1e-9) > int((step - 1) / every + 1e-9) for every in periods if every > 0)


@dataclass(frozen=True)
class Machine:
    """The machine of a run."""

    world_size: int = 1  # the number of ranks
    accelerator: str | None = None  # the one that is visible to a rank: "cuda" or "npu"
    capability: tuple[int, int] | None = None  # the compute capability of the GPU; None if it is unknown
    gpu: str | None = None  # the name of the GPU, such as "NVIDIA H200"; None if it is unknown


@dataclass(frozen=True)
class RunConfig:
    """The options of a run, with every node typed."""

    data: DataOptions  # those that all dataset families have
    dataset: DatasetOptions  # those of `dataset_class`
    dataset_class: type[PackDataset]
    loss: LossOptions
    reference: ReferenceOptions
    attention: AttentionOptions
    parallel: ParallelOptions
    trainer: TrainerOptions
    ray: RayOptions
    eval: AnswerOptions
    model_options: Any  # keys by name; verl's class itself would load the model's config and tokenizer
    engine: FSDPEngineConfig  # verl's own dataclass, as the next two
    optim: StepOptimizerConfig
    checkpoint: RunCheckpointConfig
    machine: Machine
    composed: Mapping[str, Any]  # the whole configuration as it was composed, in plain dicts and lists
    notices: tuple[str, ...] = ()  # lines about changes to the user's values

    @classmethod
    def from_composed(cls, composed: Any, machine: Machine | None = None) -> "RunConfig":
        """Read every node; raise ValueError with a line for each wrong value."""
        values = plain(composed)
        problems: list[str | None] = [*upstream_problems(values)]
        nodes: dict[str, Any] = {}

        def read(name: str, options: Callable[[], Any]) -> None:
            try:
                nodes[name] = options()
            except ValueError as error:
                problems.extend(str(error).splitlines())

        # verl's dataclasses have the options of their nodes too, but do not check them.
        for options in OF_EVERY_RUN:
            reader = reader_of(options.prefix, values) if options in NODES else options
            read(options.prefix, functools.partial(reader.read, values[options.prefix]))
        read("dataset_class", lambda: dataset_class(values))
        read(
            "dataset", lambda: nodes["dataset_class"].Options.read(values["data"]) if "dataset_class" in nodes else None
        )
        refuse(problems)
        nodes["model_options"] = SimpleNamespace(**values["model"] | vars(nodes.pop("model")))
        nodes |= {name: node_of_verl(name, values) for name in ("engine", "optim", "checkpoint")}
        return cls(**nodes, machine=machine or Machine(), composed=values)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The whole configuration as plain dicts and lists, for verl and for trackers."""
        typed = {options.prefix: asdict(getattr(self, options.prefix)) for options in NODES}
        typed |= {"data": asdict(self.dataset) | asdict(self.data), "model": vars(self.model_options)}
        values = {**self.composed}
        for name, options in typed.items():
            node = self.composed[name]  # whose numbers stay as they were written, 1 and not 1.0
            changed = {key: value for key, value in options.items() if key in node and value != node[key]}
            values[name] = {**node, **changed}
        values["engine"] = {**values["engine"], "mixed_precision": self.engine.mixed_precision}
        return values

    def decided(self, notice: str | None = None, **nodes: Mapping[str, Any]) -> "RunConfig":
        """Return this config with other values of nodes, by name, and a notice about them."""
        changed: dict[str, Any] = {
            name: SimpleNamespace(**vars(node) | options) if name == "model_options" else replace(node, **options)
            for name, options in nodes.items()
            for node in (getattr(self, name),)
        }
        return replace(self, **changed, notices=(*self.notices, *([notice] if notice else [])))

    def sharing(self, problem: str | None) -> "RunConfig":
        """Return this config with null `data.share_prefixes` decided by a problem, if any."""
        if getattr(self.dataset, "share_prefixes", False) is not None:
            return self
        notice = f"data.share_prefixes=false: {problem}; a prompt is computed for each answer" if problem else None
        return self.decided(notice, dataset={"share_prefixes": problem is None})

    @property
    def model_folder(self) -> str:
        """The path of the model with `~` expanded."""
        return os.path.expanduser(str(self.model_options.path))

    @property
    def param_dtype(self) -> str:
        """The dtype of parameters in a forward: fp32, bf16 or fp16."""
        return (self.engine.mixed_precision or {}).get("param_dtype", "bf16")

    @property
    def max_tokens(self) -> int:
        """The token budget of a pack, for any dataset family."""
        return self.composed["data"]["max_tokens"]

    @property
    def watched(self) -> dict[str, str]:
        """The metrics that keep a checkpoint or end the run, by key."""
        metrics = {KEEP_BEST: self.checkpoint.keep_best, EARLY_STOP: self.trainer.early_stop.metric}
        return {key: name for key, name in metrics.items() if name is not None and not self.trainer.eval_only}

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that share one pack."""
        return self.engine.ulysses_sequence_parallel_size * self.parallel.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks, or groups sharing a pack, with different packs."""
        return self.machine.world_size // self.sequence_parallel_size


def reader_of(node: str, values: Mapping[str, Any]) -> Any:
    """Return the class that reads a node."""
    if node == LossOptions.prefix and values[node].get("mode") in PreferenceOptions.modes:
        return PreferenceOptions
    return _READERS.get(node) or get_class(values[node]["_target_"])


def node_of_verl(node: str, values: Mapping[str, Any], **more: Any) -> Any:
    """Return a node as the dataclass that reads it, verl's or ours of it."""
    reader = reader_of(node, values)
    target = {"_target_": f"{reader.__module__}.{reader.__qualname__}"}
    return omega_conf_to_dataclass(OmegaConf.create({**values[node], **target, **more}))


def dataset_class(config: Any) -> type[PackDataset]:
    """Return `SFTDataSet`, or the `PackDataset` of `data.custom_cls.path` and `data.custom_cls.name`.

    A class with a `collate_fn`, which packs by itself, is read through a `CollatedDataset`.

    Raises:
        ValueError: If there is no such class, or it is neither, or lacks a member that the trainer needs.
    """
    custom = config["data"]["custom_cls"]
    path, name = custom.get("path"), custom.get("name")
    if not (path or name):
        return SFTDataSet
    if str(path).startswith("pkg://verl_ext.data."):  # older configurations name the modules of our classes
        path = "pkg://verl_ext.data"
    named = custom_object("data.custom_cls", path, name)
    if not (isinstance(named, type) and issubclass(named, PackDataset)):
        if is_collated(named):
            return CollatedDataset
        known = "a subclass of verl_ext.data.PackDataset, or a class with __len__, __getitem__ and a collate_fn"
        raise ValueError(must("data.custom_cls.name", f"name {known}", f"{name} of {path}"))
    if lacking := sorted(named.__abstractmethods__):
        members = f"all members of {PackDataset.__name__}"
        raise ValueError(f"data.custom_cls.name must be a class with {members}; {name} lacks {', '.join(lacking)}")
    return named


def _logger_problems(logger: object) -> Iterable[str | None]:
    from verl.utils.tracking import Tracking

    names = [logger] if isinstance(logger, str) else logger
    if not isinstance(names, (list, tuple)) or not names:
        yield must("trainer.logger", "be a list of loggers, e.g. [console]", logger)
        return
    for name in names:
        yield choice_problem("trainer.logger", name, Tracking.supported_backend)
