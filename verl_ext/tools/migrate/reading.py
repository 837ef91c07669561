"""The keys of a configuration: files, and flags of a command."""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from verl_ext.options import DataError, first_line, must

# A word of a shell command: plain characters, escapes, '…', "…", `…` and $(…) with two levels of parentheses inside
WORD = re.compile(
    r"""(?:\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|[^\s'"\\`]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""", re.DOTALL
)
_END = re.compile(r"[|;]|&&|&|\|\||\d*[<>].*", re.DOTALL)  # the first word that is not an argument of the command
_SETTING = re.compile(r"\w+=.*", re.DOTALL)  # of a variable, before a command
# {what a command's words say of its ranks: a variable before it, or a flag}
_TOPOLOGY = {
    "per_node": re.compile(r"(?:NPROC_PER_NODE|--nproc[_-]per[_-]node)(?:=(.+))?"),
    "nodes": re.compile(r"(?:NNODES|--nnodes|--num[_-]machines)(?:=(.+))?"),
    "ranks": re.compile(r"--num[_-]processes(?:=(.+))?"),  # of all nodes together
}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# Variables of the environment by which ms-swift reads images, videos and sounds.
IMAGE_SETTINGS = ("MAX_PIXELS", "VIDEO_MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_TOKEN_NUM", "FPS_MAX_FRAMES")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "True": True, "False": False, "None": None}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON of keys, or raise DataError with one line."""
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        what = first_line(error) if mark is None else f"line {mark.line + 1}: {getattr(error, 'problem', None)}"
        raise DataError(f"{path} must be a YAML of keys and values; it cannot be read: {what}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        kind = {list: "a list", type(None): "nothing"}.get(type(values), f"a {type(values).__name__}")
        got = kind if not isinstance(values, dict) else "other keys"
        raise DataError(must(f"{path}", "be a YAML of keys and values", got))
    return values


def file_below(folder: Path, name: str) -> Path | None:
    """Return where a named file lies: here, in the folder or in one above it."""
    roots = (Path(), folder, *folder.resolve().parents)
    return next((path for root in roots if (path := root / name).is_file()), None)


def unquoted(word: str) -> str:
    """Return a word as the shell passes it, with variables and commands unexpanded."""
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        hidden.append(match[0])
        return f"\x00{len(hidden) - 1}\x00"

    kept = re.sub(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`", hide, word)
    with suppress(ValueError):
        kept = "".join(shlex.split(kept))
    return re.sub(r"\x00(\d+)\x00", lambda match: hidden[int(match[1])], kept)


def end_of(words: Sequence[str], start: int = 0) -> int:
    """Return the number of the first word that is not of the command any more."""
    return next((number for number in range(start, len(words)) if _END.fullmatch(words[number])), len(words))


def settings_of(words: Sequence[str]) -> list[str]:
    """Return the variables that are set before a command."""
    return [*takewhile(_SETTING.fullmatch, words)]


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags `--key value …` and words `key=value` of a command."""
    values: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            values[key] = typed(value) if equals else True
            key = None if equals else key
        elif key is not None:
            before = values[key]
            values[key] = (
                typed(word) if before is True else [*(before if isinstance(before, list) else [before]), typed(word)]
            )
        elif "=" in word and re.fullmatch(r"\w+", word.partition("=")[0]):
            name, _, value = word.partition("=")
            values[name] = typed(value)
    return values


def typed(text: str) -> Any:
    """Return a word's value: true, a number (an exponent keeps its spelling), JSON, or the text."""
    import json

    if text in _WORDS:
        return _WORDS[text]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if NUMBER.fullmatch(text):
        return text if re.search(r"[eE]", text) else float(text)
    if text[:1] in "{[":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def topology_of(words: Sequence[str]) -> dict[str, str]:
    """Return the ranks `per_node`, the `nodes` and all `ranks`, as far as a command's words name them."""
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        for name, pattern in _TOPOLOGY.items():
            if (match := pattern.fullmatch(word)) and (value := match[1] or "".join(words[number + 1 : number + 2])):
                found.setdefault(name, value)
    return found
