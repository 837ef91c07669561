"""A rank's packs of a step as flat tensors, and a list of their targets.

```
packs            |  doc A  | doc B |      doc C      | idle |
input_ids        a0 a1 a2   b0 b1    c0 c1 c2 c3       0
position_ids      0  1  2    0  1     0  1  2  3       0
copies            1  1  1    1  1     1  1  1  1       0       also 0 in padding
pack_lengths            5                4             1

targets          a2  b1  |  c3                                 each is predicted at the token before it
row               1   3  |   7
document          0   1  |   2
coefficient       x   y  |   z                                 a_t; or other columns that the loss makes
```

If a pack's last token is only a label (`PackDataset.last_is_label`), it is dropped here and `next_ids` keeps it:

```
pack             a0 a1 a2 | b0 b1        input_ids  a0 a1 a2 b0        next_ids  a1 a2 b0 b1
```

With `data.share_prefixes`, input_ids and position_ids of a pack are those of its documents' own tokens, and loss_mask,
category_ids and loss_weight those of their whole texts (verl_ext.parallel.trees). A row may then be that of several
documents' targets, whose coefficients add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from verl_ext.metrics import StepSums
from verl_ext.trainer.loss import StepLoss
from verl_ext.trainer.texts import Columns

# Keys that verl's engine reads from every batch.
_ENGINE_FLAGS = {"use_remove_padding": True, "pad_mode": DatasetPadMode.NO_PADDING, "temperature": 1.0}


@dataclass
class StepBatch:
    """A rank's share of one step: N tokens, K targets and D documents in all packs.

    Attributes:
        input_ids, position_ids: int64[N].
        copies: int64[N], the number of documents that have each token; 0 for padding and idle tokens.
        targets: columns of the targets, [K] each, one document's after the other: `row`, the place among the N tokens
            that predicts it; `slot`, its category slot; `document`, among the D; and those of the loss.
        documents: columns of the documents that the loss reads, [D] each; none for token losses.
        pack_lengths, target_counts, document_counts: the N, K and D of each pack slot, including idle slots.
        counts: what the packs alone add to the sums of a step, Z and the counts of tokens.
        shares_prefixes: whether documents may begin with tokens of the document before.
        next_ids: int64[N], the token after each position if it is not always the next of input_ids; else None.
        mismatched: the answers of kto's baseline; None for other losses.
        mismatched_reference: the sum of their reference's sums.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    copies: torch.Tensor
    targets: Mapping[str, torch.Tensor]
    documents: Columns
    pack_lengths: list[int]
    target_counts: list[int]
    document_counts: list[int]
    counts: StepSums
    shares_prefixes: bool = False
    next_ids: torch.Tensor | None = None
    mismatched: "StepBatch | None" = None
    mismatched_reference: float = 0.0

    @property
    def normalisers(self) -> torch.Tensor:
        """float64[terms]: this rank's part of Z of each term."""
        return self.counts.normalisers

    @property
    def _tokens(self) -> dict[str, torch.Tensor]:
        """The columns of the tokens."""
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value)}

    @classmethod
    def joined(cls, packs: Sequence["StepBatch"]) -> "StepBatch":
        """Join batches, whose rows and documents each count from its own first."""
        first, lists = packs[0], ("pack_lengths", "target_counts", "document_counts")
        if len(packs) == 1:
            return first
        whole: dict[str, Any] = {name: torch.cat([getattr(pack, name) for pack in packs]) for name in first._tokens}
        whole["targets"] = {name: torch.cat([pack.targets[name] for pack in packs]) for name in first.targets}
        for name, numbers in (("row", "pack_lengths"), ("document", "document_counts")):
            before = np.cumsum([0, *(sum(getattr(pack, numbers)) for pack in packs)])[:-1]
            whole["targets"][name] += torch.from_numpy(before.repeat([sum(pack.target_counts) for pack in packs]))
        whole["documents"] = {
            name: np.concatenate([pack.documents[name] for pack in packs]) for name in first.documents
        }
        whole |= {name: [number for pack in packs for number in getattr(pack, name)] for name in lists}
        return replace(first, **whole, counts=reduce(add, (pack.counts for pack in packs)))

    def targets_of(self, slot: int, ends: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns of one pack's targets; `document` counts from the pack's first document.

        ends: int64[D], those of the documents as the dataset counts them, unless they share tokens.
        """
        first, tokens = sum(self.target_counts[:slot]), sum(self.pack_lengths[:slot])
        columns = {name: x[first : first + self.target_counts[slot]].numpy() for name, x in self.targets.items()}
        document = columns["document"] - sum(self.document_counts[:slot])
        if not self.shares_prefixes:
            document = np.searchsorted(ends, columns["row"] - tokens + 1, side="right")
        return {**columns, "document": document}

    def pin_memory(self) -> "StepBatch":
        """Return a copy in pinned memory, as torch's loader asks."""
        pinned: dict[str, Any] = {n: part.pin_memory() for n, part in vars(self).items() if hasattr(part, "pin_memory")}
        return replace(self, **pinned, targets={name: values.pin_memory() for name, values in self.targets.items()})

    def micro_batches(self, size: int, loss: StepLoss | None = None, **flags: Any) -> Iterator[TensorDict]:
        """Cut the step into verl's jagged micro-batches of ``size`` packs; add the engine's and the loss's flags.

        Rows and documents of targets count from the micro-batch's first.
        """
        of_engine = {**_ENGINE_FLAGS, "shares_prefixes": self.shares_prefixes}
        targets = {f"target_{name}": values for name, values in self.targets.items()}
        for first in range(0, len(self.pack_lengths), size):
            packs = slice(first, first + size)
            row, document = sum(self.pack_lengths[:first]), sum(self.document_counts[:first])
            columns = _jagged(self._tokens, self.pack_lengths, packs)
            columns |= _jagged(targets, self.target_counts, packs, {"target_row": row, "target_document": document})
            own = slice(document, document + sum(self.document_counts[packs]))
            of_loss = {} if loss is None else loss.flags({name: x[own] for name, x in self.documents.items()})
            yield tu.get_tensordict(columns, {**of_engine, **of_loss, **flags})


def _jagged(
    columns: Mapping[str, torch.Tensor], lengths: Sequence[int], packs: slice, begins: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the columns of some packs, jagged by pack.

    lengths: those of all packs. begins: numbers from which columns count.
    """
    begin, edges, first = sum(lengths[: packs.start]), np.cumsum([0, *lengths[packs]]), begins or {}
    part, offsets = slice(begin, begin + int(edges[-1])), torch.from_numpy(edges)
    flat = {name: x[part] - first[name] if first.get(name) else x[part] for name, x in columns.items()}
    return {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in flat.items()}


def rows(values: Any) -> torch.Tensor:
    """View a jagged tensor of rows of one length as ``[B, L]``."""
    lengths = values.offsets().diff()
    assert bool((lengths == lengths[0]).all()), "rows of one length on every rank, or the ranks wait for each other"
    return values.values().view(len(lengths), -1)  # [B, L]


def target_slots(micro_batch: TensorDict) -> torch.Tensor:
    """Return int64``[B, L]``, the category slot of the target that each position predicts; -1 for none."""
    ids = rows(micro_batch["input_ids"])
    slots = torch.full_like(ids, -1)
    slots.view(-1)[micro_batch["target_row"].values()] = micro_batch["target_slot"].values()
    return slots
