"""Count records and the documents that they become, by source or category."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CHAT_COUNTS = (
    *("end_of_turn", "text_ends", "context_parts", "unprinted", "unused_fields", "dropped_media"),
    *("readings", "loss_weights"),
)
EXAMPLES = 3  # examples that the report gives for each reason


class Ranges(dict[str, dict[str, float]]):
    """The number of records, and the least and largest of their values, by the value's name."""

    def count(self, name: str, least: float, most: float, records: float = 1) -> None:
        """Count values of so many records."""
        known = self.setdefault(name, {"records": 0, "least": least, "most": most})
        known["records"] += records
        known |= {"least": min(known["least"], least), "most": max(known["most"], most)}


@dataclass
class Counts:
    """The counts of one source or category."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    target_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # documents by length
    # Documents that were cut or left out for their length, and what is gone: documents, tokens, targets.
    over_length: Counter[str] = field(default_factory=Counter)
    # Records with names of special tokens encoded as text, and the occurrences of these names.
    special_tokens: Counter[str] = field(default_factory=Counter)
    border_tokens: int = 0  # target tokens that also hold text from outside the target
    bad: Counter[str] = field(default_factory=Counter)  # unusable records by reason
    end_of_turn: Counter[str] = field(default_factory=Counter)  # target turns by the text that ends them, "" for none
    text_ends: Counter[str] = field(default_factory=Counter)  # target turns whose end has several tokens, by that text
    target_kinds: Counter[str] = field(default_factory=Counter)  # target tokens of chats by the kind of their part
    context_parts: Counter[str] = field(default_factory=Counter)  # parts of target turns that are not targets, by kind
    dropped_reasoning: int = 0  # target turns whose reasoning was left out
    dropped_blocks: int = 0  # texts of chats that `drop_empty_reasoning` selected
    text_calls: int = 0  # messages of calls (`function_call`) that are not JSON, and are read as text
    closed_again: int = 0  # parts of target turns that close a thinking block that is closed already
    unprinted: Counter[str] = field(default_factory=Counter)  # records by the kind of words that the template omits
    # Records (or messages, as `messages.<field>`) with a field that nothing reads.
    unused_fields: Counter[str] = field(default_factory=Counter)
    dropped_media: Counter[str] = field(default_factory=Counter)  # images, audio and video left out
    readings: Counter[str] = field(default_factory=Counter)  # records by how an unusual text in them was read
    loss_weights: Ranges = field(default_factory=Ranges)  # those of records, by the field that has them
    # Preferences: units, pairs, labels (answers alone), answers tied with the best, pairs by what is unequal in them.
    preferences: Counter[str] = field(default_factory=Counter)
    uncategorised: int = 0  # records without a value of `category_field`
    default_system: int = 0  # records whose chat got the system prompt of `system`
    replaced: int = 0  # records in which a text of `replace` stood
    duplicates: int = 0  # records that `deduplicate` left out
    examples: dict[str, list[str]] = field(default_factory=dict)  # the first examples of each reason

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value}  # few, where every record has its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**vars(Counts()), **state})

    def add_bad(self, reason: str, example: str) -> None:
        """Count an unusable record; `example` names its place and the reason."""
        self.bad[reason] += 1
        self._add_examples(reason, [example])

    def _add_examples(self, reason: str, examples: list[str]) -> None:
        known = self.examples.setdefault(reason, [])
        known += examples[: EXAMPLES - len(known)]

    def add(self, *others: "Counts") -> "Counts":
        """Add others' counts, with examples after those here; return the sum."""
        for other in others:
            for name, value in vars(other).items():
                if isinstance(value, Counter):
                    getattr(self, name).update(value)
                elif isinstance(value, Ranges):
                    for of, values in value.items():
                        getattr(self, name).count(of, **values)
                elif isinstance(value, int):
                    setattr(self, name, getattr(self, name) + value)
            for reason, examples in other.examples.items():
                self._add_examples(reason, examples)
        return self

    @property
    def target_share(self) -> float:
        """The share of tokens that are targets; 0 for no tokens."""
        return self.target_tokens / self.tokens if self.tokens else 0.0

    def length_quantile(self, fraction: float) -> int:
        """Return a quantile of the documents' lengths by nearest rank, or 0."""
        if not self.lengths:
            return 0
        lengths, documents = list(self.lengths), list(self.lengths.values())
        return int(np.quantile(lengths, fraction, method="inverted_cdf", weights=documents))

    def as_dict(self) -> dict[str, Any]:
        """Return the report's counts, in an order that no record decides."""
        longest = max(self.lengths, default=0)
        return {
            **{name: getattr(self, name) for name in ("records", "documents", "tokens", "target_tokens")},
            "target_share": round(self.target_share, 4),
            "length": {"median": self.length_quantile(0.5), "p95": self.length_quantile(0.95), "max": longest},
            "special_tokens_in_text": {name: self.special_tokens[name] for name in ("records", "occurrences")},
            **{name: getattr(self, name) for name in ("border_tokens", "dropped_reasoning", "dropped_blocks")},
            **{name: getattr(self, name) for name in ("text_calls", "closed_again")},
            **{name: getattr(self, name) for name in ("default_system", "replaced", "duplicates")},
            "bad_records": dict(sorted(self.bad.items())),
            **{name: dict(sorted(getattr(self, name).items())) for name in ("over_length", *CHAT_COUNTS)},
            **({"preferences": dict(sorted(self.preferences.items()))} if self.preferences else {}),
            "examples": dict(sorted(self.examples.items())),
        }


NO_KEY = 2**64 - 1  # of a record that cannot be read


class Tally:
    """The counts of a chunk's records by category; with `by_record` also for each record, with its key."""

    def __init__(self, by_record: bool) -> None:
        self.by_record = by_record
        self.records: list[tuple[str, Counts]] = []  # empty unless by_record, as `keys` is
        self.keys: list[int] = []
        self._categories: defaultdict[str, Counts] = defaultdict(Counts)
        self._own = Counts()

    def of(self, category: str) -> Counts:
        """Return the counts that the current record, of this category, adds to."""
        return self._own if self.by_record else self._categories[category]

    def end_record(self, category: str, key: int = NO_KEY) -> None:
        """Count the current record; the next one begins."""
        self.of(category).records += 1
        if self.by_record:
            self.records.append((category, self._own))
            self.keys.append(key)
            self._own = Counts()

    def by_category(self) -> dict[str, Counts]:
        """Return the counts of all records by category."""
        return add_by_category(self.records) if self.by_record else dict(self._categories)


def add_by_category(counts: Iterable[tuple[str, Counts]]) -> dict[str, Counts]:
    """Return the sums of counts by category, in first order."""
    found: dict[str, Counts] = {}
    for category, own in counts:
        found.setdefault(category, Counts()).add(own)
    return found
