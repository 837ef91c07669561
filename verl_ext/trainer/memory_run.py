"""One optimizer step of the real engine on a fake GPU, in a process of its own: what memory each rank would need.

Started by :mod:`verl_ext.trainer.memory`, which sends a :class:`Job` and gets a :class:`Prediction`, one after another:

    model from its config alone ─► verl's worker, our engine, FSDP2 over a fake process group ─► forward, backward, step

Nothing is computed by a formula: what is allocated is counted, operation by operation.
"""

import contextlib
import gc
import importlib
import os
import pickle
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from verl_ext.trainer.caching_allocator import Event, reserved
from verl_ext.trainer.fake_gpu import (
    GPU,
    FakePlatform,
    MemoryTracker,
    fake_sdpa,
    flash_memory,
    register_gpu,
)

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, HEAD, GATHERED, BACKWARD = "activations", "head and loss", "gathered by FSDP", "backward pass"
REPLAYED = 40
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, GATHERED, BACKWARD)


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        values: the whole configuration, checked and resolved for the device that is meant.
        steps: the micro-batches of each step, as :class:`verl_ext.trainer.batch.StepBatch` of one micro-batch.
        world_size, rank: the ranks, and the one that is run.
        backend: of attention; sdpa takes one kernel call a document.
        vendor: of the engine, in :mod:`verl_ext.plugin`.
        others: steps of other packs, which PyTorch's allocator meets in the same run.
        on_gpu: False where memory is that of CPU ranks: no rounding of blocks, no foreach in the optimizer.
    """

    values: Mapping[str, Any]
    steps: Sequence[Sequence[Any]]
    world_size: int
    rank: int
    backend: str
    vendor: str
    on_gpu: bool = True
    others: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True)
class Prediction:
    """Memory of a rank in bytes.

    Attributes:
        kinds: at the peak of a step, by what it is allocated for.
        standing: before a step.
        host: on the host, of what was copied there from the device, at its most.
        reserved: of a job with other packs: what PyTorch's allocator reserves over :data:`REPLAYED` steps of them all,
            with `expandable` segments and with segments of `fixed` size.
    """

    kinds: dict[str, int]
    standing: int
    host: int
    reserved: dict[str, int] | None = None

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())


def main() -> None:
    """Answer jobs from standard input until it ends; an exception is sent back as the answer."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # verl prints while it builds
    _prepare_process()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = predicted(job)
        except Exception as error:
            traceback.print_exc()
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


def _prepare_process() -> None:
    """Let this process have the fake GPU, models without weights, and verl's engines on it."""
    os.environ.update(VERL_ENGINE_DEVICE="cuda", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # seconds for an engine that is not used
    register_gpu()
    functional.scaled_dot_product_attention = fake_sdpa  # type: ignore[assignment]
    from verl.plugin.platform import set_platform

    from verl_ext.engines import tiles
    from verl_ext.engines.tiles import slices

    tiles.slices = lambda tokens, tile: slices(tokens, tile)[:2] + slices(tokens, tile)[2:][-1:]  # of equal memory
    set_platform(FakePlatform())  # before verl's engines are imported, which ask for the device's name
    import transformers
    import verl.workers.engine.fsdp.transformer_impl as engine

    transformers.PreTrainedModel.from_pretrained = classmethod(_from_config)  # type: ignore[assignment, arg-type]
    engine.get_init_weight_context_manager = lambda **_: contextlib.nullcontext
    engine.fsdp2_load_full_state_dict = _place  # type: ignore[assignment]


def _from_config(cls: Any, path: Any, *args: Any, config: Any, torch_dtype: Any = None, **kwargs: Any) -> Any:
    """In place of ``from_pretrained``: a model without weights."""
    return cls._from_config(config, dtype=kwargs.get("dtype", torch_dtype))


def _place(model: Any, full_state: Any, mesh: Any = None, cpu_offload: Any = None) -> None:
    """In place of reading the weights: the shards on the device, or on the host where FSDP keeps them there."""
    device = f"{GPU}:0"
    model.to_empty(device=device)
    if cpu_offload is None:
        return
    model.to("cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def predicted(job: Job) -> Prediction:
    """Run a job on the fake GPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from verl_ext.attention import packed
    from verl_ext.attention.kernels import KERNELS, sdpa

    KERNELS["sdpa"] = sdpa if job.backend == "sdpa" else flash_memory
    packed.set_backend("sdpa")
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    dist.init_process_group("fake", rank=job.rank, world_size=job.world_size, store=FakeStore())
    tracker = MemoryTracker(GPU, block=512 if job.on_gpu else 1)
    foreach = ["cuda", GPU] if job.on_gpu else ["cuda"]
    optimizers = importlib.import_module("torch.optim.optimizer")  # no attribute of torch.optim
    optimizers._get_foreach_kernels_supported_devices = lambda: foreach  # type: ignore[attr-defined]
    try:
        with torch.autograd.set_multithreading_enabled(False), tracker:
            with torch.device("meta"):
                engine = build_engine(job)
            fill_optimizer(engine, tracker)
            standing = sum(tracker.now.values())
            tracker.forget_peak()
            events = [tracker.take_events()]
            for step in job.steps:
                take_steps(engine, replace(job, steps=[step]), tracker)
                events.append(tracker.take_events())
            kinds, host = {kind: tracker.peak.get(kind, 0) for kind in KINDS}, tracker.host_peak
            for step in job.others:
                take_steps(engine, replace(job, steps=[step]), tracker)
                events.append(tracker.take_events())
        return Prediction(kinds, standing, host, _reserved(events) if job.others else None)
    finally:
        dist.destroy_process_group()
        gc.collect()


def _reserved(events: list[list[Event]]) -> dict[str, int]:
    """What an allocator reserves, by its kind of segments, of what stands and of steps in random order."""
    standing, *steps = events
    steps += random.Random(0).choices(steps, k=REPLAYED - len(steps))
    return {name: reserved(standing, steps, name == "expandable") for name in ("expandable", "fixed")}


def build_engine(job: Job) -> Any:
    """The run's engine with its model, FSDP2 and optimizer."""
    from verl.workers.engine_workers import TrainingWorker

    from verl_ext.config.run import worker_config
    from verl_ext.plugin import select_engine

    select_engine(job.vendor)
    values = {**job.values, "model": {**job.values["model"], "load_tokenizer": False}}
    if not job.on_gpu:
        given = job.values["optim"]["override_optimizer_config"] or {}
        values["optim"] = {**job.values["optim"], "override_optimizer_config": {"foreach": False, **given}}
    worker = TrainingWorker(worker_config(values, total_steps=2))
    worker.reset()
    return worker.engine


def fill_optimizer(engine: Any, tracker: MemoryTracker) -> None:
    """Give the optimizer the states that it has after a first step, by a step without gradients."""
    with engine.train_mode():
        tracker.assign(PARAMETERS, [*engine.module.parameters(), *engine.module.buffers()])
        with tracker.allocating(OPTIMIZER):
            for parameter in engine.module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            engine.optimizer.step()
        engine.optimizer_zero_grad()


def take_steps(engine: Any, job: Job, tracker: MemoryTracker) -> None:
    """The job's steps as the trainer takes them; the tracker counts them by :data:`KINDS`."""
    from verl_ext.losses import LossOptions
    from verl_ext.trainer.batch import StepLoss

    flags = LossOptions.read(job.values["loss"]).head_flags
    for step in job.steps:
        micro_batches = [micro for batch in step for micro in batch.micro_batches(len(batch.pack_lengths), **flags)]
        with _kinds(engine, tracker), engine.train_mode():
            engine.optimizer_zero_grad()
            engine.accumulate(micro_batches, StepLoss(1.0, engine.get_data_parallel_size(), None))
            with tracker.allocating(OPTIMIZER):
                engine.optimizer_step()


@contextlib.contextmanager
def _kinds(engine: Any, tracker: MemoryTracker) -> Iterator[None]:
    """Tell the tracker what is being allocated, by where the step stands.

    A forward allocates activations until the head is reached, and head and loss from there until the backward pass
    leaves the head; what FSDP gathers and reduces is its own.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def reach(kind: str, *_: Any) -> None:
        tracker.kind = kind

    def reach_head(_: Any, args: Any) -> None:
        reach(HEAD)
        if args[0].requires_grad:
            args[0].register_hook(partial(reach, BACKWARD))

    methods = {name: getattr(FSDPParamGroup, name) for name in ("unshard", "wait_for_unshard", "post_backward")}

    def gathering(method: Any, group: Any, *args: Any) -> Any:
        with tracker.allocating(GATHERED):
            result = method(group, *args)
        for parameter in group.fsdp_params:
            tracker.assign(GRADIENTS, [parameter.sharded_param.grad, parameter.unsharded_accumulated_grad])
            unsharded = getattr(parameter, "_unsharded_param", None)
            tracker.assign(GRADIENTS, [None if unsharded is None else unsharded.grad])
        return result

    for name, method in methods.items():
        setattr(FSDPParamGroup, name, lambda group, *args, method=method: gathering(method, group, *args))
    hooks = [
        engine.module.register_forward_pre_hook(partial(reach, ACTIVATIONS)),
        engine.module.get_output_embeddings().register_forward_pre_hook(reach_head),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, method in methods.items():
            setattr(FSDPParamGroup, name, method)
