"""The loss watched for spikes: which documents a step had whose loss stands out, or that was skipped.

    loss > trainer.spike_factor · median of the last 64 losses of trained steps (once there are 8)

    spikes.jsonl    one line a step, beside the run's checkpoints: step, reason ("spike" or "skipped"), loss, reference
                    (the median), the packs of all data-parallel ranks, and their documents, the worst first

A document is a row of a dataset's folder: {"folder", "row", "start", "tokens", "target_tokens", "category", "pack",
"loss"}. start is above 0 for a piece of a document that was split; category is that of most of its targets, null for
none; loss is the mean over its targets, null where it has none or the step has no loss. A loss that is not finite is
"nan" or "inf".

Nothing is summed by document while training goes on: ℓ_t of the step's tokens is kept on the device, 4 bytes a token,
and read by the steps that are written.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from verl_ext.checkpoint.layout import SPIKES
from verl_ext.checkpoint.resume import RunState
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.loader import DataParallelRank
from verl_ext.trainer.setup import Run
from verl_ext.trainer.tracking import continued_lines
from verl_ext.values import reason_of

WINDOW, LEAST = 64, 8  # losses that the median is of, and the fewest that it is taken of

Document = dict[str, Any]


class SpikeWatch:
    """Looks at every step's loss.

    Args:
        run: with the plan of packs that the steps follow.
        rank: this rank's part of it.
        state: where recent losses and the number of spikes are kept; a checkpoint holds them.
        first_step: steps done before; the file keeps their lines.
    """

    def __init__(self, run: Run, rank: DataParallelRank, state: RunState, first_step: int) -> None:
        assert run.config.trainer.spike_factor is not None
        self.factor: float = run.config.trainer.spike_factor
        self._run, self._rank, self._state = run, rank, state
        self._writes = dist.get_rank() == 0
        if self._writes:
            continued_lines(run.output / SPIKES, first_step)

    def see(
        self, step: int, batch: StepBatch, loss: float, nll: Sequence[torch.Tensor] | None, skipped: bool
    ) -> str | None:
        """Check a step, and write it to the file if it is a spike or was skipped; the line to print then.

        Every rank calls it: all data-parallel ranks have the same loss.

        Args:
            step: counted from 1.
            batch: this rank's share of it.
            loss: of all ranks, NaN where nothing was computed.
            nll: ℓ_t of the micro-batches of `batch`, None where nothing was computed.
            skipped: the parameters stayed as they were.
        """
        recent = self._state.recent_losses
        reference = statistics.median(recent) if len(recent) >= LEAST else None
        is_spike = not skipped and reference is not None and loss > self.factor * reference
        if not skipped:
            self._state.recent_losses = [*recent, loss][-WINDOW:]
        self._state.spikes += is_spike
        if not (is_spike or skipped):
            return None
        packs = self._run.plan.rank_packs(step - 1, self._rank.rank, self._rank.size)
        documents = sorted(self._rank.gather(self._documents(packs, batch, nll)), key=_badness)
        reason = "spike" if is_spike else "skipped"
        if self._writes:
            facts = {"step": step, "reason": reason, "loss": _written(loss), "reference": reference}
            numbers = self._run.plan.packs(step - 1).tolist()
            self._write({**facts, "packs": numbers, "documents": [_readable(document) for document in documents]})
        over = f" is over {self.factor:g} × the median {reference:.4g}" if is_spike else ", skipped"
        return f"step {step}: loss {loss:.4g}{over}; its documents are in {SPIKES}{worst_line(documents)}"

    def _documents(
        self, packs: Sequence[int | None], batch: StepBatch, nll: Sequence[torch.Tensor] | None
    ) -> list[Document]:
        """Those of this rank's packs, with their losses where the step has some."""
        losses = None if nll is None else torch.cat(list(nll)).double().cpu().numpy()
        category, found, begin = batch.category_index.numpy(), [], 0
        for pack, length in zip(packs, batch.pack_lengths, strict=True):
            part = slice(begin, begin + length)
            if pack is not None:
                found += self._of_pack(pack, category[part], None if losses is None else losses[part])
            begin += length
        return found

    def _of_pack(self, pack: int, category: NDArray[Any], losses: NDArray[Any] | None) -> list[Document]:
        """The documents of a pack; category and losses [T] are those of the token that each position predicts."""
        dataset = self._run.train_set
        places = dataset.documents_of(pack)
        ends = np.cumsum([place.tokens for place in places])
        predicts = np.flatnonzero(category >= 0)
        of_document = np.searchsorted(ends, predicts + 1, side="right")  # where the predicted token lies
        names = (None, *dataset.categories.names)
        found = []
        for number, place in enumerate(places):
            own = predicts[of_document == number]
            found.append(
                {
                    **place._asdict(),
                    "target_tokens": len(own),
                    "category": names[np.bincount(category[own]).argmax()] if len(own) else None,
                    "pack": pack,
                    "loss": float(losses[own].mean()) if losses is not None and len(own) else None,
                }
            )
        return found

    def _write(self, facts: dict[str, Any]) -> None:
        path = self._run.output / SPIKES
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            print(f"warning: {path} cannot be written: {reason_of(error)}", file=sys.stderr, flush=True)


def worst_line(documents: Sequence[Document]) -> str:
    """The words that name the worst of documents, the worst first; none where all with a loss are alike."""
    losses = [document for document in documents if document["loss"] is not None]
    if not losses or (len(losses) > 1 and _badness(losses[0]) == _badness(losses[-1])):
        return ""
    return "; worst: row {row} of {folder}, loss {loss:.4g}".format(**losses[0])


def _badness(document: Document) -> tuple[bool, float]:
    """The order of documents: losses that are not finite, then the highest, then those without one."""
    loss = document["loss"]
    return loss is None, 0.0 if loss is None else -loss if math.isfinite(loss) else -math.inf


def _readable(document: Document) -> Document:
    loss = document["loss"]
    return document if loss is None else {**document, "loss": _written(loss)}


def _written(loss: float) -> float | str:
    return loss if math.isfinite(loss) else str(loss)
