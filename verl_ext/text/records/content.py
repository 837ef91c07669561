"""What a record holds: a chat, a plain text, or a preference between answers.

              chats          texts that become documents
Chat          itself         each alone
PlainText     none           itself
Preference    its answers    one of each answer, all or none
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.text.read.bad_record import check_characters

# A `Chat` and a `Preference` are Any here, because their modules import this one.
Render = Callable[[Any], Sequence[Any]]  # returns the texts of a chat, several with turns=each


class Content(ABC):
    """The base class of what records hold."""

    text = ""  # a plain text's

    @property
    def chats(self) -> Sequence[Any]:
        """The chats, the preferred answer first; none for a plain text."""
        return ()

    @property
    def preference(self) -> Any:
        """The preference itself, if the chats are answers to a prompt."""
        return None

    @property
    def chat(self) -> Any:
        """The chat of a record that holds no other answer."""
        return self.chats[0] if self.chats and self.preference is None else None

    @abstractmethod
    def texts(self, render: Render) -> Sequence[Sequence[Any]]:
        """Return the texts in groups; the documents of a group are made all or none. Raises `BadRecord`."""


@dataclass(frozen=True)
class PlainText(Content):
    """A text whose tokens are all targets, except the first."""

    text: str

    def texts(self, render: Render) -> Sequence[Sequence[Any]]:
        """Return the text itself."""
        check_characters(self.text)
        return [[self]]
