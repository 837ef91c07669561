"""From a command line to Hydra overrides: old names translated, needless plus signs dropped, typos told."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from verl_ext.config import schema
from verl_ext.config.legacy import Item, translate

# Hydra's flags that take the next argument as their value.
_VALUED_FLAGS = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")


def prepare_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides as Hydra takes them, notices to be said once) from a command line's arguments.

    Arguments that begin with `-` pass untouched. Raises ValueError in one line for an override that cannot be parsed,
    an unknown key (with the nearest) and an unknown choice of a config group (with the choices).
    """
    flags, words = _split_flags(argv)
    multirun = any(flag in ("-m", "--multirun") for flag in flags)
    items, notices = translate([_parse(word, multirun) for word in words])
    overrides = []
    own_class = any(item.key == "data.custom_cls.name" and item.value != "SFTDataSet" for item in items)
    for item in items:
        item, notice = _known(item, own_class)
        notices += [notice] if notice else []
        overrides.append(str(item))
    return [*flags, *overrides], list(dict.fromkeys(notices))


def _split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    words: list[str] = []
    takes_next = False
    for word in argv:
        (flags if takes_next or word.startswith("-") else words).append(word)
        takes_next = not takes_next and word in _VALUED_FLAGS
    return flags, words


def _parse(word: str, multirun: bool = False) -> Item:
    override = _parsed(word)
    if override.is_sweep_override() and not multirun:
        key, _, value = word.partition("=")
        raise ValueError(f"{key} takes one value; got {value}: write {key}=[{value}] for a list")
    key, _, value = word.partition("=")
    name = key.lstrip("+~")
    return Item(key[: len(key) - len(name)], name, value if "=" in word else None)


def _parsed(word: str) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"an override is written key=value; got {word}") from None
        quoted = value.replace("'", "\\'")
        raise ValueError(f"cannot read the override {word}; quote the value: \"{key}='{quoted}'\"") from None


def _known(item: Item, own_class: bool) -> tuple[Item, str | None]:
    """The override as Hydra takes it, and a notice when a needless plus sign was dropped."""
    value = None if item.value is None else _parsed(str(item)).value()
    group = item.key.partition("@")[0]
    is_choice = group in schema.groups() and (value is None or isinstance(value, str))
    unknown = [key for key in _keys(item.key, value) if not is_choice and not schema.is_known(key)]
    if unknown and own_class and item.prefix.startswith("+") and item.key.startswith("data."):
        return item, None  # a key that the user's own dataset class reads
    if unknown:
        raise ValueError(schema.unknown_key(unknown[0]))
    notice = f"{item}: the key exists, so the + is not needed" if item.prefix == "+" else None
    if item.prefix == "~":
        return item, None
    if is_choice:
        choice = item.value if value is None else schema.choice_path(group, value)
        return replace(item, prefix="", value=choice), notice
    # Keys that only a dataclass or a free-form node has are not in the composed config: Hydra must add them.
    prefix = item.prefix if item.prefix == "++" or item.key.startswith("hydra.") else "++"
    in_config = item.key in schema.composed_keys() and not isinstance(value, dict)
    return replace(item, prefix="" if in_config and item.prefix != "++" else prefix), notice


def _keys(key: str, value: object) -> Iterator[str]:
    """The dotted keys that an override sets."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _keys(f"{key}.{name}", inner)
    else:
        yield key
