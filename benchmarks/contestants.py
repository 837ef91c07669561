"""The contestants: each trains one optimizer step on a step's documents, through its own engine and optimizer.

| name     | engine | micro-batches                                                          |
|----------|--------|------------------------------------------------------------------------|
| padded   | verl's | a fixed number of documents, padded to the longest of them             |
| dynamic  | verl's | verl's balanced partition under a token limit, no padding              |
| next_fit | ours   | one next-fit pack each, padded to the budget                           |
| ours     | ours   | one best-fit pack each, no padding                                     |

Two more help to explain a difference: ``dynamic_ours`` runs verl's partition on our engine, and ``single`` is
``padded`` with one document a micro-batch. verl's contestants run ``FSDPEngineWithLMHead.train_batch`` with verl's
own collator, micro-batching and ``sft_loss``; ours run the trainer's own step with its category losses. All start from
the same weights and see the same documents at every step. Each data-parallel rank holds its share of a step.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

from benchmarks.forwards import Forwards
from benchmarks.lengths import Document
from benchmarks.quiet import quiet
from benchmarks.steps import take_step
from verl_ext.attention import PACKED_ATTENTION, has_flash_attn
from verl_ext.config import compose
from verl_ext.config.run import worker_config
from verl_ext.data import SFTDataSet
from verl_ext.plugin import PACKED as OURS
from verl_ext.plugin import register_engine
from verl_ext.trainer.batch import StepBatch, StepCollator
from verl_ext.trainer.setup import Run, prepare
from verl_ext.trainer.trainer import SFTTrainer

NAMES = ("padded", "dynamic", "next_fit", "ours", "dynamic_ours", "single")
STOCK = "stock"

# verl registers its engine for accelerators only, so the class is used directly.
EngineRegistry.register(model_type="language_model", backend="fsdp2", device=["cpu", "cuda"], vendor=STOCK)(
    FSDPEngineWithLMHead
)


@dataclass(frozen=True)
class Step:
    """The documents of one optimizer step, in memory and as a dataset folder."""

    documents: list[Document]
    folder: Path

    @property
    def tokens(self) -> int:
        return sum(len(document["input_ids"]) for document in self.documents)

    @property
    def target_tokens(self) -> int:
        return sum(int(document["loss_mask"].sum()) for document in self.documents)


class Contestant(Protocol):
    """One way to train: ``load`` stands for the loader processes' work ahead of time, and ``train`` is timed."""

    forwards: Forwards

    def load(self, step: Step) -> Any:
        """Turn documents into the batch that ``train`` takes."""

    def train(self, batch: Any) -> float:
        """Take one optimizer step, and return the loss reported before it."""


class StockContestant:
    """verl's engine, loss, collator and micro-batching, combined as in ``verl.trainer.sft_trainer``.

    Args:
        run: gives the optimizer, precision and model path.
        attention: Hugging Face attention implementation.
        vendor: the vendor of the engine class.
        padded: documents per micro-batch, or None for dynamic batches under the token budget.
    """

    def __init__(self, run: Run, attention: str, vendor: str, padded: int | None) -> None:
        values = copy.deepcopy(dict(run.config.values))
        values["model"]["use_remove_padding"] = padded is None
        values["model"]["override_config"]["attn_implementation"] = attention
        self.engine = _build_worker(values, vendor, run.total_steps).engine
        self.forwards = Forwards()
        self.forwards.watch(self.engine.module)
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

    def load(self, step: Step) -> dict[str, Any]:
        """Load the whole step, as one rank takes it."""
        return self.collate(step.documents)

    def collate(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Make verl's rows into jagged tensors with verl's collator."""
        rows = []
        for document in documents:
            tensors = {name: torch.from_numpy(document[name]) for name in ("input_ids", "loss_mask")}
            rows.append({**tensors, "position_ids": torch.arange(len(document["input_ids"]))})
        return self._collate(rows)

    def train(self, batch: dict[str, Any]) -> float:
        """Run verl's ``train_batch`` and schedule; return its reported loss, micro-batch shares averaged over ranks."""
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
        self.forwards = Forwards()
        self.forwards.watch(self.trainer.engine.module)

    def load(self, step: Step) -> StepBatch:
        """Load all packs of the step's documents, collated."""
        dataset = SFTDataSet(str(step.folder), config=self.run.config.values["data"], key="data.train_dir")
        return self.collate([dataset[pack] for pack in range(len(dataset))])

    @property
    def collate(self) -> StepCollator:
        """Collate packs with the trainer's collator; None if the rank idles."""
        return StepCollator(self.run.loss_for(self.run.train_set), self.run.train_set.categories)

    def train(self, batch: StepBatch, logged: bool = True) -> float:
        """Take the trainer's step; the loss is NaN if the step is not logged, because nothing is collected then."""
        outcome = take_step(self.trainer, batch, summed=logged)
        if outcome.sums is None:
            return float("nan")
        group = self.trainer.engine.get_data_parallel_group()
        sums = outcome.sums.reduced(lambda values: dist.all_reduce(values, group=group))
        return sums.report("train", self.run.train_set.categories.names)["train/loss"]


@dataclass(frozen=True)
class Setting:
    """The common settings of all contestants: a model, data, a token budget and a schedule's number of steps.

    Attributes:
        data: a dataset folder; in a contest, that of one step.
        overrides: overrides of conf/sft.yaml for every contestant.
    """

    model: Path
    data: Path
    output: Path
    budget: int
    steps: int
    overrides: tuple[str, ...] = ()

    def stock(self, name: str, padded: int | None, vendor: str = STOCK, attention: str = "") -> StockContestant:
        """Build verl's batches on verl's engine or another's, by default with the fastest attention that it can run."""
        return StockContestant(self._run(name, ()), attention or _best_stock_attention(), vendor, padded)

    def packed(self, name: str, strategy: str, *overrides: str) -> PackedContestant:
        """Build our engine on the packs of ``strategy``, with its own copy of the weights."""
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


def build_contestants(names: Sequence[str], setting: Setting, micro_batch_size: int) -> dict[str, Contestant]:
    """Build the contestants by name, each with its own copy of the model's weights."""
    builders: dict[str, Callable[[], Contestant]] = {
        "padded": lambda: setting.stock("padded", micro_batch_size),
        "dynamic": lambda: setting.stock("dynamic", None),
        "next_fit": lambda: setting.packed("next_fit", "next_fit", "data.pad_mode=right"),
        "ours": lambda: setting.packed("ours", "best_fit"),
        "dynamic_ours": lambda: setting.stock("dynamic_ours", None, OURS, PACKED_ATTENTION),
        "single": lambda: setting.stock("single", 1),
    }
    register_engine()
    with quiet():
        return {name: builders[name]() for name in names}


def _best_stock_attention() -> str:
    """Return verl's own choice, flash attention, if it can run here."""
    return "flash_attention_2" if torch.cuda.is_available() and has_flash_attn() else "sdpa"


def _build_worker(values: dict[str, Any], vendor: str, total_steps: int) -> TrainingWorker:
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    worker = TrainingWorker(worker_config(values, total_steps))
    worker.reset()
    expected = FSDPEngineWithLMHead if vendor == STOCK else None
    assert expected is None or type(worker.engine) is expected, "verl's own class is what competes"
    return worker
