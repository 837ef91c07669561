"""The contestants of the training tables, each with its own engine.

All start from the same weights. Each data-parallel rank holds its share of a step.
"""

import copy
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

from benchmarks.documents import Document, document_lengths, write_documents
from benchmarks.meters import seconds, wait_for_gpu
from benchmarks.models import kernel_of, kernel_of_peers, optimizer_of
from verl_ext.config.compose import compose
from verl_ext.config.resolve import worker_config
from verl_ext.losses import HEADS
from verl_ext.plugin import register_engine
from verl_ext.trainer import report
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.run import Run
from verl_ext.trainer.setup import prepare
from verl_ext.trainer.trainer import SFTTrainer, StepOutcome, UpcomingStep

STOCK = "stock"

register_engine()
# verl registers its engine for accelerators only, so the class is used directly.
EngineRegistry.register(model_type="language_model", backend="fsdp2", device=["cpu", "cuda"], vendor=STOCK)(
    FSDPEngineWithLMHead
)


class Contestant:
    """An engine on which turns are measured, by its model's calls.

    A subclass has `load`, `train`, `counts(batch)`: a loaded batch's documents, tokens without padding and targets,
    `lengths(positions)`: the lengths int64[n] over which attention runs in a call, and `implementations(packed)`: the
    names of kernel, head and optimizer, whether the mask is quadratic in rows of several documents (`packed`), and
    whether the head computes the targets' logits alone.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._calls: list[tuple[torch.Tensor, float]] = []  # positions with padding, and the processor time
        engine.module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._calls.append((kwargs["position_ids"], time.process_time()))  # positions are read afterwards

    def turn(self, cost: Any, batches: Sequence[Any]) -> dict[str, Any]:
        """Train on batches; return this rank's times, losses, and forwards' costs."""
        self._calls.clear()
        gc.collect()
        _meet()
        wall, began = time.perf_counter(), time.process_time()
        losses = [self.train(batch) for batch in batches]
        ended = time.process_time()
        _meet()
        wall = time.perf_counter() - wall
        positions, clocks = zip(*self._calls, strict=True)
        return {
            **{"wall": wall, "cpu": np.diff([began, *clocks[1:], ended]).tolist(), "losses": losses},
            "costs": [float(cost.documents(self.lengths(call)).sum()) for call in positions],
            "ran": sum(call.numel() for call in positions),
            "counts": [self.counts(batch) for batch in batches],
        }


class StockContestant(Contestant):
    """verl's `train_batch`, collator, micro-batching and `sft_loss`, combined as in `verl.trainer.sft_trainer`.

    run: gives the optimizer, precision and model path. padded: documents per micro-batch, or None for dynamic batches
    under the token budget.
    """

    def __init__(self, run: Run, padded: int | None) -> None:
        config = copy.deepcopy(dict(run.config.values))
        config["model"]["use_remove_padding"] = padded is None
        config["model"]["override_config"]["attn_implementation"] = kernel_of_peers()
        os.environ["VERL_ENGINE_VENDOR"] = STOCK
        worker = TrainingWorker(worker_config(config, run.total_steps))
        worker.reset()
        super().__init__(worker.engine)
        assert type(self.engine) is FSDPEngineWithLMHead, "verl's own class is what competes"
        limits = {"max_token_len_per_gpu": run.train_set.max_tokens, "micro_batch_size_per_gpu": padded or 1}
        padding = {"use_remove_padding": padded is None, "pad_mode": DatasetPadMode.NO_PADDING, "pad_token_id": 0}
        self._meta = {**limits, **padding, "use_dynamic_bsz": padded is None, "temperature": 1.0}

    def load(self, documents: Sequence[Document], folder: Path | None = None) -> dict[str, Any]:
        """Make verl's rows into jagged tensors, as loaders do ahead of time."""
        rows = [{name: torch.from_numpy(of_one[name]) for name in ("input_ids", "loss_mask")} for of_one in documents]
        rows = [{**row, "position_ids": torch.arange(len(row["input_ids"]))} for row in rows]
        return SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows)

    def counts(self, batch: dict[str, Any]) -> tuple[int, int, int]:
        mask = batch["loss_mask"]
        return len(mask), mask.values().numel(), int(mask.values().sum())

    def implementations(self, packed: bool) -> dict[str, Any]:
        fused = torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
        head = f"plain, {'flash-attn cross entropy' if fused else 'log-softmax by rows'}"
        names = {"head": head, "optimizer": optimizer_of(self.engine.optimizer), "targets_only": False}
        return {**kernel_of(self.engine.module, packed), **names}

    def lengths(self, positions: torch.Tensor) -> np.ndarray:
        return np.full(*positions.shape)  # without flash-attn it computes whole rows

    def train(self, batch: dict[str, Any]) -> float:
        """Run verl's `train_batch` and schedule; return its loss over all ranks."""
        data = tu.get_tensordict(tensor_dict=batch, non_tensor_dict=dict(self._meta))
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=partial(sft_loss, config=None))
        self.engine.lr_scheduler_step()
        loss = torch.tensor(output["loss"], dtype=torch.float64, device=get_device_id()).sum()  # micro-batches' shares
        dist.all_reduce(loss, group=self.engine.get_data_parallel_group())
        return loss.item() / self.engine.get_data_parallel_size()


class PackedContestant(Contestant):
    """Our trainer's step on the packs of a prepared run, metrics included."""

    lengths = staticmethod(document_lengths)

    def __init__(self, run: Run) -> None:
        self.run, self.trainer = run, SFTTrainer(run)
        super().__init__(self.trainer.engine)

    def load(self, documents: Sequence[Document], folder: Path) -> StepBatch:
        """Load all packs of the documents, collated; write `folder` unless it holds them."""
        if not folder.is_dir():
            write_documents(documents, folder)
        family: Any = type(self.run.train_set)
        dataset = family(str(folder), config=self.run.config.values["data"], key="data.train_dir")
        collate = StepCollator.of_dataset(self.run.objective, self.run.train_set)
        return collate([dataset[pack] for pack in range(len(dataset))])

    def implementations(self, packed: bool) -> dict[str, Any]:
        head = max(self.run.config.loss.head, self.engine.cheapest_head, key=HEADS.index)
        names = report.implementations(self.run.config, self.run.model.backend, head)
        ran = dict(zip(("kernel", "head", "optimizer"), names, strict=True))
        return {**ran, "quadratic": False, "targets_only": ran["head"] != "plain"}

    def counts(self, batch: StepBatch) -> tuple[int, int, int]:
        documents = (batch.position_ids.diff(prepend=batch.position_ids.new_full((1,), -2)) != 1) & (batch.copies > 0)
        return int(documents.sum()), int(batch.counts["tokens"]), int(batch.counts["target_tokens"])

    def train(self, batch: StepBatch) -> float:
        """Take the trainer's step; return the loss that it reports."""
        outcome, group = take_step(self.trainer, batch), self.engine.get_data_parallel_group()
        sums = outcome.sums.reduced(lambda values: dist.all_reduce(values, group=group))
        return sums.report("train", self.run.train_set.categories.names)["train/loss"]


@dataclass(frozen=True)
class Setting:
    """What all contestants share.

    data: a tokenized folder; in a contest, that of one step. budget: tokens of a pack. steps: those of the schedule.
    overrides: of conf/sft.yaml.
    """

    model: Path
    data: Path
    output: Path
    budget: int
    steps: int
    overrides: tuple[str, ...] = ()

    def stock(self, name: str, padded: int | None) -> StockContestant:
        return StockContestant(self._run(name), padded)

    def packed(self, name: str, *overrides: str) -> PackedContestant:
        return PackedContestant(self._run(name, *overrides))

    def _run(self, name: str, *overrides: str) -> Run:
        where = (f"model.path={self.model}", f"data.train_dir={self.data}", f"data.max_tokens={self.budget}")
        how = ("model.enable_gradient_checkpointing=false", "data.pad_mode=no_padding", "data.num_workers=0")
        steps = (f"trainer.total_training_steps={self.steps}", "optim.lr=1e-3", "optim.lr_warmup_steps=0")
        output = f"trainer.default_local_dir={self.output / name}"
        return prepare(compose((*where, *how, *steps, output, *self.overrides, *overrides)))


def take_step(trainer: SFTTrainer, batch: StepBatch, summed: bool = True) -> StepOutcome:
    """Take the trainer's own optimizer step; every rank joins with its batch."""
    counts = trainer.engine.is_mp_src_rank_with_outputs()
    return trainer.train_step(UpcomingStep(batch, counts, trainer.hosts), summed=summed)


def together(function: Callable[[], Any], count: int = 1) -> list[float]:
    """Return the wall seconds of calls, after each of which ranks meet."""
    _meet()
    return [seconds(lambda: (function(), _meet())) for _ in range(count)]


def _meet() -> None:
    wait_for_gpu()
    dist.barrier()
