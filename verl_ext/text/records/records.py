"""Parse records into chats, texts or preferences by their fields' names.

The fields of one of the shapes (shapes.py, preference_shapes.py), which `columns` may rename, make a chat, a text, or
the answers to a prompt. Further fields are:

    system, system_prompt     the system message, if the chat has none
    tools, functions          the template's `tools`, also when a system message holds them
    history, context          earlier turns, and the start of the user turn, in shapes with a single user turn
    enable_thinking           an argument of the chat template for this record
    chat_template_kwargs      {argument: value}, the same for any argument
    loss_weight, weight       the weight of the record's target tokens, or of a preference as a whole
    kto_tag                   whether the last answer of a chat is desirable
    image, audios, ...        a bad record, or left out with `media=drop`

`Record.unused` lists all other fields.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from verl_ext.options import choice_problem
from verl_ext.text.read.bad_record import BadRecord, readable_value, short_text
from verl_ext.text.read.json_records import parse_json
from verl_ext.text.read.readers import TextFile, read_record
from verl_ext.text.records.message_names import MessageNames
from verl_ext.text.records.messages import Chat, as_weight, map_strings, without_placeholders
from verl_ext.text.records.preference import Content, Preference
from verl_ext.text.records.preference_shapes import PREFERENCES, labelled
from verl_ext.text.records.shapes import (
    LABEL,
    MEDIA_FIELDS,
    SHAPES,
    SIDE_FIELDS,
    WEIGHT_FIELDS,
    Fields,
    field_names,
    read_content,
)

ALL_SHAPES = (*SHAPES, *PREFERENCES)
_IN_TURN = (*PREFERENCES, *SHAPES)  # a preference may have the fields of a chat too
FIELDS = field_names(ALL_SHAPES)
_KNOWN_NAMES = MessageNames()

LONGEST_CATEGORY = 200  # characters


class Record(NamedTuple):
    """The content of a record, and its loss weight or None.

    unused: names of fields that nothing reads. message_fields: names of message fields that only a template may read,
    with the number of messages. dropped: the counts of images, audio and video that were left out. text_calls: the
    number of messages of calls that are no JSON, and are text. has_default: whether its chat has the default system
    prompt. is_replaced: whether a text of `replace` stood in it.
    """

    content: Content
    weight: float | None
    unused: list[str]
    message_fields: Mapping[str, int]
    dropped: Mapping[str, int]
    text_calls: int
    has_default: bool = False
    is_replaced: bool = False


def parse_record(
    raw: Any,
    columns: Mapping[str, str | None] | None = None,
    drop_media: bool = False,
    names: MessageNames = _KNOWN_NAMES,
    system: str = "",
    replace: Mapping[str, str] | None = None,
) -> Record:
    """Parse a record by its fields. Raises `BadRecord` if unusable.

    `columns` maps the names above to those of the record, where `a.b` is field b of a; a field mapped to None is not
    read. With `drop_media`, images, audio and video are left out and counted. names: those of roles and fields in
    messages. system: the prompt of chats without a system message. replace: {a text in any field: what stands for it}.
    """
    raw, columns = read_record(raw), columns or {}
    try:
        # Known names first: what follows never sees the record's own.
        renamed, own_names = _renamed(raw, columns) if columns else (raw, {})
        if names:
            renamed = {key: names.known(value) for key, value in renamed.items()}
        given = renamed
        if replace:
            # What is replaced may lie across two blocks of a long text file.
            given = {
                name: "".join(each.blocks()) if isinstance(each, TextFile) else each for name, each in given.items()
            }
            renamed = map_strings(given, partial(_replaced, texts=replace))
        fields = Fields({key: value for key, value in renamed.items() if value is not None}, drop_media, system)
        weight_name = fields.first(WEIGHT_FIELDS)
        weight = as_weight(fields.take(weight_name), weight_name) if weight_name else None
        _drop_media_fields(fields)
        # The fields that are left after the weight and the media decide on the shape.
        content = read_content(fields, [name for name, column in columns.items() if column], _IN_TURN)
        if LABEL in fields.values:
            content = labelled(fields, content)
    except RecursionError as error:
        raise BadRecord("malformed_json", "the record is nested too deep") from error
    # Weights multiply over turns and record, so that only their product can be checked.
    if isinstance(content, Preference):
        for answer in content.answers:
            _check_weights(answer, 1)
    elif isinstance(content, Chat):
        _check_weights(content, weight)
    # A field that a column took the place of is unused as well, and counted under its own name.
    replaced = [name for name in columns if raw.get(name) is not None and name not in own_names.values()]
    unused = list(dict.fromkeys([*(own_names.get(name, name) for name in fields.unread), *replaced]))
    reader = fields.reader
    counted = unused, fields.message_fields, reader.dropped, reader.text_calls
    return Record(content, weight, *counted, fields.has_default, renamed != given)


def _replaced(text: str, texts: Mapping[str, str]) -> str:
    """Replace texts; within JSON, as JSON writes them."""
    is_json = False
    if text.lstrip().startswith(("[", "{")):
        with suppress(BadRecord):
            is_json = parse_json(text) is not None
    for given, other in texts.items():
        if not is_json:
            text = text.replace(given, other)
            continue
        for form in dict.fromkeys(json.dumps(given, ensure_ascii=ascii)[1:-1] for ascii in (False, True)):
            text = text.replace(form, json.dumps(other, ensure_ascii=False)[1:-1])
    return text


def _check_weights(chat: Chat, weight: float | None) -> None:
    """Raise `BadRecord` if a chat's weights do not fit in float32."""
    if weight is None and not chat.masks:
        return
    for index, target in chat.targets.items():
        mask = chat.masks.get(index)
        parts = (part for found in mask.stretches.values() for _, part in found if part) if mask else ()
        for part in {1.0, *parts}:
            as_weight(target * part * (1 if weight is None else weight), "a weight in a turn times the record's")


def read_columns(columns: Mapping[str, str | None], *more: str | None) -> set[str]:
    """Return the columns that `parse_record` may read, and those of `more` fields."""
    fields = {*FIELDS} - columns.keys() | {column for column in (*columns.values(), *more) if column}
    return {name for field in fields for name in (field, field.partition(".")[0])}


def _renamed(raw: dict[str, Any], columns: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields under this module's names, and the original names."""
    values, own_names = {}, {}
    for name, column in columns.items():
        if column:
            is_there, values[name] = field_of(raw, column)
            if not is_there:
                found = f"got {column}, it has {', '.join(map(str, raw)) or 'none'}"
                raise BadRecord("missing_column", f"columns.{name} must name a field of the record; {found}")
            own_names[name] = column if column in raw else column.partition(".")[0]
    taken = {*columns, *own_names.values()}
    return {**{key: value for key, value in raw.items() if key not in taken}, **values}, own_names


def _drop_media_fields(fields: Fields) -> None:
    """Remove a record's media, and placeholders such as `<image>` from its texts."""
    for name in [name for name in MEDIA_FIELDS if name in fields.values]:
        value = fields.take(name)
        for item in value if isinstance(value, list) else [value]:
            if item not in (None, "", {}):
                fields.reader.drop(name.rstrip("s"), f"the record has {name}")
        del fields.values[name]
    if fields.reader.dropped:
        fields.values = without_placeholders(fields.values)


def field_of(raw: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Return whether the record has a field (`a.b`: nested), and its value."""
    if name in raw:
        return True, readable_value(raw[name])
    value: Any = raw
    for part in name.split("."):
        value = readable_value(value)
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, readable_value(value)


def category_of(raw: Any, name: str) -> str | None:
    """Return the category in a record's field; None if missing or blank."""
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
            f" an integer of 64 bits or a bool; got {short_text(value)}",
        )
    return str(value)


def column_problems(columns: Mapping[str, Any]) -> list[str]:
    """Return one line for every mistake in `columns`."""
    problems = [
        f"columns.{name} must be a column's name, or null; got {column!r}"
        for name, column in columns.items()
        if column is not None and not (isinstance(column, str) and column)
    ]
    problems += filter(None, (choice_problem("a name in columns", name, FIELDS) for name in columns))
    named = [name for name, column in columns.items() if column and name not in SIDE_FIELDS]
    if not problems and not any(shape.names.issuperset(named) for shape in ALL_SHAPES):
        shapes = " | ".join(map(str, ALL_SHAPES))
        problems.append(f"columns must name fields of one shape of {shapes}; got {', '.join(named)}")
    return problems
