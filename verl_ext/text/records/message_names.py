"""Names of roles and of message fields beyond the known ones.

roles={Customer: user, Agent: assistant}  message_columns={role: speaker, content: says}
{"speaker": "Agent", "says": "Yes."}  →  {"role": "assistant", "content": "Yes."}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.options import choice_problem, must
from verl_ext.text.read.bad_record import BadRecord, readable_value
from verl_ext.text.read.json_records import parse_json
from verl_ext.text.records.messages import LEARN_FIELDS, OWN_ROLE, ROLES, TEMPLATE_FIELDS

KNOWN_ROLES = tuple(dict.fromkeys(ROLES.values()))
MESSAGE_FIELDS = (*sorted(TEMPLATE_FIELDS), *LEARN_FIELDS)


@dataclass(frozen=True)
class MessageNames:
    """The names that a record has in place of the known ones.

    roles: {a role's name, in any case: the known role}. columns: {a known field: its name}; a field mapped to None is
    not read.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.roles or self.columns)

    def known(self, value: Any) -> Any:
        """Return a field's value with known names in its messages.

        A message has a role; a list of messages may be their JSON text. Anything else is returned as it is.
        """
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                parsed = parse_json(value)
            except BadRecord:
                return value
            found = self.known(parsed)
            return value if found == parsed else found
        if isinstance(value, list):
            return [self.known(each) for each in value]
        return self._message(value) if isinstance(value, dict) else value

    def _message(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return a message under the known names; another object unchanged."""
        given = next((name for name in (self.columns.get("role") or "role", "from") if name in raw), None)
        if given is None:
            return raw
        taken = {*self.columns, *self.columns.values()}
        message = {name: value for name, value in raw.items() if name not in taken}
        message |= {name: raw[own] for name, own in self.columns.items() if own in raw}
        at = "role" if "role" in message else "from"
        role = readable_value(message.get(at))
        known = {name.lower(): role for name, role in self.roles.items()}
        if not isinstance(role, str) or role.lower() not in known:
            return message
        return {**message, at: known[role.lower()], OWN_ROLE: role}

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake in `roles` and `message_columns`."""
        for name, role in self.roles.items():
            yield choice_problem(f"roles.{name}", role, KNOWN_ROLES)
        if len({name.lower() for name in self.roles}) < len(self.roles):
            yield must("roles", "have each name once, in any case", ", ".join(self.roles))
        for name, column in self.columns.items():
            yield choice_problem("a name in message_columns", name, MESSAGE_FIELDS)
            if column is not None and not (isinstance(column, str) and column):
                yield must(f"message_columns.{name}", "be a field's name, or null", column)
