"""Documents of a pack that begin with tokens of the document before them.

```
texts          A: s s s q q a a      B: s s s r r b      C: s s s r u
pack           s s s q q a a | s r r b | r u             B and C repeat the last shared token: here it predicts another
position_ids   0 1 2 3 4 5 6 | 2 3 4 5 | 3 4
begins         0             | 2       | 3               the tokens before are those of the text of the document before
rows of texts  0 1 2 3 4 5 6 | 0 1 7 8 9 10 | 0 1 7 11 12
```

A document begins wherever `position_ids` do not go on by one. A begin is less than the length of the text before, so
that it never goes on by one, and the positions alone describe any tree of documents. Queries are a document's own
tokens, keys those of its whole text.

Legend: T tokens of a micro-batch, S tokens of all texts, K key/value heads of a rank inside attention, E head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.options import must
from verl_ext.parallel.shards import DocumentLayout, pinned

_SUMMED_BYTES = 1 << 26  # of gradients in fp32 at a time


class PackDocuments(NamedTuple):
    """A pack's documents: lengths int64[D] of their own tokens, begins int64[D], the tokens before these."""

    lengths: NDArray[np.int64]
    begins: NDArray[np.int64]


def read_documents(position_ids: NDArray[np.integer]) -> PackDocuments:
    """Read the documents of position_ids[T]. Raises ValueError if one begins beyond the text before it."""
    starts = np.flatnonzero(np.diff(position_ids, prepend=-2) != 1)
    lengths, begins = np.diff(starts, append=len(position_ids)), position_ids[starts].astype(np.int64)
    before = np.append(0, (begins + lengths)[:-1])
    if (wrong := (begins < 0) | (begins > np.maximum(before - 1, 0))).any():
        at = int(wrong.argmax())
        needed = "restart at 0, or inside of the document before with data.share_prefixes=true"
        got = f"{begins[at]} after a document of {before[at]} tokens"
        raise ValueError(must("position_ids", needed, got))
    return PackDocuments(lengths, begins)


def text_rows(documents: PackDocuments) -> list[NDArray[np.int64]]:
    """Return the rows of each document's whole text."""
    texts: list[NDArray[np.int64]] = []
    first = 0
    for length, begin in zip(*(values.tolist() for values in documents), strict=True):
        own = np.arange(first, first + length)
        texts.append(np.concatenate([texts[-1][:begin], own]) if begin else own)
        first += length
    return texts


class KeyRows(NamedTuple):
    """The rows of the keys of T' neighbouring tokens, and how their gradients add up.

    Attributes:
        of_texts: int64[S], the row of each token of the texts.
        own: int64[T'], the place of each row among the S in its own document.
        shared: int64[R], the rows that several documents have.
        places: int64[sum of counts], the places of these rows among the S, row by row.
        counts: int64[R], the documents that have each of them.
    """

    of_texts: torch.Tensor
    own: torch.Tensor
    shared: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def from_texts(cls, texts: Sequence[NDArray[np.int64]], device: Any) -> "KeyRows":
        """Sort the places of each row, on the host."""
        index = np.concatenate(texts)
        by_row = np.argsort(index, kind="stable")
        counts = np.bincount(index)
        # A row's own document comes before those that share it.
        own = by_row[np.cumsum(counts) - counts]
        shared = np.flatnonzero(counts > 1)
        places = by_row[np.repeat(counts > 1, counts)]
        columns = (index, own, shared, places, counts[shared])
        return cls(*(pinned(torch.from_numpy(x), device).to(device, non_blocking=True) for x in columns))


def tree_layout(position_ids: torch.Tensor, device: Any) -> DocumentLayout:
    """Read boundaries from host ``position_ids[T]``; a plain layout if no document shares tokens.

    Raises ValueError as :func:`read_documents` does.
    """
    documents = read_documents(position_ids.numpy())
    if documents.begins.any():
        return TreeLayout.from_documents(documents, device)
    return DocumentLayout.from_lengths(documents.lengths.tolist(), device)


class _TextRows(torch.autograd.Function):
    """Rows ``[T', K, E]`` as those of whole texts ``[S, K, E]``; the gradients of a row add up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: KeyRows) -> torch.Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.of_texts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows: KeyRows = ctx.rows
        (grad,) = grad_outputs
        total = grad.index_select(0, rows.own)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        # index_add_ would add in any order on a GPU. Blocks of columns bound the copy in fp32.
        columns, flat = total.flatten(1), grad.flatten(1)
        width = max(_SUMMED_BYTES // (dtype.itemsize * max(len(rows.places), 1)), 1)
        for first in range(0, columns.size(1), width):
            part = flat[:, first : first + width].index_select(0, rows.places).to(dtype)
            sums = torch.segment_reduce(part, "sum", lengths=rows.counts, axis=0, unsafe=True)
            columns[:, first : first + width].index_copy_(0, rows.shared, sums.to(grad.dtype))
        return total, None


class _Run(NamedTuple):
    """Neighbouring documents of one kernel call; `keys` is None if none of them shares a token."""

    rows: slice
    keys: KeyRows | None
    layout: DocumentLayout


@dataclass(frozen=True)
class TreeLayout(DocumentLayout):
    """A pack's boundaries, where documents share their beginnings.

    Attributes:
        begins: the position of each document's first own token.
        runs: the kernel calls. Keys of documents that share nothing stay where they are.
    """

    begins: tuple[int, ...] = field(kw_only=True)
    runs: tuple[_Run, ...] = field(kw_only=True, repr=False)

    @classmethod
    def from_documents(cls, documents: PackDocuments, device: Any) -> "TreeLayout":
        """Lay out documents, on the host."""
        lengths, begins = (values.tolist() for values in documents)
        base, texts = DocumentLayout.from_lengths(lengths, device), text_rows(documents)
        # A document is in a tree if it begins inside the text before it, or the next one inside its own.
        in_tree = [begin > 0 or after > 0 for begin, after in zip(begins, [*begins[1:], 0], strict=True)]
        runs = []
        for is_tree, members in groupby(range(len(lengths)), key=in_tree.__getitem__):
            first, *_ = of_run = list(members)
            last, start = of_run[-1] + 1, base.offsets[first]
            keys = [len(text) for text in texts[first:last]]
            layout = DocumentLayout.from_lengths(lengths[first:last], device, keys)
            rows = KeyRows.from_texts([text - start for text in texts[first:last]], device) if is_tree else None
            runs.append(_Run(slice(start, base.offsets[last]), rows, layout))
        return cls(base.offsets, base.cu_seqlens, base.max_length, begins=tuple(begins), runs=tuple(runs))

    def positions(self) -> torch.Tensor:
        """Return int64[T] on the host, each own token's position in its text."""
        pairs = zip(self.begins, self.lengths, strict=True)
        return torch.cat([torch.arange(begin, begin + length) for begin, length in pairs])

    def _calls(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> list[tuple]:
        """Return a call for each run, with the keys of whole texts."""
        calls = []
        for rows, keys, layout in self.runs:
            pair = key[rows], value[rows]
            if keys is not None:
                pair = _TextRows.apply(pair[0], keys), _TextRows.apply(pair[1], keys)
            calls.append((layout, query[rows], *pair))
        return calls

    def in_chunks(self, size: int) -> DocumentLayout:
        """Refuse: chunks are counted from a text's first token, which another document holds."""
        raise ValueError(must("data.share_prefixes", f"be false for attention in chunks of {size} tokens", True))

    def padded(self, pad: int) -> "DocumentLayout":
        """Append ``pad`` tokens as one pseudo-document."""
        if pad == 0:
            return self
        lengths = np.append(np.diff(self.offsets), pad)
        return TreeLayout.from_documents(PackDocuments(lengths, np.array([*self.begins, 0])), self.cu_seqlens.device)
