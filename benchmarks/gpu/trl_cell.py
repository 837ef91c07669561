"""A cell with TRL's SFTTrainer; verl's model patches fail beside TRL."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.documents import document_lengths, random_document
from benchmarks.gpu.shapes import Cell, kernel_of, longest_of, optimizer_of, peak_memory, vocabulary
from benchmarks.meters import on_gpu, wait_for_gpu
from verl_ext.attention.kernels import unusable


class Counting(SFTTrainer):
    """TRL's trainer, which keeps positions and labels of micro-batches by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.kept.setdefault(self.state.global_step, []).append((inputs["position_ids"], inputs["labels"]))
        return super().training_step(model, inputs, *args, **kwargs)


class Clock(TrainerCallback):
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
    """Build TRL's best setting for long packs.

    Best-fit packs without padding, flash-attn if it runs, its own fused head.
    """
    attention = "flash_attention_2" if on_gpu() and not unusable("flash_attn") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(cell.model, dtype=torch.float32, attn_implementation=attention)
    packs = {"max_length": budget, "packing": True, "packing_strategy": "bfd", "completion_only_loss": True}
    steps_of = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation, "max_steps": steps}
    silent = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    config = SFTConfig(
        output_dir=str(cell.folder / "trl"),
        learning_rate=1e-5,
        bf16=on_gpu(),
        use_cpu=not on_gpu(),
        gradient_checkpointing=True,
        optim="adamw_torch_fused" if on_gpu() else "adamw_torch",
        **packs,
        **steps_of,
        **silent,
    )
    names = {"input_ids": "input_ids", "completion_mask": "loss_mask"}
    columns = {name: [document[own].tolist() for document in documents] for name, own in names.items()}
    tokenizer = AutoTokenizer.from_pretrained(cell.model)
    return Counting(model, args=config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer)


def implementations(built: Counting, packed: bool) -> dict[str, Any]:
    targets_only = on_gpu()  # TRL's choice: on other devices its head's tiles cover all tokens
    head = f"fused, {'targets' if targets_only else 'all tokens'}"
    optimizer = optimizer_of(built.create_optimizer())
    return {**kernel_of(built.model, packed), "head": head, "optimizer": optimizer, "targets_only": targets_only}


def throughput(cell: Cell) -> Iterator[dict[str, Any]]:
    accumulation = max(round(cell.options.step_tokens / cell.pack), 1)
    documents = [document for step in cell.documents() for document in step]
    built, clock = build(cell, documents, cell.pack, accumulation, cell.options.steps + 1), Clock()
    yield (ran := implementations(built, packed=True))
    built.add_callback(clock)
    built.train()
    measured = [micro for step, kept in built.kept.items() if step > 0 for micro in kept]
    lengths = [length for positions, _ in measured for length in document_lengths(positions).tolist()]
    targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in measured)
    yield cell.figures(lengths, targets, ran["targets_only"], sum(clock.seconds[1:]))


def longest(cell: Cell) -> Iterator[dict[str, Any]]:
    built = build(cell, cell.few_documents(), 512, 1, 1)
    yield implementations(built, packed=False)
    built.current_gradient_accumulation_steps = 1  # otherwise set by train()
    model = built.accelerator.prepare(built.model)
    model.train()
    built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rng = np.random.default_rng(0)

    def train(length: int) -> None:
        document = random_document(length, vocabulary(cell.shape), rng)
        ids, mask = (torch.from_numpy(document[name])[None] for name in ("input_ids", "loss_mask"))
        labels = ids.masked_fill(mask == 0, -100)
        built.training_step(model, {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None]})
        built.optimizer.step()
        built.optimizer.zero_grad()

    yield from longest_of(train, cell.options.first)
