"""The table of all keys, key_table.json: for help, early refusals and completion, without torch.

`python docs/make_configuration.py` makes it from the options where they stand. A run is checked by the options
themselves; the table refuses a mistake of spelling before anything is imported that takes seconds.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.config.keys import FOREIGN_ENGINES, RENAMED, is_name_of_verl, renamed, superseded
from verl_ext.custom import names_own_class
from verl_ext.options import UsageError, choice_problem, leaves, must, nearest_name, spell, unknown
from verl_ext.overrides import Item, parsed_words, restored, split_flags

TABLE = Path(__file__).with_name("key_table.json")
TRAINER = "train"
PAPERS = "papers"  # a folder of recipes, which are chosen by their own names
# What a first run is likely to set, in the order of the help.
MOST_USED = (
    *("recipe", "model.path", "data.sources", "data.val_share", "turns", "nproc"),
    *("data.max_tokens", "data.over_length", "data.train_batch_size"),
    *("optim.lr", "optim.lr_scheduler_type", "optim.lr_warmup_steps_ratio", "optim.weight_decay"),
    *("trainer.total_epochs", "trainer.save_freq", "trainer.default_local_dir", "trainer.logger"),
    *("model", "loss", "parallel"),
)
OF_TRAIN = ("data.sources", "data.val_sources", "data.val_share", "nproc", "dry_run")
_OTHER_CONFIG = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")


class KeyRow(NamedTuple):
    """A key of a command.

    of: the choice of a group that has it, such as data=pretrain; "" for keys that every run has.
    """

    key: str
    default: str
    values: str
    meaning: str
    of: str = ""


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def keys_of(command: str) -> list[KeyRow]:
    """Return the keys of a command of `verl-ext`; `train` has the trainer's."""
    return [KeyRow(*row) for row in _table()["commands"].get(command, ())]


def commands() -> list[str]:
    """Return the commands with keys, such as `synthesize glm_long`."""
    return list(_table()["commands"])


def command_names() -> list[str]:
    """Return the commands of `verl-ext`."""
    return list(_table()["names"])


def group_names() -> list[str]:
    """Return the groups of choices, such as parallel."""
    return list(_table()["groups"])


def node_names() -> list[str]:
    """Return the nodes of a run's configuration, such as trainer."""
    return sorted({key.partition(".")[0] for key in _table()["known"] if "." in key})


def choices(group: str) -> list[str]:
    """Return the choices of a group that come with this package and with verl."""
    if group != "recipe":
        return list(_table()["groups"][group])
    runs = {file.parent.name for file in (conf_folder() / group).glob("**/run.yaml")}
    return sorted(runs.union(choice_files(group)))


def choice_files(group: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return {choice of a group: its name in Hydra} of the files here and in the user's config folders.

    A recipe's name is NAME for the config.yaml of its folder, and NAME/STAGE for another yaml file there. A folder with
    a run.yaml has whole runs (verl_ext/config/run_file.py), and no choices.
    """
    roots = [root / group for root in (conf_folder(), *folders)]
    files = [(root, file) for root in roots for file in root.glob("*.yaml")]
    if group == "recipe":
        nested = [(root, file) for root in (*roots, roots[0] / PAPERS) for file in root.glob("*/*.yaml")]
        files += [(root, file) for root, file in nested if not file.with_name("run.yaml").is_file()]
    names = sorted(file.relative_to(root).with_suffix("").as_posix() for root, file in files)
    return {name.removesuffix("/config"): name for name in names}


def conf_folder() -> Path:
    """Return the folder of the configuration; importing its package would take seconds."""
    spec = find_spec("verl_ext.conf")
    assert spec is not None, "it comes with this package"
    assert spec.submodule_search_locations, "it is a package"
    return Path(spec.submodule_search_locations[0])


def first_below(node: str, known: Iterable[str]) -> str | None:
    """Return the first of the known keys below a node; None if there are none."""
    return min((key for key in known if key.startswith(f"{node}.") and "._" not in key), default=None)


def line_of_unknown(key: str, known: Iterable[str]) -> str:
    """Return the error line for a key that no configuration has."""
    if entry := superseded(key):
        return f"{key} has no equivalent: {entry.why}"
    if today := renamed(key):
        return unknown(key, [key], renamed={key: today})
    names = [name for name in (*known, *RENAMED) if not key.startswith(f"{name}.")]
    return unknown(key, names, renamed=RENAMED)


def unknown_choice(group: str, choice: str, available: Sequence[str]) -> str:
    """Return the error line for a choice that a group does not have."""
    close = nearest_name(choice, available)
    hint = f"nearest: {close}; " if close else ""
    return f"unknown choice {group}={choice}; {hint}available: {', '.join(available) or 'none'}"


def read_words(words: Sequence[str]) -> tuple[list[str], list[Item]]:
    """Return the flags of Hydra on a command line, and its overrides; raise UsageError for any other word."""
    try:
        flags, others = split_flags(words)
        if bare := next((word for word in others if "=" not in word and not word.startswith("~")), None):
            raise UsageError(must("a word", "be key=value, or first the YAML file of a run", bare))
        return flags, parsed_words(others)
    except ValueError as error:
        raise UsageError(str(error)) from None


def refuse_early(words: Sequence[str], trains: bool = True) -> None:
    """Raise UsageError for unknown keys and choices of a trainer's command line, and for a missing rate.

    What the translation of verl's commands reads passes, and so does what a configuration of the user's may have.
    trains: whether the command needs a rate.
    """
    flags, items = read_words(words)
    values = {item.key: str(item.value) for item in items}
    has_own_config = any(flag.partition("=")[0] in _OTHER_CONFIG for flag in flags)
    has_own_class = names_own_class(*(values.get(f"data.custom_cls.{name}") for name in ("path", "name")))
    problems: list[str] = []
    if version("verl") == _table()["verl"]:  # another version may have other keys
        for item in items:
            value, group = item.parsed(), item.key.partition("@")[0]
            if group in ("engine", "optim") and value in FOREIGN_ENGINES:
                continue  # translated or refused with the reason later
            if group not in group_names() or isinstance(value, dict | list):
                pairs = list(leaves({restored(item.key): value}))
                problems += [_unknown(name, item) for name, _ in pairs if not _is_known(name, has_own_class)]
                problems += [line for pair in pairs if (line := _value_problem(*pair))]
                problems += [line for name, _ in pairs if value is not None and (line := _node_problem(name, value))]
            elif not (value is None or item.prefix == "~" or has_own_config or spell(value) in choices(group)):
                problems.append(unknown_choice(group, spell(value), choices(group)))
    is_measured = values.get("trainer.eval_only", "").lower() == "true"
    has_rate = has_own_config or any(values.get(key, "null") != "null" for key in ("optim.lr", "optim", "recipe"))
    if trains and not (problems or is_measured or has_rate):
        problems.append(f"optim.lr is required: {meaning('optim.lr')}; got null")
    if problems:
        raise UsageError("\n".join(problems))


def _unknown(name: str, item: Item) -> str:
    if name.startswith(OF_TRAIN):
        return (
            f"{name} is read by `verl-ext train`, on one machine; here data.train_dir must name a folder of `verl-ext "
            f"tokenize`; got {restored(str(item))}"
        )
    if name in (row.key for row in keys_of("tokenize")):
        return must(name, "stand beside data.sources, whose tokens it makes", f"{restored(str(item))} without them")
    return line_of_unknown(name, _known())


def _value_problem(key: str, value: Any) -> str | None:
    """Return a line for a text in the place of a number or of a choice."""
    kinds = [row.values for row in keys_of(TRAINER) if row.key == key]
    if not kinds or not isinstance(value, str) or "${" in value:
        return None
    if all(kind.startswith(("int", "float")) for kind in kinds):
        return must(key, "be a number", value)
    allowed = [choice for kind in kinds for choice in kind.split(" | ")]
    return choice_problem(key, value, allowed) if all(" | " in kind for kind in kinds) else None


def _node_problem(key: str, value: Any) -> str | None:
    """Return a line for a node that is given as a whole by something that maps no names."""
    below = None if isinstance(value, dict) else first_below(key, _known())
    return None if below is None else must(key, f"be given by its keys, such as {below}", value)


@functools.cache
def _known() -> frozenset[str]:
    return frozenset({*_table()["known"], *group_names()})


def _is_known(key: str, has_own_class: bool) -> bool:
    """Tell whether the trainer, verl, or a dataset class of the user's may read a key."""
    is_free = any(f"{key}.".startswith(f"{node}.") for node in _table()["free"])
    is_own = has_own_class and key.startswith("data.")
    return key in _known() or is_free or is_own or is_name_of_verl(key)


def is_number(key: str) -> bool:
    """Tell whether a key of the trainer is a number, or true or false."""
    return any(row.key == key and row.values.startswith(("int", "float", "bool")) for row in keys_of(TRAINER))


def meaning(key: str) -> str:
    """Return what a key of the trainer means."""
    return next(row.meaning for row in keys_of(TRAINER) if row.key == key)
