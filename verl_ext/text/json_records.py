"""JSON lines and lists as records, read as a stream; and what is done with unusable records.

Python's own parser reads them, more strictly: what it would change without a word is a bad record. That is a key given
twice, of which it keeps the last; `NaN` and `Infinity`, which JSON does not have; a number that becomes infinite.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, BinaryIO, NamedTuple, NoReturn

from verl_ext.values import DataError, Options, one_line, option

BLOCK = 1 << 20  # characters of a list taken at once
_LONGEST_TOKEN = 32  # characters; a value cut off by a block's end seems wrong no further than this before it
_BLANKS = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class RecordOptions(Options):
    """What is done with unusable records, and with names of special tokens in them: options of all record readers."""

    special_tokens_in_text: str = option(
        "encode",
        "names of special tokens in records: encode: as text | keep: as the tokens themselves | error: a bad record",
        choices=("encode", "keep", "error"),
    )
    on_bad_record: str = option(
        "error", "error: the first ends the run | skip: left out, counted by reason", choices=("error", "skip")
    )

    def key(self, name: str) -> str:
        """The dotted key of an option, as errors name it."""
        return f"{self.prefix}.{name}" if self.prefix else name


class BadRecord(ValueError):
    """Ends the run under `on_bad_record=error`, and is counted by `reason`, one of a few words, under `skip`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(one_line(message))  # it names fields and values of the data
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return BadRecord, (self.reason, str(self))  # an exception's own calls it with the message alone


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
    """The parser's error as a bad record with the reason."""
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
    """The value of a JSON text. Raises `BadRecord` for malformed JSON, and where a value would be changed."""
    try:
        return _STRICT.decode(text)
    except RecursionError as error:
        raise BadRecord("malformed_json", "malformed JSON: nested too deep") from error
    except ValueError as error:
        raise _malformed(error) from error


def parse_line(line: bytes) -> Any:
    """The record of one JSONL line. Raises `BadRecord` as `parse_json` does."""
    try:
        return parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _malformed(error) from error
    except BadRecord as error:
        if b"\r" in line.strip():
            raise BadRecord(error.reason, f"{error}; a line must end with LF or CR LF, not with CR alone") from error
        raise


def read_record(raw: Any) -> dict[str, Any]:
    """A record of a chunk, parsed where it is a line's bytes. Raises `BadRecord` for anything but an object."""
    record = parse_line(raw) if isinstance(raw, bytes) else raw
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord("not_an_object", f"a record must be an object with fields; got {type(record).__name__}")
    return record


def check_characters(text: str) -> None:
    """Raises `BadRecord` for a text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord("invalid_text", "the text has half a surrogate pair, which is no character") from error


class LineColumn(NamedTuple):
    """Where a record of a JSON list begins, both counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


class JsonList:
    """Iterates over the elements of a JSON list without holding the file: yields ((place, element), characters).

    An element that cannot be used but whose end is known is a `BadRecord`. Raises `DataError` for a list whose syntax
    is broken, since its records' borders are lost from there on.
    """

    def __init__(self, path: str, stream: BinaryIO, block: int = BLOCK) -> None:
        """block: characters taken at once."""
        self.path, self.block = path, block
        self.stream = TextIOWrapper(stream, encoding="utf-8-sig")
        self.text = ""
        self.position = 0
        self.line = self.column = 1  # of `position`
        self.ended = False

    def __iter__(self) -> Iterator[tuple[tuple[LineColumn, Any], int]]:
        try:
            self._expect("[", "a list of records")
            is_empty = self._next_character() == "]"
            while not is_empty:
                self._next_character()
                place = LineColumn(self.line, self.column)
                value, length = self._decode()
                yield (place, value), length
                if self._next_character() == "]":
                    break
                self._expect(",", "',' or ']' after a record")
            self._advance(1)
            if self._next_character():
                self._fail("text after the list's end")
            self.stream.detach()  # else it closes the file, whose end is yet to be checked
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}:{self.line}: malformed JSON: no UTF-8 there or after it") from error

    def _decode(self) -> tuple[Any, int]:
        block = self.block
        while True:
            try:
                value, end = self._value()
            except json.JSONDecodeError as error:
                # A value cut off by the buffer's end looks malformed: read on, twice as far, before saying so.
                is_cut = error.pos > len(self.text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if self.ended or not is_cut:
                    self._advance(error.pos - self.position)
                    self._fail(error.msg.removesuffix(" at"))
                self._read(block)
                block *= 2
                continue
            except RecursionError:
                self._fail("nested too deep")
            if end == len(self.text) and not self.ended:  # a number might go on
                self._read(block)
                continue
            length = end - self.position
            self._advance(length)
            return value, length

    def _value(self) -> tuple[Any, int]:
        """The value at `position`, or the `BadRecord` that it is, and where it ends."""
        try:
            return _STRICT.raw_decode(self.text, self.position)
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            return _malformed(error), _FINDS_THE_END.raw_decode(self.text, self.position)[1]

    def _read(self, size: int) -> None:
        more = self.stream.read(size)
        self.text, self.position = self.text[self.position :] + more, 0
        self.ended = len(more) < size

    def _advance(self, count: int) -> None:
        end = self.position + count
        if breaks := self.text.count("\n", self.position, end):
            self.line += breaks
            self.column = end - self.text.rfind("\n", self.position, end)
        else:
            self.column += count
        self.position = end

    def _next_character(self) -> str:
        """Skip white space; the character there, empty at the file's end."""
        while True:
            self._advance(_BLANKS.match(self.text, self.position).end() - self.position)  # type: ignore[union-attr]
            if self.position < len(self.text) or self.ended:
                return self.text[self.position : self.position + 1]
            self._read(self.block)

    def _expect(self, character: str, what: str) -> None:
        if self._next_character() != character:
            self._fail(f"expected {what}")
        self._advance(1)

    def _fail(self, message: str) -> NoReturn:
        raise DataError(f"{self.path}:{self.line}: malformed JSON: {message} at column {self.column}")
