"""The composition of a config, with names translated and typos refused."""

import functools
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.config import schema
from verl_ext.config.key_table import first_below, unknown_choice
from verl_ext.config.keys import is_name_of_verl, is_raw
from verl_ext.config.resolve import resolve_config
from verl_ext.config.translation import translate
from verl_ext.custom import names_own_class
from verl_ext.data import SFTDataSet
from verl_ext.losses import PreferenceOptions
from verl_ext.options import leaves, must, spell
from verl_ext.overrides import Item, parsed_words, restored, split_flags

PRIMARY = "sft"
_DECISIVE = ("loss.mode", "data.custom_cls.path", "data.custom_cls.name")
SEARCH_PATH = "hydra.searchpath=[pkg://verl_ext.conf,pkg://verl.trainer.config]"


def prepare_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (overrides for Hydra, notices to print once) from a command line.

    Arguments that begin with `-` stay unchanged, and needless plus signs are dropped. Raises ValueError with a line for
    each unparsable override, unknown key (with the nearest) and unknown choice of a config group (with the choices).
    """
    flags, words = split_flags(argv)
    if any(flag in ("-m", "--multirun") for flag in flags):
        raise ValueError("--multirun starts runs one after the other inside one set of ranks; start one run a command")
    primary, folders = _files_of(flags)
    given = parsed_words(words)
    # The loss, and the dataset class, which decides which names of verl are translated.
    mode, path, name = _drafted(given, primary, folders)
    own_class = names_own_class(path, name)
    packs = not own_class and name in (None, "", SFTDataSet.__name__)

    def is_known(key: str) -> bool:
        return schema.is_known(key) or key in schema.groups()

    translation = translate(given, own_class, packs, is_known)
    if translation.sources:  # the command is printed, and does not run
        translation = translate(given, own_class, packs, is_known, writes_rate=True)
    items, notices = [*translation.items], [*translation.notices]
    if packs and not name and mode in (*PreferenceOptions.modes,):
        items = [*(item for item in items if item.key != "data"), Item("", "data", "preference")]
        notices.append(f"loss={mode} compares answers, so data=preference packs them")
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
    if translation.sources:  # last, so that the command to give stands at the end
        raw = [item.key for item in given if is_raw(item.key)]
        mistakes.append(f"{', '.join(raw)}: raw files are tokenized first, as the last line does before it trains")
        mistakes += [f"note: {translation.replies}"] * bool(translation.replies)
        words = [*_ranks(given), *flags, *map(str, (*translation.sources, *items))]
        mistakes.append(shlex.join(["verl-ext", "train", *words]))
    if mistakes:
        raise ValueError(restored("\n".join(mistakes)))
    if primary != PRIMARY:
        overrides.append(SEARCH_PATH)  # Hydra reads it only from the primary config, which is then not ours
    return [*flags, *overrides], list(dict.fromkeys(map(restored, notices)))


def _files_of(flags: Sequence[str]) -> tuple[str, tuple[Path, ...]]:
    """Return the primary config and the user's config folders, by Hydra's flags."""
    written = [tuple(flag.split("=", 1)) for flag in flags if "=" in flag] + list(pairwise(flags))
    primary = [value for name, value in written if name in ("--config-name", "-cn")]
    folders = (Path(value).expanduser() for name, value in written if name in ("--config-dir", "-cd"))
    return (primary or [PRIMARY])[-1], tuple(folders)


def _drafted(items: Sequence[Item], primary: str, folders: tuple[Path, ...]) -> tuple[Any, ...]:
    """Compose once dry, and return the values of `_DECISIVE`."""
    words = [SEARCH_PATH] * (primary != PRIMARY)
    for item in items:
        if item.key.partition("@")[0] in schema.groups() or item.key in schema.with_nodes(_DECISIVE):
            with suppress(ValueError):  # it is reported with all other mistakes
                words += filter(None, [str(_known(item, False, folders)[0] or "")])
    return (_values_of.__wrapped__ if folders else _values_of)(tuple(words), primary, folders)


@functools.cache
def _values_of(words: tuple[str, ...], primary: str, folders: tuple[Path, ...]) -> tuple[Any, ...]:
    draft = schema.composed(schema.CONF, primary, words, folders)
    return tuple(OmegaConf.select(draft, key) for key in _DECISIVE)


def _ranks(given: Sequence[Item]) -> list[str]:
    """Return `nproc=N` for `verl-ext train`, if the ranks are known."""
    of_ray = [item.value for item in given if item.key == "trainer.n_gpus_per_node"]
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or (of_ray[-1] if of_ray else None)
    return [] if ranks is None else [f"nproc={ranks}"]


def _known(item: Item, own_class: bool, folders: Sequence[Path]) -> tuple[Item | None, str | None]:
    """Return the override for Hydra, None if it is left out, and a notice about a needless plus."""
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
    below = None if "." in item.key or group in schema.groups() else first_below(item.key, schema.known_keys())
    if below and item.value is not None and not isinstance(value, dict):
        raise ValueError(must(item.key, f"be given by its keys, such as {below}", value))
    notice = f"+{item.key}: the key exists, so it is read without the +" if item.prefix == "+" else None
    if group == "recipe" and (value is None or item.prefix == "~"):
        return None, notice  # the default is no recipe
    if item.prefix == "~" and not schema.is_free_form(item.key):
        raise ValueError(f"{item.key} cannot be removed from the config; got {item}")
    if is_choice:
        names, choice = schema.options(group, folders), spell(value)
        if (name := names.get(choice, choice)) not in names.values():
            raise ValueError(unknown_choice(group, choice, [*names]))
        return replace(item, prefix="", value=name), notice
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
