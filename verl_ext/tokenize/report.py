"""The closing table and report.json: what was written, and everything that was not, by category."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.commands.table import aligned
from verl_ext.tokenize.config import REPORT, TokenizeConfig
from verl_ext.tokenize.tally import Tally

# Options that change neither tokens nor counts: left out, so that equal data has equal reports.
NOT_REPORTED = ("num_workers", "overwrite")
_TEXT = ("category", "over max_tokens", "encoded as text", "bad record", "first")  # columns to the left


class Report:
    """One tally per category, in the order of `sources`."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.config = config
        self.tallies = {name: Tally() for name in config.sources}

    def tally(self, category_id: int) -> Tally:
        """The tally of a category by its number, from 1."""
        return list(self.tallies.values())[category_id - 1]

    @property
    def total(self) -> Tally:
        """All categories together."""
        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        return total

    def as_dict(self) -> dict[str, Any]:
        """The content of report.json; it names no time, so that equal runs give equal files."""
        options = {key: value for key, value in asdict(self.config).items() if key not in NOT_REPORTED}
        total = self.total.as_dict()
        del total["examples"]
        return {
            "tokenizer": self.config.model.tokenizer,
            "options": options,
            "categories": {name: tally.as_dict() for name, tally in self.tallies.items()},
            "total": total,
        }

    def write(self, folder: Path) -> None:
        """Write report.json and categories.json into the dataset's folder."""
        names = {str(number): name for number, name in enumerate(self.tallies, start=1)}
        for file, content in ((REPORT, self.as_dict()), ("categories.json", names)):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / file).write_text(text, encoding="utf-8")

    def table(self) -> str:
        """The closing table, and one each of documents over max_tokens, special tokens in text and bad records, where
        there are any."""
        rows = [_row(name, tally) for name, tally in self.tallies.items()]
        if len(rows) > 1:
            rows.append(_row("all", self.total))
        parts = [aligned(rows, _TEXT)]
        cut = [row for name, tally in self.tallies.items() for row in _cut_rows(name, tally)]
        if cut:
            parts.append(aligned(cut, _TEXT))
        if special := special_token_rows("category", self.tallies):
            parts.append(aligned(special, _TEXT))
        bad = [
            {"category": name, "bad record": reason, "records": f"{count:,}", "first": tally.examples[reason][0]}
            for name, tally in self.tallies.items()
            for reason, count in sorted(tally.bad.items())
        ]
        if bad:
            parts.append(aligned(bad, _TEXT))
        return "\n\n".join(parts)


def _row(name: str, tally: Tally) -> dict[str, str]:
    row: dict[str, str | int] = {
        "category": name,
        "records": tally.records,
        "bad": tally.bad.total(),
        "documents": tally.documents,
        "tokens": tally.tokens,
        "targets": tally.target_tokens,
        "median": tally.length_quantile(0.5),
        "p95": tally.length_quantile(0.95),
        "max": max(tally.lengths, default=0),
    }
    return {key: f"{value:,}" if isinstance(value, int) else value for key, value in row.items()}


def special_token_rows(what: str, tallies: Mapping[str, Tally]) -> list[dict[str, str]]:
    """A row for each category (`what` it is called) whose texts hold names of special tokens."""
    return [
        {
            what: name,
            "encoded as text": "special tokens",
            "records": f"{tally.special_tokens['records']:,}",
            "occurrences": f"{tally.special_tokens['occurrences']:,}",
        }
        for name, tally in tallies.items()
        if tally.special_tokens
    ]


def _cut_rows(name: str, tally: Tally) -> Iterator[dict[str, str]]:
    """A row for each thing that was done to documents over max_tokens: tokens are those removed (of `split`, cut)."""
    over = tally.over_length
    before = tally.tokens + over["dropped_tokens"] + over["truncated_tokens"]
    for reason in ("dropped", "truncated", "split"):
        if over[f"{reason}_documents"]:
            tokens = over[f"{reason}_tokens"]
            yield {
                "category": name,
                "over max_tokens": reason,
                "documents": f"{over[f'{reason}_documents']:,}",
                "tokens": f"{tokens:,}",
                "share": f"{tokens / before:.2%}",
                "targets lost": "all" if reason == "dropped" else f"{over[f'{reason}_targets_lost']:,}",
                "last target lost": f"{over[f'{reason}_last_target_lost']:,}" if reason == "truncated" else "–",
            }
