"""The frame of a command: help, errors in one line, exit codes, Ctrl-C.

Keys that a dict of an override has twice, of which Hydra keeps the last: sources={a:one.txt,a:two.txt}.

A command's options: composed by Hydra from `conf/<name>.yaml` and the command line, typed by a dataclass, checked.

The dataclass states types and defaults, the file describes them. Annotations are `Optional[...]` and not `| None`,
because OmegaConf's structured configs read them.
"""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

from antlr4 import CommonTokenStream, InputStream
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.values import DataError, UsageError, first_line, nearest_key


def repeated_keys(override: str) -> list[str]:
    """The keys that stand more than once in one dict, in the order of their places. `override` is one that parses."""
    parser = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override))))
    visitor = _DictKeys()
    visitor.visit(parser.override())
    return visitor.repeated


class _DictKeys(HydraOverrideVisitor):
    """Hydra's own reading of an override, which notes the keys that its dicts lose."""

    def __init__(self) -> None:
        super().__init__(create_functions())
        self.repeated: list[str] = []

    def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
        """Note a dict's repeated keys."""
        counts = Counter(str(self.visitDictKey(pair.dictKey())) for pair in ctx.dictKeyValuePair())
        self.repeated += [key for key, count in counts.items() if count > 1]
        return super().visitDictContainer(ctx)


class Options(Protocol):
    """A dataclass of options."""

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without opening a source."""


OptionsT = TypeVar("OptionsT", bound=Options)


def load_options(
    name: str, schema: type[OptionsT], overrides: Iterable[str], open_nodes: Mapping[str, str] | None = None
) -> OptionsT:
    """Compose `conf/<name>.yaml` with command-line overrides into a checked `schema`.

    `open_nodes` are those whose keys are the user's own, with what they map to what ("a category to files"; empty where
    the node may hold a single value instead). A mandatory key without a value arrives as an empty string.
    Raises `UsageError` with one line for every mistake.
    """
    known = known_keys(schema)
    overrides = [_checked_override(text, known, open_nodes or {}) for text in overrides]
    try:
        with initialize_config_module(version_base="1.3", config_module="verl_ext.conf"):
            node = compose(name, overrides=overrides)
        merged = OmegaConf.merge(OmegaConf.structured(schema), node)
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
    if problems := options.problems():
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


def _checked_override(text: str, known: Sequence[str], open_nodes: Mapping[str, str]) -> str:
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


def run_command(arguments: Sequence[str], usage: str, config_name: str, work: Callable[[Sequence[str]], str]) -> int:
    """Do `work(arguments)`, print what it returns, and return the exit code.

    0: done, or `--help` asked for, which shows `usage` and `conf/<config_name>.yaml`; 1: `DataError` or `OSError`;
    2: `UsageError` or no arguments; 130: Ctrl-C or a polite kill.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        options = resources.files("verl_ext.conf").joinpath(f"{config_name}.yaml")
        print(f"{usage}\n\n{options.read_text(encoding='utf-8')}")
        return 0 if arguments else 2
    # A polite kill cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        told = work(arguments)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(told)
    return 0
