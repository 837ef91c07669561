"""The dotted keys of a config, and the defaults for Hydra.

    verl's sft_trainer_engine  ∪  fields of each node's `_target_` dataclass  ∪  fields of our options dataclasses

Only the dataclasses hold defaults and meanings; conf/ refers to them in defaults lists (`/options/loss@_here_`). Any
key is allowed below a free-form node, which goes unchanged to transformers, an optimizer or a profiler.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_origin

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config import key_table
from verl_ext.config.keys import DEPRECATED, is_name_of_verl, with_fact
from verl_ext.config.model import PackedModel
from verl_ext.config.run import OF_EVERY_RUN, dataset_class
from verl_ext.custom import names_own_class
from verl_ext.data import PackDataset, SFTDataSet
from verl_ext.data.packs.options import DataOptions
from verl_ext.losses import LossOptions, PreferenceOptions
from verl_ext.options import Options, default_values, leaves, must, options_of, refuse, spell
from verl_ext.overrides import restored

CONF = "verl_ext.conf"
UPSTREAM_CONF = "verl.trainer.config"
UPSTREAM_PRIMARY = "sft_trainer_engine"

# Groups of verl, whose other choices are engines on which packs do not run.
_UPSTREAM_GROUPS = {"engine": ("fsdp",), "optim": ("fsdp",), "profiler": ("profiler",)}


def composed(module: str, primary: str, overrides: Sequence[str], folders: Sequence[Path] = ()) -> DictConfig:
    """Compose the config `primary` of a config package, or of the user's folders, under Hydra overrides.

    Raises ValueError with one line for anything that Hydra or OmegaConf refuses, including dangling interpolations.
    """
    try:
        with _without_hydra(), initialize_config_module(module, version_base=None):
            loader: Any = GlobalHydra.instance().config_loader()
            for folder in folders:  # as for Hydra's --config-dir
                loader.get_search_path().prepend("command-line", f"file://{folder.absolute()}", "schema")
            loader.repository.initialize_sources(loader.get_search_path())
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
    nodes = {choice: _file("data", choice).get("custom_cls") or {} for choice in options("data")}
    return {choice: dataset_class(OmegaConf.create({"data": {"custom_cls": node}})) for choice, node in nodes.items()}


@functools.cache
def model_kinds() -> dict[str, type[PackedModel]]:
    """Return {choice of the group `model`: its class} where `_target_` names one."""
    targets = {choice: _file("model", choice).get("_target_") for choice in options("model")}
    return {choice: get_class(target) for choice, target in targets.items() if target}


def _file(group: str, choice: str) -> Any:
    return OmegaConf.load(str(files(CONF).joinpath(group, f"{choice}.yaml")))


@functools.cache
def option_nodes() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return {name below `/options`: (its node, {key: default})} of our dataclasses."""
    nodes = {cls.prefix: (cls.prefix, default_values(cls)) for cls in OF_EVERY_RUN}
    nodes["loss/preference"] = (PreferenceOptions.prefix, default_values(PreferenceOptions))
    for kind in model_kinds().values():
        for cls in kind.config_options:  # null means the model's own value, else the default
            nodes[cls.prefix.replace(".", "/")] = (cls.prefix, dict.fromkeys(options_of(cls)))
    for choice, family in dataset_families().items():
        nodes[f"data/{choice}"] = ("data", {**default_values(DataOptions), **default_values(family.Options)})
    return nodes


def register() -> None:
    """Register our options, verl's files and the papers' recipes as groups of Hydra.

    Idempotent. A file of ours that has the name of one of verl's begins with that one.
    """
    store = ConfigStore.instance()
    optim = OmegaConf.load(str(files(UPSTREAM_CONF).joinpath("optim/fsdp.yaml")))
    store.store(group="upstream/optim", name="fsdp", node=optim)
    for name, (_, node) in option_nodes().items():
        group, _, leaf = f"options/{name}".rpartition("/")
        store.store(group=group, name=leaf, node=node)
    for file in Path(str(files(CONF).joinpath("recipe", key_table.PAPERS))).glob("*/*.yaml"):
        recipe, base = file.parent.name, f"/recipe/{key_table.PAPERS}/{file.parent.name}/{file.stem}"
        store.store(group=f"recipe/{recipe}", name=file.stem, package="_global_", node={"defaults": [base]})


@functools.cache
def known_keys() -> frozenset[str]:
    """Return every dotted key, nodes too, except below free-form nodes."""
    keys = {*value_keys(_upstream()), *_target_fields(_upstream()), *with_fact("choices")}
    keys |= {f"{prefix}.{key}" for prefix, node in option_nodes().values() for key, _ in leaves(node)}
    keys |= {f"model.{entry.name}" for cls in model_kinds().values() for entry in fields(cls)}
    keys -= with_fact("is_derived").keys()
    return frozenset({key for key in with_nodes(keys) if not is_free_form(key)} | free_form())


@functools.cache
def free_form() -> frozenset[str]:
    """Return the nodes that take any keys: some of verl's, and our options that are mappings."""
    families: list[type[Options]] = [family.Options for family in dataset_families().values()]
    classes: tuple[type[Options], ...] = (*OF_EVERY_RUN, PreferenceOptions, *families)
    ours = ((f"{cls.prefix}.{name}", of.type) for cls in classes for name, of in options_of(cls).items())
    return frozenset({*with_fact("is_free"), *(key for key, kind in ours if dict in (kind, get_origin(kind)))})


def is_free_form(key: str) -> bool:
    """Tell whether a key is a free-form node or lies below one."""
    return any(f"{key}.".startswith(f"{node}.") for node in free_form())


def is_known(key: str) -> bool:
    """Tell whether the schema has or allows this dotted key."""
    return is_free_form(key) or key in known_keys()


def foreign_option_problems(config: Any) -> Iterator[str]:
    """Yield a line for each option of unchosen families or kinds alone."""
    custom = config["data"]["custom_cls"]
    if not names_own_class(custom["path"], custom["name"]):
        chosen = dataset_class(config)
        families = {choice: set(options_of(family.Options)) for choice, family in dataset_families().items()}
        yield from _foreign(config["data"], "data", families, {*options_of(DataOptions), *options_of(chosen.Options)})
    loss, ours = config["loss"], default_values(PreferenceOptions)
    for key in ours.keys() - options_of(LossOptions).keys() if loss["mode"] not in PreferenceOptions.modes else ():
        if loss.get(key) not in (None, ours[key]):
            got = f"got {spell(loss[key])} with loss.mode={loss['mode']}"
            yield f"loss.{key} is an option of preferences (loss={'|'.join(PreferenceOptions.modes)}); {got}"
    kinds = {choice: set(options_of(kind)) for choice, kind in model_kinds().items()}
    yield from _foreign(config["model"], "model", kinds, set(options_of(get_class(config["model"]["_target_"]))))


def _foreign(node: Any, prefix: str, readers: dict[str, set[str]], read: set[str]) -> Iterator[str]:
    for key in sorted(set().union(*readers.values()) - read - set(_upstream()[prefix])):  # verl's keys always have one
        groups = [f"{prefix}={choice}" for choice, keys in readers.items() if key in keys]
        if node.get(key) is not None:
            yield f"{prefix}.{key} is an option of {', '.join(groups)}; got {spell(node[key])} without it"


def unknown_key(key: str) -> str:
    """Return the error line for a key that the schema lacks."""
    return key_table.line_of_unknown(key, [*known_keys(), *groups()])


def check_keys(config: DictConfig) -> None:
    """Raise ValueError with a line for each unknown key of a config, or one for keys that it lacks.

    It also refuses a value that refers to a missing key. If data.custom_cls names a user's dataset class, the keys
    below data belong to that class.
    """
    own_class = names_own_class(*(OmegaConf.select(config, f"data.custom_cls.{key}") for key in ("path", "name")))
    keys = value_keys(config)
    unknown = [key for key in keys if not is_known(key) and not (own_class and key.startswith("data."))]
    if unknown:
        raise ValueError("\n".join(unknown_key(key) for key in unknown))
    refuse([_incomplete(config, keys)])
    check_interpolations(config)
    if not own_class:
        refuse(_untranslated(config))


def _incomplete(config: DictConfig, keys: Sequence[str]) -> str | None:
    """Return a line if keys of every config are missing: Hydra has what a user's file has, and no more."""
    if not (lacking := sorted(_always() - with_nodes(keys))):
        return None
    if above := next(iter(with_nodes(lacking[:1]).intersection(keys)), None):
        return must(above, f"be given by its keys, such as {lacking[0]}", OmegaConf.select(config, above))
    node, more = lacking[0].partition(".")[0], f" and {len(lacking) - 1} more keys" * (len(lacking) > 1)
    return f"{node} must have {lacking[0]}{more}: a file of your own gets them from a choice in its defaults list"


@functools.cache
def _always() -> frozenset[str]:
    """Return the keys of values that every composed config has."""
    ours = (f"{of.prefix}.{key}" for of in OF_EVERY_RUN for key, _ in leaves(default_values(of)))
    keys = {*value_keys(_upstream()), *ours}
    return frozenset(key for key in keys if not is_free_form(key))


def with_nodes(keys: Iterable[str]) -> set[str]:
    """Return dotted keys and the nodes above them."""
    return {key[:end] for key in keys for end in (*(i for i, sign in enumerate(key) if sign == "."), len(key))}


def _untranslated(config: DictConfig) -> Iterator[str]:
    """Yield a line for a file's keys that only command lines translate, except for verl's defaults."""
    classes = {family.__name__: family for family in dataset_families().values()}
    own = options_of(classes.get(OmegaConf.select(config, "data.custom_cls.name"), SFTDataSet).Options)
    defaults = _upstream()
    for key in value_keys(config):
        if not is_name_of_verl(key) or key in DEPRECATED or key.removeprefix("data.") in own:
            continue
        if (item := OmegaConf.select(config, key)) not in (None, OmegaConf.select(defaults, key)):
            yield must(key, "be given on the command line, which translates it for packs", item) + " in a file"


def value_keys(config: DictConfig) -> list[str]:
    """Return the dotted keys of values; lists and empty dicts are values."""
    values: Any = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    return [key for key, _ in leaves(values)]


def groups() -> tuple[str, ...]:
    """Return the config groups that a command line or recipe may choose."""
    ours = (entry.name for entry in files(CONF).iterdir() if entry.is_dir() and not entry.name.startswith("_"))
    return tuple(sorted({*ours, *_UPSTREAM_GROUPS}))


def options(group: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return {choice of a group: its name in Hydra}: verl's, ours, and those in the user's config folders."""
    of_verl = {name: name for name in _UPSTREAM_GROUPS.get(group, ())}
    return dict(sorted((of_verl | key_table.choice_files(group, folders)).items()))


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
