"""The hook that lists the documents of loss spikes and skipped steps.

    loss > trainer.spike_factor · median of the last 64 losses of trained steps (once there are 8)

    spikes.jsonl    a line per step, beside the run's checkpoints: step, reason ("spike" or "skipped"), loss, reference
                    (the median), the packs of all data-parallel ranks, and their documents, the worst first

A document is a row of a dataset's folder: {"folder", "row", "start", "tokens", "target_tokens", "category", "pack",
"loss"}. start is above 0 for a later piece of a split document. category is the most frequent one of its targets, or
null. loss is the mean over its targets; null if it has no targets or the step has no loss. A non-finite loss is "nan"
or "inf".

Training does not sum by document: the device keeps ℓ_t of the step's tokens, 4 bytes per token, and only the steps that
are written read it.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.checkpoint.layout import SPIKES
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.hooks.base import Hook, StepOutcome, Training
from verl_ext.trainer.hooks.tracking import append_lines, continued_lines

WINDOW, LEAST = 64, 8  # the number of losses for the median, and the least number

Document = dict[str, Any]


class SpikeHook(Hook):
    """The hook that watches every step's loss if `trainer.spike_factor` is set.

    Its state is the number of spikes and the losses of the last trained steps.
    """

    state_names = ("spikes", "recent_losses")

    def __init__(self, trainer: Training) -> None:
        super().__init__(trainer)
        self.spikes, self.recent_losses = 0, list[float]()

    def pre_train(self) -> None:
        """Keep the file's lines of finished steps."""
        if self.trainer.is_rank0 and self.options.spike_factor is not None:
            continued_lines(self.run.output / SPIKES, self.trainer.first_step)

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Write spikes and skipped steps, on which all data-parallel ranks agree."""
        factor, rank, recent = self.options.spike_factor, self.trainer.rank, self.recent_losses
        if factor is None:
            return
        loss = math.nan if outcome.sums is None else outcome.sums.loss
        reference = statistics.median(recent) if len(recent) >= LEAST else None
        is_spike = not outcome.skipped and reference is not None and loss > factor * reference
        if not outcome.skipped:
            self.recent_losses = [*recent, loss][-WINDOW:]
        self.spikes += is_spike
        outcome.metrics["train/spikes"] = self.spikes
        if not (is_spike or outcome.skipped):
            return
        packs = self.run.plan.rank_packs(step - 1, rank.rank, rank.size)
        documents = sorted(rank.gather(self._documents(packs, outcome)), key=_badness)
        if self.trainer.is_rank0:
            facts: dict[str, Any] = {"step": step, "reason": "spike" if is_spike else "skipped", "loss": _as_json(loss)}
            facts |= {"reference": reference, "packs": self.run.plan.packs(step - 1).tolist()}
            facts["documents"] = [{**one, "loss": _as_json(one["loss"])} for one in documents]
            path = self.run.output / SPIKES
            append_lines(path, [facts], f"{path} lacks the documents of step {step}")
        over = f" is over {factor:g} × the median {reference:.4g}" if is_spike else ", skipped"
        self.trainer.progress.say(
            f"step {step}: loss {loss:.4g}{over}; its documents are in {SPIKES}{worst_line(documents)}"
        )

    def _documents(self, packs: Sequence[int | None], outcome: StepOutcome) -> list[Document]:
        """List the documents of this rank's packs, with losses if known."""
        losses = None if outcome.nll is None else torch.cat(outcome.nll).double().cpu().numpy()
        found = []
        for slot, pack in enumerate(packs):
            if pack is not None:
                found += self._of_pack(pack, slot, outcome.batch, losses)
        return found

    def _of_pack(self, pack: int, slot: int, batch: StepBatch, losses: NDArray[Any] | None) -> list[Document]:
        """List a pack's documents; losses [N] are those of the step's tokens."""
        dataset = self.run.train_set
        places = dataset.documents_of(pack)
        targets = batch.targets_of(slot, np.cumsum([place.tokens for place in places]))
        names = (None, *dataset.categories.names)
        found = []
        for number, place in enumerate(places):
            own = np.flatnonzero(targets["document"] == number)
            found.append(
                {
                    **place._asdict(),
                    "target_tokens": len(own),
                    "category": names[np.bincount(targets["slot"][own]).argmax()] if len(own) else None,
                    "pack": pack,
                    "loss": float(losses[targets["row"][own]].mean()) if losses is not None and len(own) else None,
                }
            )
        return found


def worst_line(documents: Sequence[Document]) -> str:
    """Name the first document, the worst; "" if all are equally bad."""
    losses = [document for document in documents if document["loss"] is not None]
    if not losses or (len(losses) > 1 and _badness(losses[0]) == _badness(losses[-1])):
        return ""
    return "; worst: row {row} of {folder}, loss {loss:.4g}".format(**losses[0])


def _badness(document: Document) -> tuple[bool, float]:
    """Return a sort key: non-finite losses first, then high ones, then none."""
    loss = document["loss"]
    return loss is None, 0.0 if loss is None else -loss if math.isfinite(loss) else -math.inf


def _as_json(loss: float | None) -> float | str | None:
    return loss if loss is None or math.isfinite(loss) else str(loss)
