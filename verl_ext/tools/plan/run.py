"""A real engine's step on a fake GPU, and its memory.

:mod:`verl_ext.tools.plan.report` starts this module in a separate process, sends one :class:`Job` after another and
gets the number of layers that have run (:class:`Layers`) now and then, and a :class:`Prediction` for each:

    model from its config alone ─► verl's worker, our engine, FSDP2 over a fake process group ─► forward, backward, step

The prediction uses no formula: it counts each allocation, operation by operation.
"""

import contextlib
import gc
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_ext.packing import CostModel
from verl_ext.tools.plan.attention_memory import LSE_MEMORY, fake_sdpa, flash_memory
from verl_ext.tools.plan.caching_allocator import Event
from verl_ext.tools.plan.fake_gpu import GPU, FakePlatform, MemoryTracker, register_gpu
from verl_ext.tools.plan.traffic import Received, Traffic

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, HEAD, GATHERED, BACKWARD = "activations", "head and loss", "gathered by FSDP", "backward pass"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, GATHERED, BACKWARD)


@dataclass(frozen=True)
class Job:
    """The steps to run.

    Attributes:
        values: the whole configuration, checked and resolved for the planned device.
        steps: the micro-batches of each step, each a :class:`verl_ext.trainer.batch.StepBatch`.
        world_size: the number of ranks.
        rank: the rank whose steps run.
        backend: the attention backend; sdpa takes one kernel call per document.
        vendor: the vendor of the engine, in :mod:`verl_ext.plugin`.
        ranks_of_node: the ranks of a node, between which nothing crosses the network.
        expert_imbalance: the rows that reach the experts of the rank, over those of a rank on average.
        on_gpu: False for the memory of CPU ranks, which do not round blocks and whose optimizer does not use foreach.
    """

    values: Mapping[str, Any]
    steps: Sequence[Sequence[Any]]
    world_size: int
    rank: int
    backend: str
    vendor: str
    ranks_of_node: int = 8
    expert_imbalance: float = 1.0
    on_gpu: bool = True


@dataclass(frozen=True)
class Prediction:
    """The memory of a rank in bytes.

    Attributes:
        kinds: the memory at the peak of a step, by the purpose of the allocation.
        standing: the memory before a step.
        host: the most host memory that copies from the device take.
        flops, computed: model FLOPs by the lengths of documents, and the FLOPs that are computed, with recomputation
            and zero heads; None if they are unknown.
        received: bytes that the rank receives in the job's steps, by content.
        events: the changes of blocks before the steps, and in each of them.
        reserved: the memory that PyTorch's allocator reserves over steps of different packs, with `expandable` segments
            and with segments of `fixed` size; None if one job ran alone.
    """

    kinds: dict[str, int]
    standing: int
    host: int
    flops: CostModel | None
    computed: CostModel | None
    received: Mapping[str, Received]
    events: Sequence[Sequence[Event]]
    reserved: dict[str, int] | None = None

    @property
    def peak(self) -> int:
        """The memory at the peak of a step."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Layers:
    """The layers that have run, recomputed ones included, of all."""

    done: int
    of: int


def main() -> None:
    """Answer each job from standard input; a failure is a RuntimeError."""
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # verl prints while it builds

    def send(answer: Any) -> None:
        pickle.dump(answer, output)
        output.flush()

    _prepare_process()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = predicted(job, send)
        except Exception as error:
            traceback.print_exc()
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        send(answer)


def _prepare_process() -> None:
    """Give this process the fake GPU, weightless models and verl's engines."""
    os.environ.update(VERL_ENGINE_DEVICE="cuda", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # saves seconds of imports for an unused engine
    register_gpu()
    functional.scaled_dot_product_attention = fake_sdpa  # type: ignore[assignment]
    from verl.plugin.platform import set_platform

    from verl_ext.engines import tiles

    cut = tiles.tile_slices
    # Those left out take equal memory: a layer's first tile, another, and a shorter one if there is any.
    tiles.tile_slices = lambda tokens, size: cut(tokens, size)[:2] + cut(tokens, size)[2:][-1:] * bool(tokens % size)
    set_platform(FakePlatform())  # before the import of verl's engines, which read the device's name
    import transformers
    import verl.workers.engine.fsdp.transformer_impl as engine

    transformers.PreTrainedModel.from_pretrained = classmethod(_from_config)  # type: ignore[assignment, arg-type]
    engine.get_init_weight_context_manager = lambda **_: contextlib.nullcontext
    engine.fsdp2_load_full_state_dict = _place  # type: ignore[assignment]


def _from_config(cls: Any, path: Any, *args: Any, config: Any, torch_dtype: Any = None, **kwargs: Any) -> Any:
    """Make a model without weights; this stands in for ``from_pretrained``."""
    return cls._from_config(config, dtype=kwargs.get("dtype", torch_dtype))


def _place(model: Any, full_state: Any, mesh: Any = None, cpu_offload: Any = None) -> None:
    """Place the shards without weights, on the host with `cpu_offload`."""
    device = f"{GPU}:0"
    model.to_empty(device=device)
    if cpu_offload is None:
        return
    model.to("cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def predicted(job: Job, send: Callable[[Layers], None] = lambda layers: None) -> Prediction:
    """Run a job on the fake GPU; `send` gets its progress."""
    from verl_ext.attention import packed
    from verl_ext.attention.kernels import KERNELS, Kernel
    from verl_ext.engines.cost import computed_flops
    from verl_ext.parallel import experts

    experts.row_counts = partial(balanced_rows, job.expert_imbalance)
    # The kernels need a GPU; those in their place allocate the same memory.
    kernel = KERNELS[job.backend]
    packed.set_backend(kernel if job.backend == "sdpa" else Kernel(flash_memory, kernel.lse and LSE_MEMORY))
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    dist.init_process_group("fake", rank=job.rank, world_size=job.world_size)
    tracker = MemoryTracker(GPU, block=512 if job.on_gpu else 1)
    # torch derives the placements of an operation on DTensors again each time that its tensors are fake: seconds for an
    # optimizer's step.
    propagator = DTensor._op_dispatcher.sharding_propagator
    derive = partial(type(propagator).propagate_op_sharding_non_cached, propagator)
    propagator.propagate_op_sharding_non_cached = lru_cache(None)(derive)  # type: ignore[method-assign]
    try:
        with torch.autograd.set_multithreading_enabled(False), tracker:
            with torch.device("meta"):
                engine = build_engine(job)
            fill_optimizer(engine, tracker)
            gc.freeze()  # the collector would look through every module of the process again and again
            _count_layers(engine, job, send)
            # What lies in memory before the first step is the base of every step's peak.
            standing = sum(tracker.now.values())
            tracker.forget_peak()
            events = [tracker.take_events()]
            ulysses = job.values["engine"]["ulysses_sequence_parallel_size"]
            of_experts = engine.expert_device_mesh and engine.expert_device_mesh["ep"].get_group().group_name
            traffic = Traffic(ulysses, job.ranks_of_node, of_experts)

            def see(func: Any, args: Sequence[Any]) -> None:
                traffic.in_optimizer = tracker.kind == OPTIMIZER
                traffic.see(func, args)

            tracker.on_collective = see
            for step in job.steps:
                take_step(engine, job, step, tracker)
                events.append(tracker.take_events())
        kinds = {kind: tracker.peak.get(kind, 0) for kind in KINDS}
        recomputes = bool(engine.model_config.enable_gradient_checkpointing)
        computed = computed_flops(engine.module, engine.model_config.hf_config, ulysses, recomputes)
        return Prediction(
            kinds, standing, tracker.host_peak, engine.train_flops, computed, dict(traffic.received), events
        )
    finally:
        dist.destroy_process_group()
        gc.unfreeze()
        gc.collect()


def balanced_rows(
    imbalance: float, counts: torch.Tensor, theirs: torch.Tensor, rows: int
) -> tuple[list[int], list[int]]:
    """Stand in for `row_counts`: equally many rows go to each rank, and so many times imbalance come."""
    ranks = len(counts)
    send = [rows * (number + 1) // ranks - rows * number // ranks for number in range(ranks)]
    return send, [round(share * imbalance) for share in send]


def _count_layers(engine: Any, job: Job, send: Callable[[Layers], None]) -> None:
    """Send the number of layers begun, about a hundred times."""
    layers = [part for part in engine.module.modules() if isinstance(part, GradientCheckpointingLayer)]
    passes = 2 if any(part.gradient_checkpointing for part in layers) else 1
    of = len(layers) * passes * sum(map(len, job.steps))
    count = itertools.count(1)

    def begin(*_: Any) -> None:
        done = next(count)
        if done % max(of // 100, 1) == 0:
            send(Layers(min(done, of), of))

    for part in layers:
        part.register_forward_pre_hook(begin)


def build_engine(job: Job) -> Any:
    """Build the run's engine with its model, FSDP2 and optimizer."""
    from verl.workers.engine_workers import TrainingWorker

    from verl_ext.config.resolve import worker_config
    from verl_ext.plugin import select_engine

    select_engine(job.vendor)
    values = {**job.values, "model": {**job.values["model"], "load_tokenizer": False}}
    if not job.on_gpu and values["optim"]["optimizer"] != "AdamW8bit":  # which has one form
        given = job.values["optim"]["override_optimizer_config"] or {}
        values["optim"] = {**job.values["optim"], "override_optimizer_config": {"foreach": False, **given}}
    worker = TrainingWorker(worker_config(values, total_steps=2))
    worker.reset()
    return worker.engine


def fill_optimizer(engine: Any, tracker: MemoryTracker) -> None:
    """Give the optimizer its state, by a step with zero gradients."""
    with engine.train_mode():
        tracker.assign(PARAMETERS, [*engine.module.parameters(), *engine.module.buffers()])
        with tracker.allocating(OPTIMIZER):
            for parameter in engine.module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            engine.optimizer.step()
        engine.optimizer_zero_grad()


def take_step(engine: Any, job: Job, step: Sequence[Any], tracker: MemoryTracker) -> None:
    """Take a step as the trainer does, with memory by :data:`KINDS`."""
    from verl_ext.config.run import reader_of
    from verl_ext.trainer.objective import objective_of
    from verl_ext.trainer.rank import DataParallelRank

    options = reader_of("loss", job.values).read(job.values["loss"])
    objective, flags = objective_of(options), options.head_flags
    loss = objective.begin((), DataParallelRank(engine, 1, flags), [1.0] * len(objective.measures.terms))
    micro_batches = [micro for batch in step for micro in batch.micro_batches(len(batch.pack_lengths), loss, **flags)]
    with _kinds(engine, tracker), engine.train_mode():
        engine.optimizer_zero_grad()
        engine.accumulate(micro_batches, loss)
        with tracker.allocating(OPTIMIZER):
            engine.optimizer_step()


@contextlib.contextmanager
def _kinds(engine: Any, tracker: MemoryTracker) -> Iterator[None]:
    """Set the tracker's kind of allocations by the step's part.

    A forward allocates activations until it reaches the head; from there until the backward pass leaves the head,
    allocations belong to head and loss. Inside the profiler ranges around its own work, FSDP2 gathers weights, reduces
    gradients, and copies a gradient that a rank keeps for later micro-batches.
    """
    unsharded: set[torch.nn.Parameter] = set()  # the parameters that FSDP2 puts into the modules for a forward

    def reach(kind: str, *_: Any) -> None:
        tracker.kind = kind

    def reach_head(_: Any, args: Any) -> None:
        reach(HEAD)
        if args[0].requires_grad:
            args[0].register_hook(partial(reach, BACKWARD))

    def begin_range(name: str) -> Callable[[], None] | None:
        if not name.startswith("FSDP::"):
            return None
        before = tracker.kind
        accumulates = name.startswith(("FSDP::post_backward_accumulate", "FSDP::post_backward_reshard"))
        reach(GRADIENTS if accumulates else GATHERED)

        def end() -> None:
            reach(before)
            if "post_backward" in name:
                kept = (parameter.grad for parameter in (*engine.module.parameters(), *unsharded))
                tracker.assign(GRADIENTS, kept)

        return end

    def see_unsharded(module: Any, _: Any) -> None:
        unsharded.update(p for p in module.parameters() if not isinstance(p, DTensor))

    # Modules tell where the forward is, a hook of the head's input tells where the backward leaves the head.
    hooks = [
        engine.module.register_forward_pre_hook(partial(reach, ACTIVATIONS)),
        engine.module.get_output_embeddings().register_forward_pre_hook(reach_head),
        *(
            part.register_forward_pre_hook(see_unsharded)  # type: ignore[attr-defined]  # FSDPModule is a mixin
            for part in engine.module.modules()
            if isinstance(part, FSDPModule)
        ),
    ]
    tracker.on_range = begin_range
    try:
        yield
    finally:
        tracker.on_range = lambda name: None
        for hook in hooks:
            hook.remove()
