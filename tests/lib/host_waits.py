"""Training steps on a GPU without data: where the host waits for it, and what its kernels and NCCL are given.

A process of its own gets a pickle of cases and prints JSON: per case, the waits of each part of a step with their line
and how often, the problems of calls, and the number of calls that were looked at (tests/attention/test_host_waits.py).
"""

import json
import os
import pickle
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from tests.lib.flash_stand_ins import check_backward, check_call
from tests.lib.nccl_rules import nccl_problem
from verl_ext.parallel import experts
from verl_ext.tools.plan import fake_gpu, run
from verl_ext.tools.plan.fake_gpu import GPU, MemoryTracker

_ATEN = torch.ops.aten
_BF16 = "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


def _site() -> str:
    """Return the innermost line outside of torch, as file:function:line."""
    for frame in reversed(traceback.extract_stack()):
        name = Path(frame.filename)
        if "torch" in name.parts or name.parts[-2:] in (("lib", "host_waits.py"), ("plan", "fake_gpu.py")):
            continue
        parts = name.parts
        known = [at for at, part in enumerate(parts) if part in ("verl_ext", "verl", "transformers", "tests")]
        return f"{'/'.join(parts[known[-1] :] if known else parts[-1:])}:{frame.name}:{frame.lineno}"
    return "?"


class HostWaits(MemoryTracker):
    """A record of what makes the host wait for the fake GPU, of kernels' calls and of collectives."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.part: str | None = None  # of a step; None: nothing is recorded
        self.waits: dict[str, Counter[str]] = {}
        self.problems: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.locked: dict[int, Any] = {}  # page-locked storages
        self.on_collective = self._see_collective

    def wait(self, kind: str) -> None:
        """Record a wait at the line that runs."""
        if self.part is not None:
            self.waits.setdefault(self.part, Counter())[f"{kind} {_site()}"] += 1

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a page-locked copy of a host tensor."""
        copy = tensor.clone()
        self.locked[id(copy.untyped_storage())] = copy.untyped_storage()
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(map(fake_gpu._is_wrapper, types)) and fake_gpu.active_fake_mode() is None:
            self._see(func, args, kwargs or {})
            if func is _ATEN._pin_memory.default and not isinstance(args[0], FakeTensor):
                return self.lock(args[0])
        is_locked = bool(kwargs and kwargs.get("pin_memory"))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_locked:
            self.locked[id(result.untyped_storage())] = result.untyped_storage()
        return result

    def _see(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name.partition("::")[2]
        given = [*fake_gpu._tensors(args), *fake_gpu._tensors(kwargs.values())]
        if func in (_ATEN._to_copy.default, _ATEN.copy_.default):
            return self._see_copy(func is _ATEN.copy_.default, args, kwargs)
        if not any(x.device.type == GPU for x in given):
            return None
        if func is _ATEN._local_scalar_dense.default:
            self.wait("item")
        elif name in _BY_VALUES or (name == "repeat_interleave" and not kwargs.get("output_size")):
            self.wait(name)
        elif name in _INDEXED:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype == torch.bool for x in indices):
                self.wait("index by booleans")
            if any(x.device.type == "cpu" and x.dim() for x in indices):
                self.wait("index of the host")
        elif "flash_attention" in name or name.startswith("_varlen_attn"):
            self._see_kernel(func, args, kwargs)
        return None

    def _see_copy(self, into: bool, args: Any, kwargs: Any) -> None:
        source = args[1] if into else args[0]
        target = args[0].device.type if into else torch.device(kwargs.get("device") or source.device).type
        goes_on = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
        if source.device.type == GPU and target == "cpu" and not goes_on:
            self.wait("copy to the host")
        elif source.device.type == "cpu" and target == GPU and not (into and source.dim() == 0):
            if id(source.untyped_storage()) not in self.locked:
                self.wait("copy of pageable memory")
            elif not goes_on:
                self.wait("copy that blocks")

    def _see_kernel(self, func: Any, args: Any, kwargs: Any) -> None:
        a = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        backward = "grad_out" in a
        cu_q, cu_k = (a.get(f"cu_seq_{side}", a.get(f"cum_seq_{side}")) for side in "qk")
        sides = a.get("window_size") or (a.get("window_size_left"), a.get("window_size_right"))
        window = tuple(-1 if side is None else side for side in sides)
        self.calls["flash backward" if backward else "flash"] += 1
        try:
            of_call = cu_q, cu_k, a["max_q"], a["max_k"], 0.0, a.get("scale"), a.get("is_causal", False), window
            check_call(a["query"], a["key"], a["value"], *of_call, reads=False)
            if backward:
                check_backward(
                    a["grad_out"].contiguous(), a["query"], a["out"].contiguous(), a.get("logsumexp", a.get("lse"))
                )
        except RuntimeError as error:
            self.problems[f"{func._schema.name}: {error} {_site()}"] += 1

    def _see_collective(self, func: Any, args: Any) -> None:
        self.calls["collectives"] += 1
        if problem := nccl_problem(func, args, GPU):
            self.problems[f"{problem} {_site()}"] += 1


class _Event(torch.cpu.Event):
    tracker: HostWaits

    def synchronize(self) -> None:
        self.tracker.wait("event")


def take_step(engine: Any, tracker: HostWaits, collate: Any, packs: Any) -> None:
    """Take a step as the trainer does, and read the sums of a step that is logged."""
    from verl_ext.trainer.rank import DataParallelRank

    rank = DataParallelRank(engine, 1, {"head": "fused", "head_block_bytes": 2**28})
    batch, objective = collate(packs).pin_memory(), collate.objective
    tracker.part = "before"
    with engine.train_mode():
        sums = rank.sums(batch)
        loss = objective.begin([batch], rank, [1.0] * len(batch.normalisers), sums)
        micro_batches = rank.micro_batches(batch, loss, token_stats=True)
        engine.optimizer_zero_grad()
        tracker.part = "accumulate"
        engine.accumulate(micro_batches, loss)
        tracker.part = "optimizer"
        engine.optimizer_step()
    tracker.part = "sums"
    sums.reduced(rank.all_reduce)
    tracker.part = "validation"
    with engine.eval_mode():
        engine.evaluate(rank.micro_batches(batch, loss, token_stats=True), objective.begin((), rank, sums=sums))
    tracker.part = None


def measure(case: Any, tracker: HostWaits) -> None:
    """Build a case's engine on a fake GPU, and take two steps; the second is recorded."""
    from tests.lib.packed_engine import build_worker
    from verl_ext.attention.kernels import KERNELS
    from verl_ext.attention.packed import set_backend

    model, ulysses, overrides, collate, packs = case
    set_backend(KERNELS["varlen"])
    with torch.autograd.set_multithreading_enabled(False), tracker:
        with torch.device("meta"):
            given = ["model.load_tokenizer=false", _BF16, *overrides]
            engine = build_worker(model, ulysses, given, parallel="auto").engine
        run.fill_optimizer(engine, tracker)
        take_step(engine, tracker, collate, packs)
        tracker.waits.clear()
        tracker.calls.clear()
        take_step(engine, tracker, collate, packs)


def _lock_for_gpu() -> None:
    """Let the package page-lock what travels to the fake GPU, as for CUDA."""
    from verl_ext.parallel import shards

    original = shards.pinned

    def pinned(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        travels = tensor.device.type == "cpu" and torch.device(device).type == GPU
        return _Event.tracker.lock(tensor) if travels else tensor

    for name, module in list(sys.modules.items()):
        if name.startswith("verl_ext.") and vars(module).get("pinned") is original:
            vars(module)["pinned"] = pinned


def main() -> None:
    """Measure each case of the pickle that standard input holds."""
    cases, found, output = pickle.load(sys.stdin.buffer), {}, sys.stdout
    sys.stdout = sys.stderr
    run._prepare_process()
    _lock_for_gpu()
    wait = experts.row_counts
    experts.row_counts = lambda *given: (wait(*given), run.balanced_rows(1.0, *given))[1]
    fake_gpu._GPUModule.Event = torch.cpu.Event = _Event  # type: ignore[misc, assignment]
    for name, case in cases.items():
        os.environ.update(RANK="0", WORLD_SIZE="8")
        dist.init_process_group("fake", rank=0, world_size=8)
        tracker = _Event.tracker = HostWaits()
        try:
            measure(case, tracker)
        finally:
            dist.destroy_process_group()
        found[name] = {"waits": tracker.waits, "problems": tracker.problems, "calls": tracker.calls}
    json.dump(found, output)


if __name__ == "__main__":
    main()
