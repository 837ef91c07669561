"""Records as chats or plain texts: the shapes are those of shapes.py, under other names where `columns` gives these."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.config.nearest import choice_problem
from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.messages import Message, as_weight, shown, without_placeholders
from verl_ext.tokenize.shapes import (
    FIELDS,
    MEDIA_FIELDS,
    SHAPES,
    SIDE_FIELDS,
    WEIGHT_FIELDS,
    Chat,
    Fields,
    PlainText,
    content_of,
    known_shapes,
)

__all__ = ["Chat", "Message", "PlainText", "Record", "category_of", "column_problems", "field_of", "parse_record"]

LONGEST_CATEGORY = 200  # characters


@dataclass
class Record:
    """What one record holds: its content, and the weight of its target tokens (None: not given).

    `unused` are its fields that nothing reads, `message_fields` those of messages that only a template may know, with
    how many messages have them; `dropped` counts the images, audio and video that were left out.
    """

    content: Chat | PlainText
    weight: float | None = None
    unused: list[str] = field(default_factory=list)
    message_fields: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


def parse_record(raw: Any, columns: Mapping[str, str | None] | None = None, drop_media: bool = False) -> Record:
    """Read a record by its fields; raise `BadRecord` saying what cannot be used.

    `columns` maps names of the table in shapes.py to the record's own, `a.b` being field b of a; a name of None is not
    read. `drop_media`: images, audio and video are left out and counted.
    """
    if isinstance(raw, BadRecord):
        raise raw
    if not isinstance(raw, dict):
        raise BadRecord("not_an_object", f"a record must be an object with fields; got {type(raw).__name__}")
    try:
        return _record(raw, columns or {}, drop_media)
    except RecursionError as error:
        raise BadRecord("malformed_json", "the record is nested too deep") from error


def _record(raw: dict[str, Any], columns: Mapping[str, str | None], drop_media: bool) -> Record:
    renamed, own_names = _renamed(raw, columns) if columns else (raw, {})
    replaced = [name for name in columns if raw.get(name) is not None and name not in own_names.values()]
    fields = Fields({key: value for key, value in renamed.items() if value is not None}, drop_media)
    weight_name = fields.first(WEIGHT_FIELDS)
    weight = as_weight(fields.take(weight_name), weight_name) if weight_name else None
    _drop_media_fields(fields)
    content = content_of(fields, [name for name, column in columns.items() if column])
    if weight is not None and isinstance(content, Chat):
        for target in content.targets.values():
            as_weight(target * weight, "the weight of a turn times the record's")
    unused = list(dict.fromkeys([*(own_names.get(name, name) for name in fields.unread), *replaced]))
    return Record(content, weight, unused, fields.message_fields, fields.reader.dropped)


def _renamed(raw: dict[str, Any], columns: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    """The record's fields under this module's names, and the record's own name of each that was renamed."""
    values, own_names = {}, {}
    for name, column in columns.items():
        if column:
            is_there, values[name] = field_of(raw, column)
            if not is_there:
                have = ", ".join(map(str, raw)) or "none"
                told = f"columns.{name} must name a field of the record; got {column}, it has {have}"
                raise BadRecord("missing_column", told)
            own_names[name] = column if column in raw else column.partition(".")[0]
    taken = {*columns, *own_names.values()}
    return {**{key: value for key, value in raw.items() if key not in taken}, **values}, own_names


def field_of(raw: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Whether the record has a field, and its value; `a.b` is field b of a, where there is no `a.b` itself."""
    if name in raw:
        return True, raw[name]
    value: Any = raw
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def category_of(raw: Any, name: str) -> str | None:
    """The category that a record's field `name` gives; None where it has none or a blank one."""
    value = field_of(raw, name)[1] if isinstance(raw, dict) else None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() <= 64:
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    usable = isinstance(value, str) and len(value) <= LONGEST_CATEGORY and value.isprintable()
    if not usable:
        raise BadRecord(
            "bad_category",
            f"{name} (category_field) must be a string of one line and at most {LONGEST_CATEGORY} characters,"
            f" an integer of 64 bits or a bool; got {shown(value)}",
        )
    return str(value)


def _drop_media_fields(fields: Fields) -> None:
    """Leave out the record's images, audio and video, and the `<image>` that stand for them in its texts."""
    found = [name for name in MEDIA_FIELDS if fields.has(name)]
    dropped = False
    for name in found:
        value = fields.take(name)
        for item in value if isinstance(value, list) else [value]:
            if item not in (None, "", {}):
                fields.reader.drop(name.rstrip("s"), f"the record has {name}")
                dropped = True
        del fields.values[name]
    if dropped:
        fields.values = without_placeholders(fields.values)


def column_problems(columns: Mapping[str, Any]) -> list[str]:
    """One line for every mistake in `columns`."""
    problems = [
        f"columns.{name} must be a column's name, or null; got {column!r}"
        for name, column in columns.items()
        if column is not None and not (isinstance(column, str) and column)
    ]
    problems += filter(None, (choice_problem("a name in columns", name, FIELDS) for name in columns))
    named = [name for name, column in columns.items() if column and name not in SIDE_FIELDS]
    if not problems and not any(shape.names.issuperset(named) for shape in SHAPES):
        problems.append(f"columns must name fields of one shape of {known_shapes()}; got {', '.join(named)}")
    return problems
