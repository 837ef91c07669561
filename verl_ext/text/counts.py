"""What became of the records of a source or category, in counts that add up over chunks; and documents as previews.

A preview is a document as text with its targets marked, in colour on a terminal: a wrong mask is seen at a glance.

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n[[hello<|im_end|>]]\\n
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from verl_ext.values import one_line

CHAT_COUNTS = ("end_of_turn", "text_ends", "unprinted", "unused_fields", "dropped_media")
EXAMPLES = 3  # places named per reason in the report


@dataclass
class Counts:
    """Counts of one source or category.

    lengths: documents by their length. special_tokens: records whose text holds names of special tokens, encoded as
    text, and how many names. border_tokens: targets' tokens that hold text of others as well. end_of_turn: target turns
    by the text that ends them, '' for none; text_ends: those whose end is no single token. unprinted: records by the
    kind of words that the chat template does not print. unused_fields: records, or messages as `messages.<field>`, with
    a field that nothing reads. dropped_media: images, audio and video left out. uncategorised: records without a value
    of `category_field`. bad, examples: unusable records by reason, and the first places.
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
        self._add_examples(reason, [example])

    def _add_examples(self, reason: str, examples: list[str]) -> None:
        known = self.examples.setdefault(reason, [])
        known += examples[: EXAMPLES - len(known)]

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
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for reason, examples in other.examples.items():
            self._add_examples(reason, examples)

    @property
    def target_share(self) -> float:
        """Target tokens by tokens; 0 of none."""
        return self.target_tokens / self.tokens if self.tokens else 0.0

    def length_quantile(self, fraction: float) -> int:
        """The shortest length that at least `fraction` of the documents do not exceed (nearest rank); 0 of none."""
        lengths = sorted(self.lengths)
        upto = accumulate(self.lengths[length] for length in lengths)
        return next(
            (length for length, seen in zip(lengths, upto, strict=True) if seen >= fraction * self.documents), 0
        )

    def as_dict(self) -> dict[str, Any]:
        """The counts as the report has them; the order of keys does not depend on that of the records."""
        longest = max(self.lengths, default=0)
        return {
            **{name: getattr(self, name) for name in ("records", "documents", "tokens", "target_tokens")},
            "target_share": round(self.target_share, 4),
            "length": {"median": self.length_quantile(0.5), "p95": self.length_quantile(0.95), "max": longest},
            "special_tokens_in_text": {name: self.special_tokens[name] for name in ("records", "occurrences")},
            "border_tokens": self.border_tokens,
            "bad_records": dict(sorted(self.bad.items())),
            **{name: dict(sorted(getattr(self, name).items())) for name in ("over_length", *CHAT_COUNTS)},
            "examples": dict(sorted(self.examples.items())),
        }


RUNS = 12  # of a document, at most
RUN_TOKENS = 96  # of a run, at most
CUT = "�"  # what bytes that are no character decode to
Run = tuple[bool, str]  # whether it is of targets; its text


def preview_of(input_ids: np.ndarray, loss_mask: np.ndarray, decode: Callable[[list[int]], str]) -> list[Run]:
    """The runs of targets and others of a document of input_ids[T] and loss_mask[T], decoded; long ones, and those of a
    document of many, are shortened in the middle."""
    borders = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    spans, half = list(pairwise(borders)), RUNS // 2
    kept = spans if len(spans) <= RUNS else spans[:half] + spans[-half:]
    shown = [(bool(loss_mask[start]), _run(input_ids, start, stop, decode)) for start, stop in kept]
    if len(spans) > RUNS:
        shown.insert(half, (False, f" … {spans[-half][0] - spans[half - 1][1]:,} tokens … "))
    return shown


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
