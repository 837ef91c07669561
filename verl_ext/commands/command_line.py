"""The command line of one command: options from `key=value` words, help, errors of one line, exit codes.

A command is a module with an options dataclass and what it does with them:

    @dataclass(frozen=True)
    class IndexOptions(Options):
        '''Text tokenized once into Megatron's indexed form.'''      the first lines of --help

        maps: ClassVar[Mapping[str, str]] = {"sources": "a source to its files"}      words for an error, see below
        sources: dict[str, Any] = option({}, "source: file, folder, glob, URL or list of them", required=True)
        num_workers: int | None = option(None, "processes; null: one for every CPU", least=1)
        model: ModelOptions = option(ModelOptions, "the tokenizer")      its fields are model.path, model.tokenizer_path

    def run(options: IndexOptions) -> str:      what is printed at the end; raises UsageError and DataError
    def main(arguments: Sequence[str]) -> int:
        return run_command(arguments, "index", IndexOptions, run, example="'sources={books:books/}' output_dir=DIR")

A field annotated `dict`, `Any` or a union of types is open: the keys below it are the user's own, sources.books=books/;
`maps` says of a dict what it maps to what. `read_options(IndexOptions, ["output_dir=DIR", ...])` gives the options.
"""

import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_origin, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.overrides import repeated_keys
from verl_ext.values import DataError, Option, Options, UsageError, first_line, nearest_key, options_of, show

OptionsT = TypeVar("OptionsT", bound=Options)


def run_command(
    arguments: Sequence[str],
    name: str,
    options_class: Any,
    run: Callable[[Any], str],
    example: str = "[key=value ...]",
) -> int:
    """Do `run(options)`, print what it returns, and return the exit code.

    0: done, or --help; 1: DataError or OSError; 2: UsageError or no arguments; 130: Ctrl-C or SIGTERM.
    """
    if isinstance(options_class, str):
        return _run_composed(arguments, name, options_class, run)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(help_text(name, options_class, example))
        return 0 if arguments else 2
    return _finish(lambda: run(read_options(options_class, arguments)))


def _finish(work: Callable[[], str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    try:
        closing = work()
    except (UsageError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(closing)
    return 0


def read_options(options_class: type[OptionsT], arguments: Sequence[str]) -> OptionsT:
    """The options that `key=value` words in Hydra's grammar give, over the defaults of the class.

    Raises UsageError, in one line, for every mistake.
    """
    known = known_options(options_class)
    config = OmegaConf.create(_defaults(options_class), flags={"allow_objects": True})
    try:
        for text in arguments:
            _apply(config, _checked(text, known, getattr(options_class, "maps", {})))
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise UsageError(f"{key}: {first_line(error)}" if key else first_line(error)) from error
    for name, value in values.items():
        if isinstance(value, dict):
            # sources={2024:a.jsonl} has a number as its key
            values[name] = {key if isinstance(key, str) else show(key): below for key, below in value.items()}
    try:
        return options_class.read(values)
    except ValueError as error:
        raise UsageError("; ".join(str(error).splitlines())) from error


def known_options(options_class: type[Options], prefix: str = "") -> dict[str, Option]:
    """{dotted key: what the dataclass says of it}, nodes before what is below them."""
    known = {}
    for name, field in options_of(options_class).items():
        known[f"{prefix}{name}"] = field
        if _is_node(field):
            known |= known_options(field.type, f"{prefix}{name}.")
    return known


def help_text(name: str, options_class: type[Options], example: str) -> str:
    """Usage, what the command makes, and a line for every option with its default and meaning."""
    rows = []
    for key, field in known_options(options_class).items():
        if not _is_node(field):
            missing = field.required and field.default in (None, "", [], {})
            rows.append((key, "required" if missing else _default_text(field.default), _meaning(field)))
    keys, defaults = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = " " * (keys + defaults + 6)
    width = max(shutil.get_terminal_size((120, 24)).columns, len(indent) + 40)
    lines = [f"usage: verl-ext {name} {example}", "", textwrap.dedent(f"    {options_class.__doc__}").strip(), ""]
    for key, default, meaning in rows:
        first = f"  {key:<{keys}}  {default:<{defaults}}  "
        lines += textwrap.wrap(meaning, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def _is_node(field: Option) -> bool:
    return isinstance(field.type, type) and issubclass(field.type, Options)


def _kind(field: Option) -> Any:
    return get_origin(field.type) or field.type


def _is_open(field: Option) -> bool:
    return _kind(field) in (Any, dict)


def _defaults(options_class: type[Options]) -> dict[str, Any]:
    fields = options_of(options_class).values()
    return {field.name: _defaults(field.type) if _is_node(field) else field.default for field in fields}


def _default_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    return show(value)


def _meaning(field: Option) -> str:
    unnamed = [choice for choice in field.choices if choice not in field.meaning]
    return f"{field.meaning} ({' | '.join(field.choices)})" if unnamed else field.meaning


def _checked(text: str, known: Mapping[str, Option], maps: Mapping[str, str]) -> Override:
    """One override, whose keys are known and whose value is of their kind; raises UsageError."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        hint = "key=value, with quotes around a value that holds spaces or '='"
        raise UsageError(f"an override must be {hint}; got {text!r}") from error
    key, value = override.key_or_group, override.value()
    if override.is_sweep_override():
        _, _, values = text.partition("=")
        raise UsageError(f"{key} takes one value; got {values}: write {key}=[{values}] for a list")
    if repeated := repeated_keys(text):
        names = ", ".join(repeated)
        raise UsageError(f"{key} must have each name once, several values of it as a list; got {names} more than once")
    field = known.get(key)
    is_node = field is not None and _is_node(field)
    for named in [f"{key}.{name}" for name in value] if is_node and isinstance(value, dict) else [key]:
        is_open = any(_is_open(known[node]) for node in known if named.startswith(f"{node}."))
        if override.package or not (is_open or named in known):
            nearest = nearest_key(named, known)
            hint = f"nearest: {nearest}" if nearest else f"known keys: {', '.join(known)}"
            raise UsageError(f"unknown key {named}; {hint}")
    if is_node and not isinstance(value, dict):
        keys = ", ".join(other for other in known if other.startswith(f"{key}."))
        raise UsageError(f"{key} must be given by its keys, {keys}; got {show(value)}")
    if field is None or override.is_delete():
        return override
    if _kind(field) is dict and not isinstance(value, dict):
        name = Path(show(value)).name.partition(".")[0] or "name"
        raise UsageError(
            f"{key} must map {maps.get(key, 'names to values')}, e.g. '{key}={{{name}:{value}}}'; got {show(value)}"
        )
    if value is None and (problem := field.problem(key, None)):
        raise UsageError(problem)
    return override


def _apply(config: DictConfig, override: Override) -> None:
    key = override.key_or_group
    if not override.is_delete():
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
        return
    node, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, node) if node else config
    if not OmegaConf.is_dict(parent) or name not in parent:
        raise UsageError(f"~{key} must name a key that was given")
    del parent[name]


# Of the commands whose options are not yet a subclass of Options: goes with the last of them.


def _run_composed(arguments: Sequence[str], usage: str, config_name: str, work: Callable[[Sequence[str]], str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        options = resources.files("verl_ext.conf").joinpath(f"{config_name}.yaml")
        print(f"{usage}\n\n{options.read_text(encoding='utf-8')}")
        return 0 if arguments else 2
    return _finish(lambda: work(arguments))


class ComposedOptions(Protocol):
    """A dataclass of options."""

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without opening a source."""


ComposedT = TypeVar("ComposedT", bound=ComposedOptions)


def load_options(
    name: str, schema: type[ComposedT], overrides: Iterable[str], open_nodes: Mapping[str, str] | None = None
) -> ComposedT:
    """Compose `conf/<name>.yaml` with command-line overrides into a checked `schema`.

    `open_nodes` are those whose keys are the user's own, with what they map to what ("a category to files"; empty where
    the node may hold a single value instead). A mandatory key without a value arrives as an empty string.
    Raises `UsageError` with one line for every mistake.
    """
    known = known_keys(schema)
    overrides = [_composed_override(text, known, open_nodes or {}) for text in overrides]
    try:
        with initialize_config_module(version_base="1.3", config_module="verl_ext.conf"):
            node = compose(name, overrides=overrides)
        typed = OmegaConf.structured(schema)
        OmegaConf.set_readonly(typed.model, False)  # a frozen dataclass
        merged = OmegaConf.merge(typed, node)
        OmegaConf.resolve(merged)
        for key in OmegaConf.missing_keys(merged):
            OmegaConf.update(merged, key, "")
        options = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None)
        raise UsageError(f"{where}: {first_line(error)}" if where else first_line(error)) from error
    except (HydraException, ValueError) as error:  # a ValueError is Hydra's of a node given as a number
        raise UsageError(first_line(error.__cause__ or error)) from error
    assert isinstance(options, schema)
    if problems := list(options.problems()):
        raise UsageError("; ".join(problems))
    return options


def known_keys(schema: type) -> list[str]:
    """Every dotted key of a dataclass, in its order."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys.append(name)
        if isinstance(kind, type) and is_dataclass(kind):
            keys += [f"{name}.{child}" for child in known_keys(kind)]
    return keys


def least_problems(lowest: Mapping[str, tuple[int | None, int]]) -> list[str]:
    """One line for every key whose (value, least) has a value that is too small; null is none."""
    return [
        f"{key} must be at least {least}; got {value}"
        for key, (value, least) in lowest.items()
        if value is not None and value < least
    ]


def _composed_override(text: str, known: Sequence[str], open_nodes: Mapping[str, str]) -> str:
    """One override whose key is known, with `++` added where it opens a key of the user's own."""
    try:
        override = OverridesParser.create().parse_override(text)
        key, value = override.key_or_group, override.value()
    except HydraException as error:
        hint = "key=value, with quotes around a value that holds spaces or '='"
        raise UsageError(f"an override must be {hint}; got {text!r}") from error
    if repeated := repeated_keys(text):
        names = ", ".join(repeated)
        raise UsageError(f"{key} must have each name once, several values of it as a list; got {names} more than once")
    if open_nodes.get(key) and not override.is_delete() and not isinstance(value, dict):
        example = f"'{key}={{{Path(str(value)).name.partition('.')[0] or 'name'}:{value}}}'"
        raise UsageError(f"{key} must map {open_nodes[key]}, e.g. {example}; got {value}")
    if key.partition(".")[0] in open_nodes:
        return text if text.startswith(("+", "~")) else f"++{text}"
    if key not in known and not key.startswith("hydra."):
        nearest = nearest_key(key, known)
        hint = f"nearest: {nearest}" if nearest else f"known keys: {', '.join(known)}"
        raise UsageError(f"unknown key {key}; {hint}")
    return text
