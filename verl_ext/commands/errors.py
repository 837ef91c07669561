"""The two ways in which a command refuses what it is given."""


class UsageError(ValueError):
    """A mistake on the command line or in the configuration: exit code 2."""


class DataError(ValueError):
    """Input that ends the run (a record that cannot be used, an unreadable file), or a dead worker: exit code 1."""


def first_line(error: BaseException) -> str:
    """An exception's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
