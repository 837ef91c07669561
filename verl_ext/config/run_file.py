"""A run in one YAML file: `verl-ext train FILE.yaml [key=value …]`.

    base: other.yaml                     optional: another run's file, of which this one has the differences
    recipe: quickstart                   optional: what the file builds on; or `defaults`, Hydra's list of choices
    nproc: 8
    turns: last                          an option of `verl-ext tokenize`
    data:
      sources: {chats: chats.jsonl}      paths start at the folder of the file
      val_share: 0.02
    optim.lr: 1e-5                       keys are nested or dotted

The file stands for the words of a command line. Words that follow it win.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config.key_table import conf_folder, node_names
from verl_ext.config.keys import RENAMED, path_kind, paths
from verl_ext.options import UsageError, first_line, leaves, must, spell
from verl_ext.overrides import Item, dotted_options, override_words, parsed_words, restored
from verl_ext.redaction import redacted
from verl_ext.text.read.hub import HUB, HUB_PREFIX
from verl_ext.text.read.sources import is_there, is_url, kind_of

_OF_DATA, _OF_RUN = ("data", "source", "corpus", "raw"), ("run", "placed")  # kinds of paths (config/keys.py)
_DATA = paths(*_OF_DATA)
# What configurations of other trainers hold, and whose they are.
_FOREIGN = (
    ({"base_model"}, "an axolotl configuration"),
    ({"model_name_or_path", "stage"}, "a LLaMA-Factory configuration"),
    ({"model_name_or_path", "finetuning_type"}, "a LLaMA-Factory configuration"),
    ({"model_name_or_path"}, "a TRL configuration"),
    ({"tuner_type"}, "an ms-swift configuration"),
    ({"train_type"}, "an ms-swift configuration"),
)


def is_run_file(word: str) -> bool:
    """Tell whether a word of a command line names a run's file and is not an override."""
    return "=" not in word and not word.startswith("-") and (word.endswith((".yaml", ".yml")) or os.path.isfile(word))


def expanded(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with a run's file, its first word, replaced by what it says.

    A key that a later word has is left out, and so are the names below `data.sources` if a word gives the whole. Raises
    UsageError with one line.
    """
    if words and is_run_file(words[0]):
        words = _with(words_of_file(Path(words[0])), words[1:])
    return _with_recipe(words, Path.cwd())


def _with_recipe(words: Sequence[str], folder: Path, seen: tuple[Path, ...] = ()) -> list[str]:
    """Build on the recipe that the words choose, if it is a whole run; its paths start at a folder."""
    chosen = next((word for word in words if word.startswith("recipe=")), "")
    file = conf_folder() / chosen.replace("=", "/", 1) / "run.yaml"
    if not chosen or not file.is_file():
        return list(words)
    return _with(words_of_file(file, seen, folder), [word for word in words if word != chosen], is_run=True)


def _with(words: Sequence[str], later: Sequence[str], is_run: bool = False) -> list[str]:
    """Append later words, and drop the earlier ones whose keys they set.

    A tokenized folder (data.train_dir) takes the place of all that it would be made of, and so do the sources of a run.
    """
    keys = {Item.read(word).key for word in later if not word.startswith("-")}
    keys |= {key for key in _DATA if is_run and any(word.startswith(f"{key}.") for word in later)}
    keys |= {"data.sources", "data.val_sources", "data.val_share"} if "data.train_dir" in keys else set()

    # Hydra merges a dict into what is there; one value for all takes the place of a value for each name (sample=1.0).
    single = {Item.read(word).key for word in later if "={" not in word}
    whole = tuple(f"{key}." for key in keys if key in _DATA or (key in single and key not in node_names()))

    def is_replaced(word: str) -> bool:
        key = Item.read(word).key
        return key in keys or key.startswith(whole)

    return [*(word for word in words if not is_replaced(word)), *later]


def trainer_words(words: Sequence[str]) -> list[str]:
    """Return the words of a trainer's command line, its run file replaced by what it says, except nproc."""
    return [word for word in expanded(words) if word in words or not word.startswith("nproc=")]


def run_file(words: Sequence[str], ranks: int | None, folder: Path | None) -> str:
    """Return the YAML of a file that starts the run of these words again.

    words: a command line, whose relative paths start at the working directory. ranks: nproc where no word has it.
    folder: that of the run, where no word has it; None: the default. Raises ValueError with one line if no file says
    the same.
    """
    words = [word for word in expanded(words) if not word.startswith("trainer.overwrite=")]  # started again, it goes on
    if bare := next((word for word in words if word.startswith(("-", "~"))), None):
        raise ValueError(f"a file of the run has no place for flags of Hydra and removed keys; got {bare}")
    choices: dict[str, Any] = {}
    config = OmegaConf.create({})
    options = {restored(item.key): item.parsed() for item in parsed_words(words)}
    for item in parsed_words(words):
        key = restored(item.key)
        value = _placed(key, item.parsed(), Path.cwd(), options)
        if "." in key or isinstance(value, Mapping):  # as Hydra merges them, in the order of the words
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        else:
            choices[key] = value
    choices.setdefault("nproc", ranks)
    nodes: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    if folder is not None:
        nodes.setdefault("trainer", {}).setdefault("default_local_dir", str(folder.absolute()))
    for name in choices.keys() & nodes:
        choices |= {f"{name}.{key}": value for key, value in nodes.pop(name).items()}
    values = choices | nodes
    pairs = zip(leaves(values), leaves(redacted(values)), strict=True)
    if secret := next((key for (key, value), (_, masked) in pairs if value != masked), None):
        raise ValueError(f"a file of the run holds no secret, which {secret} looks like")
    return "# Starts this run again: verl-ext train run.yaml\n" + OmegaConf.to_yaml(OmegaConf.create(values))


def words_of_file(file: Path, seen: tuple[Path, ...] = (), folder: Path | None = None) -> list[str]:
    """Return the overrides that a run's file stands for, with absolute paths.

    seen: the files that build on this one. folder: where paths start; None: at the file's. Raises UsageError.
    """
    values = _read(file)
    for keys, whose in _FOREIGN:
        if keys <= values.keys():
            raise UsageError(f"{file} must be a run of this package; it is {whose}: verl-ext migrate {file}")
    run = values.pop("base", None)
    base = values.pop("defaults", [])
    if "recipe" in values:  # after other choices, so that it builds on them
        base = [*base, {"recipe": values.pop("recipe")}] if isinstance(base, list) else base
    if not isinstance(base, list) or not all(isinstance(each, Mapping) and len(each) == 1 for each in base):
        raise UsageError(must(f"{file}: defaults", "be a list of choices such as {parallel: ulysses8}", base))
    # Hydra may write "override" and a slash around a group's name.
    named = [(re.sub(r"^(override\s+)?/?", "", str(name)), choice) for each in base for name, choice in each.items()]
    chosen = [*(name for name, _ in named), *(key for key, value in values.items() if not isinstance(value, Mapping))]
    if twice := next((name for name, _ in named if chosen.count(name) > 1), None):
        raise UsageError(must(f"{file}: {twice}", "be chosen once", "it more than once"))
    choices = [f"{name}={spell(choice)}" for name, choice in named]
    folder = folder or file.absolute().parent
    try:
        options = dotted_options(values)
        placed = {key: _placed(key, value, folder, options) for key, value in options.items()}
        words = choices + override_words(placed, keeps_references=True)
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    seen = (*seen, file.resolve())
    if run is None:
        return _with_recipe(words, folder, seen)
    if not isinstance(run, str) or (file.parent / run).resolve() in seen:
        raise UsageError(must(f"{file}: base", "name the YAML file of another run", run))
    return _with(words_of_file(file.parent / run, seen), words, is_run=True)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UsageError(must(f"{file}", "be the YAML file of a run", "a folder" if file.is_dir() else "nothing there"))
    values: Any = None
    try:
        loaded = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        if isinstance(loaded, dict):
            values = OmegaConf.to_container(OmegaConf.create(loaded), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{file}{line} must be YAML: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{file} must be YAML: {first_line(error)}") from None
    if not isinstance(values, dict):
        got = loaded or "nothing"
        raise UsageError(must(f"{file}", "map keys to values, such as 'nproc: 8'", got))
    for node in node_names():
        if node in values and isinstance(values[node], list | None):
            raise UsageError(must(f"{file}: {node}", "map keys to values, or name a choice", values[node]))
    return values


class _Loader(yaml.SafeLoader):
    """Reads a run's file: values as Hydra reads them, names as the texts that they are (1e3, 007, no)."""

    # Without dates, as in Hydra; YAML 1.1 itself takes 1e-5 for a text, because it has no point.
    yaml_implicit_resolvers: ClassVar = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        names: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode) or name.tag == "tag:yaml.org,2002:merge":
                continue
            name.tag = "tag:yaml.org,2002:str"
            if name.value in names:
                what, where = f"found duplicate key {name.value}", name.start_mark
                raise yaml.constructor.ConstructorError(problem=what, problem_mark=where)
            names.add(name.value)
        return super().construct_mapping(node, deep=deep)


_EXPONENT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def _placed(key: str, value: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """Return an option's value with its paths made absolute from a folder.

    options: all of them by their keys, to which references lead.
    """
    if isinstance(value, list):
        return [_placed(key, each, folder, options) for each in value]
    if isinstance(value, Mapping):
        return {name: _placed(f"{key}.{name}", each, folder, options) for name, each in value.items()}
    if not isinstance(value, str) or not value or not (text := _relative(value, options)):
        return value
    path = os.path.normpath(folder / text) if "${" not in value else str(folder / value)
    exists = any(map(is_there, (str(folder / text), f"{folder / text}.idx")))
    key = RENAMED.get(key, key)
    kind = path_kind(key)
    if kind in _OF_DATA:
        # A tokenized folder has no place on the Hub, unlike sources.
        if not exists and kind == "source" and HUB.fullmatch(text) and kind_of(text) is None:
            return value if value.startswith(HUB_PREFIX) else f"{HUB_PREFIX}{value}"
        return path
    if key == "chat_templates" and ":" in text:  # a package's
        return value
    if kind in _OF_RUN or (kind == "object" and ".py:" in value):
        return path
    if kind in ("model", "template"):
        if not exists and os.path.exists(text):
            raise ValueError(f"{key} must start at the folder of this file, {folder}, which has no {value}")
        return path if exists else value
    return value


def _relative(value: str, options: Mapping[str, Any]) -> str | None:
    """Resolve a path's references as far as known here; None if it does not start at the file."""
    if match := re.match(r"\$\{([\w.]+)\}", value):
        kind = path_kind(RENAMED.get(match[1], match[1]))
        if kind in (*_OF_DATA, *_OF_RUN, "model"):  # absolute already, or a default's
            return None
        start = options.get(match[1])  # a default, if it is not here, and no path
        return value if not isinstance(start, str) or _relative(start, options) else None
    if "${" in value:
        try:
            value = str(OmegaConf.create({"value": value}).value)
        except OmegaConfBaseException:
            return None if value.startswith("${") else value
    return None if is_url(value) or value.startswith(("~", "pkg://", "file://", "/")) else value
