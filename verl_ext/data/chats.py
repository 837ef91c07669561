"""Tokenized folders' chat template and ends of turns, by their report.json."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_ext.files import REPORT


@dataclass(frozen=True)
class TrainedChats:
    """The form of the chats that a model is trained on.

    Attributes:
        templates: the chat templates of the folders, each once; none if no report names one.
        ends: the texts that end chats and are targets; a turn before the last may end otherwise.
    """

    templates: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @classmethod
    def of_folders(cls, folders: Iterable[str]) -> "TrainedChats":
        """Read folders' reports; one without, as of another program, says nothing."""
        templates: dict[str, None] = {}
        ends: dict[str, None] = {}
        for folder in folders:
            try:
                report = json.loads(Path(folder, REPORT).read_text(encoding="utf-8"))
                template, end = report.get("chat_template"), report.get("end_of_chat")
                is_trained = report.get("total", {}).get("end_of_turn", {}).get(end, 0) > 0
            except (OSError, ValueError, AttributeError, TypeError):
                continue
            if isinstance(template, str):
                templates[template] = None
            if is_trained:
                ends[end] = None
        return cls(tuple(templates), tuple(ends))

    @property
    def template(self) -> str | None:
        """The template of all chats; None without one, or with several."""
        return self.templates[0] if len(self.templates) == 1 else None

    def template_problem(self, given: str | None, key: str) -> str | None:
        """Return a line if `model.custom_chat_template` is not that of `key`'s data."""
        if given is None or given == self.template:
            return None
        made = "has another" if self.templates else "names none"
        return (
            f"model.custom_chat_template must be the template that {key} was made with; got one that its {REPORT}, "
            f"which {made}, does not hold: verl-ext tokenize chat_template=FILE makes data with it"
        )

    def notices(self, key: str) -> Iterator[str]:
        """Yield a line if the data gives the trained model no template."""
        if len(self.templates) > 1:
            yield f"the folders of {key} were made with {len(self.templates)} chat templates: exports keep model.path's"


def tokens_added(folder: str) -> dict[str, int] | None:
    """Read the new tokens, {token: id}, with which `verl-ext tokenize` made a folder; None if another program did."""
    try:
        report = json.loads(Path(folder, REPORT).read_text(encoding="utf-8"))
        return report.get("new_tokens", {} if "turns" in report["options"] else None)  # none before there were any
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
