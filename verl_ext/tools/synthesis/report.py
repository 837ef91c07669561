"""What a run says of its items: report.yaml, and the lines that are printed at the end."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from verl_ext.options import DataError, one_line
from verl_ext.redaction import redacted
from verl_ext.tables import aligned
from verl_ext.tools.endpoint.answer import DONE, OUTCOMES, Usage
from verl_ext.tools.endpoint.client import Client
from verl_ext.tools.endpoint.spending import spent
from verl_ext.tools.synthesis.corpus import Corpus
from verl_ext.tools.synthesis.items import SourceItem
from verl_ext.tools.synthesis.options import SynthesizeOptions

NOT_REPORTED = ("preview", "output_dir", "overwrite", "store")
SHOWN = 100  # characters of a preview's prompt and answer


@dataclass(frozen=True)
class Result:
    """The records of an item, or why it has none.

    lost: the outcomes of those of its questions that have no record.
    """

    outcome: str
    records: Sequence[dict[str, Any]] = ()
    reason: str = ""
    lost: Sequence[str] = ()

    @classmethod
    def joined(cls, results: Sequence["Result"]) -> "Result":
        """Return the records of several questions, or the first one's result if none has a record."""
        records = [record for result in results for record in result.records]
        lost = [result.outcome for result in results if not result.records]
        return cls(DONE, records, lost=lost) if records else replace(results[0], lost=lost)


@dataclass
class Outcomes:
    """The outcomes of the items of a run, and what their requests cost.

    Attributes:
        items: the number of items by outcome.
        records: the number of records.
        without: the items without a record, with reasons.
        lost: the questions without a record by outcome, if items have several.
        lengths: the rows of the table of lengths; if empty, the report shows those of the corpus.
        facts: further entries of the report.
        notes: further lines for the terminal.
        costs: a line about the requests to each server.
    """

    items: Counter[str] = field(default_factory=Counter)
    records: int = 0
    without: list[dict[str, str]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    costs: list[str] = field(default_factory=list)

    def add(self, item: SourceItem, result: Result) -> None:
        """Count an item and its records, and list it if it has none."""
        self.items[result.outcome] += 1
        self.records += len(result.records)
        self.lost.update(result.lost)
        if not result.records:
            self.without.append({"item": item.name, "outcome": result.outcome, "reason": result.reason})

    def add_spending(self, clients: Sequence[Client]) -> None:
        """Add requests and outcomes by stage, and what items without a record have cost."""
        # A stage may be asked of several servers, which are added up.
        self.costs = [spent(client) for client in clients]
        stages: dict[str, dict[str, int]] = {}
        columns = ("requests", *OUTCOMES)
        for client in clients:
            for (stage, outcome), count in client.outcomes.items():
                stages.setdefault(stage, dict.fromkeys(columns, 0))[outcome] += count
            for stage, count in client.asked.items():
                stages.setdefault(stage, dict.fromkeys(columns, 0))["requests"] += count
        names = [name for name in columns if any(row[name] for row in stages.values())]
        self.facts["stages"] = {stage: {name: row[name] for name in names} for stage, row in stages.items()}
        # What led to no record was paid for as well.
        dropped: dict[str, dict[str, float]] = {}
        for entry in self.without:
            row = dropped.setdefault(entry["outcome"], {"items": 0, "tokens": 0})
            row["items"] += 1
            for client in clients:
                usage = client.usage_of.get(entry["item"], Usage())
                row["tokens"] += usage.prompt_tokens + usage.completion_tokens
                if client.price is not None:
                    row["cost"] = round(row.get("cost", 0.0) + client.price.of(usage), 6)
        # The most expensive reason first: it is where a better prompt or filter saves most.
        by_cost = sorted(dropped.items(), key=lambda each: (-each[1].get("cost", 0.0), -each[1]["tokens"], each[0]))
        self.facts["spent_without_record"] = dict(by_cost)
        if stages:
            rows = [{"stage": stage, **{n: f"{row[n]:,}" for n in names}} for stage, row in stages.items()]
            self.notes.append(aligned(rows, ["stage"]))
        if any(row["tokens"] for row in dropped.values()):
            forms = {"items": ",.0f", "tokens": ",.0f", "cost": ",.6g"}
            lost = [
                {"without record": name, **{key: format(value, forms[key]) for key, value in row.items()}}
                for name, row in by_cost
            ]
            self.notes.append(aligned(lost, ["without record"]))

    def check(self, options: SynthesizeOptions) -> None:
        """Raise `DataError` for too many failed items, or no record."""
        failed = Counter({name: self.items[name] for name in OUTCOMES if name != DONE})
        kept = f"nothing was written; the answers are kept in {options.store_path}"
        first = "; ".join(f"{each['item']}: {each['outcome']}: {each['reason']}" for each in self.without[:3])
        if failed.total() > options.max_failed_share * self.items.total():
            share = f"{failed.total():,} of {self.items.total():,} items are without an answer to use"
            limit = f"max_failed_share is {options.max_failed_share}"
            raise DataError(f"{share} ({spelled_counts(failed)}), {limit}: {kept}. {first}")
        if not self.items[DONE]:
            raise DataError(f"no item has a record ({spelled_counts(self.items)}): {kept}. {first}")

    def report(self, task: str, options: SynthesizeOptions, corpus: Corpus) -> dict[str, Any]:
        """Return the content of report.yaml."""
        drawn = {n: {"found": corpus.available[n], "drawn": len(own)} for n, own in corpus.chosen.items()}
        return {
            "task": task,
            "options": redacted({name: value for name, value in asdict(options).items() if name not in NOT_REPORTED}),
            "lengths": self.lengths or drawn,
            "left_out": dict(corpus.left_out),
            "outcomes": dict(self.items),
            "records": self.records,
            **({"questions_without_record": dict(self.lost)} if _has_questions(options) else {}),
            "without_record": self.without,
            **self.facts,
        }

    def closing_lines(
        self, options: SynthesizeOptions, lengths: Mapping[str, Mapping[str, int]], left_out: Mapping[str, int]
    ) -> list[str]:
        """Return what is printed above the preview: tables and counts."""
        rows = [{"length": name, **{key: f"{count:,}" for key, count in row.items()}} for name, row in lengths.items()]
        items, lost = f"items: {spelled_counts(self.items)}", spelled_counts(self.lost)
        if _has_questions(options):
            items += f"; {self.records:,} records" + (f"; questions without a record: {lost}" if lost else "")
        left = f"left out: {spelled_counts(left_out) or 'none'}"
        return [aligned(rows, ["length"]), left, items, *self.notes]


def preview_line(line: str) -> str:
    """Return a record in a line: the end of its prompt and the start of its answer, or the start of its text."""
    record = json.loads(line)
    messages = record.get("messages") or [*record.get("prompt", []), *record.get("chosen", [])]
    texts = [message["content"] for message in messages if isinstance(message, dict)] or [str(record.get("text", ""))]
    parts = [f"… {one_line(texts[-2][-SHOWN:])} → "] if len(texts) > 1 else []
    return f"record ({record.get('category', '')}): {''.join(parts)}{one_line(texts[-1][:SHOWN])} …"


def spelled_counts(counts: Mapping[str, int]) -> str:
    """Return counts by name in one line."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)


def _has_questions(options: SynthesizeOptions) -> bool:
    return getattr(options, "questions", 1) > 1
