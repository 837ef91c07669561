"""A rank's packs of a step as flat tensors with loss coefficients.

```
packs            |  doc A  | doc B |      doc C      | idle |
input_ids        a0 a1 a2   b0 b1    c0 c1 c2 c3       0
position_ids      0  1  2    0  1     0  1  2  3       0
coefficients      0  x  0    y  0     0  0  z  0       0       a of the token that each position predicts
copies            1  1  1    1  1     1  1  1  1       0       also 0 in padding
pack_lengths            5                4             1
```

If a pack's last token is only a label (`PackDataset.last_is_label`), it is dropped here and `next_ids` keeps it:

```
pack             a0 a1 a2 | b0 b1        input_ids  a0 a1 a2 b0        next_ids  a1 a2 b0 b1
```

With `data.share_prefixes`, input_ids and position_ids of a pack are those of its documents' own tokens, and loss_mask,
category_ids and loss_weight those of their whole texts (verl_ext.parallel.trees). A row may then be a target of several
documents: their coefficients add up, and `targets` lists each document's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec, pack_coefficients, shift_left
from verl_ext.metrics import ONE_BIN, LengthBins, StepSums
from verl_ext.packing.plan import offsets_of
from verl_ext.parallel.trees import PackDocuments, read_documents, text_rows

Pack = Mapping[str, torch.Tensor]

# Keys that verl's engine reads from every batch.
_ENGINE_FLAGS = {"use_remove_padding": True, "pad_mode": DatasetPadMode.NO_PADDING, "temperature": 1.0}


class PackTargets(NamedTuple):
    """The targets of one pack's documents, int64[K] each.

    rows: the position in the step that predicts each target; category: its dense category, 0 for none; document: the
    document of the pack that it belongs to.
    """

    rows: NDArray[np.int64]
    category: NDArray[np.int64]
    document: NDArray[np.int64]


Columns = dict[str, NDArray[Any]]  # of one pack's targets, [K] each: those of PackTargets, and others of a loss


@dataclass
class Targets:
    """The targets of a step's documents, one after the other, if a row may be a target of several.

    Attributes:
        columns: those of PackTargets, and others of a loss, [K] each.
        counts: the number of targets of each pack slot.
        documents: the number of documents of each pack slot.
    """

    columns: dict[str, torch.Tensor]
    counts: list[int]
    documents: list[int]

    @classmethod
    def from_packs(cls, packs: Sequence["LaidOut"]) -> "Targets":
        """Join the targets of packs, whose rows count from a pack's first token."""
        begins = np.cumsum([0, *(len(pack.columns[0]) for pack in packs)])[:-1]
        counts = [len(pack.targets["rows"]) for pack in packs]
        names = packs[0].targets
        columns = {name: torch.from_numpy(np.concatenate([pack.targets[name] for pack in packs])) for name in names}
        columns["rows"] += torch.from_numpy(np.repeat(begins, counts))
        return cls(columns, counts, [pack.documents for pack in packs])

    def part(self, first: int, last: int) -> slice:
        """Return the targets of pack slots [first, last)."""
        return slice(sum(self.counts[:first]), sum(self.counts[:last]))

    def pin_memory(self) -> "Targets":
        """Return a copy in pinned memory."""
        return replace(self, columns={name: values.pin_memory() for name, values in self.columns.items()})

    def of_slots(self, first: int, last: int, begin: int) -> dict[str, torch.Tensor]:
        """Return the columns of pack slots [first, last), whose tokens begin at `begin`, jagged by pack.

        Their documents are numbered one after the other.
        """
        part, counts = self.part(first, last), self.counts[first:last]
        columns = {f"target_{name}": values[part] for name, values in self.columns.items()}
        columns["target_rows"] = columns["target_rows"] - begin
        before = np.cumsum([0, *self.documents[first:last]])[:-1]
        columns["target_document"] = columns["target_document"] + torch.from_numpy(np.repeat(before, counts))
        offsets = torch.from_numpy(np.cumsum([0, *counts]))
        return {key: torch.nested.nested_tensor_from_jagged(values, offsets) for key, values in columns.items()}


@dataclass
class StepBatch:
    """A rank's share of one step, N tokens in all packs.

    Attributes:
        input_ids, position_ids: int64[N].
        coefficients: float32[N], a_t before normalization, of the token that each position predicts.
        category_index: int64[N], the dense category of that token; 0 for a target without a category, -1 for no target.
        copies: int64[N], the number of documents that have each token; 0 for padding and idle tokens.
        pack_lengths: the number of tokens in each pack slot, including idle slots.
        counts: float64[5 + C + 1]: normaliser, tokens of documents, computed tokens, target tokens, packs, target
            tokens by category slot.
        normalisers: float64[1], this rank's term of Z.
        next_ids: int64[N], the token after each position if it is not always the next of input_ids; else None.
        targets: every document's targets if documents share tokens; else None.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    coefficients: torch.Tensor
    category_index: torch.Tensor
    copies: torch.Tensor
    pack_lengths: list[int]
    counts: torch.Tensor
    normalisers: torch.Tensor
    next_ids: torch.Tensor | None = None
    targets: Targets | None = None

    @property
    def categories(self) -> int:
        """C, the number of categories."""
        return len(self.counts) - _COUNTS - 1

    def targets_of(self, slot: int, ends: NDArray[np.int64]) -> PackTargets:
        """Return a pack slot's targets; `ends` int64[D] are those of its documents if they share no tokens."""
        if self.targets is not None:
            part, columns = self.targets.part(slot, slot + 1), self.targets.columns
            return PackTargets(*(columns[name][part].numpy() for name in PackTargets._fields))
        begin = sum(self.pack_lengths[:slot])
        rows = begin + np.flatnonzero(self.category_index.numpy()[begin : begin + self.pack_lengths[slot]] >= 0)
        document = np.searchsorted(ends, rows - begin + 1, side="right")  # the document of the predicted token
        return PackTargets(rows, self.category_index.numpy()[rows], document)

    def count(self, sums: StepSums) -> None:
        """Add the counts to the sums of a step."""
        sums.add_counts(self.counts)

    def pin_memory(self) -> "StepBatch":
        """Return a copy in pinned memory, as torch's loader asks."""
        optional = [name for name in ("next_ids", "targets") if getattr(self, name) is not None]
        names = (*_COLUMNS, "counts", "normalisers", *optional)
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})

    def micro_batches(self, size: int, **flags: Any) -> Iterator[TensorDict]:
        """Cut the step into verl's jagged micro-batches of ``size`` packs, with flags."""
        edges = np.concatenate([[0], np.cumsum(self.pack_lengths)])
        columns = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "loss_coefficients": self.coefficients,
            "category_index": self.category_index,
            "copies": self.copies,
        }
        if self.next_ids is not None:
            columns["next_ids"] = self.next_ids
        for first in range(0, len(self.pack_lengths), size):
            cuts = edges[first : first + size + 1]
            offsets = torch.from_numpy(cuts - cuts[0])
            tensors: dict[str, Any] = {
                key: torch.nested.nested_tensor_from_jagged(values[cuts[0] : cuts[-1]], offsets)
                for key, values in columns.items()
            }
            if self.targets is not None:
                tensors |= self.targets.of_slots(first, first + len(cuts) - 1, int(cuts[0]))
            yield tu.get_tensordict(tensors, {**_ENGINE_FLAGS, **self.flags_of(first, first + len(cuts) - 1), **flags})

    def flags_of(self, first: int, last: int) -> dict[str, Any]:
        """Return what is no column of pack slots [first, last)."""
        return {}


_COLUMNS = ("input_ids", "position_ids", "coefficients", "category_index", "copies")
_COUNTS = 5  # before those of categories


@dataclass(frozen=True)
class StepCollator:
    """A collator in the loader's workers: packs to a :class:`StepBatch`.

    Attributes:
        loss: the configured loss.
        categories: the fixed category table of the dataset.
        idle_tokens: the number of tokens that an idle rank runs.
        last_is_label: whether a pack's last token is only predicted.
        shares_prefixes: whether documents of a pack may begin with tokens of the document before.
        bins: the bins of document lengths; of several, a target's slot tells its category and its document's bin.
    """

    loss: LossSpec
    categories: CategoryTable
    idle_tokens: int = 1
    last_is_label: bool = False
    shares_prefixes: bool = False
    bins: LengthBins = ONE_BIN

    def __post_init__(self) -> None:
        assert len(self.loss.category_weights) == len(self.categories.ids) + 1, (
            "a weight for each category and for none"
        )

    def __call__(self, packs: Sequence[Pack | None]) -> StepBatch:
        """Collate packs from a `PackDataset`; None stands for an idle rank."""
        return StepBatch(**self.joined([self.idle() if pack is None else self.laid_out(pack) for pack in packs]))

    def joined(self, packs: Sequence["LaidOut"]) -> dict[str, Any]:
        """Return the attributes of a StepBatch of packs that were laid out."""
        names = (*_COLUMNS, "next_ids") if self.last_is_label else _COLUMNS
        columns = zip(*(pack.columns for pack in packs), strict=True)
        flat = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns)
        sums = (torch.from_numpy(np.sum(parts, axis=0)) for parts in zip(*(pack[2:4] for pack in packs), strict=True))
        return {
            **dict(zip(names, map(torch.from_numpy, flat), strict=True)),
            **dict(zip(("counts", "normalisers"), sums, strict=True)),
            "pack_lengths": [len(pack.columns[0]) for pack in packs],
            "targets": Targets.from_packs(packs) if self.lists_targets else None,
        }

    @property
    def lists_targets(self) -> bool:
        """Whether a batch lists the targets of each document."""
        return self.shares_prefixes

    def laid_out(self, pack: Pack) -> "LaidOut":
        """Lay out a pack."""
        texts = PackTexts.read(pack, self.categories, self.shares_prefixes)
        # Coefficients depend on whole documents, so they are computed on texts and given to the rows afterwards.
        share = pack_coefficients(self.loss, *texts.of_loss, texts.columns.get("loss_weight"), texts.real)
        return self.of_texts(texts, {"coefficients": share.coefficients}, [share.normaliser], texts.is_target)

    def of_texts(
        self, texts: "PackTexts", of_tokens: Columns, normalisers: Sequence[float], is_counted: NDArray[np.int64]
    ) -> "LaidOut":
        """Lay out the rows of texts.

        of_tokens: columns of the texts' tokens, [S] each: `coefficients`, and others that the list of targets has.
        is_counted: int64[S], 1 for the targets of the categories' means.
        """
        ids, positions, less = texts.columns["input_ids"], texts.columns["position_ids"], int(self.last_is_label)
        tokens = int(texts.offsets[texts.real])
        numbers = normalisers[0], tokens - less, len(ids) - texts.padding - less, texts.is_target.sum(), 1
        slots, lengths = len(self.categories.ids) + 1, np.diff(texts.offsets)
        slot = texts.category + np.repeat(self.bins.index(lengths), lengths) * slots
        of_category = np.bincount(slot[is_counted == 1], minlength=slots * len(self.bins))
        # The model's output at a position predicts the next token.
        predicted = shift_left(np.where(texts.is_target == 1, slot + 1, 0), texts.offsets) - 1
        of_tokens = {name: shift_left(values, texts.offsets) for name, values in of_tokens.items()}
        coefficients, targets = of_tokens.pop("coefficients"), _NO_TARGETS
        copies = (np.arange(len(ids)) < len(ids) - texts.padding).astype(np.int64)
        if self.lists_targets:
            rows, predicts = np.concatenate(text_rows(texts.documents)), np.flatnonzero(predicted >= 0)
            document = np.searchsorted(texts.offsets, predicts, side="right") - 1
            targets = {"rows": rows[predicts], "category": predicted[predicts], "document": document}
            targets |= {name: values[predicts] for name, values in of_tokens.items()}
            coefficients = np.bincount(rows, coefficients, len(ids))
            copies = np.bincount(rows[:tokens], minlength=len(ids))
            predicted = np.full(len(ids), -1)
            predicted[targets["rows"][::-1]] = targets["category"][::-1]  # of the first document that has the row
        columns: tuple[NDArray[Any], ...] = (ids, positions, coefficients.astype(np.float32), predicted, copies)
        columns = (*(x[:-1] for x in columns), ids[1:]) if less else columns
        counts = np.concatenate([numbers, of_category]).astype(np.float64)
        return LaidOut(columns, targets, counts, np.asarray(normalisers), len(texts.offsets) - 1)

    def idle(self) -> "LaidOut":
        """Make an idle rank's tokens, which only let others' collectives complete."""
        zeros = np.zeros(self.idle_tokens, dtype=np.int64)
        positions = np.maximum(np.arange(self.idle_tokens) - 1, 0)
        columns = (zeros, positions, zeros.astype(np.float32), zeros - 1, zeros, zeros)
        counts = np.zeros(_COUNTS + (len(self.categories.ids) + 1) * len(self.bins))
        return LaidOut(columns[: len(_COLUMNS) + self.last_is_label], _NO_TARGETS, counts, np.zeros(1), 0)


_NO_TARGETS: Columns = dict.fromkeys(PackTargets._fields, np.zeros(0, np.int64))


class LaidOut(NamedTuple):
    """A pack's columns in a StepBatch, its targets, counts and normalisers, and the number of its documents."""

    columns: tuple[NDArray[Any], ...]
    targets: Columns
    counts: NDArray[np.float64]
    normalisers: NDArray[np.float64]
    documents: int


@dataclass(frozen=True)
class PackTexts:
    """The whole texts of a pack's documents, S tokens together.

    Attributes:
        columns: those of the pack; loss_mask, category_ids and loss_weight are [S].
        documents: their own tokens.
        offsets: int64[D + 1], of the texts; padding is a last pseudo-document.
        real: the number of documents without the padding.
        padding: the number of tokens of padding.
        category: int64[S], the dense category of each target, 0 for other tokens.
    """

    columns: Columns
    documents: PackDocuments
    offsets: NDArray[np.int64]
    real: int
    padding: int
    category: NDArray[np.int64]

    @classmethod
    def read(cls, pack: Pack, categories: CategoryTable, shares_prefixes: bool) -> "PackTexts":
        """Read a pack of a `PackDataset`; raise ValueError for unexpected positions."""
        columns = {key: value.numpy() for key, value in pack.items()}
        mask, documents = columns.get("attention_mask"), read_documents(columns["position_ids"])
        if not shares_prefixes and documents.begins.any():
            raise ValueError(
                "data.custom_cls.name must give packs whose position_ids restart at 0 in every document, unless its "
                f"facts() have `shared`; got {documents.begins[documents.begins > 0][0]}"
            )
        padding = 0 if mask is None else len(mask) - int(mask.sum())
        offsets = offsets_of(documents.lengths + documents.begins)
        real = int((offsets[:-1] < offsets[-1] - padding).sum())
        category = categories.index(columns["category_ids"]) * columns["loss_mask"]
        return cls(columns, documents, offsets, real, padding, category)

    @property
    def is_target(self) -> NDArray[np.int64]:
        """int64[S]: 1 for a target."""
        return self.columns["loss_mask"]

    @property
    def of_loss(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The targets, categories and offsets."""
        return self.is_target, self.category, self.offsets
