"""The dotted keys that a config may have: verl's own, the fields of the dataclasses that verl builds, and ours.

    upstream leaves (sft_trainer_engine)  ∪  fields of each node's `_target_` dataclass  ∪  fields of our nodes

Below a free-form node anything goes: it is handed to transformers, an optimizer or a profiler as it is.

The data groups that are not packs of a tokenised dataset: their classes, and the options that are theirs.

Typed config nodes: what is ours below data, loss, attention and trainer.

LossConfig and AttentionConfig are named by `_target_` in conf/ and built by verl's omega_conf_to_dataclass.
DataConfig and TrainerConfig are typed views of the keys that this project reads from nodes that verl owns.
Every constructor raises one ValueError with a line for each value that cannot be.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.base_config import BaseConfig

from verl_ext.attention import BACKENDS
from verl_ext.config import legacy
from verl_ext.config.compose import CONF, check_interpolations, composed
from verl_ext.config.model import MEMORY_KEYS
from verl_ext.config.own_data import NOT_USERS_CLASS, OWN_KEYS, TOKENISED, train_dir_is
from verl_ext.data.mixture import MixtureOptions
from verl_ext.data.sft import PAD_MODES
from verl_ext.losses import MODES
from verl_ext.packing import OVER_LENGTH_POLICIES, STRATEGIES
from verl_ext.values import choice_problem, nearest_key, nearest_name, show, simple_fields, type_problems

ATTENTION_BACKENDS = ("auto", *BACKENDS)
RESUME_MODES = ("auto", "disable", "resume_path")
DEVICES = ("auto", "cpu", "cuda")
AFTER_EACH_EPOCH = "after_each_epoch"
BALANCES = ("sorted", "none")
COSTS = ("flops", "tokens")


@dataclass
class LossConfig(BaseConfig):
    """Which mean is minimised: the mode of the loss and its optional weights by category (a category's name)."""

    mode: str = "token"
    category_weights: dict[str, float] | None = None
    documents_per_pack: int = 30

    def __post_init__(self) -> None:
        weights = self.category_weights
        problems = [choice_problem("loss.mode", self.mode, MODES)]
        problems += type_problems(LossConfig, self, "loss")
        problems.append(_at_least(self, "loss", "documents_per_pack", 1))
        if weights is not None and not isinstance(weights, Mapping):
            problems.append(f"loss.category_weights must map categories to weights; got {show(weights)}")
        elif weights is not None:
            problems += [_weight_problem(name, weight) for name, weight in weights.items()]
        _raise(problems)
        if weights is not None:
            # A category without a name is named by its number, which YAML reads as an integer. BaseConfig is frozen.
            named = {str(name): float(weight) for name, weight in weights.items()}
            object.__setattr__(self, "category_weights", named)


@dataclass
class AttentionConfig(BaseConfig):
    """Which kernel computes the attention inside the documents of a pack."""

    backend: str = "auto"

    def __post_init__(self) -> None:
        _raise([choice_problem("attention.backend", self.backend, ATTENTION_BACKENDS)])


@dataclass(frozen=True)
class DataConfig:
    """How documents become packs: the keys of the data node that this project reads. Lengths are in tokens."""

    train_dir: str = ""
    val_dir: str | None = None
    max_tokens: int = 8192
    train_batch_size: int = 8
    micro_batch_size_per_gpu: int = 1
    strategy: str = "best_fit"
    over_length: str = "error"
    pad_mode: str = "no_padding"
    seed: int = 42
    shuffle: bool = True
    balance: str = "sorted"
    balance_group: int | None = None
    cost: str = "flops"
    drop_last: bool = False
    mixture: dict[str, Any] | None = None
    num_workers: int = 2
    prefetch_factor: int = 2
    pin_memory: bool | None = None
    train_dir_is: InitVar[str | None] = TOKENISED

    def __post_init__(self, train_dir_is: str | None) -> None:
        problems: list[str | None] = [*type_problems(DataConfig, vars(self), "data")]
        problems += [] if train_dir_is is None else self._folder_problems(train_dir_is)
        problems += [
            _at_least(self, "data", "max_tokens", 2),
            _at_least(self, "data", "train_batch_size", 1),
            _at_least(self, "data", "micro_batch_size_per_gpu", 1),
            _at_least(self, "data", "seed", 0),
            _at_least(self, "data", "balance_group", 1),
            _at_least(self, "data", "num_workers", 0),
            _at_least(self, "data", "prefetch_factor", 1),
            choice_problem("data.strategy", self.strategy, STRATEGIES),
            choice_problem("data.over_length", self.over_length, OVER_LENGTH_POLICIES),
            choice_problem("data.pad_mode", self.pad_mode, PAD_MODES),
            choice_problem("data.balance", self.balance, BALANCES),
            choice_problem("data.cost", self.cost, COSTS),
            self._group_problem(),
            self._order_problem(),
        ]
        _raise(problems)

    def _group_problem(self) -> str | None:
        group, step = self.balance_group, self.train_batch_size
        if isinstance(group, int) and isinstance(step, int) and group > step > 0:
            return f"data.balance_group must be at most data.train_batch_size={step}; got {group}"
        return None

    def _order_problem(self) -> str | None:
        if self.shuffle is False and self.balance == "sorted":
            return "data.balance must be none with data.shuffle=false, which keeps the plan's order; got sorted"
        return None

    def _folder_problems(self, train_dir_is: str) -> list[str | None]:
        """data.train_dir, which a mixture whose sources all name their own folders does without, and the mixture."""
        if self.mixture is not None:
            try:
                if not MixtureOptions.read(self.mixture).needs_train_dir:
                    return []
            except ValueError as error:
                return [*str(error).splitlines()]
        return [_required("data.train_dir", self.train_dir, train_dir_is)]


@dataclass(frozen=True)
class TrainerConfig:
    """verl's trainer node with our keys: device, log_freq and what follows it.

    Frequencies are in steps."""

    default_local_dir: str = ""
    default_hdfs_dir: str | None = None
    project_name: str = "verl_ext"
    experiment_name: str = "sft"
    total_epochs: int = 1
    total_training_steps: int | None = None
    logger: list[str] | str = field(default_factory=lambda: ["console"])
    seed: int = 1
    save_freq: int | str = -1
    test_freq: int | str = -1
    max_ckpt_to_keep: int | None = None
    balance_batch: bool = True
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    device: str = "auto"
    nnodes: int = 1
    n_gpus_per_node: int = 1
    profile_interval: list[int] = field(default_factory=lambda: [-1, -1])
    log_freq: int = 1
    log_every_batches: int | None = None
    max_skipped_steps: int = 10
    nccl_timeout: int = 1800
    overwrite: bool = False
    plan_only: bool = False
    eval_only: bool = False
    answer_tokens: int | None = None

    def __post_init__(self) -> None:
        problems: list[str | None] = [*type_problems(TrainerConfig, vars(self), "trainer")]
        problems += [
            _required("trainer.default_local_dir", self.default_local_dir, "the folder of the run's files"),
            choice_problem("trainer.resume_mode", self.resume_mode, RESUME_MODES),
            choice_problem("trainer.device", self.device, DEVICES),
            _frequency_problem("trainer.save_freq", self.save_freq),
            _frequency_problem("trainer.test_freq", self.test_freq),
            _interval_problem(self.profile_interval),
            _at_least(self, "trainer", "seed", 0),
            _at_least(self, "trainer", "max_skipped_steps", 0),
            _at_least(self, "trainer", "answer_tokens", 0),
        ]
        at_least_one = (
            "total_epochs",
            "total_training_steps",
            "max_ckpt_to_keep",
            "nnodes",
            "n_gpus_per_node",
            "log_freq",
            "log_every_batches",
            "nccl_timeout",
        )
        problems += [_at_least(self, "trainer", name, 1) for name in at_least_one]
        problems += _logger_problems(self.logger)
        _raise(problems)


def loss_config(config: DictConfig) -> LossConfig:
    """The loss node, built by verl; raises ValueError with a line for each value that cannot be."""
    return _built(config.loss)


def attention_config(config: DictConfig) -> AttentionConfig:
    """The attention node, built by verl; raises ValueError when the backend is none that exists."""
    return _built(config.attention)


def data_config(config: DictConfig) -> DataConfig:
    """The typed view of the data node; raises ValueError with a line for each value that cannot be."""
    return _view(DataConfig, config.data, "data", train_dir_is=train_dir_is(config))


def trainer_config(config: DictConfig) -> TrainerConfig:
    """The typed view of the trainer node; raises ValueError with a line for each value that cannot be."""
    return _view(TrainerConfig, config.trainer, "trainer")


def _built(node: DictConfig) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    try:
        return omega_conf_to_dataclass(node)
    except InstantiationException as error:
        # Hydra wraps what __post_init__ raised in a paragraph about the call.
        raise ValueError(str(error.__cause__ or error)) from None


def _view(cls: Any, node: DictConfig, prefix: str, **more: Any) -> Any:
    values: dict[str, Any] = {}
    simple = simple_fields(cls)
    for entry in fields(cls):
        if entry.name not in node and not OmegaConf.is_missing(node, entry.name):
            continue
        try:
            value = None if OmegaConf.is_missing(node, entry.name) else node[entry.name]
        except OmegaConfBaseException as error:
            raise ValueError(f"{prefix}.{entry.name} cannot be read: {str(error).splitlines()[0]}") from None
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if entry.name not in simple and isinstance(value, int | float) and not entry.name.endswith("_freq"):
            value = show(value)  # a name or folder that reads as a number, e.g. trainer.experiment_name=7
        values[entry.name] = value
    return cls(**values, **more)


def _raise(problems: Iterable[str | None]) -> None:
    lines = list(dict.fromkeys(problem for problem in problems if problem))
    if lines:
        raise ValueError("\n".join(lines))


def _required(key: str, value: str | None, what: str) -> str | None:
    return None if value else f"{key} is required: {what}; got {show(value)}"


def _at_least(node: Any, prefix: str, name: str, least: int) -> str | None:
    value = getattr(node, name)
    if isinstance(value, bool) or not isinstance(value, int) or value >= least:
        return None  # a value of another type is told by type_problems
    return f"{prefix}.{name} must be at least {least}; got {value}"


def _weight_problem(name: object, weight: object) -> str | None:
    key = f"loss.category_weights.{name}"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return f"{key} must be a number; got {show(weight)}"
    if not math.isfinite(weight) or weight < 0:
        return f"{key} must be finite and at least 0; got {weight}"
    return None


def _frequency_problem(key: str, value: object) -> str | None:
    if value == AFTER_EACH_EPOCH or (isinstance(value, int) and not isinstance(value, bool)):
        return None
    return f"{key} must be a whole number of steps or {AFTER_EACH_EPOCH}; got {show(value)}"


def _interval_problem(interval: object) -> str | None:
    if isinstance(interval, list) and len(interval) == 2 and all(isinstance(step, int) for step in interval):
        start, end = interval
        if start <= end and (start >= 0 or end < 0):
            return None
    return f"trainer.profile_interval must be [first step, last step], or [-1, -1] for none; got {show(interval)}"


def _logger_problems(logger: object) -> list[str]:
    from verl.utils.tracking import Tracking

    names = [logger] if isinstance(logger, str) else logger
    if not isinstance(names, list) or not names:
        return [f"trainer.logger must be a list of loggers, e.g. [console]; got {show(logger)}"]
    problems = []
    for name in names:
        if name not in Tracking.supported_backend:
            hint = nearest_name(str(name), Tracking.supported_backend)
            problems.append(
                f"trainer.logger must be among {', '.join(Tracking.supported_backend)}; got {show(name)}"
                + (f" (nearest: {hint})" if hint else "")
            )
    return problems


UPSTREAM_CONF = "verl.trainer.config"
UPSTREAM_PRIMARY = "sft_trainer_engine"

FREE_FORM = (
    "data.apply_chat_template_kwargs",
    "data.mixture",
    "data.train_dir",
    "data.val_dir",
    "engine.turbo_config",
    "engine.wrap_policy",
    "hydra",
    "loss.category_weights",
    "model.fused_kernel_options",
    "model.lora",
    "model.override_config",
    "optim.override_optimizer_config",
    "profiler.global_tool_config",
    "profiler.tool_config",
)
# What verl reads from this dict by name (workers/engine/fsdp/transformer_impl.py).
MIXED_PRECISION = tuple(f"engine.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer"))
# HFModelConfig fills these itself: setting them would be overwritten in silence.
_DERIVED = (
    "architectures generation_config hf_config local_hf_config_path local_path local_tokenizer_path processor tokenizer"
)
# Of model=qwen_titans alone.
_TITANS = (
    "model.train",
    "model.memory_checkpoint",
    *(f"model.memory.{name}" for name in MEMORY_KEYS),
)
# Groups of verl's whose other choices are engines that packs do not run on.
_UPSTREAM_GROUPS = {"engine": ("fsdp",), "optim": ("fsdp",), "profiler": ("profiler",)}


@functools.cache
def composed_keys() -> frozenset[str]:
    """The dotted keys, nodes and leaves, that stand in every composed config; none of or below a free-form node."""

    keys = set(leaves(_upstream()))
    ours = {"attention": AttentionConfig, "loss": LossConfig, "data": DataConfig, "trainer": TrainerConfig}
    for node, cls in ours.items():
        keys |= {f"{node}.{entry.name}" for entry in fields(cls)}
    return frozenset(key for key in _with_nodes(keys) if not is_free_form(key))


@functools.cache
def known_keys() -> frozenset[str]:
    """Every dotted key, nodes and leaves, without what lies below free-form nodes."""
    keys = set(_target_fields(_upstream())) | set(MIXED_PRECISION)
    keys -= {f"model.{name}" for name in _DERIVED.split()}
    keys |= {*_TITANS, *OWN_KEYS}
    keys = {key for key in _with_nodes(keys) if not is_free_form(key)}
    return frozenset(keys | composed_keys() | set(FREE_FORM))


def is_free_form(key: str) -> bool:
    """Whether key is a free-form node or lies below one."""
    return any(key == node or key.startswith(node + ".") for node in FREE_FORM)


def is_known(key: str) -> bool:
    """Whether the schema has this dotted key, or lets anything be below its node."""
    return is_free_form(key) or key in known_keys()


def nearest(key: str) -> str | None:
    """The known key, or config group, that a mistyped or outdated one was meant to be; None when nothing is close."""
    if today := legacy.renamed(key):
        return today
    close = nearest_key(key, [*known_keys(), *groups(), *legacy.RENAMED])
    return legacy.RENAMED.get(close, close) if close else None


def unknown_key(key: str) -> str:
    """The one line for a key that the schema lacks."""
    close = nearest(key)
    return f"unknown key {key}; nearest: {close}" if close else f"unknown key {key}"


def check_keys(config: DictConfig) -> None:
    """Raises ValueError with a line for each key of a composed config that the schema lacks (a typo in YAML).

    A value that refers to a key that does not exist is told likewise.

    Keys below data belong to the user's own dataset class where data.custom_cls names one.
    """
    own_class = OmegaConf.select(config, "data.custom_cls.name") not in NOT_USERS_CLASS
    unknown = [key for key in leaves(config) if not is_known(key) and not (own_class and key.startswith("data."))]
    if unknown:
        raise ValueError("\n".join(unknown_key(key) for key in unknown))
    check_interpolations(config)


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the values below a config; lists and empty dicts are values."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key


def groups() -> tuple[str, ...]:
    """The config groups that a command line or a recipe may choose from."""
    ours = (entry.name for entry in files(CONF).iterdir() if entry.is_dir() and not entry.name.startswith("_"))
    return tuple(sorted({*ours, *_UPSTREAM_GROUPS}))


def options(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """The choices of a group; a recipe is named by its folder, or folder and file. folders: a user's config folders."""
    if group in _UPSTREAM_GROUPS:
        return list(_UPSTREAM_GROUPS[group])
    entries = {entry.name: entry for root in _roots(group, folders) if root.is_dir() for entry in root.iterdir()}
    if group == "recipe":
        return sorted(choice for entry in entries.values() if entry.is_dir() for choice in _recipes(entry))
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def _recipes(folder: Any) -> Iterator[str]:
    """What a recipe's folder is chosen by: NAME for its config.yaml, NAME/STAGE for another yaml file of it."""
    for file in folder.iterdir():
        if file.name.endswith(".yaml"):
            yield folder.name if file.name == "config.yaml" else f"{folder.name}/{file.name.removesuffix('.yaml')}"


def choice_path(group: str, choice: str, folders: Sequence[Path] = ()) -> str:
    """What Hydra calls a choice: `NAME/config` for a recipe; raises ValueError listing the choices."""
    available = options(group, folders)
    if choice in available:
        return f"{choice}/config" if group == "recipe" and "/" not in choice else choice
    if group == "recipe" and any(root.joinpath(f"{choice}.yaml").is_file() for root in _roots(group, folders)):
        return choice
    close = nearest_name(choice, available)
    hint = f"nearest: {close}; " if close else ""
    raise ValueError(f"unknown choice {group}={choice}; {hint}available: {', '.join(available) or 'none'}")


def recipe_choice(recipe: str, group: str, folders: Sequence[Path] = ()) -> str | None:
    """What a recipe, or the recipe that it begins with, chooses of another group; None when both leave it alone."""
    chosen = None
    for root in _roots("recipe", folders):
        file = root.joinpath(f"{recipe if '/' in recipe else f'{recipe}/config'}.yaml")
        for entry in OmegaConf.create(file.read_text(encoding="utf-8")).get("defaults", []) if file.is_file() else ():
            if isinstance(entry, str) and entry.startswith("/recipe/"):
                chosen = recipe_choice(entry.removeprefix("/recipe/"), group, folders) or chosen
            elif isinstance(entry, DictConfig):
                chosen = entry.get(f"override /{group}", chosen)
    return chosen


def _roots(group: str, folders: Sequence[Path]) -> list[Any]:
    return [root.joinpath(group) for root in (files(CONF), *folders)]


@functools.cache
def _upstream() -> DictConfig:
    return composed(UPSTREAM_CONF, UPSTREAM_PRIMARY, [])


def _with_nodes(keys: Iterable[str]) -> set[str]:
    return {key[:end] for key in keys for end in range(1, len(key) + 1) if end == len(key) or key[end] == "."}


def _target_fields(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the fields of every dataclass that a node below is built as."""
    from hydra.utils import get_class

    for name in map(str, node):
        child = node._get_node(name)  # unresolved: profiler nodes interpolate keys that only RL configs have
        if not isinstance(child, DictConfig) or is_free_form(f"{prefix}{name}"):
            continue
        yield from _target_fields(child, f"{prefix}{name}.")
        target = child.get("_target_")
        cls = get_class(target) if target else None
        if cls is not None and is_dataclass(cls):
            yield from (f"{prefix}{name}.{entry.name}" for entry in fields(cls))
