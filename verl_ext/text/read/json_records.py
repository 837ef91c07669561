"""Read JSON lines and lists as records, and report bad records.

Python's own parser is made stricter: a record that it would silently change is a bad record. That is a key that is
given twice (the parser keeps the last), `NaN` or `Infinity` (JSON has neither), or a number that becomes infinite.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, BinaryIO, NoReturn

from verl_ext.options import DataError, Options, one_line, option

BLOCK = 1 << 20  # characters of a list that are read at once
_LONGEST_TOKEN = 32  # characters before a block's end; an element that is cut off there fails to parse within them
_BLANKS = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class RecordOptions(Options):
    """The options of all record readers: bad records, and names of special tokens in texts."""

    special_tokens_in_text: str = option(
        "encode",
        "names of special tokens in records: encode: as text | keep: as the tokens themselves | error: a bad record",
        choices=("encode", "keep", "error"),
    )
    on_bad_record: str = option(
        "error", "bad record: error: ends the run | skip: left out, counted by reason", choices=("error", "skip")
    )

    def key(self, name: str) -> str:
        """Return the dotted key of an option, as errors name it."""
        return f"{self.prefix}.{name}" if self.prefix else name


class BadRecord(ValueError):
    """An unusable record. It ends the run under `on_bad_record=error` and is counted by `reason` under `skip`.

    As the value of a field it stands for one that cannot be read, and makes the record bad if something reads it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(one_line(message))  # the message has fields and values of the data
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return BadRecord, (self.reason, str(self))  # the default would pass the message alone


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise BadRecord("duplicate_key", f"an object has the key {key[:80]!r} more than once")
    return fields


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadRecord("malformed_json", f"malformed JSON: the number {text[:80]} is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise BadRecord("malformed_json", f"malformed JSON: {name} is no JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_constant)
_FINDS_THE_END = json.JSONDecoder(parse_float=str, parse_int=str)


def _malformed(error: ValueError) -> BadRecord:
    """Return the parser's error as a bad record with a reason."""
    if isinstance(error, BadRecord):
        return error
    if isinstance(error, json.JSONDecodeError):
        why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
    elif isinstance(error, UnicodeDecodeError):
        why = f"no UTF-8 at byte {error.start + 1}"
    else:
        why = "a whole number has more digits than Python converts"
    return BadRecord("malformed_json", f"malformed JSON: {why}")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `BadRecord` if it is malformed or its value would be changed."""
    try:
        return _STRICT.decode(text)
    except RecursionError as error:
        raise BadRecord("malformed_json", "malformed JSON: nested too deep") from error
    except ValueError as error:
        raise _malformed(error) from error


def parse_line(line: bytes) -> Any:
    """Return the record of one JSONL line. Raises `BadRecord` as `parse_json` does."""
    try:
        return parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _malformed(error) from error
    except BadRecord as error:
        if b"\r" in line.strip():
            raise BadRecord(error.reason, f"{error}; a line must end with LF or CR LF, not with CR alone") from error
        raise


def read_record(raw: Any) -> dict[str, Any]:
    """Return a record of a chunk, parsed if it is a line's bytes. Raises `BadRecord` unless it is an object."""
    record = parse_line(raw) if isinstance(raw, bytes) else raw
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord("not_an_object", f"a record must be an object with fields; got {type(record).__name__}")
    return record


def readable_value(value: Any) -> Any:
    """Return the value of a field. Raises `BadRecord` if it cannot be read."""
    if isinstance(value, BadRecord):
        raise value
    return value


def repeated_name(names: Iterable[Any]) -> Any:
    """Return the first name that occurs more than once; None if all differ."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def from_json(value: Any, name: str) -> Any:
    """Decode a string, such as a cell of a table's column, as JSON; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except BadRecord as error:
        raise BadRecord(error.reason, f"{name} is a string that is no JSON: {error}") from error


def short_text(value: Any) -> str:
    """Return a short text of a value for an error, even of a very long integer or a whole list."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def check_characters(text: str) -> None:
    """Raise `BadRecord` if UTF-8 cannot hold a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord("invalid_text", "the text has half a surrogate pair, which is no character") from error


def json_list(path: str, stream: BinaryIO, block: int = BLOCK) -> Iterator[tuple[tuple[int, Any], int]]:
    """Yield ((number from 1, element), characters) for each element of a JSON list.

    About `block` characters are held at once. An unusable element whose end is known is a `BadRecord`. Raises
    `DataError` if the list's syntax is broken, because the borders of its records are unknown from there on.
    """
    reader = TextIOWrapper(stream, encoding="utf-8-sig")
    text, at, number, is_read = "", 0, 0, False

    def read_on(size: int) -> None:
        nonlocal text, at, is_read
        more = reader.read(size)
        text, at, is_read = text[at:] + more, 0, len(more) < size

    def next_character() -> str:
        """Skip white space and return the next character, or an empty string at the file's end."""
        nonlocal at
        while True:
            at = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or is_read:
                return text[at : at + 1]
            read_on(block)

    def fail(message: str) -> NoReturn:
        raise DataError(f"{path}: malformed JSON: {message}{f' in record {number}' if number else ''}")

    def next_element() -> tuple[Any, int]:
        """Return the next element, or its `BadRecord`, and the position of its end."""
        size = block
        while True:
            try:
                value, end = _element(text, at)
                if end < len(text) or is_read:  # otherwise a number might continue
                    return value, end
            except json.JSONDecodeError as error:
                # An element that is cut off at the end of `text` looks malformed: read on before reporting it.
                is_cut = error.pos > len(text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if is_read or not is_cut:
                    fail(error.msg.removesuffix(" at"))
            except RecursionError:
                fail("nested too deep")
            read_on(size)
            size *= 2

    try:
        if next_character() != "[":
            fail("expected a list of records")
        at += 1
        is_empty = next_character() == "]"
        while not is_empty:
            number += 1
            value, end = next_element()
            length, at = end - at, end
            yield (number, value), length
            if (separator := next_character()) == "]":
                break
            if separator != ",":
                fail("expected ',' or ']' after a record")
            at += 1
            next_character()
        at += 1
        if next_character():
            fail("text after the list's end")
        reader.detach()  # it would close the file, whose end is yet to be checked
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: malformed JSON: no UTF-8 after record {number}") from error


def _element(text: str, at: int) -> tuple[Any, int]:
    try:
        return _STRICT.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return _malformed(error), _FINDS_THE_END.raw_decode(text, at)[1]
