"""Packs: the plan of documents in packs, and their tokens, sliced from memory-mapped columns.

    doc A (3)      doc B (4)        with pad_mode=right, max_tokens = 9
    input_ids      a0 a1 a2 | b0 b1 b2 b3 | P P
    position_ids    0  1  2 |  0  1  2  3 | 0 1
    loss_mask       0  0  1 |  0  1  1  1 | 0 0
    category_ids    0  0  1 |  0  2  2  2 | 0 0
    attention_mask  1  1  1 |  1  1  1  1 | 0 0
    labels          . . A2  |  . B1 B2 B3 | . .      only in sets of texts; `.` is -100, not shifted

A document's first token is never a target, and a token that is not a target has category 0.

With share_prefixes, a document that begins with tokens of the one before has only its own from the last of these on:

    doc A (4)      doc B (5)        a0 a1 a2 of both
    input_ids      a0 a1 a2 a3 | a2 b3 b4
    position_ids    0  1  2  3 |  2  3  4
    loss_mask       0  0  0  1 |  0 0 0 1 1     of whole documents, as category_ids and loss_weight are
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.grouping import Grouping
from verl_ext.data.packs.mixture import KEY, MixtureRow, draw_spans
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.data.tokenized.facts import DocumentScan, scan_documents
from verl_ext.data.tokenized.ranks import ONE_RANK, Ranks, together
from verl_ext.options import must
from verl_ext.packing import PackPlan, Spans, plan_packs
from verl_ext.packing.shared import plan_drawn, plan_shared


class Packs:
    """The packs of grouped documents.

    A mixture draws from the wholes, so that one may lie in several packs or in none; the draw is the same in every
    epoch.
    """

    def __init__(
        self, documents: DocumentRows, grouping: Grouping, packing: SFTOptions, train_dirs: Sequence[str] = ()
    ) -> None:
        """Plan what needs no token.

        packing: options with the budget. train_dirs: the absolute folders that a mixture's sources without folders of
        their own draw from.

        Raises ValueError for documents that do not fit, and for a mixture that cannot be drawn.
        """
        self.documents, self.grouping, self.packing, self._train_dirs = documents, grouping, packing, train_dirs
        if not grouping.reads_tokens:
            _ = self.spans, self.draw
            if not packing.share_prefixes:
                self.plan()

    def __len__(self) -> int:
        return self.plan().num_packs

    @property
    def spans(self) -> Spans:
        """The documents by row, cut to the budget."""
        return self.grouping.spans

    @cached_property
    def draw(self) -> tuple[NDArray[np.int64] | None, Sequence[MixtureRow]]:
        """The wholes that the mixture draws (None: all once), and its report."""
        if (mixture := self.packing.mixture_options) is None:
            return None, ()
        source, categories = self.documents.source, {*self.documents.category_names.values()}
        shared = (name for name, own in mixture.sources.items() if own.train_dir is None)
        if len(categories) > 1 and (name := next((name for name in shared if name in categories), None)):
            needed = f"have a train_dir with the documents of {name} alone, or another name"
            why = "without one it draws every category of data.train_dir"
            raise ValueError(must(f"{KEY}.sources.{name}", f"{needed}: {why}", "train_dir=null"))
        of_data = source.folders, source.first_rows(), self._train_dirs
        return draw_spans(mixture, self.grouping.wholes(), *of_data, self.packing.seed)

    @together
    def plan(self, ranks: Ranks | None) -> PackPlan:
        """Return the pack that each document lies in; documents that share tokens come together."""
        packing, shared = self.packing, self.grouping.shared(ranks)
        how = packing.max_tokens, packing.strategy, packing.seed
        with (ranks or ONE_RANK).guard():
            lengths = self.grouping.wholes().length
            if (drawn := self.draw[0]) is not None:
                plan = plan_drawn(lengths, drawn, shared, *how)
            elif packing.shuffle_documents:
                order = self.grouping.order(packing.seed)
                plan = plan_packs(lengths[order], *how).renumbered(order)
            else:
                plan = plan_shared(lengths, shared, *how)
        return self.grouping.expand(plan)

    @together
    def scan(self, ranks: Ranks | None) -> DocumentScan:
        """Return the facts that only tokens show; ranks read shares, and cache them if files tell of changes."""
        source, over = self.documents.source, self.grouping.over_length
        keep = ranks is not None and bool(source.files)
        return scan_documents(source, self.spans, over, ranks or ONE_RANK, keep=keep)

    def members(self, pack: int) -> NDArray[np.integer]:
        """Return the places, among the spans, of a pack's documents."""
        return self.plan().documents(range(len(self))[pack])

    def row(self, pack: int, padding: int) -> dict[str, NDArray[Any]]:
        """Return a pack's documents by column, one after the other, filled up with `padding` if packs are padded."""
        documents, source, packing = self.members(pack), self.documents.source, self.packing
        length = self.spans.length[documents].astype(np.int64)
        tokens, pads = int(length.sum()), packing.pad_mode == "right"
        size = packing.max_tokens if pads else tokens
        kinds = {name: np.float32 if name == "loss_weight" else np.int64 for name in source.columns}
        out: dict[str, NDArray[Any]] = {name: np.empty(size, kind) for name, kind in kinds.items()}
        of_pack = {name: values[:tokens] for name, values in out.items()}
        source.gather(self.spans.row[documents], self.spans.start[documents], length, of_pack)
        for name, values in out.items():
            values[tokens:] = padding if name == "input_ids" else 0
        out["loss_mask"][np.cumsum(length) - length] = 0
        out["category_ids"] *= out["loss_mask"]
        counts = [*length.tolist(), size - tokens]
        ramp = np.arange(max(counts))
        begins = [*self.plan().begins_of(range(len(self))[pack]).tolist(), 0]
        out["position_ids"] = np.concatenate([ramp[begin:count] for begin, count in zip(begins, counts, strict=True)])
        if any(begins):
            out["input_ids"] = _own_tokens(out["input_ids"], counts, begins)
        if pads:
            out["attention_mask"] = np.zeros(size, np.int64)
            out["attention_mask"][:tokens] = 1
        return out


def _own_tokens(ids: NDArray[np.int64], lengths: Sequence[int], begins: Sequence[int]) -> NDArray[np.int64]:
    """Return documents' tokens from `begins` on; those before are shared."""
    own, first, before = [], 0, ids[:0]
    for length, begin in zip(lengths, begins, strict=True):
        text = ids[first : first + length]
        assert np.array_equal(text[:begin], before[:begin]), "documents share the tokens that the plan says"
        own.append(text[begin:])
        first, before = first + length, text
    return np.concatenate(own)
