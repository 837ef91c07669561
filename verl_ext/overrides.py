"""`key=value` words in Hydra's grammar, with names of any script, and one line on a word that is none.

'sources={数学:math.jsonl}'    Hydra's grammar has ASCII names alone, so each other letter is spelled while Hydra
sources={_U006570__U005B66_:math.jsonl}                              reads the word, and put back in what it found
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser
from omegaconf import DictConfig, OmegaConf

_SPELLED = re.compile(r"_U([0-9A-F]{6})_")
_CLOSED_BY = {"[": "]", "{": "}"}
_OPENED_BY = {"]": "[", "}": "{"}
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_NAME = re.compile(rf"(?<=[{{,])\s*({_QUOTED.pattern})\s*(?=:)")  # in quotes, which Hydra has for values alone


def readable(words: Sequence[str], number: int) -> str:
    """Word `number` of a command line as Hydra reads it: names spelled, a plain value that its grammar refuses quoted.

    Raises:
        ValueError: it is no override; the line says which bracket, quote or space is to blame.
    """
    word = words[number]
    _, equals, value = word.partition("=")
    named = _NAME.sub(lambda name: _spelled(name[1][1:-1], r"[\s\S]"), word)
    spelled = _spelled(named, r"[^\x00-\x7f]")
    candidates = [word, spelled]
    is_plain = equals and value[:1] not in ("[", "{", "'", '"') and "${" not in value
    if is_plain and not any(_unclosed(value)):  # such as ~/data or /part=1/x
        escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
        key = spelled.partition("=")[0]
        candidates[1:] = [f"{key}={value}", f"{key}='{escaped}'"]
    for candidate in candidates:
        if parsed(candidate) is not None:
            return candidate
    raise ValueError(f"an override is written key=value; got {word}{_mistake(words, number)}")


def parsed(text: str) -> Override | None:
    """What Hydra reads in a word that :func:`readable` gave, names still spelled; None where it is no override."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def restored(value: Any) -> Any:
    """A text, or the dicts and lists of an override's value, with its own letters again."""
    if isinstance(value, str):
        return _SPELLED.sub(lambda found: chr(int(found[1], 16)), value)
    if isinstance(value, dict):
        return {restored(key): restored(below) for key, below in value.items()}
    return [restored(below) for below in value] if isinstance(value, list) else value


def restore(config: DictConfig) -> None:
    """Put the letters back into a config that Hydra composed, in place."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    for name, node in values.items():
        if restored(node) != node:
            config[name] = restored(node)


def repeated_keys(override: str) -> list[str]:
    """The keys that a dict of a Hydra override has twice, as in sources={a:one.txt,a:two.txt}: Hydra keeps the last."""
    repeated: list[str] = []

    class DictKeys(HydraOverrideVisitor):
        def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
            counts = Counter(str(self.visitDictKey(pair.dictKey())) for pair in ctx.dictKeyValuePair())
            repeated.extend(restored(key) for key, count in counts.items() if count > 1)
            return super().visitDictContainer(ctx)

    parser = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override))))
    DictKeys(create_functions()).visit(parser.override())
    return repeated


def _spelled(text: str, letters: str) -> str:
    return re.sub(letters, lambda letter: f"_U{ord(letter[0]):06X}_", text)


def _mistake(words: Sequence[str], number: int) -> str:
    """What is wrong with a word, as the end of a line; "" where that is not known."""
    word = words[number]
    key, equals, value = word.partition("=")
    if not equals:
        before = words[number - 1] if number else ""
        return f": if it belongs to the word before it, write quotes around both: '{before} {word}'" if before else ""
    if " " in key:
        return ": its key holds a space"
    plain = _QUOTED.sub("", value)
    if quotes := [mark for mark in "'\"" if mark in plain]:
        return f": its {quotes[0]} is not closed" if value[:1] in ("[", "{", *quotes) else ""
    missing, extra = _unclosed(plain)
    if extra:
        return f": it has a {extra} without its {_OPENED_BY[extra]}"
    if not missing:
        return ": write quotes around a name or a value with brackets, ',', ':' or '='" if value[:1] in "[{" else ""
    joined = word
    for after in words[number + 1 :]:  # the shell may have cut the word at a space
        joined += f" {after}"
        if _unclosed(_QUOTED.sub("", joined)) == ("", ""):
            return f": a space outside of quotes ends it, write '{joined}'"
    return f": it lacks {missing} at its end"


def _unclosed(text: str) -> tuple[str, str]:
    """(the brackets that are missing at the end of a text, the first that it closes without having opened it)."""
    missing = ""
    for letter in text:
        if letter in _CLOSED_BY:
            missing = _CLOSED_BY[letter] + missing
        elif letter in _OPENED_BY:
            if missing[:1] != letter:
                return missing, letter
            missing = missing[1:]
    return missing, ""
