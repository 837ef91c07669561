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

import inspect
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

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
    options_class: type[OptionsT],
    run: Callable[[OptionsT], str],
    example: str = "[key=value ...]",
) -> int:
    """Do `run(options)`, print what it returns, and return the exit code.

    0: done, or --help; 1: DataError or OSError; 2: UsageError or no arguments; 130: Ctrl-C or SIGTERM.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        print(help_text(name, options_class, example))
        return 0 if arguments else 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    try:
        closing = run(read_options(options_class, arguments))
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
    config = OmegaConf.create(_defaults(options_class))
    try:
        for text in arguments:
            override = _parsed(text)
            key, value = override.key_or_group, override.value()
            if override.is_delete():
                _delete(config, key)
                continue
            given = {key: value}
            if key in known and _is_node(known[key]) and isinstance(value, dict):
                given = {f"{key}.{name}": below for name, below in value.items()}
            for name, below in given.items():
                _check_value(name, below, known, getattr(options_class, "maps", {}))
                OmegaConf.update(config, name, below, merge=True, force_add=True)
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None)
        raise UsageError(f"{where}: {first_line(error)}" if where else first_line(error)) from error
    for name, value in values.items():
        if isinstance(value, dict):  # sources={2024:a.jsonl} has a number as its key
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
        if _is_node(field):
            continue
        default = f"[{','.join(map(show, field.default))}]" if isinstance(field.default, list) else show(field.default)
        if field.required and not field.default:
            default = "required"
        meaning = field.meaning
        if any(choice not in meaning for choice in field.choices):
            meaning += f" ({' | '.join(field.choices)})"
        rows.append((key, default, meaning))
    keys, defaults = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = " " * (keys + defaults + 6)
    width = max(shutil.get_terminal_size((120, 24)).columns, len(indent) + 40)
    lines = [f"usage: verl-ext {name} {example}", "", inspect.getdoc(options_class) or "", ""]
    for key, default, meaning in rows:
        first = f"  {key:<{keys}}  {default:<{defaults}}  "
        lines += textwrap.wrap(meaning, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def _is_node(field: Option) -> bool:
    return isinstance(field.type, type) and issubclass(field.type, Options)


def _is_open(field: Option) -> bool:
    return field.type is Any or _is_dict(field)


def _is_dict(field: Option) -> bool:
    return (get_origin(field.type) or field.type) is dict


def _defaults(options_class: type[Options]) -> dict[str, Any]:
    fields = options_of(options_class).values()
    return {field.name: _defaults(field.type) if _is_node(field) else field.default for field in fields}


def _parsed(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        hint = "key=value, with quotes around a value that holds spaces or '='"
        raise UsageError(f"an override must be {hint}; got {text!r}") from error
    key = override.key_or_group
    if override.package:
        raise UsageError(f"unknown key {key}@{override.package}")
    if override.is_sweep_override():
        _, _, values = text.partition("=")
        raise UsageError(f"{key} takes one value; got {values}: write {key}=[{values}] for a list")
    if repeated := repeated_keys(text):
        names = ", ".join(repeated)
        raise UsageError(f"{key} must have each name once, several values of it as a list; got {names} more than once")
    return override


def _check_value(key: str, value: Any, known: Mapping[str, Option], maps: Mapping[str, str]) -> None:
    """Raises UsageError for an unknown key, and for a value that OmegaConf would merge or the class ignore unsaid."""
    field = known.get(key)
    if field is None:
        if any(_is_open(known[node]) for node in known if key.startswith(f"{node}.")):
            return
        nearest = nearest_key(key, known)
        hint = f"nearest: {nearest}" if nearest else f"known keys: {', '.join(known)}"
        raise UsageError(f"unknown key {key}; {hint}")
    if _is_node(field):
        keys = ", ".join(other for other in known if other.startswith(f"{key}."))
        raise UsageError(f"{key} must be given by its keys, {keys}; got {show(value)}")
    if _is_dict(field) and not isinstance(value, dict):
        words, name = maps.get(key, "names to values"), Path(show(value)).name.partition(".")[0] or "name"
        raise UsageError(f"{key} must map {words}, e.g. '{key}={{{name}:{value}}}'; got {show(value)}")
    if value is None and (problem := field.problem(key, None)):
        raise UsageError(problem)


def _delete(config: DictConfig, key: str) -> None:
    node, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, node) if node else config
    if not OmegaConf.is_dict(parent) or name not in parent:
        raise UsageError(f"~{key} must name a key that was given")
    del parent[name]
