"""The dotted keys of a config, and the defaults for Hydra.

    verl's sft_trainer_engine  ∪  fields of each node's `_target_` dataclass  ∪  fields of our options dataclasses

Only the dataclasses hold defaults and meanings; conf/ refers to them in defaults lists (`/options/loss@_here_`). Any
key is allowed below a free-form node, which goes unchanged to transformers, an optimizer or a profiler.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config import legacy
from verl_ext.config.best import BestOptions
from verl_ext.config.model import PackedModel
from verl_ext.config.run import NODES, dataset_class
from verl_ext.config.weights import ModelNode
from verl_ext.data import PackDataset, SFTDataSet
from verl_ext.data.options import DataOptions
from verl_ext.engines.schedule import OptimOptions
from verl_ext.losses import LossOptions, PreferenceOptions
from verl_ext.options import Options, default_values, leaves, nearest_name, options_of, refuse, spell, unknown
from verl_ext.overrides import restored

CONF = "verl_ext.conf"
UPSTREAM_CONF = "verl.trainer.config"
UPSTREAM_PRIMARY = "sft_trainer_engine"

FREE_FORM = (
    "data.apply_chat_template_kwargs",
    "data.mixture",
    "data.train_dir",
    "data.val_dir",
    "engine.turbo_config",
    "engine.wrap_policy",
    "eval.apply_chat_template_kwargs",
    "eval.columns",
    "eval.prompts",
    "hydra",
    "loss.category_weights",
    "model.fused_kernel_options",
    "model.lora",
    "model.override_config",
    "optim.lr_of",
    "optim.override_optimizer_config",
    "profiler.global_tool_config",
    "profiler.tool_config",
)
# The keys that verl reads from this dict by name (workers/engine/fsdp/transformer_impl.py).
MIXED_PRECISION = tuple(f"engine.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer"))
# HFModelConfig fills these itself and would silently overwrite given values.
_DERIVED = (
    "architectures generation_config hf_config local_hf_config_path local_path local_tokenizer_path processor tokenizer"
)
_GLOBAL_GROUPS = ("parallel", "recipe")  # their files have keys of the whole config
# Groups of verl, whose other choices are engines on which packs do not run.
_UPSTREAM_GROUPS = {"engine": ("fsdp",), "optim": ("fsdp",), "profiler": ("profiler",)}


def composed(module: str, primary: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the config `primary` of a config package under Hydra overrides.

    Raises ValueError with one line for anything that Hydra or OmegaConf refuses, including dangling interpolations.
    """
    try:
        with _without_hydra(), initialize_config_module(module, version_base=None):
            config = hydra_compose(primary, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(restored(_one_line(error))) from None
    check_interpolations(config)
    return config


def check_interpolations(config: DictConfig) -> None:
    """Raise ValueError if a value refers to a key that is missing."""
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ValueError(_one_line(error)) from None


@contextmanager
def _without_hydra() -> Iterator[None]:
    """Set aside a running application's Hydra state, and restore it."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("object_type", "reference_type", "See https"))]
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None)
        return f"{key} cannot be read: {lines[0]}" if key else lines[0]
    return " ".join(lines[:2])


@functools.cache
def dataset_families() -> dict[str, type[PackDataset]]:
    """Return {choice of the group `data`: the dataset class that conf/data/CHOICE.yaml names}."""
    nodes = {choice: _choice("data", choice).get("custom_cls") or {} for choice in options("data")}
    return {choice: dataset_class(OmegaConf.create({"data": {"custom_cls": node}})) for choice, node in nodes.items()}


@functools.cache
def model_kinds() -> dict[str, type[PackedModel]]:
    """Return {choice of the group `model`: its class} where `_target_` names one."""
    targets = {choice: _choice("model", choice).get("_target_") for choice in options("model")}
    return {choice: get_class(target) for choice, target in targets.items() if target}


def _choice(group: str, choice: str) -> Any:
    return OmegaConf.load(str(files(CONF).joinpath(group, f"{choice}.yaml")))


@functools.cache
def option_nodes() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return {name below `/options`: (its node, {key: default})} of our dataclasses."""
    always: tuple[type[Options], ...] = (ModelNode, OptimOptions, BestOptions, *NODES)
    nodes = {cls.prefix: (cls.prefix, default_values(cls)) for cls in always}
    nodes["loss/preference"] = (PreferenceOptions.prefix, default_values(PreferenceOptions))
    for kind in model_kinds().values():
        for cls in kind.config_options:  # null means the model's own value, else the default
            nodes[cls.prefix.replace(".", "/")] = (cls.prefix, dict.fromkeys(options_of(cls)))
    for choice, family in dataset_families().items():
        nodes[f"data/{choice}"] = ("data", {**default_values(DataOptions), **default_values(family.Options)})
    return nodes


def register() -> None:
    """Register :func:`option_nodes` as Hydra's config group `options`; idempotent."""
    for name, (_, node) in option_nodes().items():
        group, _, leaf = f"options/{name}".rpartition("/")
        ConfigStore.instance().store(group=group, name=leaf, node=node)


@functools.cache
def known_keys() -> frozenset[str]:
    """Return every dotted key, nodes too, except below free-form nodes."""
    keys = {*value_keys(_upstream()), *_target_fields(_upstream()), *MIXED_PRECISION}
    keys |= {f"{prefix}.{key}" for prefix, node in option_nodes().values() for key, _ in leaves(node)}
    keys |= {f"model.{entry.name}" for cls in model_kinds().values() for entry in fields(cls)}
    keys -= {f"model.{name}" for name in _DERIVED.split()}
    keys |= {key[:end] for key in keys for end in range(len(key)) if key[end] == "."}  # the nodes above the keys
    return frozenset({key for key in keys if not is_free_form(key)} | set(FREE_FORM))


@functools.cache
def nodes() -> dict[str, str]:
    """Return {top node that is no group of choices: its first key}."""
    found = {key.partition(".")[0]: key for key in sorted(known_keys(), reverse=True) if "." in key and "._" not in key}
    return {name: key for name, key in found.items() if name not in groups() and not is_free_form(name)}


def is_free_form(key: str) -> bool:
    """Tell whether a key is a free-form node or lies below one."""
    return any(f"{key}.".startswith(f"{node}.") for node in FREE_FORM)


def is_known(key: str) -> bool:
    """Tell whether the schema has or allows this dotted key."""
    return is_free_form(key) or key in known_keys()


def foreign_option_problems(config: Any) -> Iterator[str]:
    """Yield a line for each option of unchosen families or kinds alone."""
    if not names_own_class(config["data"]["custom_cls"]["name"]):
        chosen = dataset_class(config)
        families = {choice: set(options_of(family.Options)) for choice, family in dataset_families().items()}
        yield from _foreign(config["data"], "data", families, {*options_of(DataOptions), *options_of(chosen.Options)})
    yield from _foreign_to_loss(config["loss"])
    kinds = {choice: set(options_of(kind)) for choice, kind in model_kinds().items()}
    yield from _foreign(config["model"], "model", kinds, set(options_of(get_class(config["model"]["_target_"]))))


def _foreign_to_loss(node: Any) -> Iterator[str]:
    """Yield a line for each option of preferences with another loss."""
    own = default_values(PreferenceOptions)
    for key in own.keys() - options_of(LossOptions).keys() if node["mode"] not in PreferenceOptions.modes else ():
        if node.get(key) not in (None, own[key]):
            got = f"got {spell(node[key])} with loss.mode={node['mode']}"
            yield f"loss.{key} is an option of preferences (loss={'|'.join(PreferenceOptions.modes)}); {got}"


def _foreign(node: Any, prefix: str, readers: dict[str, set[str]], read: set[str]) -> Iterator[str]:
    for key in sorted(set().union(*readers.values()) - read - set(_upstream()[prefix])):  # verl's keys always have one
        groups = [f"{prefix}={choice}" for choice, keys in readers.items() if key in keys]
        if node.get(key) is not None:
            yield f"{prefix}.{key} is an option of {', '.join(groups)}; got {spell(node[key])} without it"


def names_own_class(name: Any) -> bool:
    """Tell whether `data.custom_cls.name` is a user's class with its own keys."""
    return name not in (None, "", "null", *(family.__name__ for family in dataset_families().values()))


def unknown_key(key: str) -> str:
    """Return the error line for a key that the schema lacks."""
    if entry := legacy.superseded(key):
        return f"{key} has no equivalent: {entry.why}"
    if today := legacy.renamed(key):
        return unknown(key, [key], renamed={key: today})
    names = [name for name in (*known_keys(), *groups(), *legacy.RENAMED) if not key.startswith(f"{name}.")]
    return unknown(key, names, renamed=legacy.RENAMED)


def check_keys(config: DictConfig) -> None:
    """Raise ValueError with a line for each unknown key of a config.

    It also refuses a value that refers to a missing key. If data.custom_cls names a user's dataset class, the keys
    below data belong to that class.
    """
    own_class = names_own_class(OmegaConf.select(config, "data.custom_cls.name"))
    unknown = [key for key in value_keys(config) if not is_known(key) and not (own_class and key.startswith("data."))]
    if unknown:
        raise ValueError("\n".join(unknown_key(key) for key in unknown))
    check_interpolations(config)
    if not own_class:
        refuse(_untranslated(config))


def _untranslated(config: DictConfig) -> Iterator[str]:
    """Yield a line for a file's keys that only command lines translate.

    A value equal to verl's own default passes.
    """
    classes = {family.__name__: family for family in dataset_families().values()}
    own = options_of(classes[OmegaConf.select(config, "data.custom_cls.name") or SFTDataSet.__name__].Options)
    defaults = _upstream()
    for key in value_keys(config):
        if not legacy.is_name_of_verl(key) or key in legacy.DEPRECATED or key.removeprefix("data.") in own:
            continue
        if (item := OmegaConf.select(config, key)) not in (None, OmegaConf.select(defaults, key)):
            yield f"{key} must be given on the command line, which translates it for packs; got {spell(item)} in a file"


def value_keys(config: DictConfig) -> list[str]:
    """Return the dotted keys of values; lists and empty dicts are values."""
    values: Any = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    return [key for key, _ in leaves(values)]


def groups() -> tuple[str, ...]:
    """Return the config groups that a command line or recipe may choose."""
    ours = (entry.name for entry in files(CONF).iterdir() if entry.is_dir() and not entry.name.startswith("_"))
    return tuple(sorted({*ours, *_UPSTREAM_GROUPS}))


def options(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Return a group's choices, with those in the user's config folders.

    A recipe's name is NAME for the config.yaml of its folder, and NAME/STAGE for another yaml file there.
    """
    pattern = "*/*.yaml" if group == "recipe" else "*.yaml"
    found = {file.relative_to(root) for root in _roots(group, folders) for file in root.glob(pattern)}
    own = sorted(path.with_suffix("").as_posix().removesuffix("/config") for path in found)
    return [*_UPSTREAM_GROUPS.get(group, ()), *own]


def choice_path(group: str, choice: str, folders: Sequence[Path] = ()) -> str:
    """Return Hydra's name of a choice, such as `NAME/config` for a recipe.

    Raises ValueError, which lists the choices, if the choice does not exist, and for a user's file without its head.
    """
    available = options(group, folders)
    path = f"{choice}/config" if group == "recipe" and choice in available and "/" not in choice else choice
    found = [file for root in _roots(group, folders) if (file := root.joinpath(f"{path}.yaml")).is_file()]
    if not found and choice not in available:
        close = nearest_name(choice, available)
        hint = f"nearest: {close}; " if close else ""
        raise ValueError(f"unknown choice {group}={choice}; {hint}available: {', '.join(available) or 'none'}")
    ours = files(CONF).joinpath(group, f"{path}.yaml").is_file() or path in _UPSTREAM_GROUPS.get(group, ())
    if found and not ours:
        _check_head(found[0], group, choice)
    return path


def _check_head(file: Path, group: str, choice: str) -> None:
    """Raise ValueError unless a user's file names what it starts from.

    Without that, Hydra has the keys of the file alone.
    """
    text, default = file.read_text(encoding="utf-8"), default_choice(group)
    lines = [] if group not in _GLOBAL_GROUPS or re.search(r"^#\s*@package", text, re.M) else ["# @package _global_"]
    lines += [] if default is None or re.search(r"^defaults\s*:", text, re.M) else [f"defaults: [{default}]"]
    if lines:
        head = " and ".join(f"`{line}`" for line in lines)
        raise ValueError(f"{group}={choice} must be a file that begins with {head}; got {file}")


def default_choice(group: str) -> str | None:
    """Return the default choice of a group from conf/."""
    chosen: dict[str, str | None] = {group: choices[0] for group, choices in _UPSTREAM_GROUPS.items()}
    for name in ("base.yaml", "sft.yaml"):
        entries = OmegaConf.create(files(CONF).joinpath(name).read_text(encoding="utf-8")).defaults
        for entry in (entry for entry in entries if isinstance(entry, DictConfig)):
            chosen |= {str(key).removeprefix("override "): choice for key, choice in entry.items()}
    return chosen[group]


def recipe_choice(recipe: str, group: str, folders: Sequence[Path] = ()) -> str | None:
    """Return a recipe's choice of another group, perhaps its base's; else None."""
    chosen = None
    names = (recipe, f"{recipe}/config")
    for file in (root.joinpath(f"{name}.yaml") for root in _roots("recipe", folders) for name in names):
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


def _target_fields(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted fields of all dataclasses that nodes are built into."""
    for name in map(str, node):
        child = node._get_node(name)  # unresolved, because profiler nodes interpolate keys that only RL configs have
        if not isinstance(child, DictConfig) or is_free_form(f"{prefix}{name}"):
            continue
        yield from _target_fields(child, f"{prefix}{name}.")
        target = child.get("_target_")
        cls = get_class(target) if target else None
        if cls is not None and is_dataclass(cls):
            yield from (f"{prefix}{name}.{entry.name}" for entry in fields(cls))
