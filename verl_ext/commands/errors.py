"""The two ways in which a command refuses what it is given, and what an OSError is told as."""

import os


class UsageError(ValueError):
    """A mistake on the command line or in the configuration: exit code 2."""


class DataError(ValueError):
    """Input that ends the run (a record that cannot be used, an unreadable file), or a dead worker: exit code 1."""


def file_of(error: OSError) -> str | None:
    """The file that an error names; a write that fails names none."""
    return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None


def reason_of(error: OSError) -> str:
    """Why, without number and file: "No space left on device"."""
    return error.strerror or first_line(error)


def one_line(text: str) -> str:
    """Text on one line that any terminal or file takes: characters that do not print are written as Python does."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """An exception's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
