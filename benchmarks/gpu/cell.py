"""A cell whose process imports verl: ours or stock verl."""

import contextlib
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.documents import Document, write_documents
from benchmarks.gpu.shapes import (
    POSITIONS,
    Cell,
    config_of,
    kernel_of,
    longest_of,
    optimizer_of,
    peak_memory,
    vocabulary,
)
from benchmarks.meters import on_gpu, seconds, wait_for_gpu


def prepare(cell: Cell) -> dict[str, Any]:
    """Write a model with random bf16 weights, and a tokenizer."""
    from transformers import AutoModelForCausalLM

    from benchmarks.small_run import write_tokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(cell.shape)).to(torch.bfloat16).save_pretrained(cell.model)
    write_tokenizer(cell.model, 16)
    return {}


def contestant(cell: Cell, budget: int, documents: list[Document], steps: int) -> Any:
    """Build ours or stock verl, with the model of the shape."""
    from benchmarks.contestants import Setting
    from benchmarks.small_run import no_progress_bars, quiet
    from verl_ext.plugin import register_engine

    no_progress_bars()
    register_engine()
    data = cell.folder / f"data-{cell.shape}-{budget}"
    if not data.is_dir():
        write_documents(documents, data)
    shared = ["model.enable_gradient_checkpointing=true", "optim.lr=1e-5", "data.strategy=best_fit"]
    if torch.cuda.is_available():
        shared.append("engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}")
    own = {"ours_liger": ("model.use_liger=true",), "ours_fa3": ("attention.backend=fa3",)}.get(cell.contestant, ())
    is_ours = cell.contestant.startswith("ours")
    overrides = (*shared, *own, *(cell.overrides if is_ours else ()))
    name = f"{cell.contestant}-{cell.shape}-{budget}"
    common = Setting(cell.model, data, cell.folder / "runs", budget, steps, overrides)
    with quiet():
        return common.packed(name, "best_fit") if is_ours else common.stock(name, None)


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
        head = max(run.config.loss.head, built.engine.cheapest_head, key=HEADS.index)
        kernel, head, optimizer = report.implementations(run.config, run.model.backend, head)
        ran = {"kernel": kernel, "head": head, "optimizer": optimizer}
        return {**ran, "quadratic": False, "targets_only": head != "plain"}
    fused = torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    return {
        **kernel_of(built.engine.module, packed),
        "head": f"plain, {'flash-attn cross entropy' if fused else 'log-softmax by rows'}",
        "optimizer": optimizer_of(built.engine.optimizer),
        "targets_only": False,
    }


def loaded(cell: Cell, built: Any, steps: list[list[Document]]) -> list[Any]:
    """Write documents to disk and load them as the contestant does."""
    batches = []
    for number, documents in enumerate(steps):
        folder = cell.folder / f"steps-{cell.contestant}-{cell.shape}-{cell.pack}" / str(number)
        if not folder.is_dir():
            write_documents(documents, folder)
        batches.append(built.load(documents, folder))
    return batches


def throughput(cell: Cell) -> Iterator[dict[str, Any]]:
    """Measure all steps but the first."""
    steps = cell.documents()
    built = contestant(cell, cell.pack, steps[0], cell.steps + 2)
    yield (ran := implementations(built, packed=True))
    first, *batches = loaded(cell, built, steps)
    built.train(first)
    peak_memory()
    took = sum(seconds(lambda batch=batch: built.train(batch)) for batch in batches)
    measured = [document for step in steps[1:] for document in step]
    lengths = [len(document["input_ids"]) for document in measured]
    targets = sum(int(document["loss_mask"][1:].sum()) for document in measured)
    yield cell.figures(lengths, targets, ran["targets_only"], took)


def longest(cell: Cell) -> Iterator[dict[str, Any]]:
    """Find the longest single document, a quarter of whose tokens are targets, that the contestant trains on."""
    built = contestant(cell, POSITIONS, cell.few_documents(), 1000)
    yield implementations(built, packed=False)
    rng = np.random.default_rng(0)

    def train(length: int) -> None:
        mask = (np.arange(length) >= length * 3 // 4).astype(np.int64)
        ids = rng.integers(0, vocabulary(cell.shape), length)
        document = {"input_ids": ids, "loss_mask": mask, "category_ids": mask}
        if cell.contestant == "verl":
            built.train(built.load([document]))
            return
        pack = {name: torch.from_numpy(column) for name, column in document.items()}
        built.train(built.collate([{**pack, "position_ids": torch.arange(length)}]))

    yield from longest_of(train, cell.first)


def shares(cell: Cell) -> dict[str, Any]:
    """Return the parts' shares of our step, by CUDA events around modules in forward, recomputation and backward."""
    steps = cell.documents()[:2]
    built = contestant(cell, cell.pack, steps[0], 4)
    warm, batch = loaded(cell, built, steps)
    built.train(warm)
    spans = Spans()
    for name, module in built.engine.module.named_modules():
        kind = {"self_attn": "attention", "mlp": "mlp", "lm_head": "head"}.get(name.rsplit(".", 1)[-1])
        if kind is not None:
            spans.watch(module, kind)
    with spans.around(built.engine, "optimizer_step", "optimizer"):
        busy, took = _busy(lambda: built.train(batch))
    found = {kind: spans.seconds(kind) / took for kind in ("attention", "mlp", "head", "optimizer")}
    return {**found, "other": max(busy / took - sum(found.values()), 0.0), "waiting": max(1 - busy / took, 0.0)}


def _busy(train: Any) -> tuple[float, float]:
    """Return (seconds in which kernels ran, seconds of the step)."""
    if not on_gpu():
        took = seconds(train)
        return took, took
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        took = seconds(train)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6, took


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
        wait_for_gpu()
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
