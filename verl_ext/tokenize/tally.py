"""What became of the records of a source or category: counts that add up over chunks."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from verl_ext.tokenize.special_tokens import ChatText

CHAT_COUNTS = ("end_of_turn", "text_ends", "unprinted", "unused_fields", "dropped_media")
EXAMPLES = 3  # places named per reason in the report


@dataclass
class Tally:
    """Counts of one source or category.

    `lengths` maps a document's length to how many have it; `special_tokens` are the records whose text holds names of
    special tokens, encoded as text, and how many of these there are.

    `end_of_turn` counts the target turns by the text that ends them, '' for none, and `text_ends` those whose end is no
    single token; `unprinted` the records that have something of a kind that the chat template does not print;
    `unused_fields` the records, or messages as `messages.<field>`, with a field that nothing reads; `dropped_media`
    images, audio and video that were left out; `uncategorised` the records without a value of `category_field`;
    `border_tokens` targets' tokens that hold text of others as well.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    target_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    over_length: Counter[str] = field(default_factory=Counter)
    special_tokens: Counter[str] = field(default_factory=Counter)
    border_tokens: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    end_of_turn: Counter[str] = field(default_factory=Counter)
    text_ends: Counter[str] = field(default_factory=Counter)
    unprinted: Counter[str] = field(default_factory=Counter)
    unused_fields: Counter[str] = field(default_factory=Counter)
    dropped_media: Counter[str] = field(default_factory=Counter)
    uncategorised: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add_bad(self, reason: str, example: str) -> None:
        """Count a record that cannot be used; `example` says where and why."""
        self.bad[reason] += 1
        known = self.examples.setdefault(reason, [])
        if len(known) < EXAMPLES:
            known.append(example)

    def add_document(self, length: int, targets: int) -> None:
        """Count a document that is written."""
        self.documents += 1
        self.tokens += length
        self.target_tokens += targets
        self.lengths[length] += 1

    def add_chat(self, chat: ChatText) -> None:
        """Count what ends the turns of a chat that is written, and what its template leaves out."""
        for target in chat.rendered.targets:
            if target.closed_by is not None:
                self.end_of_turn[target.closed_by] += 1
        for kind in chat.rendered.unprinted:
            self.unprinted[kind] += 1
        self.border_tokens += chat.border_tokens

    def add_special_tokens(self, occurrences: int, records: int = 1) -> None:
        """Count names of special tokens that so many records' texts hold together; nothing of none."""
        if occurrences:
            self.special_tokens.update(records=records, occurrences=occurrences)

    def add(self, other: "Tally") -> None:
        """Add another tally's counts; its examples come after those here."""
        for name in ("records", "documents", "tokens", "target_tokens", "uncategorised", "border_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("lengths", "over_length", "special_tokens", "bad", *CHAT_COUNTS):
            getattr(self, name).update(getattr(other, name))
        for reason, examples in other.examples.items():
            known = self.examples.setdefault(reason, [])
            known += examples[: EXAMPLES - len(known)]

    @property
    def target_share(self) -> float:
        """Target tokens by tokens; 0 of none."""
        return self.target_tokens / self.tokens if self.tokens else 0.0

    def length_quantile(self, fraction: float) -> int:
        """The shortest length that at least `fraction` of the documents do not exceed (nearest rank); 0 of none."""
        seen = 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= fraction * self.documents:
                return length
        return 0

    def as_dict(self) -> dict[str, Any]:
        """The tally as the report has it; the order of keys does not depend on that of the records."""
        return {
            "records": self.records,
            "documents": self.documents,
            "tokens": self.tokens,
            "target_tokens": self.target_tokens,
            "target_share": round(self.target_share, 4),
            "length": {
                "median": self.length_quantile(0.5),
                "p95": self.length_quantile(0.95),
                "max": max(self.lengths, default=0),
            },
            "special_tokens_in_text": {name: self.special_tokens[name] for name in ("records", "occurrences")},
            "border_tokens": self.border_tokens,
            "bad_records": dict(sorted(self.bad.items())),
            "over_length": dict(sorted(self.over_length.items())),
            **{name: dict(sorted(getattr(self, name).items())) for name in CHAT_COUNTS},
            "examples": {reason: self.examples[reason] for reason in sorted(self.examples)},
        }
