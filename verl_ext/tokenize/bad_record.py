"""A record that cannot be used."""

ON_BAD_RECORD = ("error", "skip")  # what may be done about one


class BadRecord(ValueError):
    """Ends the run under `on_bad_record=error`, and is counted under `skip`.

    `reason` is one of a few words that the report counts by; the message says what was found.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return BadRecord, (self.reason, str(self))  # an exception's own calls it with the message alone
