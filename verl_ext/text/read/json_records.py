"""Read JSON lines and lists as records.

Python's own parser is made stricter: a record that it would silently change is a bad record. That is a key that is
given twice (the parser keeps the last), `NaN` or `Infinity` (JSON has neither), or a number that becomes infinite.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from typing import Any, BinaryIO, NoReturn

from verl_ext.options import DataError
from verl_ext.text.read.bad_record import BadRecord

BLOCK = 1 << 20  # characters of a list that are read at once
_LONGEST_TOKEN = 32  # characters before a block's end; an element that is cut off there fails to parse within them
_BLANKS = re.compile(r"[ \t\r\n]*")


class TableRow(dict[str, Any]):
    """A row of a table as a record, whose cells may hold JSON where JSON itself would have a list."""


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
    raise BadRecord("malformed_json", f"malformed JSON: {name} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_constant)
_FINDS_THE_END = json.JSONDecoder(parse_float=str, parse_int=str)


def _malformed(error: ValueError) -> BadRecord:
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
    """Return a JSON text's value. Raises `BadRecord` if malformed or changed."""
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


def repeated_name(names: Iterable[Any]) -> Any:
    """Return the first repeated name; None if all differ."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def from_json(value: Any, name: str) -> Any:
    """Decode a string, as of a table's cell; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except BadRecord as error:
        raise BadRecord(error.reason, f"{name} is a string that is not JSON: {error}") from error


class JsonList:
    """The elements of a JSON list in a stream.

    About `block` characters are held at once.

    Iterating yields ((number from 1, element), characters); an unusable element whose end is known is a `BadRecord`.
    Raises `DataError` if the list's syntax is broken, because the borders of its records are unknown from there on.
    """

    def __init__(self, path: str, stream: BinaryIO, block: int = BLOCK) -> None:
        self._path, self._block = path, block
        self._reader = TextIOWrapper(stream, encoding="utf-8-sig")
        self._text, self._at, self._number, self._is_read = "", 0, 0, False

    def __iter__(self) -> Iterator[tuple[tuple[int, Any], int]]:
        try:
            yield from self._elements()
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: malformed JSON: no UTF-8 after record {self._number}") from error
        self._reader.detach()  # it would close the file, whose end is yet to be checked

    def _elements(self) -> Iterator[tuple[tuple[int, Any], int]]:
        if self._next_character() != "[":
            self._fail("expected a list of records")
        self._at += 1
        is_empty = self._next_character() == "]"
        while not is_empty:
            self._number += 1
            value, end = self._next_element()
            length, self._at = end - self._at, end
            yield (self._number, value), length
            if (separator := self._next_character()) == "]":
                break
            if separator != ",":
                self._fail("expected ',' or ']' after a record")
            self._at += 1
            self._next_character()
        self._at += 1
        if self._next_character():
            self._fail("text after the list's end")

    def _read_on(self, size: int) -> None:
        more = self._reader.read(size)
        self._text, self._at, self._is_read = self._text[self._at :] + more, 0, len(more) < size

    def _next_character(self) -> str:
        """Skip white space; return the next character, "" at the end."""
        while True:
            self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._is_read:
                return self._text[self._at : self._at + 1]
            self._read_on(self._block)

    def _next_element(self) -> tuple[Any, int]:
        """Return the next element or its `BadRecord`, and its end."""
        size = self._block
        while True:
            try:
                value, end = _element(self._text, self._at)
                if end < len(self._text) or self._is_read:  # otherwise a number might continue
                    return value, end
            except json.JSONDecodeError as error:
                # An element that is cut off at the end of the text looks malformed: read on before reporting it.
                is_cut = error.pos > len(self._text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if self._is_read or not is_cut:
                    self._fail(error.msg.removesuffix(" at"))
            except RecursionError:
                self._fail("nested too deep")
            self._read_on(size)
            size *= 2

    def _fail(self, message: str) -> NoReturn:
        where = f" in record {self._number}" if self._number else ""
        raise DataError(f"{self._path}: malformed JSON: {message}{where}")


def _element(text: str, at: int) -> tuple[Any, int]:
    try:
        return _STRICT.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return _malformed(error), _FINDS_THE_END.raw_decode(text, at)[1]
