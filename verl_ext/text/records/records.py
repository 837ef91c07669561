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

A field that is null decides on the shape like any other, so that a record that lacks an answer does not pass for
another one; of the further fields only `kto_tag` must have a value. `Record.unused` lists all other fields.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from verl_ext.options import choice_problem, must
from verl_ext.text.read.bad_record import BadRecord, readable_value, short_text
from verl_ext.text.read.json_records import TableRow, parse_json
from verl_ext.text.read.readers import read_record
from verl_ext.text.records.content import Content
from verl_ext.text.records.fields import LABEL, MEDIA_FIELDS, SIDE_FIELDS, WEIGHT_FIELDS, Fields
from verl_ext.text.records.message_names import MessageNames
from verl_ext.text.records.messages import Chat, as_weight, map_strings, without_placeholders
from verl_ext.text.records.preference_shapes import PREFERENCES, labelled
from verl_ext.text.records.shapes import SHAPES, field_names, read_content

ALL_SHAPES = (*SHAPES, *PREFERENCES)
_IN_TURN = (*PREFERENCES, *SHAPES)  # a preference may have the fields of a chat too
FIELDS = field_names(ALL_SHAPES)
_KNOWN_NAMES = MessageNames()

_JSON_TEXT = re.compile(r'("(?:\\.|[^"\\])*")(\s*:)?')
LONGEST_CATEGORY = 200  # characters
_NOTHING = ("nan", "NaN", "NULL", "null", "None", "N/A", "NA", "<NA>")  # what programs write for an empty cell


class Record(NamedTuple):
    """The content of a record, and its loss weight or None.

    unused: names of fields that nothing reads. message_fields: names of message fields that only a template may read,
    with the number of messages. dropped: the counts of images, audio and video that were left out. text_calls: the
    number of messages of calls that are not JSON but text. readings: how unusual texts were read. weight_field: the
    record's own name of the weight's field. has_default: whether its chat has the default system prompt. is_replaced:
    whether a text of `replace` stood in it.
    """

    content: Content
    weight: float | None
    unused: list[str]
    message_fields: Mapping[str, int]
    dropped: Mapping[str, int]
    text_calls: int
    readings: set[str]
    weight_field: str | None = None
    has_default: bool = False
    is_replaced: bool = False

    @property
    def token_weight(self) -> float | None:
        """The weight of each target token, if the record has one; a preference's is that of its pairs."""
        return self.weight if self.content.preference is None else None


def parse_record(
    raw: Any,
    columns: Mapping[str, str | None] | None = None,
    drop_media: bool = False,
    names: MessageNames = _KNOWN_NAMES,
    system: str = "",
    replace: Mapping[str, str] | None = None,
    drop_nulls: bool = False,
) -> Record:
    """Parse a record by its fields. Raises `BadRecord` if unusable.

    `columns` maps the names above to those of the record, where `a.b` is field b of a; a field mapped to None is not
    read. With `drop_media`, images, audio and video are left out and counted. names: those of roles and fields in
    messages. system: the prompt of chats without a system message. replace: {a text in any field: what stands for it}.
    drop_nulls: read the record as if it had no fields that are null.
    """
    raw, columns = read_record(raw), columns or {}
    is_row = isinstance(raw, TableRow)
    try:
        # Known names first: what follows never sees the record's own.
        renamed, own_names = _renamed(raw, columns) if columns else (raw, {})
        if names:
            renamed = {key: names.known(value) for key, value in renamed.items()}
        is_replaced = False
        if replace:
            found = map_strings(renamed, partial(replaced, texts=replace))
            renamed, is_replaced = found, found != renamed
        if drop_nulls:
            renamed = {name: value for name, value in renamed.items() if value is not None}
        fields = Fields(renamed, drop_media, system, is_row)
        weight_name = next((name for name in WEIGHT_FIELDS if name in fields.values), None)
        weight = as_weight(fields.take(weight_name), weight_name) if weight_name else None
        _drop_media_fields(fields)
        # The fields that are left after the weight and the media decide on the shape.
        content = read_content(fields, [name for name, column in columns.items() if column], _IN_TURN)
        if fields.first([LABEL]):
            content = labelled(fields, content)
    except RecursionError as error:
        raise BadRecord("malformed_json", "the record is nested too deep") from error
    # A field that a column took the place of is unused as well, and counted under its own name.
    overruled = [name for name in columns if name in raw and name not in own_names.values()]
    unused = list(dict.fromkeys([*(own_names.get(name, name) for name in fields.unread), *overruled]))
    if is_row:
        cells = (fields.values[name] for name in fields.values.keys() - fields.unread.keys())
        fields.readings.update(f"{cell!r} as a word" for cell in cells if isinstance(cell, str) and cell in _NOTHING)
    reader = fields.reader
    counted = unused, fields.message_fields, reader.dropped, reader.text_calls, fields.readings
    weight_field = own_names.get(weight_name, weight_name) if weight_name else None
    record = Record(content, weight, *counted, weight_field, fields.has_default, is_replaced)
    # Weights multiply over turns and record, so that only their product can be checked.
    for chat in content.chats:
        _check_weights(chat, record.token_weight)
    return record


def replaced(text: str, texts: Mapping[str, str]) -> str:
    """Replace texts, the longest first and all at once, so that one may become another; in JSON within its texts."""
    pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))

    def in_text(plain: str) -> str:
        return pattern.sub(lambda found: texts[found[0]], plain)

    def in_json(found: re.Match[str]) -> str:
        plain = json.loads(found[1])
        other = plain if found[2] else in_text(plain)  # a name of a field stays
        return found[0] if other == plain else json.dumps(other, ensure_ascii=False)

    if text.lstrip().startswith(("[", "{")):
        with suppress(BadRecord):
            if parse_json(text) is not None:
                return _JSON_TEXT.sub(in_json, text)
    return in_text(text)


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
        needed = f"be a string of one line and at most {LONGEST_CATEGORY} characters, an integer of 64 bits or a bool"
        raise BadRecord("bad_category", must(f"{name} (category_field)", needed, short_text(value)))
    return str(value)


def column_problems(columns: Mapping[str, Any]) -> list[str]:
    """Return one line for every mistake in `columns`."""
    problems = [
        must(f"columns.{name}", "be a column's name, or null", column)
        for name, column in columns.items()
        if column is not None and not (isinstance(column, str) and column)
    ]
    problems += filter(None, (choice_problem("a name in columns", name, FIELDS) for name in columns))
    named = [name for name, column in columns.items() if column and name not in SIDE_FIELDS]
    if not problems and not any(shape.names.issuperset(named) for shape in ALL_SHAPES):
        shapes = " | ".join(map(str, ALL_SHAPES))
        problems.append(must("columns", f"name fields of one shape of {shapes}", ", ".join(named)))
    return problems
