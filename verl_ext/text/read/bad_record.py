"""Unusable records, and the options that decide what becomes of them."""

from dataclasses import dataclass
from typing import Any

from verl_ext.options import Options, must, one_line, option

MOST_CHARACTERS = 64_000_000  # of a text, which is tokenized whole


@dataclass(frozen=True)
class RecordOptions(Options):
    """The options of bad records, and of special tokens' names in texts."""

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
    """An unusable record, which ends the run or is counted by `reason`.

    As the value of a field it stands for one that cannot be read, and makes the record bad if something reads it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(one_line(message))  # the message has fields and values of the data
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return BadRecord, (self.reason, str(self))  # the default would pass the message alone


def readable_value(value: Any) -> Any:
    """Return a field's value. Raises `BadRecord` if it cannot be read."""
    if isinstance(value, BadRecord):
        raise value
    return value


def check_length(characters: int) -> None:
    """Raise `BadRecord` if a text has too many characters to be tokenized."""
    if characters > MOST_CHARACTERS:
        raise BadRecord("too_long", must("a text", f"have at most {MOST_CHARACTERS:,} characters (split it)", "more"))


def check_characters(text: str) -> None:
    """Raise `BadRecord` if a text is too long to be tokenized, or if UTF-8 cannot hold it."""
    check_length(len(text))
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord("invalid_text", "the text has half a surrogate pair, which is not a character") from error


def short_text(value: Any) -> str:
    """Return a short text of any value for an error."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"
