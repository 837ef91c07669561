"""The collator of a rank's packs: it lays out their tokens and lists their targets."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data import CategoryTable, PackDataset
from verl_ext.losses import LossOptions, LossSpec
from verl_ext.metrics import COUNTS, ONE_BIN, LengthBins, StepSums
from verl_ext.parallel.trees import text_rows
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.mismatched import mismatched_pack
from verl_ext.trainer.objective import Objective
from verl_ext.trainer.texts import Columns, Pack, PackTexts


@dataclass(frozen=True)
class StepCollator:
    """A collator in the loader's workers: packs to a :class:`StepBatch`.

    Attributes:
        loss: the configured mean of token losses.
        categories: the fixed category table of the dataset.
        idle_tokens: the number of tokens that an idle rank runs.
        last_is_label: whether a pack's last token is only predicted.
        shares_prefixes: whether documents of a pack may begin with tokens of the document before.
        bins: the bins of document lengths; of several, a target's slot tells its category and its document's bin.
        objective: what reads the columns of a pack.
    """

    loss: LossSpec
    categories: CategoryTable
    idle_tokens: int = 1
    last_is_label: bool = False
    shares_prefixes: bool = False
    bins: LengthBins = ONE_BIN
    objective: Objective = field(default_factory=lambda: Objective(LossOptions()))

    def __post_init__(self) -> None:
        assert len(self.loss.category_weights) == len(self.categories.ids) + 1, (
            "a weight for each category and for none"
        )

    @classmethod
    def of_dataset(cls, objective: Objective, dataset: PackDataset, **others: Any) -> "StepCollator":
        """Return the collator of a dataset's packs; others: fields beside those that the data decides."""
        facts, categories = dataset.facts(), dataset.categories
        shares, spec = facts.shared is not None, objective.options.spec(categories.names)
        others |= {"last_is_label": facts.last_is_label, "shares_prefixes": shares, "objective": objective}
        return cls(spec, categories, **others)

    def __call__(self, packs: Sequence[Pack | None]) -> StepBatch:
        """Collate packs from a `PackDataset`; None stands for an idle rank."""
        batch = StepBatch.joined([self.idle() if pack is None else self.laid_out(pack) for pack in packs])
        if (objective := self.objective.mismatched) is None:
            return batch
        others = [None if pack is None else mismatched_pack(pack, self.shares_prefixes) for pack in packs]
        known = [float(pack["mismatched_reference"]) for pack in packs if pack and "mismatched_reference" in pack]
        return replace(batch, mismatched=replace(self, objective=objective)(others), mismatched_reference=sum(known))

    def laid_out(self, pack: Pack) -> StepBatch:
        """Lay out the rows of a pack's texts and list their targets."""
        # Columns of the loss depend on whole documents, so they are those of texts, which may share rows.
        texts = PackTexts.read(pack, self.categories, self.shares_prefixes)
        assert not texts.is_target[texts.offsets[:-1]].any(), "a document's first token is never a target"
        of_loss = self.objective.columns(texts, self.loss)
        ids, positions, less = texts.columns["input_ids"], texts.columns["position_ids"], int(self.last_is_label)
        shared, tokens = texts.documents.begins.any(), int(texts.offsets[texts.real])
        row_of = np.concatenate(text_rows(texts.documents)) if shared else np.arange(len(ids))
        slots, lengths = len(self.categories.ids) + 1, np.diff(texts.offsets)
        slot = texts.category + np.repeat(self.bins.index(lengths), lengths) * slots
        # The model's output at a token predicts the next one of the text.
        places = np.flatnonzero(texts.is_target)
        document = np.repeat(np.arange(len(lengths)), lengths)[places]
        targets = {"row": row_of[places - 1], "slot": slot[places], "document": document}
        targets |= {name: values[places] for name, values in of_loss.tokens.items()}
        # Padding counts for nothing, and a last token that is only predicted is not computed.
        counts = self._counts()
        counts.normalisers.add_(torch.tensor(of_loss.normalisers, dtype=torch.float64))
        numbers = tokens - less, len(ids) - texts.padding - less, len(places), 1
        for name, number in zip(COUNTS, numbers, strict=True):
            counts[name].add_(number)
        counted = slot[of_loss.is_counted == 1]
        counts["targets"].add_(torch.from_numpy(np.bincount(counted, minlength=counts.slots)))
        return self._of_one_pack(
            (ids, positions, np.bincount(row_of[:tokens], minlength=len(ids))),
            targets,
            of_loss.documents,
            len(texts.offsets) - 1,
            counts,
        )

    def idle(self) -> StepBatch:
        """Make an idle rank's tokens, which only let others' collectives complete."""
        zeros = np.zeros(self.idle_tokens + self.last_is_label, dtype=np.int64)
        columns = zeros, np.maximum(np.arange(len(zeros)) - 1, 0), zeros
        nothing = self.objective.nothing
        targets = {**dict.fromkeys(("row", "slot", "document"), zeros[:0]), **nothing.tokens}
        return self._of_one_pack(columns, targets, nothing.documents, 0, self._counts())

    def _counts(self) -> StepSums:
        return StepSums.zeros((len(self.categories.ids) + 1) * len(self.bins), "cpu", self.objective.measures)

    def _of_one_pack(
        self, tokens: tuple[NDArray[Any], ...], targets: Columns, documents: Columns, number: int, counts: StepSums
    ) -> StepBatch:
        """Return a batch of one pack of `number` documents; tokens: ids, positions and copies."""
        ids, *_ = columns = [torch.from_numpy(values) for values in tokens]
        input_ids, position_ids, copies = (values[: len(ids) - self.last_is_label] for values in columns)
        return StepBatch(
            input_ids=input_ids,
            position_ids=position_ids,
            copies=copies,
            targets={name: torch.from_numpy(values) for name, values in targets.items()},
            documents=documents,
            pack_lengths=[len(input_ids)],
            target_counts=[len(targets["row"])],
            document_counts=[number],
            counts=counts,
            shares_prefixes=self.shares_prefixes,
            next_ids=ids[1:] if self.last_is_label else None,
        )
