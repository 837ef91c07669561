"""A cell whose process imports verl: ours or stock verl."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.documents import Document, random_document, write_documents
from benchmarks.gpu.shapes import POSITIONS, Cell, kernel_of, longest_of, optimizer_of, peak_memory, vocabulary
from benchmarks.harness import words_of
from benchmarks.meters import on_gpu, seconds, wait_for_gpu

OWN = {"ours_liger": ("model.use_liger=true",), "ours_fa3": ("attention.backend=fa3",)}


def contestant(cell: Cell, budget: int, documents: list[Document], steps: int) -> Any:
    """Build ours or stock verl, with the model of the shape."""
    from benchmarks.contestants import Setting

    data = cell.folder / f"data-{cell.shape}-{budget}"
    if not data.is_dir():
        write_documents(documents, data)
    shared = ["model.enable_gradient_checkpointing=true", "optim.lr=1e-5"]
    if on_gpu():
        shared.append("engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}")
    setting = Setting(cell.model, data, cell.folder / "runs", budget, steps, tuple(shared))
    name = f"{cell.contestant}-{cell.shape}-{budget}"
    if cell.contestant == "verl":
        return setting.stock(name, None)
    return setting.packed(name, *OWN.get(cell.contestant, ()), *words_of(cell.options.overrides))


def implementations(built: Any, packed: bool) -> dict[str, Any]:
    """Name the kernel, head and optimizer of a contestant.

    Also tells whether its mask is quadratic in the pack, and whether its head computes only the targets' logits.
    packed: whether rows hold several documents.
    """
    from verl.utils import torch_functional

    from benchmarks.contestants import PackedContestant
    from verl_ext.losses import HEADS
    from verl_ext.trainer import report

    if isinstance(built, PackedContestant):
        run = built.run
        head = max(run.config.loss.head, built.engine.cheapest_head, key=HEADS.index)
        names = report.implementations(run.config, run.model.backend, head)
        ran = dict(zip(("kernel", "head", "optimizer"), names, strict=True))
        return {**ran, "quadratic": False, "targets_only": ran["head"] != "plain"}
    fused = torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    head = f"plain, {'flash-attn cross entropy' if fused else 'log-softmax by rows'}"
    optimizer = optimizer_of(built.engine.optimizer)
    return {**kernel_of(built.engine.module, packed), "head": head, "optimizer": optimizer, "targets_only": False}


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
    steps = cell.documents()
    built = contestant(cell, cell.pack, steps[0], cell.options.steps + 2)
    yield (ran := implementations(built, packed=True))
    first, *batches = loaded(cell, built, steps)
    built.train(first)
    peak_memory()
    took = sum(seconds(lambda batch=batch: built.train(batch)) for batch in batches)
    lengths = [len(document["input_ids"]) for documents in steps[1:] for document in documents]
    targets = sum(built.counts(batch)[2] for batch in batches)
    yield cell.figures(lengths, targets, ran["targets_only"], took)


def longest(cell: Cell) -> Iterator[dict[str, Any]]:
    built, rng = contestant(cell, POSITIONS, cell.few_documents(), 1000), np.random.default_rng(0)
    yield implementations(built, packed=False)

    def train(length: int) -> None:
        document = random_document(length, vocabulary(cell.shape), rng)
        if cell.contestant == "verl":
            built.train(built.load([document]))
        else:
            pack = {name: torch.from_numpy(column) for name, column in document.items()}
            built.train(built.collate([{**pack, "position_ids": torch.arange(length)}]))

    yield from longest_of(train, cell.options.first)


def shares(cell: Cell) -> dict[str, Any]:
    """Return the shares of our step's parts, by CUDA events around modules."""
    steps = cell.documents()[:2]
    built = contestant(cell, cell.pack, steps[0], 4)
    warm, batch = loaded(cell, built, steps)
    built.train(warm)
    spans = Spans()
    for name, module in built.engine.module.named_modules():
        kind = {"self_attn": "attention", "mlp": "mlp", "lm_head": "head"}.get(name.rsplit(".", 1)[-1])
        if kind is not None:
            spans.watch(module, kind)
    with patch.object(built.engine, "optimizer_step", spans.marked(built.engine.optimizer_step, "optimizer")):
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
    """Time on the GPU's stream, each moment of the innermost open part.

    A checkpointed layer is recomputed inside the backward pass of its last part, up to the last tensor that is kept.
    Parts therefore open inside others there, and nothing closes the last one explicitly.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Any, str]] = []
        self._marks: list[tuple[Any, str | None]] = []  # a moment, and the kind that begins there

    def watch(self, module: torch.nn.Module, kind: str) -> None:
        """Record every forward and backward of the module from now on.

        Its tensors' gradients mark the backward pass, because torch's own module hooks see no keyword arguments.
        """

        def before(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            self._begin((module, "forward"), kind)
            _on_gradient(args[0] if args else kwargs["hidden_states"], lambda: self._end((module, "backward")))

        def after(_: Any, __: tuple, output: Any) -> None:
            self._end((module, "forward"))
            first = output[0] if isinstance(output, tuple) else output
            _on_gradient(first, lambda: self._begin((module, "backward"), kind))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def marked(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return a function that records each of its calls."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._begin(function, kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._end(function)

        return recorded

    def seconds(self, kind: str) -> float:
        wait_for_gpu()
        spans = [(begin, end) for (begin, name), (end, _) in pairwise(self._marks) if name == kind]
        return sum(begin.elapsed_time(end) / 1e3 if on_gpu() else end - begin for begin, end in spans)

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
        if on_gpu():
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._open[-1][1] if self._open else None))


def _on_gradient(x: torch.Tensor, call: Callable[[], None]) -> None:
    if x.requires_grad:
        x.register_hook(lambda _: call())
