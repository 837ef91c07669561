"""Tokenized folders' chat template and ends of turns, by their report.json."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.files import REPORT
from verl_ext.options import must


def read_report(folder: str | Path) -> dict[str, Any]:
    """Return a tokenized folder's report; one that another program wrote, or none, has no total and no options."""
    report: Any = None
    with suppress(OSError, ValueError):
        report = json.loads(Path(folder, REPORT).read_text(encoding="utf-8"))
    found = report if isinstance(report, dict) else {}
    parts = {name: found.get(name) for name in ("total", "options")}
    return {**found, **{name: part if isinstance(part, dict) else {} for name, part in parts.items()}}


def unused_fields(folders: Iterable[str]) -> set[str]:
    """Return the fields of records that nothing read, by the reports of tokenized folders."""
    return {name for folder in folders for name in read_report(folder)["total"].get("unused_fields") or ()}


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
        for report in map(read_report, folders):
            template, end = report.get("chat_template"), report.get("end_of_chat")
            if isinstance(template, str):
                templates[template] = None
            counts = report["total"].get("end_of_turn")
            if isinstance(end, str) and isinstance(counts, dict) and counts.get(end):
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
        hint = "verl-ext tokenize chat_template=FILE makes data with it"
        got = f"one that its {REPORT}, which {made}, does not hold: {hint}"
        return must("model.custom_chat_template", f"be the template that {key} was made with", got)

    def notices(self, key: str) -> Iterator[str]:
        """Yield a line if the data gives the trained model no template."""
        if len(self.templates) > 1:
            yield f"the folders of {key} were made with {len(self.templates)} chat templates: exports keep model.path's"


def tokens_added(folder: str) -> dict[str, int] | None:
    """Return the new tokens, {token: id}, with which `verl-ext tokenize` made a folder; None if another program did."""
    report = read_report(folder)
    if not (options := report["options"]):
        return None
    return report.get("new_tokens", {} if "turns" in options else None)  # none before there were any
