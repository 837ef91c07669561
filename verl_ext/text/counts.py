"""What became of the records of a source or category: counts that add up over chunks.

Written documents as text with their targets marked: most mistakes of a mask are seen at a glance.

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n[[hello<|im_end|>]]\\n

On a terminal the targets are in colour instead of `[[…]]`. A document is decoded in runs of targets and others, so that
a character of several tokens stays whole; long runs, and a document of many, are shortened in the middle.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from verl_ext.values import one_line

CHAT_COUNTS = ("end_of_turn", "text_ends", "unprinted", "unused_fields", "dropped_media")
EXAMPLES = 3  # places named per reason in the report


@dataclass
class Counts:
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

    def add_special_tokens(self, occurrences: int, records: int = 1) -> None:
        """Count names of special tokens that so many records' texts hold together; nothing of none."""
        if occurrences:
            self.special_tokens.update(records=records, occurrences=occurrences)

    def add(self, other: "Counts") -> None:
        """Add another's counts; its examples come after those here."""
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
        """The counts as the report has it; the order of keys does not depend on that of the records."""
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


RUNS = 12  # of a document, at most
RUN_TOKENS = 96  # of a run, at most
CUT = "�"  # what bytes that are no character decode to
Run = tuple[bool, str]  # whether it is of targets; its text


def preview_of(input_ids: np.ndarray, loss_mask: np.ndarray, decode: Callable[[list[int]], str]) -> list[Run]:
    """The runs of a document of input_ids[T] and loss_mask[T], decoded and shortened."""
    borders = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    spans = list(pairwise(borders))
    shown = [spans] if len(spans) <= RUNS else [spans[: RUNS // 2], spans[-RUNS // 2 :]]
    parts = [[(bool(loss_mask[a]), _run(input_ids, a, b, decode)) for a, b in part] for part in shown]
    if len(parts) == 1:
        return parts[0]
    return [*parts[0], (False, f" … {shown[1][0][0] - shown[0][-1][1]:,} tokens … "), *parts[1]]


def _run(ids: np.ndarray, start: int, stop: int, decode: Callable[[list[int]], str]) -> str:
    if stop - start <= RUN_TOKENS:
        return _decoded(ids, start, stop, decode)
    half = RUN_TOKENS // 2
    head = _decoded(ids, start, start + half, decode).rstrip(CUT)
    tail = _decoded(ids, stop - half, stop, decode).lstrip(CUT)
    return f"{head} … {stop - start - 2 * half:,} tokens … {tail}"


def _decoded(ids: np.ndarray, start: int, stop: int, decode: Callable[[list[int]], str]) -> str:
    """Tokens start..stop as they read after the one before, without which some tokenizers drop a leading space."""
    if start:
        before, text = decode(ids[start - 1 : start].tolist()), decode(ids[start - 1 : stop].tolist())
        if CUT not in before and text.startswith(before):
            return text[len(before) :]
    return decode(ids[start:stop].tolist())


def previews_text(previews: Mapping[str, Sequence[Sequence[Run]]], console: Any) -> str:
    """Every source's documents for a rich console: in colour where it has colours, else with `[[…]]`."""
    from rich.text import Text  # not for a command with a mistake in it

    in_colour = console.is_terminal and console.color_system and not console.no_color
    text = Text()
    for name, documents in previews.items():
        for number, runs in enumerate(documents, start=1):
            text.append(f"\n{name}, document {number}", style="bold").append(
                " (targets in green):\n" if in_colour else " (targets in [[…]]):\n", style="dim"
            )
            for is_target, run in runs:
                shown = "\\n\n".join(map(one_line, run.split("\n")))
                marked = shown if in_colour or not is_target else f"[[{shown}]]"
                text.append(marked, style="bold green" if is_target else "")
            text.append("" if text.plain.endswith("\n") else "\n")
    with console.capture() as capture:
        console.print(text, soft_wrap=True, highlight=False, end="")
    return capture.get()
