"""The three ways in which a tokenise run refuses its input."""


class UsageError(ValueError):
    """A mistake on the command line or in the configuration: exit code 2."""


class DataError(ValueError):
    """Input that ends the run (a bad record under `on_bad_record=error`, an unreadable file): exit code 1."""


class BadRecord(ValueError):
    """A record that cannot be used.

    `reason` is one of a few words that the report counts by; the message says what was found.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """An exception's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
