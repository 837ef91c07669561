"""The `key=value` words of command lines, with names in any script.

'sources={数学:math.jsonl}'                    Hydra's grammar allows only ASCII names, so other characters are escaped
sources={_U006570__U005B66_:math.jsonl}      while Hydra parses the word, and restored in the parsed values
"""

import numbers
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from verl_ext.options import must

_SPELLED = re.compile(r"_U([0-9A-F]{6})_")
_BRACKETS = (("[", "]"), ("{", "}"))
_QUOTED = re.compile(r"(?s:'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")")
_PLAIN_NAME = re.compile(rf"(?!(?i:null|true|false|inf|nan)\Z|.*{_SPELLED.pattern})[A-Za-z_]\w*", re.ASCII)
# A text that needs no quotes: a word or a path.
_PLAIN = re.compile(rf"(?:{_PLAIN_NAME.pattern}|(?!.*{_SPELLED.pattern})/)[\w./@-]*", re.ASCII)
# A text in quotes: a name, if the groups beside it match. Hydra allows quotes only for values.
_NAME = re.compile(rf"([{{,]\s*)?({_QUOTED.pattern})(\s*(?=:))?")
# A name without quotes that Hydra would write otherwise, as it does 1e3, 0.10 and True; or a text in quotes.
_NUMBER = re.compile(
    rf"{_QUOTED.pattern}|(?<=[{{,])(\s*)((?!(?:0|-?[1-9]\d*|true|false|null|inf|nan)\s*:)"
    r"(?:[+.\d-][\w+.-]*|(?i:true|false|null|inf|nan)))(?=\s*:)"
)


# The flags of Hydra's main function; the former take the next argument as their value.
_VALUED_FLAGS = (
    *("--cfg", "-c", "--package", "-p"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)
_FLAGS = (*_VALUED_FLAGS, "--resolve", "--multirun", "-m", "--run", "-r", "--info", "-i", "--hydra-help", "--version")


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's flags of a command line, each with its value, and the other words.

    Raises ValueError with one line for a flag of another kind, such as `--optim.lr 1e-5`.
    """
    flags: list[str] = []
    others: list[str] = []
    takes_next = False
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not takes_next and word.startswith("-") and name not in _FLAGS:
            if not equals:
                following = words[number + 1 : number + 2]
                value = following[0] if following and "=" not in following[0] else "VALUE"
            is_file = value.endswith((".yaml", ".yml"))
            better = (
                f"{value} first, before the overrides" if is_file else f"{name.lstrip('-').replace('-', '_')}={value}"
            )
            raise ValueError(f"an override is written key=value; got {word}: write {better}")
        (flags if takes_next or word.startswith("-") else others).append(word)
        takes_next = not takes_next and word in _VALUED_FLAGS
    return flags, others


@dataclass(frozen=True)
class Item:
    """An override `<prefix><key>=<value>`, with the prefix "", "+", "++" or "~".

    key, value: as Hydra's grammar writes them; value is None without a `=`. written: the spelling of the value in a
    shell script, if it comes from one.
    """

    prefix: str
    key: str
    value: str | None
    written: str | None = None

    @classmethod
    def read(cls, word: str) -> "Item":
        """Return the override that a word is."""
        key, equals, value = word.partition("=")
        name = key.lstrip("+~")
        return cls(key[: len(key) - len(name)], name, value if equals else None)

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")

    def parsed(self) -> Any:
        """Return the typed value with original characters; None without one. Raises ValueError for no override."""
        if self.value is None:
            return None
        override = _parsed(_readable([str(self)], 0))
        assert override is not None, "it is readable"
        return restored(override.value())


def parsed_words(words: Sequence[str]) -> list[Item]:
    """Return the overrides that the words of a command line are.

    Raises ValueError with one line for the first word that is not an override, has several values, or names a key of a
    dict twice (Hydra would keep the last).
    """
    items = []
    for number in range(len(words)):
        word = _readable(words, number)
        item, override = Item.read(word), _parsed(word)
        key, value = restored(item.key), restored(item.value)
        if override is not None and override.is_sweep_override():
            raise ValueError(f"{key} takes one value; got {value}: write {key}=[{value}] for a list")
        if repeated := _repeated_keys(word) if "{" in word else []:
            names = ", ".join(repeated)
            needed = "have each name once, several values of it as a list"
            raise ValueError(must(key, needed, f"{names} more than once"))
        items.append(item)
    return items


def _readable(words: Sequence[str], number: int) -> str:
    """Return word `number` of a command line as Hydra parses it.

    Its names are escaped, and a plain value that Hydra's grammar refuses, such as ~/data or /part=1/x, is quoted.

    Raises:
        ValueError: If it is not an override; the line names the bracket, quote or space at fault.
    """
    word = _NUMBER.sub(lambda name: name[0] if name[2] is None else name[1] + _spelled(name[2], "."), words[number])
    spelled = _spelled(_NAME.sub(_spelled_name, word), r"[^\x00-\x7f]")
    candidates = [word, spelled]
    value = word.partition("=")[2]
    is_balanced = all(value.count(opening) == value.count(closing) for opening, closing in _BRACKETS)
    if value[:1] not in ("", "[", "{", "'", '"') and "${" not in value and is_balanced:
        escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
        key = spelled.partition("=")[0]
        candidates[1:] = [f"{key}={value}", f"{key}='{escaped}'"]
    for candidate in candidates:
        if _parsed(candidate) is not None:
            return candidate
    raise ValueError(f"an override is written key=value; got {word}{_mistake(words, number)}")


def _parsed(text: str) -> Override | None:
    """Parse a word, its names still escaped; None for no override."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def quoted(text: str) -> str:
    """Return a text as Hydra's grammar reads it anywhere, in quotes."""
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    return f'"{escaped}"'


def override_words(options: Mapping[str, Any], keeps_references: bool = False) -> list[str]:
    """Return the overrides of nested or dotted options, whose values stay as they are.

    A text stays one: "1" is not a number, and ${…} is a reference to another key only with `keeps_references`. Raises
    ValueError with one line for a key given twice or unknown, and for a value that no configuration holds.
    """
    return [f"{key}={_written(key, value, keeps_references)}" for key, value in dotted_options(options).items()]


def dotted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested or dotted options by their dotted keys. Raises ValueError as :func:`override_words` does."""
    values: dict[str, Any] = {}
    for key, value in _dotted(options):
        if key in values:
            raise ValueError(must(key, "be given once", "it as a nested and as a dotted key"))
        if not key or re.search(r"[\s=]", key):
            raise ValueError(must("an option's key", "be dotted names", key))
        values[key] = value
    return values


def _dotted(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); a mapping with names that no dotted key has is a value."""
    for name, value in options.items():
        if isinstance(value, Mapping) and value and all(map(_PLAIN_NAME.fullmatch, map(str, value))):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _written(key: str, value: Any, keeps_references: bool) -> str:
    """Return a value in Hydra's grammar."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, numbers.Real):  # numpy's too
        return str(int(value)) if isinstance(value, numbers.Integral) else repr(float(value))
    if isinstance(value, str):
        if _PLAIN.fullmatch(value):
            return value  # without quotes, since choices of groups are compared as they are written
        # OmegaConf reads a backslash as itself, but for those before ${.
        text = value if keeps_references else re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        return quoted(_SPELLED.sub(lambda match: f"_U00005F_{match[0][1:]}", text))  # the user's own, to be restored
    if isinstance(value, Mapping):
        pairs = (
            f"{_written_name(str(name))}:{_written(key, below, keeps_references)}" for name, below in value.items()
        )
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_written(key, below, keeps_references) for below in value) + "]"
    kinds = "a text, a number, a bool, a path, None, or a list or dict of these"
    raise ValueError(must(key, f"be {kinds}", type(value).__name__))


def _written_name(name: str) -> str:
    """Return a dict's name as a command line has it, in quotes where these suffice."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    can_be_quoted = name and not re.search(rf"[\\\"]|{_SPELLED.pattern}", name)
    return f'"{name}"' if can_be_quoted else _spelled(name, r"[^A-Za-z]|\A.")


def restored(value: Any) -> Any:
    """Return a string, dict or list with the original characters."""
    if isinstance(value, str):
        return _SPELLED.sub(lambda match: chr(int(match[1], 16)), value)
    if isinstance(value, dict):
        return {restored(key): restored(below) for key, below in value.items()}
    return [restored(below) for below in value] if isinstance(value, list) else value


def _repeated_keys(override: str) -> list[str]:
    """Return the keys repeated in a dict, as in {a:1,a:2}."""
    repeated: list[str] = []

    class DictKeys(HydraOverrideVisitor):
        def visitDictContainer(self, ctx: Any) -> dict[str, Any]:
            counts = Counter(str(self.visitDictKey(pair.dictKey())) for pair in ctx.dictKeyValuePair())
            repeated.extend(restored(key) for key, count in counts.items() if count > 1)
            return super().visitDictContainer(ctx)

    parser = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override))))
    DictKeys(create_functions()).visit(parser.override())
    return repeated


def _spelled_name(text: re.Match[str]) -> str:
    """Return a name without its quotes, its letters escaped; any other text in quotes as it is."""
    if text[1] is None or text[3] is None:
        return text[0]
    return text[1] + _spelled(text[2][1:-1], r"[\s\S]") + text[3]


def _spelled(text: str, letters: str) -> str:
    return re.sub(letters, lambda letter: f"_U{ord(letter[0]):06X}_", text)


def _mistake(words: Sequence[str], number: int) -> str:
    """Return a word's mistake, the end of an error line, or ""."""
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
    for opening, closing in _BRACKETS:
        if plain.count(opening) > plain.count(closing):
            return f": it lacks a {closing}; if a space ends it, write quotes around all of it"
        if plain.count(opening) < plain.count(closing):
            return f": it has a {closing} without its {opening}"
    return ": write quotes around a name or a value with brackets, ',', ':' or '='" if value[:1] in ("[", "{") else ""
