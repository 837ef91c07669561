r"""Tokenized documents, cut to max_tokens, with counts of records and previews.

document 1   document 2
5 6 7        8 9          input_ids  5 6 7 8 9      lengths  3 2
0 1 1        0 1          loss_mask  0 1 1 0 1

A preview shows a document as text with its targets marked, in colour on a terminal, so that a wrong mask is obvious:

    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[hello<|im_end|>]]\n
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import DataError, one_line
from verl_ext.text.read.json_records import BadRecord

CHAT_COUNTS = ("end_of_turn", "text_ends", "context_parts", "unprinted", "unused_fields", "dropped_media")
EXAMPLES = 3  # examples that the report gives for each reason
RUNS = 12  # the maximum number of runs of a document in a preview
RUN_TOKENS = 96  # the maximum number of tokens of a run in a preview
CUT = "�"  # the decoded form of bytes that are not a character
Run = tuple[bool, str]  # True for a run of targets; its text


@dataclass
class Counts:
    """The counts of one source or category."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    target_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # documents by length
    over_length: Counter[str] = field(default_factory=Counter)  # the changes that `fit` made
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
    text_calls: int = 0  # messages of calls (`function_call`) that are no JSON, and are read as text
    closed_again: int = 0  # parts of target turns that close a thinking block that is closed already
    unprinted: Counter[str] = field(default_factory=Counter)  # records by the kind of words that the template omits
    # Records (or messages, as `messages.<field>`) with a field that nothing reads.
    unused_fields: Counter[str] = field(default_factory=Counter)
    dropped_media: Counter[str] = field(default_factory=Counter)  # images, audio and video left out
    uncategorised: int = 0  # records without a value of `category_field`
    examples: dict[str, list[str]] = field(default_factory=dict)  # the first examples of each reason

    def add_bad(self, reason: str, example: str) -> None:
        """Count an unusable record; `example` names its place and the reason."""
        self.bad[reason] += 1
        self._add_examples(reason, [example])

    def _add_examples(self, reason: str, examples: list[str]) -> None:
        known = self.examples.setdefault(reason, [])
        known += examples[: EXAMPLES - len(known)]

    def add_documents(self, lengths: Iterable[int], targets: int = 0) -> None:
        """Count documents of these lengths, and their targets."""
        lengths = list(lengths)
        self.documents += len(lengths)
        self.tokens += sum(lengths)
        self.target_tokens += targets
        self.lengths.update(lengths)

    def add_special_tokens(self, occurrences: int, records: int = 1) -> None:
        """Count `occurrences` of names of special tokens in the texts of this many records."""
        if occurrences:
            self.special_tokens.update(records=records, occurrences=occurrences)

    def add(self, other: "Counts") -> None:
        """Add the counts of another; its examples come after those here."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for reason, examples in other.examples.items():
            self._add_examples(reason, examples)

    @property
    def target_share(self) -> float:
        """The share of tokens that are targets; 0 if there are no tokens."""
        return self.target_tokens / self.tokens if self.tokens else 0.0

    def length_quantile(self, fraction: float) -> int:
        """Return the shortest length that at least `fraction` of the documents do not exceed (nearest rank), or 0."""
        if not self.lengths:
            return 0
        lengths, documents = list(self.lengths), list(self.lengths.values())
        return int(np.quantile(lengths, fraction, method="inverted_cdf", weights=documents))

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for the report; the order of keys does not depend on that of the records."""
        longest = max(self.lengths, default=0)
        return {
            **{name: getattr(self, name) for name in ("records", "documents", "tokens", "target_tokens")},
            "target_share": round(self.target_share, 4),
            "length": {"median": self.length_quantile(0.5), "p95": self.length_quantile(0.95), "max": longest},
            "special_tokens_in_text": {name: self.special_tokens[name] for name in ("records", "occurrences")},
            **{name: getattr(self, name) for name in ("border_tokens", "dropped_reasoning", "dropped_blocks")},
            **{name: getattr(self, name) for name in ("text_calls", "closed_again")},
            "bad_records": dict(sorted(self.bad.items())),
            **{name: dict(sorted(getattr(self, name).items())) for name in ("over_length", *CHAT_COUNTS)},
            "examples": dict(sorted(self.examples.items())),
        }


@dataclass
class Document:
    """A document: input_ids[T] int32, loss_mask[T] int8, and weights[T] float32 if a target has one.

    full_length: the number of tokens before the document was cut; None if it was not cut. parts: the first token and
    the kind of each learnt part of a chat, in order; empty for a plain text. category_ids[T] int32: those of a record
    that was tokenized already. border_tokens: the targets that also hold text from outside their part of a chat.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    weights: np.ndarray | None = None
    full_length: int | None = None
    parts: Sequence[tuple[int, str]] = ()
    category_ids: np.ndarray | None = None
    border_tokens: int = 0

    def part(self, start: int, stop: int) -> "Document":
        """Return tokens start..stop-1 as a document, whose first token is not a target."""
        mask = self.loss_mask[start:stop].copy()
        mask[:1] = 0
        weights = None if self.weights is None else self.weights[start:stop]
        parts = [(max(first - start, 0), kind) for first, kind in self.parts if first < stop]
        own = None if self.category_ids is None else self.category_ids[start:stop] * mask
        return Document(self.input_ids[start:stop], mask, weights, len(self.input_ids), parts, own)

    def tokens_by_kind(self) -> Iterator[tuple[str, int]]:
        """Yield the kind of each part and the number of its targets, without the context that follows it."""
        if not self.parts:
            return
        mask, kinds = self.loss_mask, dict(self.parts)  # if two parts begin at one token, the later one counts
        kinds.pop(len(mask), None)
        sums = np.add.reduceat(mask, list(kinds), dtype=np.int64).tolist() if kinds else []
        yield from zip(kinds.values(), sums, strict=True)


@dataclass
class Documents:
    """The D documents of a chunk of records, concatenated to ΣT tokens."""

    category_id: int  # the number of their source, from 1
    num_bytes: int  # the bytes that the records take in the source's files
    input_ids: NDArray[np.int32]  # [ΣT]
    loss_mask: NDArray[np.int8]  # [ΣT]
    lengths: NDArray[np.int32]  # [D]
    weights: NDArray[np.float32] | None  # [ΣT]; None if no target has one
    counts: Counts
    full_lengths: NDArray[np.int32] | None = None  # [D], the tokens before a cut; None if none was cut
    category_names: list[str] | None = None  # one for each document, if records name their categories
    category_counts: dict[str, Counts] = field(default_factory=dict)  # the counts of each of these categories
    token_categories: NDArray[np.int32] | None = None  # [ΣT], of records that were tokenized already
    category_ids: NDArray[np.int32] | None = None  # [D], the numbers that the writing process gives to category_names
    preview: list[list[Run]] = field(default_factory=list)  # the first documents, decoded
    chat_template: str | None = None  # of the chats; None for texts alone, or for several templates by name
    end_of_chat: str | None = None  # the text after the last turn; earlier turns, or parts of turns, may end otherwise
    texts: dict[str, list[str]] = field(default_factory=dict)  # further columns, with one text for each document

    @property
    def records(self) -> int:
        """The number of records."""
        return self.counts.records

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.counts.tokens


def concat_documents(documents: Sequence[Document], category_id: int, num_bytes: int, counts: Counts) -> Documents:
    """Concatenate documents."""
    weights = None
    if any(document.weights is not None for document in documents):
        weights = np.concatenate(
            [np.ones(len(d.input_ids), np.float32) if d.weights is None else d.weights for d in documents]
        )
    lengths = np.array([len(d.input_ids) for d in documents], np.int32)
    categories = [d.category_ids for d in documents if d.category_ids is not None]
    return Documents(
        category_id,
        num_bytes,
        np.concatenate([np.empty(0, np.int32), *(d.input_ids for d in documents)]),
        np.concatenate([np.empty(0, np.int8), *(d.loss_mask for d in documents)]),
        lengths,
        weights,
        counts,
        np.array([d.full_length or len(d.input_ids) for d in documents], np.int32),
        token_categories=np.concatenate(categories) if categories else None,
    )


def cut_to_length(document: Document, max_tokens: int | None, policy: str, counts: Counter[str]) -> list[Document]:
    """Cut a document into pieces of at most `max_tokens` tokens, and count the changes.

    `truncate` keeps the first max_tokens tokens; `split` keeps all tokens in pieces, even pieces without a target.
    Raises `DataError` under the policy `error`, and `BadRecord` if no target is left.
    """
    tokens = len(document.input_ids)
    if max_tokens is None or tokens <= max_tokens:
        return [document]
    if policy == "error":
        raise DataError(
            f"a document must have at most max_tokens={max_tokens} tokens, or over_length=drop|truncate|split be given;"
            f" got {tokens}"
        )
    if policy == "drop":
        counts.update(dropped_documents=1, dropped_tokens=tokens)
        return []
    # Pieces without a target are kept beside others: what is split stays whole.
    stop = max_tokens if policy == "truncate" else tokens
    pieces = [document.part(start, min(start + max_tokens, stop)) for start in range(0, stop, max_tokens)]
    targets = [int(piece.loss_mask.sum()) for piece in pieces]
    past, done = {"truncate": ("truncation", "truncated"), "split": ("split", "split")}[policy]
    if not any(targets):
        raise BadRecord(f"no_target_after_{past}", f"no target is left of {tokens} tokens at max_tokens={max_tokens}")
    counts[f"{done}_documents"] += 1
    counts[f"{done}_targets_lost"] += int(document.loss_mask.sum()) - sum(targets)
    if policy == "truncate":
        counts["truncated_tokens"] += tokens - max_tokens
        counts["truncated_last_target_lost"] += int(document.loss_mask[max_tokens:].any())
    else:
        counts["split_tokens"] += tokens
        counts["split_pieces"] += len(pieces)
        counts["split_pieces_without_target"] += targets.count(0)
    return pieces


def preview_of(input_ids: np.ndarray, loss_mask: np.ndarray, decode: Callable[[list[int]], str]) -> list[Run]:
    """Decode the runs of targets and of other tokens in input_ids[T], by loss_mask[T].

    Long runs, and documents of many runs, are shortened in the middle.
    """

    def run(start: int, stop: int) -> str:
        if stop - start <= RUN_TOKENS:
            return decoded(input_ids, start, stop, decode)
        half = RUN_TOKENS // 2
        head = decoded(input_ids, start, start + half, decode)
        tail = decoded(input_ids, stop - half, stop, decode)
        return f"{head.rstrip(CUT)} … {stop - start - 2 * half:,} tokens … {tail.lstrip(CUT)}"

    borders = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    spans, half = list(pairwise(borders)), RUNS // 2
    kept = spans if len(spans) <= RUNS else spans[:half] + spans[-half:]
    shown = [(bool(loss_mask[start]), run(start, stop)) for start, stop in kept]
    if len(spans) > RUNS:
        shown.insert(half, (False, f" … {spans[-half][0] - spans[half - 1][1]:,} tokens … "))
    return shown


def decoded(ids: np.ndarray, start: int, stop: int, decode: Callable[[list[int]], str]) -> str:
    """Decode tokens start..stop-1 after the token before, because some tokenizers drop a leading space otherwise."""
    if start:
        before, text = decode(ids[start - 1 : start].tolist()), decode(ids[start - 1 : stop].tolist())
        if CUT not in before and text.startswith(before):
            return text[len(before) :]
    return decode(ids[start:stop].tolist())


def previews_text(previews: Mapping[str, Sequence[Sequence[Run]]], console: Any) -> str:
    """Format every source's documents for a rich console, in colour if it has colours, or else with `[[…]]`."""
    from rich.text import Text  # imported here: a command that only reports a mistake does not need it

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
