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

verl's engine calls the loss function ``fn(model_output, data, dp_group)`` for every micro-batch.
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
from verl_ext.losses import TOKEN_STATS, LossSpec, pack_coefficients, shift_left
from verl_ext.metrics import ONE_BIN, LengthBins, StepSums
from verl_ext.packing.plan import offsets_of
from verl_ext.parallel.trees import read_documents, text_rows
from verl_ext.trainer.hang import watch

Pack = Mapping[str, torch.Tensor]

# Keys that verl's engine reads from every batch.
_ENGINE_FLAGS = {"use_remove_padding": True, "pad_mode": DatasetPadMode.NO_PADDING, "temperature": 1.0}


class PackTargets(NamedTuple):
    """The targets of one pack's documents, int64[K] each, as in :class:`Targets`."""

    rows: NDArray[np.int64]
    category: NDArray[np.int64]
    document: NDArray[np.int64]


@dataclass
class Targets:
    """The targets of the documents of a step that share tokens, pack by pack.

    Attributes:
        rows: int64[K], the position in the step that predicts each target.
        category: int64[K], the dense category of each target, 0 for none.
        document: int64[K], the document of the pack that each target belongs to.
        counts: the number of targets of each pack slot.
    """

    rows: torch.Tensor
    category: torch.Tensor
    document: torch.Tensor
    counts: list[int]

    @classmethod
    def from_packs(cls, packs: Sequence["PackTargets"], lengths: Sequence[int]) -> "Targets":
        """Join the targets of packs of these lengths, whose rows count from a pack's first token."""
        begins = np.cumsum([0, *lengths])[:-1]
        rows, category, document = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*packs, strict=True))
        counts = [len(targets.rows) for targets in packs]
        return cls(rows + torch.from_numpy(np.repeat(begins, counts)), category, document, counts)

    def of_slot(self, slot: int) -> PackTargets:
        """Return the targets of one pack slot."""
        first = sum(self.counts[:slot])
        part = slice(first, first + self.counts[slot])
        return PackTargets(*(values[part].numpy() for values in (self.rows, self.category, self.document)))

    def pin_memory(self) -> "Targets":
        """Return a copy in pinned memory."""
        return replace(self, rows=self.rows.pin_memory(), category=self.category.pin_memory())

    def of_slots(self, first: int, last: int, begin: int) -> dict[str, torch.Tensor]:
        """Return the targets of pack slots [first, last), whose tokens begin at `begin`, jagged by pack."""
        edges = np.concatenate([[0], np.cumsum(self.counts)])[first : last + 1]
        part, offsets = slice(edges[0], edges[-1]), torch.from_numpy(edges - edges[0])
        columns = {"target_rows": self.rows[part] - begin, "target_category": self.category[part]}
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
    next_ids: torch.Tensor | None = None
    targets: Targets | None = None

    @property
    def categories(self) -> int:
        """C, the number of categories."""
        return len(self.counts) - _COUNTS - 1

    def targets_of(self, slot: int, ends: NDArray[np.int64]) -> PackTargets:
        """Return a pack slot's targets; `ends` int64[D] are those of its documents if they share no tokens."""
        if self.targets is not None:
            return self.targets.of_slot(slot)
        begin = sum(self.pack_lengths[:slot])
        rows = begin + np.flatnonzero(self.category_index.numpy()[begin : begin + self.pack_lengths[slot]] >= 0)
        document = np.searchsorted(ends, rows - begin + 1, side="right")  # the document of the predicted token
        return PackTargets(rows, self.category_index.numpy()[rows], document)

    @property
    def normaliser(self) -> torch.Tensor:
        """float64[1]: this rank's term of Z."""
        return self.counts[:1]

    def pin_memory(self) -> "StepBatch":
        """Return a copy in pinned memory, as torch's loader asks."""
        optional = [name for name in ("next_ids", "targets") if getattr(self, name) is not None]
        names = (*_COLUMNS, "counts", *optional)
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
            yield tu.get_tensordict(tensors, {**_ENGINE_FLAGS, **flags})


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
        slots = len(self.categories.ids) + 1
        counts = np.zeros(_COUNTS + slots * len(self.bins))
        columns: list[tuple[np.ndarray, ...]] = []
        targets: list[PackTargets] = []
        for pack in packs:
            columns.append(self._idle() if pack is None else self._laid_out(pack, counts, targets))
            if pack is None:
                targets.append(PackTargets(*[np.zeros(0, np.int64)] * 3))
        flat = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*columns, strict=True))
        lengths = [len(column[0]) for column in columns]
        return StepBatch(
            **dict(zip(self._names, map(torch.from_numpy, flat), strict=True)),
            pack_lengths=lengths,
            counts=torch.from_numpy(counts),
            targets=Targets.from_packs(targets, lengths) if self.shares_prefixes else None,
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return (*_COLUMNS, "next_ids") if self.last_is_label else _COLUMNS

    def _laid_out(self, pack: Pack, counts: np.ndarray, targets: list[PackTargets]) -> tuple[np.ndarray, ...]:
        """Lay out a pack's columns; add its tokens to ``counts``, and its documents' targets to ``targets``."""
        columns = {key: value.numpy() for key, value in pack.items()}
        ids, mask, is_target = columns["input_ids"], columns.get("attention_mask"), columns["loss_mask"]
        padding = 0 if mask is None else len(ids) - int(mask.sum())
        documents = read_documents(columns["position_ids"])
        if not self.shares_prefixes and documents.begins.any():
            raise ValueError(
                "data.custom_cls.name must give packs whose position_ids restart at 0 in every document, unless its "
                f"facts() have `shared`; got {documents.begins[documents.begins > 0][0]}"
            )
        # Coefficients depend on whole documents, so they are computed on texts and given to the rows afterwards.
        offsets = offsets_of(documents.lengths + documents.begins)
        tokens = int(offsets[-1]) - padding
        real = int((offsets[:-1] < tokens).sum())  # without the padding, which is one last pseudo-document
        category = self.categories.index(columns["category_ids"]) * is_target
        share = pack_coefficients(self.loss, is_target, category, offsets, columns.get("loss_weight"), real)
        number = int(is_target.sum())
        if len(self.bins) > 1:
            lengths = np.diff(offsets)
            category = category + np.repeat(self.bins.index(lengths) * (len(self.categories) + 1), lengths) * is_target
        by_category = np.bincount(category, minlength=len(counts) - _COUNTS)
        by_category[0] = number - by_category[1:].sum()  # without the tokens that are not targets
        less = int(self.last_is_label)
        counts[:_COUNTS] += share.normaliser, tokens - less, len(ids) - padding - less, number, 1
        counts[_COUNTS:] += by_category
        coefficients = shift_left(share.coefficients, offsets)
        predicted = shift_left(np.where(is_target == 1, category + 1, 0), offsets) - 1
        copies = (np.arange(len(ids)) < len(ids) - padding).astype(np.int64)
        if self.shares_prefixes:
            rows, predicts = np.concatenate(text_rows(documents)), np.flatnonzero(predicted >= 0)
            document = np.searchsorted(offsets, predicts, side="right") - 1
            of_pack = PackTargets(rows[predicts], predicted[predicts], document)
            targets.append(of_pack)
            coefficients = np.bincount(rows, coefficients, len(ids))
            copies = np.bincount(rows[:tokens], minlength=len(ids))
            predicted = np.full(len(ids), -1)
            predicted[of_pack.rows[::-1]] = of_pack.category[::-1]  # of the first document that has the row
        laid_out = (ids, columns["position_ids"], coefficients.astype(np.float32), predicted, copies)
        return (*(column[:-1] for column in laid_out), ids[1:]) if self.last_is_label else laid_out

    def _idle(self) -> tuple[np.ndarray, ...]:
        """Make an idle rank's tokens, which only let others' collectives complete."""
        zeros = np.zeros(self.idle_tokens, dtype=np.int64)
        positions = np.maximum(np.arange(self.idle_tokens) - 1, 0)
        return (zeros, positions, zeros.astype(np.float32), zeros - 1, zeros, zeros)[: len(self._names)]


class StepLoss:
    """The loss of a step, Σ a_t·ℓ_t / Z, by micro-batches.

    The engine averages gradients over data-parallel ranks, so each share is multiplied by their number; verl's gather
    over sequence-parallel ranks already balances its own group. Nothing here waits for the device.

    Args:
        normaliser: Z of the global step, above 0.
        data_parallel_size: the number of ranks whose shares add up to the loss.
        sums: collects the weighted and category losses; None for steps that are not logged.
        kept: receives each micro-batch's ℓ_t, float32[T] on the device; None: ℓ_t is not kept.
    """

    def __init__(
        self,
        normaliser: float,
        data_parallel_size: int,
        sums: StepSums | None,
        kept: list[torch.Tensor] | None = None,
    ) -> None:
        assert normaliser > 0, "a step without a weighted target is skipped, not divided by 0"
        self.scale = data_parallel_size / normaliser
        self.sums, self.kept = sums, kept

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict]:
        """Return the micro-batch's share of the loss, a scalar, and empty metrics.

        The gradient of a non-finite share is NaN, so the gradient norm, which all ranks share, makes every rank skip
        the step, even if only the loss is infinite.
        """
        watch.mark()
        coefficients = data["loss_coefficients"].values()  # float32[T], for the token that position t predicts
        nll = -model_output["log_probs"].values()  # float32[T]
        if "loss_terms" in model_output:  # from a fused head
            terms = model_output["loss_terms"].values()
        else:  # the infinite nll of a token that is not a target must not become NaN by a product with 0
            terms = torch.where(coefficients != 0, coefficients * nll, torch.zeros_like(nll))
        if self.kept is not None:
            self.kept.append(nll.detach())
        if self.sums is not None:
            self.sums.weighted_loss.add_(terms.detach().double().sum())
            category = data["category_index"].values()
            columns = [nll, *(model_output[name].values() for name in TOKEN_STATS if name in model_output)]
            if "target_rows" in data:  # a row may be a target of several documents
                category = data["target_category"].values()
                columns = [column[data["target_rows"].values()] for column in columns]
            self.sums.add_targets(category, *columns)
        share = terms.sum() * self.scale
        return share * torch.where(share.detach().isfinite(), 1.0, torch.nan), {}
