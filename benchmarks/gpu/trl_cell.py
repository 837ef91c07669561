"""A cell of run.py with TRL's SFTTrainer and without verl, because verl 0.9.1's model patches fail beside TRL."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu import setting
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
        setting.synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        setting.synchronize()
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) == 1:
            setting.peak_memory()


def trainer(spec: dict[str, Any], documents: list[dict], budget: int, accumulation: int, steps: int) -> Counting:
    """Build TRL's best setting for long packs: best-fit without padding, flash-attn if it runs, its own fused head."""
    cuda = torch.cuda.is_available()
    folder = Path(spec["folder"])
    attention = "flash_attention_2" if cuda and not unusable("flash_attn") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder / spec["shape"], dtype=torch.float32, attn_implementation=attention
    )
    config = SFTConfig(
        output_dir=str(folder / "trl"),
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
    tokenizer = AutoTokenizer.from_pretrained(folder / spec["shape"])
    return Counting(model, args=config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer)


def report(built: Counting, packed: bool) -> bool:
    """Print kernel, head and optimizer; return whether the head computes only the targets' logits."""
    targets_only = torch.cuda.is_available()  # TRL's choice: on other devices its head's tiles cover all tokens
    head = f"fused, {'targets' if targets_only else 'all tokens'}"
    optimizer = setting.optimizer_of(built.create_optimizer())
    setting.report(**setting.kernel_of(built.model, packed), head=head, optimizer=optimizer)
    return targets_only


def throughput(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure all steps but the first."""
    steps = setting.steps_of_documents(spec["shape"], spec["pack"], spec["step_tokens"], spec["steps"])
    accumulation = max(round(spec["step_tokens"] / spec["pack"]), 1)
    documents = [document for step in steps for document in step]
    built, clock = trainer(spec, documents, spec["pack"], accumulation, spec["steps"] + 1), Clock()
    targets_only = report(built, packed=True)
    built.add_callback(clock)
    built.train()
    measured = [micro for step, kept in built.kept.items() if step > 0 for micro in kept]
    lengths = [length for positions, _ in measured for length in lengths_of(positions)]
    targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in measured)
    return setting.figures(spec["shape"], lengths, targets if targets_only else sum(lengths), sum(clock.seconds[1:]))


def longest(spec: dict[str, Any]) -> dict[str, Any]:
    """Find the longest single document, a quarter of whose tokens are targets, that TRL trains on."""
    few = setting.steps_of_documents(spec["shape"], 512, 2048, 0)[0]
    built = trainer(spec, few, 512, 1, 1)
    report(built, packed=False)
    built.current_gradient_accumulation_steps = 1  # otherwise set by train()
    model = built.accelerator.prepare(built.model)
    model.train()
    if built.args.gradient_checkpointing:
        built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def train(length: int) -> None:
        ids = torch.randint(setting.vocabulary(spec["shape"]), (1, length))
        labels = ids.masked_fill(torch.arange(length) < length * 3 // 4, -100)
        batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None]}
        built.training_step(model, batch)
        built.optimizer.step()
        built.optimizer.zero_grad()

    return setting.longest(train, spec["first"])


def main() -> None:
    """Measure the cell that the command line describes."""
    spec = setting.spec_of_this_process()
    print(json.dumps({"throughput": throughput, "longest": longest}[spec["kind"]](spec)))


if __name__ == "__main__":
    main()
