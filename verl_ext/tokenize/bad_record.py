"""A record that cannot be used, and the choices of what is done about it."""

from verl_ext.commands.errors import one_line

ON_BAD_RECORD = ("error", "skip")
ON_UNPRINTED = ("error", "warn", "drop")  # where a chat template leaves something of a chat out
TURNS = ("all", "last", "each")  # which of a chat's turns are learnt, and in one document or each in its own
ON_MEDIA = ("error", "drop")
SPECIAL_TOKENS_IN_TEXT = ("encode", "keep", "error")  # what becomes of their names in data; see special_tokens.py


class BadRecord(ValueError):
    """Ends the run under `on_bad_record=error`, and is counted under `skip`.

    `reason` is one of a few words that the report counts by; the message says what was found.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(one_line(message))  # it names fields and values of the data
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return BadRecord, (self.reason, str(self))  # an exception's own calls it with the message alone
