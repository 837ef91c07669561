"""The contestants of the training tables: each trains through its own engine and optimizer.

verl's run `FSDPEngineWithLMHead.train_batch` with verl's own collator, micro-batching and `sft_loss`; ours run the
trainer's own step with its category losses. All start from the same weights and see the same documents at every step.
Each data-parallel rank holds its share of a step.
"""

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

from benchmarks.documents import Document
from benchmarks.small_run import take_step
from verl_ext.attention import unusable
from verl_ext.config import compose
from verl_ext.config.run import worker_config
from verl_ext.data import SFTDataSet
from verl_ext.trainer.batch import StepBatch, StepCollator
from verl_ext.trainer.setup import Run, prepare
from verl_ext.trainer.trainer import SFTTrainer

STOCK = "stock"

# verl registers its engine for accelerators only, so the class is used directly.
EngineRegistry.register(model_type="language_model", backend="fsdp2", device=["cpu", "cuda"], vendor=STOCK)(
    FSDPEngineWithLMHead
)


class Forwards:
    """The calls of a model since the last `clear`.

    Attributes:
        positions: the `position_ids` of each call, [rows, tokens with padding], kept unchanged and read afterwards.
        clocks: this process's processor time at each call, in seconds.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.positions: list[torch.Tensor] = []
        self.clocks: list[float] = []
        module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self.positions.append(kwargs["position_ids"])
        self.clocks.append(time.process_time())

    def clear(self) -> None:
        self.positions.clear()
        self.clocks.clear()

    @property
    def tokens(self) -> int:
        """The tokens that went through the model, padding included."""
        return sum(positions.numel() for positions in self.positions)

    def spans(self, documents: bool) -> list[np.ndarray]:
        """Return for each call the lengths int64[n] over which attention runs, of `documents` or of whole rows."""
        return [_documents(call) if documents else np.full(*call.shape) for call in self.positions]


def _documents(positions: torch.Tensor) -> np.ndarray:
    flat = positions.flatten().cpu().numpy()
    return np.diff(np.append(np.flatnonzero(flat == 0), len(flat)))


class StockContestant:
    """verl's engine, loss, collator and micro-batching, combined as in `verl.trainer.sft_trainer`.

    Args:
        run: gives the optimizer, precision and model path.
        padded: documents per micro-batch, or None for dynamic batches under the token budget.
    """

    def __init__(self, run: Run, padded: int | None) -> None:
        config = copy.deepcopy(dict(run.config.values))
        config["model"]["use_remove_padding"] = padded is None
        # verl's own choice, if it can run here
        attention = "flash_attention_2" if torch.cuda.is_available() and not unusable("flash_attn") else "sdpa"
        config["model"]["override_config"]["attn_implementation"] = attention
        os.environ["VERL_ENGINE_VENDOR"] = STOCK
        worker = TrainingWorker(worker_config(config, run.total_steps))
        worker.reset()
        self.engine = worker.engine
        assert type(self.engine) is FSDPEngineWithLMHead, "verl's own class is what competes"
        self.forwards = Forwards(self.engine.module)
        self._collate = SFTTensorCollator(DatasetPadMode.NO_PADDING)
        self.loss = partial(sft_loss, config=None)
        self.meta = {
            "use_remove_padding": padded is None,
            "use_dynamic_bsz": padded is None,
            "max_token_len_per_gpu": run.train_set.max_tokens,
            "micro_batch_size_per_gpu": padded or 1,
            "temperature": 1.0,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "pad_token_id": 0,
        }

    def load(self, documents: Sequence[Document], folder: Path | None = None) -> dict[str, Any]:
        """Make verl's rows into jagged tensors with verl's collator, as loader processes do ahead of time."""
        rows = []
        for document in documents:
            tensors = {name: torch.from_numpy(document[name]) for name in ("input_ids", "loss_mask")}
            rows.append({**tensors, "position_ids": torch.arange(len(document["input_ids"]))})
        return self._collate(rows)

    def train(self, batch: dict[str, Any]) -> float:
        """Run verl's `train_batch` and schedule; return its reported loss, micro-batch shares averaged over ranks."""
        data = tu.get_tensordict(tensor_dict=batch, non_tensor_dict=dict(self.meta))
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=self.loss)
        self.engine.lr_scheduler_step()
        loss = torch.tensor(output["loss"], dtype=torch.float64, device=get_device_id()).sum()
        dist.all_reduce(loss, group=self.engine.get_data_parallel_group())
        return loss.item() / self.engine.get_data_parallel_size()


class PackedContestant:
    """Our trainer's step on our packs, including category losses and the reported metrics.

    Args:
        run: a prepared run, which determines how documents are packed.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer = SFTTrainer(run)
        self.engine = self.trainer.engine
        self.forwards = Forwards(self.engine.module)

    def load(self, documents: Sequence[Document], folder: Path) -> StepBatch:
        """Load all packs of the documents, which `folder` holds, collated."""
        dataset = SFTDataSet(str(folder), config=self.run.config.values["data"], key="data.train_dir")
        return self.collate([dataset[pack] for pack in range(len(dataset))])

    @property
    def collate(self) -> StepCollator:
        """Collate packs with the trainer's collator; None if the rank idles."""
        return StepCollator(self.run.loss_for(self.run.train_set), self.run.train_set.categories)

    def train(self, batch: StepBatch) -> float:
        """Take the trainer's step, and return the loss that it reports."""
        outcome = take_step(self.trainer, batch)
        assert outcome.sums is not None
        group = self.engine.get_data_parallel_group()
        sums = outcome.sums.reduced(lambda values: dist.all_reduce(values, group=group))
        return sums.report("train", self.run.train_set.categories.names)["train/loss"]


Contestant = StockContestant | PackedContestant


@dataclass(frozen=True)
class Setting:
    """The common settings of all contestants: a model, data, a token budget and a schedule's number of steps.

    Attributes:
        data: a tokenized folder; in a contest, that of one step.
        overrides: overrides of conf/sft.yaml for every contestant.
    """

    model: Path
    data: Path
    output: Path
    budget: int
    steps: int
    overrides: tuple[str, ...] = ()

    def stock(self, name: str, padded: int | None) -> StockContestant:
        """Build verl's batches on verl's engine."""
        return StockContestant(self._run(name, ()), padded)

    def packed(self, name: str, strategy: str, *overrides: str) -> PackedContestant:
        """Build our engine on the packs of `strategy`, with its own copy of the weights."""
        return PackedContestant(self._run(name, (f"data.strategy={strategy}", *overrides)))

    def _run(self, name: str, overrides: tuple[str, ...]) -> Run:
        shared = (
            f"model.path={self.model}",
            "model.enable_gradient_checkpointing=false",
            "parallel=auto",
            f"data.train_dir={self.data}",
            f"data.max_tokens={self.budget}",
            "data.pad_mode=no_padding",
            f"trainer.default_local_dir={self.output / name}",
            f"trainer.total_training_steps={self.steps}",
            "optim.lr_warmup_steps=0",
        )
        return prepare(compose((*shared, *self.overrides, *overrides)))
