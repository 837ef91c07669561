"""The closing table and report.json: what each source's index holds, and the records that are not in it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.commands.table import aligned
from verl_ext.data.index.config import REPORT, IndexConfig
from verl_ext.data.index.text_documents import TextTokenizer
from verl_ext.tokenize.report import special_token_rows
from verl_ext.tokenize.tally import CHAT_COUNTS, Tally

# Options that change neither tokens nor counts: left out, so that equal data has equal reports.
NOT_REPORTED = ("num_workers", "overwrite")
TEXT_COLUMNS = ("source", "encoded as text", "bad record", "first")
# Counts of `Tally` that mean nothing for text without targets and limits.
NOT_COUNTED = ("target_tokens", "target_share", "over_length", *CHAT_COUNTS)


class Report:
    """One tally per source, in the order of `sources`, and the tokenizer's facts."""

    def __init__(self, config: IndexConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.tallies = {name: Tally() for name in config.sources}
        self.tokens = {
            "vocabulary": tokenizer.vocabulary,
            "dtype": tokenizer.dtype.name,
            "eos_token_id": tokenizer.last[0] if tokenizer.last else None,
            "bos_token_id": tokenizer.first[0] if tokenizer.first else None,
        }

    def as_dict(self) -> dict[str, Any]:
        """The content of report.json; it names no time, so that equal runs give equal files."""
        options = {key: value for key, value in asdict(self.config).items() if key not in NOT_REPORTED}
        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        sources = {name: _counts(tally) for name, tally in self.tallies.items()}
        in_all = {key: value for key, value in _counts(total).items() if key != "examples"}
        tokenizer = {"tokenizer": self.config.model.tokenizer, **self.tokens}
        return {**tokenizer, "options": options, "sources": sources, "total": in_all}

    def write(self, folder: Path) -> None:
        """Write report.json beside the indices."""
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")

    def table(self) -> str:
        """The closing table, and one each of special tokens in text and bad records, where there are any."""
        rows = [_row(name, tally) for name, tally in self.tallies.items()]
        special = special_token_rows("source", self.tallies)
        bad = [
            {"source": name, "bad record": reason, "records": f"{count:,}", "first": tally.examples[reason][0]}
            for name, tally in self.tallies.items()
            for reason, count in sorted(tally.bad.items())
        ]
        return "\n\n".join(aligned(part, TEXT_COLUMNS) for part in (rows, special, bad) if part)


def _counts(tally: Tally) -> dict[str, Any]:
    return {key: value for key, value in tally.as_dict().items() if key not in NOT_COUNTED}


def _row(name: str, tally: Tally) -> dict[str, str]:
    counts = {
        "records": tally.records,
        "bad": tally.bad.total(),
        "documents": tally.documents,
        "tokens": tally.tokens,
        "median": tally.length_quantile(0.5),
        "longest": max(tally.lengths, default=0),
    }
    return {"source": name, **{key: f"{value:,}" for key, value in counts.items()}}
