"""A cell with TRL's SFTTrainer and without verl, because verl 0.9.1's model patches fail beside TRL."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu.shapes import Cell, kernel_of, longest_of, optimizer_of, peak_memory, vocabulary
from benchmarks.meters import wait_for_gpu
from verl_ext.attention.kernels import unusable


class Counting(SFTTrainer):
    """TRL's trainer, which also keeps each micro-batch's positions and labels by optimizer step, for later counting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.kept.setdefault(self.state.global_step, []).append((inputs["position_ids"], inputs["labels"]))
        return super().training_step(model, inputs, *args, **kwargs)


def lengths_of(position_ids: torch.Tensor) -> list[int]:
    """Return the lengths of the documents in a row of packed positions."""
    positions = position_ids.flatten().cpu().numpy()
    return np.diff(np.append(np.flatnonzero(positions == 0), len(positions))).tolist()


class Clock(TrainerCallback):
    """A callback that times each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        wait_for_gpu()
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wait_for_gpu()
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) == 1:
            peak_memory()


def build(cell: Cell, documents: list[dict], budget: int, accumulation: int, steps: int) -> Counting:
    """Build TRL's best setting for long packs: best-fit without padding, flash-attn if it runs, its own fused head."""
    cuda = torch.cuda.is_available()
    attention = "flash_attention_2" if cuda and not unusable("flash_attn") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(cell.model, dtype=torch.float32, attn_implementation=attention)
    config = SFTConfig(
        output_dir=str(cell.folder / "trl"),
        max_length=budget,
        packing=True,
        packing_strategy="bfd",
        completion_only_loss=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=1e-5,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=True,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    columns = {
        "input_ids": [document["input_ids"].tolist() for document in documents],
        "completion_mask": [document["loss_mask"].tolist() for document in documents],
    }
    tokenizer = AutoTokenizer.from_pretrained(cell.model)
    return Counting(model, args=config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer)


def implementations(built: Counting, packed: bool) -> dict[str, Any]:
    """Name kernel, head and optimizer, and say whether the head computes only the targets' logits."""
    targets_only = torch.cuda.is_available()  # TRL's choice: on other devices its head's tiles cover all tokens
    head = f"fused, {'targets' if targets_only else 'all tokens'}"
    optimizer = optimizer_of(built.create_optimizer())
    return {**kernel_of(built.model, packed), "head": head, "optimizer": optimizer, "targets_only": targets_only}


def throughput(cell: Cell) -> Iterator[dict[str, Any]]:
    """Measure all steps but the first."""
    accumulation = max(round(cell.step_tokens / cell.pack), 1)
    documents = [document for step in cell.documents() for document in step]
    built, clock = build(cell, documents, cell.pack, accumulation, cell.steps + 1), Clock()
    yield (ran := implementations(built, packed=True))
    built.add_callback(clock)
    built.train()
    measured = [micro for step, kept in built.kept.items() if step > 0 for micro in kept]
    lengths = [length for positions, _ in measured for length in lengths_of(positions)]
    targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in measured)
    yield cell.figures(lengths, targets, ran["targets_only"], sum(clock.seconds[1:]))


def longest(cell: Cell) -> Iterator[dict[str, Any]]:
    """Find the longest single document, a quarter of whose tokens are targets, that TRL trains on."""
    built = build(cell, cell.few_documents(), 512, 1, 1)
    yield implementations(built, packed=False)
    built.current_gradient_accumulation_steps = 1  # otherwise set by train()
    model = built.accelerator.prepare(built.model)
    model.train()
    built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def train(length: int) -> None:
        ids = torch.randint(vocabulary(cell.shape), (1, length))
        labels = ids.masked_fill(torch.arange(length) < length * 3 // 4, -100)
        batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None]}
        built.training_step(model, batch)
        built.optimizer.step()
        built.optimizer.zero_grad()

    yield from longest_of(train, cell.first)
