"""Plans of packs in CSR form, and cuts of longer documents.

    pack_offsets      0        2           5     6
                      |        |           |     |
    document_index    7  0  |  4  1  2  |  3
                      pack 0   pack 1      pack 2

These are pure functions of lengths, which neither read nor copy tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.options import check_choice, must

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.integer]  # int32 or int64
OVER_LENGTH_POLICIES = ("error", "drop", "truncate", "split")


class PackPlan(NamedTuple):
    """document_index int32 or int64[N], pack_offsets int64[P+1], and begins int32[N] where documents share tokens.

    Pack k holds `document_index[pack_offsets[k]:pack_offsets[k+1]]`, in that order. The strategies name every document
    once; a plan of a sample may name a document several times or never. The tokens of a document before its `begins`
    are those of the document before it in the pack, and are not computed again (None: no document shares any).
    """

    document_index: Indices
    pack_offsets: Ints
    begins: NDArray[np.int32] | None = None

    @property
    def num_packs(self) -> int:
        """The number of packs."""
        return len(self.pack_offsets) - 1

    def documents(self, pack: int) -> Indices:
        """Return integer[n]: the documents of one pack."""
        return self.document_index[self.pack_offsets[pack] : self.pack_offsets[pack + 1]]

    def pack_sums(self, values: ArrayLike) -> Ints:
        """Return int64[P]: `values` (integer[D], one per document) summed over each pack."""
        return np.diff(offsets_of(np.asarray(values)[self.document_index])[self.pack_offsets])

    def renumbered(self, documents: Indices) -> "PackPlan":
        """Return the same packs with document i named `documents[i]`."""
        return self._replace(document_index=documents[self.document_index])

    def expanded(self, units: Sequence[Indices], begins: Indices | None = None) -> "PackPlan":
        """Return the packs of documents for packs of units, runs of neighbouring documents.

        units: integer[U] twice, the first document of each unit and their number. begins: integer[D], the `begins` of
        each document.
        """
        first, sizes = (values[self.document_index] for values in units)
        offsets = offsets_of(sizes)
        documents = np.repeat(first - offsets[:-1], sizes) + np.arange(offsets[-1])
        of_place = None if begins is None else begins[documents].astype(np.int32)
        return PackPlan(documents.astype(index_type(len(documents))), offsets[self.pack_offsets], of_place)

    def begins_of(self, pack: int) -> NDArray[np.int32]:
        """Return int32[n]: the `begins` of one pack's documents, or zeros."""
        part = slice(*self.pack_offsets[pack : pack + 2])
        return np.zeros(part.stop - part.start, np.int32) if self.begins is None else self.begins[part]

    @classmethod
    def joined(cls, plans: Sequence["PackPlan"]) -> "PackPlan":
        """Return the packs of several plans of the same documents."""
        index, sizes = (
            np.concatenate(parts)
            for parts in zip(*((plan.document_index, np.diff(plan.pack_offsets)) for plan in plans), strict=True)
        )
        if all(plan.begins is None for plan in plans):
            return cls(index, offsets_of(sizes))
        nothing = (np.zeros(len(plan.document_index), np.int32) for plan in plans)
        begins = [zeros if plan.begins is None else plan.begins for plan, zeros in zip(plans, nothing, strict=True)]
        return cls(index, offsets_of(sizes), np.concatenate(begins))

    def pack_tokens(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """Return int64[P]: the tokens of each pack that are computed; lengths integer[D] of the documents."""
        tokens = self.pack_sums(lengths)
        return tokens if self.begins is None else tokens - np.diff(offsets_of(self.begins)[self.pack_offsets])


@dataclass(frozen=True)
class Spans:
    """The parts of documents that are packed, by dataset row.

    Span s is tokens start..start+length of row `row`: row int64[S], start int64[S], length int32[S]. Rows ascend, and
    every length is at least 1.
    """

    row: Ints
    start: Ints
    length: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)


def offsets_of(sizes: Indices) -> Ints:
    """Return int64[n+1]: consecutive parts' starts, and the last one's end."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def index_type(documents: int) -> "type[np.signedinteger]":
    """Return the integer type for the numbers of this many documents."""
    return np.int32 if documents < 2**31 else np.int64


def cut_spans(lengths: Indices, max_tokens: int, policy: str, key: str = "data.train_dir") -> Spans:
    """Return the documents to pack, where long ones follow `policy`.

    Rows without a token are left out.

        max_tokens = 4        row 0 (3 tokens)    row 1 (9 tokens)
        drop                  0:[0,3)
        truncate              0:[0,3)             1:[0,4)
        split                 0:[0,3)             1:[0,4) 1:[4,8) 1:[8,9)

    Every piece is a document of its own: positions restart and its first token is never a target. Raises ValueError if
    a row is over max_tokens under `error`, no document is left under `drop`, or there is no token at all.
    """
    check_choice("data.over_length", policy, OVER_LENGTH_POLICIES)
    if not lengths.any():
        raise ValueError(f"{key} must hold at least one token; all of its {len(lengths)} documents are empty")
    # Refuse what would leave nothing to pack, or drop what the user did not give up.
    over = lengths > max_tokens
    if over.any() and policy == "error":
        longer = f"{int(over.sum())} of {len(lengths)} documents are longer, the longest has {lengths.max()} tokens"
        hint = "raise data.max_tokens or choose data.over_length=drop|truncate|split"
        got = f"{max_tokens}, but {longer}: {hint}"
        raise ValueError(must("data.max_tokens", f"hold every document of {key}", got))
    if policy == "drop" and (over | (lengths == 0)).all():
        shortest = f"the shortest document has {lengths[over].min()} tokens"
        got = f"{max_tokens}, {shortest} and data.over_length=drop leaves none"
        raise ValueError(must("data.max_tokens", f"hold at least one document of {key}", got))
    # Count the pieces of each row, then lay them out one after the other, `max_tokens` apart.
    budget = min(max_tokens, np.iinfo(lengths.dtype).max)  # no document is longer than a number of its type
    pieces = -(-lengths // budget)  # 0 for an empty row
    if policy == "drop":
        pieces[pieces > 1] = 0
    elif policy == "truncate":
        np.minimum(pieces, 1, out=pieces)
    row = np.repeat(np.arange(len(lengths)), pieces)
    start = (np.arange(len(row)) - offsets_of(pieces)[row]) * max_tokens
    return Spans(row, start, np.minimum(lengths[row] - start, max_tokens).astype(np.int32))
