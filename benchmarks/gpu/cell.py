"""A cell of run.py whose process imports verl: ours or stock verl. Prints one JSON line."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import setting
from benchmarks.lengths import Document, write_dataset
from verl_ext.trainer.distributed import process_group


def prepare(spec: dict[str, Any]) -> dict[str, Any]:
    """Write a model with random bf16 weights, half as many key/value heads as query heads, and tied embeddings."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    shape, folder = spec["shape"], Path(spec["folder"]) / spec["shape"]
    torch.manual_seed(0)
    config = setting.config_of(shape)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    return {}


def contestant(spec: dict[str, Any], budget: int, documents: list[Document], steps: int) -> Any:
    """Build ours or stock verl, with the model of the shape."""
    from benchmarks.contestants import Setting
    from benchmarks.quiet import no_progress_bars, quiet
    from verl_ext.plugin import register_engine

    no_progress_bars()
    register_engine()
    folder = Path(spec["folder"])
    data = folder / f"data-{spec['shape']}-{budget}"
    if not data.is_dir():
        write_dataset(documents, data)
    shared = ["model.enable_gradient_checkpointing=true", "optim.lr=1e-5", "data.strategy=best_fit"]
    if torch.cuda.is_available():
        shared.append("engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}")
    if spec["contestant"] == "ours_liger":
        shared.append("model.use_liger=true")
    if spec["contestant"] == "ours_fa3":
        shared.append("attention.backend=fa3")
    if spec["contestant"].startswith("ours"):
        shared += spec.get("overrides", [])
    name = f"{spec['contestant']}-{spec['shape']}-{budget}"
    common = Setting(folder / spec["shape"], data, folder / "runs", budget, steps, tuple(shared))
    with quiet():
        if spec["contestant"].startswith("ours"):
            return common.packed(name, "best_fit")
        return common.stock(name, None)


def implementations(built: Any, packed: bool) -> dict[str, Any]:
    """Name the kernel, head and optimizer of a contestant; `packed` means that rows hold several documents.

    Also returns whether its mask is quadratic in the pack, and whether its head computes only the targets' logits.
    """
    from verl.utils import torch_functional

    from benchmarks.contestants import PackedContestant
    from verl_ext.losses import HEADS
    from verl_ext.trainer import report

    if isinstance(built, PackedContestant):
        run = built.run
        head = max(run.config.loss.head, built.trainer.engine.head_use, key=HEADS.index)
        kernel, head, optimizer = report.implementations(run.config, run.model.backend, head)
        found = {"kernel": kernel, "head": head, "optimizer": optimizer}
        return {**found, "quadratic": False, "targets_only": head != "plain"}
    fused = torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    return {
        **setting.kernel_of(built.engine.module, packed),
        "head": f"plain, {'flash-attn cross entropy' if fused else 'log-softmax by rows'}",
        "optimizer": setting.optimizer_of(built.engine.optimizer),
        "targets_only": False,
    }


def as_step(documents: list[Document], folder: Path) -> Any:
    """Write documents to disk in the form that a contestant loads."""
    from benchmarks.contestants import Step

    write_dataset(documents, folder)
    return Step(documents, folder)


def throughput(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure the contestant's throughput at one pack size."""
    documents = setting.steps_of_documents(spec["shape"], spec["pack"], spec["step_tokens"], spec["steps"])
    built = contestant(spec, spec["pack"], documents[0], spec["steps"] + 2)
    found = implementations(built, packed=True)
    setting.report(**found)
    own = Path(spec["folder"]) / f"steps-{os.getpid()}"
    batches = [built.load(as_step(step, own / str(index))) for index, step in enumerate(documents)]
    return setting.throughput(built.train, batches, spec, documents, found["targets_only"])


def longest(spec: dict[str, Any]) -> dict[str, Any]:
    """Find the longest single document, a quarter of whose tokens are targets, that the contestant trains on."""
    few = setting.steps_of_documents(spec["shape"], 512, 2048, 0)[0]
    built = contestant(spec, setting.POSITIONS, few, 1000)
    setting.report(**implementations(built, packed=False))
    rng = np.random.default_rng(0)

    def train(length: int) -> None:
        mask = (np.arange(length) >= length * 3 // 4).astype(np.int64)
        ids = rng.integers(0, setting.vocabulary(spec["shape"]), length)
        document = {"input_ids": ids, "loss_mask": mask, "category_ids": mask}
        if spec["contestant"] == "verl":
            built.train(built.collate([document]))
            return
        pack = {name: torch.from_numpy(values) for name, values in document.items()}
        built.train(built.collate([{**pack, "position_ids": torch.arange(length)}]))

    return setting.longest(train, spec["first"])


def shares(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the parts' shares of our step, by CUDA events around modules in forward, recomputation and backward."""
    documents = setting.steps_of_documents(spec["shape"], spec["pack"], spec["step_tokens"], 1)
    built = contestant(spec, spec["pack"], documents[0], 4)
    own = Path(spec["folder"]) / f"steps-{os.getpid()}"
    warm, batch = (built.load(as_step(step, own / str(index))) for index, step in enumerate(documents))
    built.train(warm)
    spans = Spans()
    engine = built.trainer.engine
    for name, module in engine.module.named_modules():
        kind = {"self_attn": "attention", "mlp": "mlp", "lm_head": "head"}.get(name.rsplit(".", 1)[-1])
        if kind is not None:
            spans.watch(module, kind)
    with spans.around(engine, "optimizer_step", "optimizer"):
        busy, seconds = _busy(lambda: built.train(batch))
    found = {kind: spans.seconds(kind) / seconds for kind in ("attention", "mlp", "head", "optimizer")}
    return {**found, "other": max(busy / seconds - sum(found.values()), 0.0), "waiting": max(1 - busy / seconds, 0.0)}


def _busy(train: Any) -> tuple[float, float]:
    """Return (seconds in which kernels ran, seconds of the step)."""
    if not torch.cuda.is_available():
        seconds = setting.timed(train)
        return seconds, seconds
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = setting.timed(train)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6, seconds


class Spans:
    """Time on the GPU's stream by kind: each moment belongs to the innermost open part.

    A checkpointed layer is recomputed inside the backward pass of its last part, up to the last tensor that is kept.
    Parts therefore open inside others there, and nothing closes the last one explicitly.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Any, str]] = []
        self._marks: list[tuple[Any, str | None]] = []  # a moment, and the kind that begins there

    def watch(self, module: torch.nn.Module, kind: str) -> None:
        """Record every forward and backward of the module from now on.

        Tensors carry the marks of the backward pass, because torch's own module hooks see no keyword arguments.
        """

        def before(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            self._begin((module, "forward"), kind)
            if args:
                return (_Mark.apply(args[0], lambda: self._end((module, "backward"))), *args[1:]), kwargs
            hidden = _Mark.apply(kwargs["hidden_states"], lambda: self._end((module, "backward")))
            return args, {**kwargs, "hidden_states": hidden}

        def after(_: Any, __: tuple, output: Any) -> Any:
            self._end((module, "forward"))
            first, *others = output if isinstance(output, tuple) else (output,)
            first = _Mark.apply(first, lambda: self._begin((module, "backward"), kind))
            return (first, *others) if isinstance(output, tuple) else first

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    @contextlib.contextmanager
    def around(self, owner: Any, method: str, kind: str) -> Iterator[None]:
        """Record every call of a method inside the block."""
        original = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._begin(method, kind)
            try:
                return original(*args, **kwargs)
            finally:
                self._end(method)

        setattr(owner, method, marked)
        try:
            yield
        finally:
            delattr(owner, method)

    def seconds(self, kind: str) -> float:
        """Return the total seconds of the kind."""
        setting.synchronize()
        spans = [(begin, end) for (begin, name), (end, _) in pairwise(self._marks) if name == kind]
        return sum(begin.elapsed_time(end) / 1e3 if torch.cuda.is_available() else end - begin for begin, end in spans)

    def _begin(self, key: Any, kind: str) -> None:
        self._open.append((key, kind))
        self._mark()

    def _end(self, key: Any) -> None:
        """End the part, and the parts that were left open inside it."""
        if key in [opened for opened, _ in self._open]:
            while self._open.pop()[0] != key:
                pass
            self._mark()

    def _mark(self) -> None:
        now: Any = time.perf_counter()
        if torch.cuda.is_available():
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._open[-1][1] if self._open else None))


class _Mark(torch.autograd.Function):
    """Identity on a tensor, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad_outputs[0], None


KINDS = {"prepare": prepare, "throughput": throughput, "longest": longest, "shares": shares}


def main() -> None:
    """Measure the cell that the command line describes."""
    spec = setting.spec_of_this_process()
    if spec["kind"] == "prepare":
        prepare(spec)
        print("{}")
        return
    with process_group():
        print(json.dumps(KINDS[spec["kind"]](spec)))


if __name__ == "__main__":
    main()
