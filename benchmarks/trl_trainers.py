"""TRL's trainers on given tokens, in processes of their own: verl 0.9.1's model patches fail beside TRL."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, pack_dataset

from benchmarks.documents import Document
from benchmarks.meters import on_gpu
from benchmarks.models import kernel_of, kernel_of_peers, optimizer_of


def trainer_of(trainer: Any, config: Any, model: Path, columns: Mapping[str, Any], **settings: Any) -> Any:
    """Build a trainer of TRL that writes and reports nothing."""
    silent = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    optimizer = "adamw_torch_fused" if on_gpu() else "adamw_torch"
    device = {"bf16": on_gpu(), "use_cpu": not on_gpu(), "optim": optimizer}
    arguments = config(output_dir=str(model.parent / "trl"), **device, **silent, **settings)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=kernel_of_peers())
    tokenizer = AutoTokenizer.from_pretrained(model)
    return trainer(weights, args=arguments, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer)


class TRLContestant:
    """TRL's best setting of SFT for long packs.

    Best-fit packs without padding, flash-attn if it runs, its own fused head. Batches are made before a step, whose
    micro-batches go through its `training_step`.
    """

    def __init__(self, model: Path, budget: int) -> None:
        packs = {"packing": True, "packing_strategy": "bfd", "max_length": budget, "gradient_checkpointing": True}
        columns = {"input_ids": [[1, 2]], "labels": [[1, 2]]}  # to satisfy the constructor
        self.budget = budget
        self.trainer = trainer_of(SFTTrainer, SFTConfig, model, columns, learning_rate=1e-5, **packs)
        self.optimizer = self.trainer.create_optimizer()
        self.model = self.trainer.accelerator.prepare(self.trainer.model).train()
        self.trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def implementations(self, packed: bool) -> dict[str, Any]:
        targets_only = on_gpu()  # TRL's choice: on other devices its head's tiles cover all tokens
        head = f"fused, {'targets' if targets_only else 'all tokens'}"
        names = {"head": head, "optimizer": optimizer_of(self.optimizer), "targets_only": targets_only}
        return {**kernel_of(self.trainer.model, packed), **names}

    def load(self, documents: Sequence[Document], folder: Path) -> list[dict[str, torch.Tensor]]:
        labels = [np.where(of_one["loss_mask"], of_one["input_ids"], -100) for of_one in documents]
        rows = Dataset.from_dict({"input_ids": [of_one["input_ids"] for of_one in documents], "labels": labels})
        return [self.trainer.data_collator([pack]) for pack in pack_dataset(rows, self.budget, "bfd")]

    def train(self, batch: Sequence[dict[str, torch.Tensor]]) -> None:
        self.trainer.current_gradient_accumulation_steps = len(batch)
        for micro_batch in batch:
            self.trainer.training_step(self.model, dict(micro_batch))
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        self.optimizer.step()
        self.model.zero_grad()


class PairsTrainer(DPOTrainer):
    """DPO on tokens, and sums of the reference, as they are given; with the clocks and the loss of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clocks: list[tuple[float, float]] = []  # wall and processor time at the beginning of each step
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    _precompute_ref_logps = _prepare_dataset

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.clocks.append((time.perf_counter(), time.process_time()))
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def train_on_pairs(model: Path, documents: Sequence[Document], prompt: int, repeats: int, threads: int) -> dict:
    """Return the times and losses of steps on the same pairs, each two documents with a prompt of `prompt` tokens."""
    torch.set_num_threads(threads)
    ids, pairs = [document["input_ids"].tolist() for document in documents], len(documents) // 2
    columns = {
        "prompt_ids": [each[:prompt] for each in ids[::2]],
        **{f"{side}_ids": [each[prompt:] for each in ids[at::2]] for at, side in enumerate(("chosen", "rejected"))},
        **{f"ref_{side}_logps": [0.0] * pairs for side in ("chosen", "rejected")},
    }
    steps = {"per_device_train_batch_size": pairs, "max_steps": repeats + 2, "max_length": None}
    step = {"learning_rate": 1e-30, "gradient_checkpointing": False, "precompute_ref_log_probs": True}
    trainer = trainer_of(PairsTrainer, DPOConfig, model, columns, **steps, **step)
    trainer.train()
    wall, cpu = np.diff(trainer.clocks, axis=0)[1:].T.tolist()  # without the first step
    return {"wall": wall, "cpu": cpu, "loss": trainer.losses[1:-1]}
