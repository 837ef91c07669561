"""LongAlign's methods of making an epoch's documents into the micro-batches of each data-parallel rank.

| name     | engine | micro-batches of a rank, and their order                                              |
|----------|--------|---------------------------------------------------------------------------------------|
| naive    | verl's | a fixed number of documents in random order, padded to the longest of them            |
| sorted   | verl's | a fixed number of documents of similar length, padded: sorted batching                |
| naive_1  | verl's | one document, in random order, without padding                                        |
| sorted_1 | verl's | one document; similar lengths in a micro-step: LongAlign's own sorted batching        |
| dynamic  | verl's | verl's balanced partition of the rank's random share under the token budget           |
| packing  | ours   | one best-fit pack, in random order                                                    |
| balanced | ours   | one best-fit pack; similar costs in a micro-step: GLM-Long's sorted packing           |

Two more are available on request: ``single`` is one document a pack on our engine, and ``sorted_packs`` uses packs of
the strategy ``sorted_batch``. A micro-step is the work of all ranks before they meet in the next forward's collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.contestants import Contestant, PackedContestant, Setting
from benchmarks.document_order import dealt_out, sorted_batching
from benchmarks.lengths import Document
from benchmarks.quiet import quiet
from verl_ext.packing import epoch_order, plan_packs
from verl_ext.plugin import register_engine


@dataclass(frozen=True)
class Method:
    """One method on one rank: its contestant, one batch for each optimizer step, and a small ``warm_up`` batch."""

    contestant: Contestant
    engine: str
    batches: list[Any]
    warm_up: Any

    @property
    def by_document(self) -> bool:
        """Whether attention runs document by document; without flash-attn, verl's engine computes whole rows."""
        return self.engine == "ours"

    @property
    def documents(self) -> int:
        """The number of this rank's documents, counted in the loaded batches."""
        return sum(_documents(batch) for batch in self.batches)

    @property
    def targets(self) -> list[int]:
        """The target tokens of each of this rank's loaded batches."""
        return [_targets(batch) for batch in self.batches]


def _documents(batch: Any) -> int:
    if isinstance(batch, dict):
        return len(batch["loss_mask"])
    idle = batch.pack_lengths.count(1)  # no document is that short
    return int((batch.position_ids == 0).sum()) - idle


def _targets(batch: Any) -> int:
    return int(batch["loss_mask"].values().sum() if isinstance(batch, dict) else batch.counts[2])


def build_methods(
    names: Sequence[str], setting: Setting, documents: Sequence[Document], steps: int, micro_batch_size: int, seed: int
) -> dict[str, Method]:
    """Build the methods by name, each with its own copy of the weights; ``documents`` are those of ``setting.data``.

    An epoch has ``steps`` optimizer steps, with equally many documents on verl's engine and, as far as they divide,
    equally many packs on ours. Call it on every rank.
    """
    lengths = np.array([len(document["input_ids"]) for document in documents])
    shuffled, shortest = epoch_order(len(lengths), seed, epoch=0), np.argsort(lengths)

    def stock(name: str, order: np.ndarray, padded: int | None) -> Method:
        contestant, size = setting.stock(name, padded), padded or 1
        shares = dealt_out(order, steps, size, dist.get_world_size())[dist.get_rank()]
        batches = [contestant.collate([documents[index] for index in share]) for share in (*shares, shortest[:size])]
        return Method(contestant, "verl's", batches[:-1], warm_up=batches[-1])

    def by_length(name: str, size: int) -> Method:
        return stock(name, sorted_batching(lengths, size * dist.get_world_size(), seed), size)

    def packed(name: str, strategy: str, balance: str) -> Method:
        packs = plan_packs(lengths, setting.budget, strategy, seed).num_packs
        overrides = (f"data.balance={balance}", f"data.seed={seed}", f"data.train_batch_size={_per_step(packs, steps)}")
        return _of_packs(setting.packed(name, strategy, *overrides))

    builders: dict[str, Callable[[], Method]] = {
        "naive": lambda: stock("naive", shuffled, micro_batch_size),
        "sorted": lambda: by_length("sorted", micro_batch_size),
        "naive_1": lambda: stock("naive_1", shuffled, 1),
        "sorted_1": lambda: by_length("sorted_1", 1),
        "dynamic": lambda: stock("dynamic", shuffled, None),
        "packing": lambda: packed("packing", "best_fit", "none"),
        "balanced": lambda: packed("balanced", "best_fit", "sorted"),
        "single": lambda: packed("single", "none", "none"),
        "sorted_packs": lambda: packed("sorted_packs", "sorted_batch", "sorted"),
    }
    register_engine()
    with quiet():
        return {name: builders[name]() for name in names}


def _per_step(packs: int, steps: int) -> int:
    """Return the packs of an optimizer step that make ``steps`` steps, rounded up to a multiple of the ranks."""
    ranks = dist.get_world_size()
    return -(-packs // (steps * ranks)) * ranks


def _of_packs(contestant: PackedContestant) -> Method:
    """Return a method on this rank's packs of one epoch, as the trainer's plan deals them out."""
    run, own = contestant.run, contestant.trainer.rank
    shares = [run.plan.rank_packs(step, own.rank, own.size) for step in range(run.plan.steps_per_epoch)]
    packs = [[None if pack is None else run.train_set[pack] for pack in share] for share in shares]
    smallest = run.train_set[int(run.train_set.pack_tokens().argmin())]
    return Method(contestant, "ours", [contestant.collate(share) for share in packs], contestant.collate([smallest]))
