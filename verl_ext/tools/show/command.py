"""The command `verl-ext show`: data and runs.

    verl-ext show data data/train longest tokens      words without `=` are paths or flags
    verl-ext show data/train longest tokens           paths alone tell their kind

A folder whose name is that of a kind is given as ./data, unless it stands alone.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from verl_ext.commands.command_line import command, read_options
from verl_ext.options import Options, UsageError, must, options_of
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.show.data import ShowDataOptions, show_data
from verl_ext.tools.show.run import ShowRunOptions, show_runs
from verl_ext.tools.show.runs import is_run


class Kind(NamedTuple):
    """A kind of paths: options, viewer, example, and need of torch."""

    options: type[Options]
    view: Callable[[Any], str]
    example: str
    loads_models: Callable[[Any], bool] = lambda options: False


SUBCOMMANDS = {
    "data": Kind(
        *(ShowDataOptions, show_data, "DATA … [row=7] [max_tokens=131072 ranks=8] [key=value …]"),
        lambda options: options.max_tokens is not None,
    ),
    "run": Kind(
        *(ShowRunOptions, show_runs, "RUN … [answers | step=400 rank=0] [html=FILE] [key=value …]"),
        lambda options: options.step is not None,
    ),
}
FLAGS = {
    name
    for kind in SUBCOMMANDS.values()
    for name, field in options_of(kind.options).items()
    if field.type is bool and not field.nullable
}
_VERBATIM = ("matches", "require")  # not parsed by Hydra, because they may contain its special characters
_HELP = ("-h", "--help")


def main(arguments: Sequence[str]) -> int:
    """Show paths of the first word's kind, or of their own."""
    if not arguments or arguments[0] in _HELP:
        print("usage: verl-ext show [KIND] PATH … [key=value …]\n")
        for name, kind in SUBCOMMANDS.items():
            print(f"  {name:<4}  {(kind.options.__doc__ or '').partition(chr(10))[0]}")
        print("\nWithout KIND, it is that of the paths. verl-ext show KIND --help lists the options of a kind.")
        return 0 if arguments else 2
    try:
        name, words = _kind_of(arguments)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kind = SUBCOMMANDS[name]
    read = partial(_read, name)
    return command(f"show {name}", kind.options, kind.view, kind.example, read, kind.loads_models)(words)


def _is_path(word: str) -> bool:
    """Tell whether a word is an existing path, or no option."""
    return os.path.exists(word) or ("=" not in word and word not in FLAGS and word not in _HELP)


def _kind_of(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the named or guessed kind, and the other words.

    A first word that names a kind is a path if it exists and no other word is one.
    """
    first, *rest = arguments
    named = [word for word in arguments if word.startswith("paths=")]
    if first in SUBCOMMANDS and (named or any(map(_is_path, rest)) or not os.path.exists(first) or {*_HELP} & {*rest}):
        return first, rest
    paths = [word for word in arguments if _is_path(word)]
    paths += read_options(ShowRunOptions, named).paths if named else []
    # A run that begins has no files yet by which it could be told.
    if {"follow", "follow=true"} & {*arguments} or any(map(is_run, paths)):
        return "run", arguments
    if first == "plan" and not os.path.exists(first):
        raise UsageError("show plan is gone: `verl-ext plan` prints a plan, whose numbers are in data_report.json")
    return "data", arguments


def _read(name: str, arguments: Sequence[str]) -> Any:
    """Parse the words into the options of a kind."""
    own, paths, words = SUBCOMMANDS[name].options, [], []
    verbatim: dict[str, str] = {}
    for word in arguments:
        if _is_path(word):
            paths.append(word)
            continue
        key, _, value = (word if "=" in word else f"{word}=true").partition("=")
        option = key.lstrip("+~").partition(".")[0]
        others = [other for other, kind in SUBCOMMANDS.items() if option in options_of(kind.options)]
        if others and name not in others:
            having = " or ".join(f"`verl-ext show {other}`" for other in others)
            raise UsageError(must(key, f"be given with {having}", f"{value} with `verl-ext show {name}`"))
        if key in _VERBATIM:
            verbatim[key] = value
        else:
            words.append(f"{key}={value}")
    options: Any = read_options(own, words, **verbatim, **({"paths": paths} if paths else {}))
    if isinstance(model := getattr(options, "model", None), ModelOptions):
        # Absolute, because sources and data of a run are opened in the folder of their writer.
        folders = {key: getattr(model, key) for key in ("path", "tokenizer_path")}
        here = {key: os.path.abspath(path) for key, path in folders.items() if path and os.path.isdir(path)}
        options = replace(options, model=replace(model, **here))
    return options
