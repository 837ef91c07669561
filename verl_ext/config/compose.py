"""The composition of a config, with names translated and typos refused."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.config import schema
from verl_ext.config.legacy import is_name_of_verl, is_raw
from verl_ext.config.resolve import resolve_config
from verl_ext.config.translation import translate
from verl_ext.losses import PreferenceOptions
from verl_ext.options import leaves, spell
from verl_ext.overrides import Item, parsed_words, restored

PRIMARY = "sft"
SEARCH_PATH = "hydra.searchpath=[pkg://verl_ext.conf,pkg://verl.trainer.config]"
# The flags of Hydra that take the next argument as their value.
_VALUED_FLAGS = (
    *("--cfg", "-c", "--package", "-p"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)


def prepare_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (overrides for Hydra, notices to print once) from a command line.

    Arguments that begin with `-` stay unchanged, and needless plus signs are dropped. Raises ValueError with a line for
    each unparsable override, unknown key (with the nearest) and unknown choice of a config group (with the choices).
    """
    flags, words = _split_flags(argv)
    if any(flag in ("-m", "--multirun") for flag in flags):
        raise ValueError("--multirun starts runs one after the other inside one set of ranks; start one run a command")
    folders = _config_folders(flags)
    given = parsed_words(words)
    # The dataset class and the data group decide which names of verl are translated.
    classes = [(item.value or "").strip("'\"") for item in given if item.key == "data.custom_cls.name"]
    own_class = any(map(schema.names_own_class, classes))
    packed = _choice("data", given, folders) in (None, "packed")
    translation = translate(given, own_class, packed, lambda key: schema.is_known(key) or key in schema.groups())
    items, notices = [*translation.items], [*translation.notices]
    losses = [_choice("loss", items, folders), *(item.value for item in items if item.key == "loss.mode")]
    if packed and not classes and losses[-1] in (*PreferenceOptions.modes,):
        items = [*(item for item in items if item.key != "data"), Item("", "data", "preference")]
        notices.append(f"loss={losses[-1]} compares answers, so data=preference packs them")
    overrides: list[str] = []
    mistakes = list(translation.problems)
    # All mistakes are collected, so that one start reports them.
    for item in items:
        try:
            known, notice = _known(item, own_class, folders)
        except ValueError as error:
            mistakes.append(str(error))
            continue
        overrides += [str(known)] if known else []
        notices += [notice] if notice else []
    mistakes += _problems_of_recipe(items, folders)
    if translation.sources:  # last, so that the command to give stands at the end
        raw = [item.key for item in given if is_raw(item.key)]
        mistakes.append(f"{', '.join(raw)}: raw files are tokenized first, as this command does before it trains:")
        words = [*_ranks(given), *flags, *map(str, (*translation.sources, *items))]
        mistakes.append(shlex.join(["verl-ext", "train", *words]))
    if mistakes:
        raise ValueError(restored("\n".join(mistakes)))
    if any(flag.split("=")[0] in ("--config-name", "-cn") for flag in flags):
        overrides.append(SEARCH_PATH)  # Hydra reads it only from the primary config, which is then not ours
    return [*flags, *overrides], list(dict.fromkeys(map(restored, notices)))


def _split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    words: list[str] = []
    takes_next = False
    for word in argv:
        (flags if takes_next or word.startswith("-") else words).append(word)
        takes_next = not takes_next and word in _VALUED_FLAGS
    return flags, words


def _choice(group: str, items: Sequence[Item], folders: Sequence[Path]) -> str | None:
    """Return a group's choice by the command line or recipe, or None."""
    given = {item.key: item.value for item in items if item.value and not item.prefix.startswith("~")}
    if group in given or "recipe" not in given:
        return given.get(group)
    return schema.recipe_choice(given["recipe"], group, folders)


def _problems_of_recipe(items: Sequence[Item], folders: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each missing or headless choice of user recipes."""
    for group in sorted({*schema.groups()} - {item.key for item in items}) if folders else ():
        if (choice := _choice(group, items, folders)) is not None:
            try:
                schema.choice_path(group, choice, folders)
            except ValueError as error:
                yield str(error)


def _config_folders(flags: Sequence[str]) -> list[Path]:
    """List the folders of Hydra's --config-dir, with the user's own choices."""
    written = [tuple(flag.split("=", 1)) for flag in flags if "=" in flag] + list(pairwise(flags))
    return [Path(value).expanduser() for name, value in written if name in ("--config-dir", "-cd")]


def _ranks(given: Sequence[Item]) -> list[str]:
    """Return `nproc=N` for `verl-ext train`, if the ranks are known."""
    of_ray = [item.value for item in given if item.key == "trainer.n_gpus_per_node"]
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or (of_ray[-1] if of_ray else None)
    return [] if ranks is None else [f"nproc={ranks}"]


def _known(item: Item, own_class: bool, folders: Sequence[Path]) -> tuple[Item | None, str | None]:
    """Return the override for Hydra, and a notice about a needless plus.

    The override is None if it is to be left out.
    """
    value = item.parsed()
    group = item.key.partition("@")[0]
    is_choice = group in schema.groups() and not isinstance(value, dict | list)
    keys = [key for key, _ in leaves({item.key: value}) if not is_choice]
    if old := next((key for key in keys if key != item.key and is_name_of_verl(key) and not own_class), None):
        raise ValueError(f"{old} is read as a word of its own, {old}=VALUE; got it inside of {item.key}={{…}}")
    unknown = [key for key in keys if not schema.is_known(key)]
    if unknown and own_class and item.prefix.startswith("+") and item.key.startswith("data."):
        return item, None  # a key for the user's own dataset class
    if unknown:
        raise ValueError(schema.unknown_key(unknown[0]))
    if item.key in (nodes := schema.nodes()) and item.value is not None and not isinstance(value, dict):
        raise ValueError(f"{item.key} must be given by its keys, such as {nodes[item.key]}; got {spell(value)}")
    notice = f"+{item.key}: the key exists, so it is read without the +" if item.prefix == "+" else None
    if group == "recipe" and (value is None or item.prefix == "~"):
        return None, notice  # the default is no recipe
    if item.prefix == "~" and not schema.is_free_form(item.key):
        raise ValueError(f"{item.key} cannot be removed from the config; got {item}")
    if is_choice:
        return replace(item, prefix="", value=schema.choice_path(group, spell(value), folders)), notice
    if item.prefix in ("++", "~") or item.key.startswith("hydra."):
        return item, None
    return replace(item, prefix="++"), notice  # works whether or not the composed config has the key


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose conf/sft.yaml under overrides, like the trainer's command line.

    Mandatory values may still be missing (`data.train_dir`, `model.path`); check_run reports all of them at once.
    Raises ValueError with one line for each override or YAML key that does not exist or cannot be read.
    """
    return compose_run(overrides)[0]


def compose_run(overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return :func:`compose`'s config, and notices that rank 0 prints once."""
    prepared, notices = prepare_overrides(overrides)
    flags = [word for word in prepared if word.startswith("-")]
    if flags:
        raise ValueError(f"an override is written key=value; got {flags[0]}")
    config = schema.composed(schema.CONF, PRIMARY, prepared)
    return config, notices + complete(config)


def complete(config: DictConfig) -> list[str]:
    """Resolve what no machine decides, in place; return notices.

    Raises ValueError with a line for each key that does not exist, or for the first value that cannot be resolved.
    """
    schema.check_keys(config)
    return resolve_config(config)
