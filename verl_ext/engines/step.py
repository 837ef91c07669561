"""verl's FSDP engine for the loop: micro-batches in, gradients out.

A subclass of ``FSDPEngineWithLMHead``. Everything that is not here (sharding, offload, LoRA, clipping, the schedule of
the learning rate) is verl's. Its subclasses decide what a forward reads and returns. What is changed in verl's own code
stands in :mod:`verl_ext.engines.upstream`, with the reason and when it can go.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from verl_ext.answers.generation import Sampling, generate
from verl_ext.engines import upstream
from verl_ext.engines.activations import ActivationOptions, apply_activation_options
from verl_ext.engines.clipping import clip_gradients
from verl_ext.engines.new_rows import add_rows, add_to_config
from verl_ext.engines.optimizer import built_optimizer, parameter_groups, take_threads, with_implementation
from verl_ext.engines.router import RouterLoss
from verl_ext.engines.schedule import rate_factor
from verl_ext.engines.sharding import (
    cast_frozen,
    keep_decays_precise,
    prefetch_experts,
    shard_experts,
    sharded_apart,
)
from verl_ext.flops import train_flops
from verl_ext.layers import mixers_of
from verl_ext.packing import CostModel
from verl_ext.parallel.experts import KeptRouting, expert_mesh
from verl_ext.parallel.shards import pinned

_STEADY_STEPS = 400  # the scale doubles after so many; verl's own number


@dataclass
class StepEngineConfig(FSDPEngineConfig):
    """verl's configuration, whose ``ulysses_sequence_parallel_size`` counts all ranks that share a pack.

    verl's meshes read it in this sense. context_parallel_size is the number of groups that these ranks form,
    `parallel.context_parallel_size`; expert_parallel is the number of ranks that share each layer's experts.
    """

    context_parallel_size: int = 1
    expert_parallel: int = 1


class StepEngine(FSDPEngineWithLMHead):
    """An engine that runs the micro-batches of a step."""

    context_device_mesh: DeviceMesh | None = None  # of the groups that share packs, if there are several
    expert_device_mesh: DeviceMesh | None = None  # of the ranks that share experts, if any do
    tells_greedy: ClassVar[bool] = False  # True if its outputs have `is_greedy`
    scaler: Any  # a ShardedGradScaler in fp16, else None
    router_loss: RouterLoss | None = None
    train_flops: CostModel | None = None  # of a step by its documents' lengths, if they are known
    host_copies: Any = None  # the copies of verl_ext.checkpoint.state from which threads write a checkpoint

    def __init__(self, model_config: HFModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, *args, **kwargs)
        upstream.adapt_config(self.model_config)

    @classmethod
    def idle_tokens(cls, max_tokens: int) -> int:
        """Return the tokens that a rank without a pack runs."""
        return 1

    def _init_device_mesh(self) -> None:
        """Make verl's meshes, and one for ranks that share experts."""
        super()._init_device_mesh()
        ranks = getattr(self.engine_config, "expert_parallel", 1)  # verl's own config has none
        if ranks > 1:
            self.expert_device_mesh = expert_mesh(self.device_mesh, ranks)

    def initialize(self) -> None:
        """Build verl's model, optimizer and schedule, and in fp16 a scaler.

        The scale starts at 2^16 and halves with every step that is skipped for an infinite gradient on any rank.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but")
            super().initialize()
        self.scaler = None
        if self._autocast_dtype == torch.float16:
            self.scaler = ShardedGradScaler(
                get_device_name(), growth_interval=_STEADY_STEPS, process_group=dist.group.WORLD
            )

    def _build_module(self) -> torch.nn.Module:
        """Build verl's module with new tokens and activation options."""
        model, module = self.model_config, cast(Any, super()._build_module())
        if pieces := getattr(model, "new_pieces", {}):  # verl's own config has none
            add_rows(module, pieces)
            add_to_config(model.hf_config, pieces)
        kept = {} if self.expert_device_mesh is None else {"context_fn": KeptRouting.contexts}
        if kept and model.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kept})
        apply_activation_options(module, ActivationOptions.read(vars(self.model_config)), **kept)
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        """Shard the module as verl does, with our patches, and count the FLOPs of a step."""

        def shard(module: Any, fsdp_kwargs: dict[str, Any], config: Any) -> None:
            keep_decays_precise(module, fsdp_kwargs)
            if self.expert_device_mesh is not None:
                shard_experts(module, self.expert_device_mesh, fsdp_kwargs)
            apply_fsdp2(module, fsdp_kwargs, config)
            if self.expert_device_mesh is not None:
                prefetch_experts(module)

        def outermost(module: Any, names: Any) -> list[Any]:
            targets = wrap_targets(module, names)
            inner = {part for outer in targets for part in outer.modules() if part is not outer}
            return [part for part in targets if part not in inner and not hasattr(part, "expert_share")]

        self._cast_frozen(module)
        apply_fsdp2, wrap_targets = upstream.APPLY_FSDP2.original, upstream.WRAP_TARGETS.original
        module._no_split_modules = sharded_apart(module)
        states = sum(mixer.state_flops(layer) for layer, mixer in mixers_of(module))
        self.train_flops = train_flops(module, self.model_config.hf_config, states)
        changes = {upstream.APPLY_FSDP2: shard, upstream.WRAP_TARGETS: outermost, upstream.SHARD_MODULE: None}
        with upstream.patched(changes):
            return super()._build_fsdp_module(module)

    def _cast_frozen(self, module: Any) -> None:
        """Store what is not trained as `model.frozen_dtype` asks."""
        if getattr(self.model_config, "frozen_dtype", "fp32") == "compute":  # verl's own config has none
            precision: Any = self.engine_config.mixed_precision or {}
            cast_frozen(module, PrecisionType.to_dtype(precision.get("param_dtype", "bf16")))

    def _build_optimizer(self, module: Any) -> Any:
        """Build verl's optimizer over the groups of parameters, in the implementation for this device and torch."""
        offloads = bool(self.engine_config.offload_policy)
        if offloads:
            take_threads()
        half = self._autocast_dtype == torch.float16
        self.optimizer_config = with_implementation(self.optimizer_config, get_device_name(), offloads, half)
        return built_optimizer(parameter_groups(module, self.optimizer_config), self.optimizer_config)

    def _build_lr_scheduler(self, optimizer: Any) -> Any:
        """Build verl's cosine, or a schedule of ours by the same options."""
        config: Any = self.optimizer_config
        if config.lr_scheduler_type == "cosine":
            return super()._build_lr_scheduler(optimizer)
        return LambdaLR(optimizer, rate_factor(config, config.total_training_steps))

    def accumulate(self, micro_batches: Sequence[TensorDict], loss_function: Callable) -> None:
        """Run forwards and backwards over a step's micro-batches; gradients add up.

        Ranks must hold equally many micro-batches: FSDP's collectives are one per layer and micro-batch.
        """
        for index, micro_batch in enumerate(micro_batches):
            with self._gradient_sync_context(is_last_micro_batch=index == len(micro_batches) - 1):
                loss = self.training_loss(micro_batch, loss_function)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def training_loss(self, micro_batch: TensorDict, loss_function: Callable) -> torch.Tensor:
        """Return a micro-batch's part of the step's loss, on the device."""
        return self.forward_step(micro_batch, loss_function, forward_only=False)[0]

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[TensorDict], loss_function: Callable) -> None:
        """Run forwards alone; ``loss_function`` collects their results."""
        for micro_batch in micro_batches:
            self.forward_step(micro_batch, loss_function, forward_only=True)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run a forward, and return the loss and verl's dictionary of outputs."""
        device: Any = get_device_id()  # an index on accelerators, "cpu" on ours
        model_inputs, output_args, micro_batch = self.prepare_micro_batch(micro_batch, device)
        with self._autocast():
            raw_output = self.run_module(model_inputs, output_args)
            model_output = self.prepare_model_outputs(raw_output, output_args, micro_batch, loss_function)
            if loss_function is None:
                assert forward_only, "training needs a loss function"
                loss, metrics = torch.ones((), device=device), {}
            else:
                loss, metrics = loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach(), "metrics": metrics}

    def optimizer_step(self) -> float:
        """Take verl's step, after a checkpoint's copies to the host."""
        if self.host_copies is not None:
            self.host_copies.hold_device()
        clip = partial(clip_gradients, device=get_device_id())
        with upstream.patched({upstream.CLIP_GRADIENTS: clip}):
            return super().optimizer_step()

    def generate_answers(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue prompts as a collective; ranks may have different prompts."""
        device: Any = get_device_id()
        with self._autocast():
            return generate(self.module, prompts, sampling, device)

    def run_module(self, model_inputs: dict, output_args: dict) -> Any:
        """Run the model."""
        return self.module(**model_inputs, use_cache=False)

    def prepare_micro_batch(self, micro_batch: TensorDict, device: Any) -> tuple[dict, dict, TensorDict]:
        """Return model inputs, output arguments and micro-batch on the device."""
        inputs, output_args = self.prepare_model_inputs(micro_batch)
        for part in (inputs, output_args):
            moved = {key: x.to(device, non_blocking=True) for key, x in part.items() if isinstance(x, torch.Tensor)}
            part.update(moved)
        return inputs, output_args, on_device(micro_batch, device)

    @staticmethod
    def gather_to_rank0(tensor: torch.Tensor) -> torch.Tensor:
        """Gather a tensor in rank 0's host memory, a collective; elsewhere nothing."""
        full = tensor
        if isinstance(tensor, DTensor):
            # verl offloads weights without waiting for their copies, so the host could read them half copied.
            on_device: Any = tensor.to(get_device_id())
            full = on_device.full_tensor()
        return full.detach().to("cpu", copy=True) if dist.get_rank() == 0 else full.new_empty(0)

    def _autocast(self) -> Any:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def on_device(micro_batch: TensorDict, device: Any) -> TensorDict:
    """Copy a jagged micro-batch to the device without waiting for it.

    ``TensorDict.to`` waits for the offsets of each tensor. Here the flat values, which the loader page-locked, are
    copied, and the offsets, which all tensors share, only once.
    """
    moved = micro_batch.copy()
    offsets: dict[int, torch.Tensor] = {}
    for key, value in micro_batch.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            shared: Any = value.offsets()  # type: ignore[attr-defined]
            if id(shared) not in offsets:
                offsets[id(shared)] = pinned(shared, device).to(device, non_blocking=True)
            flat = pinned(value.values(), device).to(device, non_blocking=True)
            moved[key] = torch.nested.nested_tensor_from_jagged(flat, offsets[id(shared)])
        elif isinstance(value, torch.Tensor):
            moved[key] = pinned(value, device).to(device, non_blocking=True)
    if (units := tu.get_non_tensor_data(micro_batch, "units", default=None)) is not None:
        tu.assign_non_tensor_data(moved, "units", units.to(device, pinned))
    return moved


def wants_token_stats(micro_batch: TensorDict) -> bool:
    """Tell whether a batch asks for TOKEN_STATS beside losses."""
    return tu.get_non_tensor_data(micro_batch, "token_stats", default=False)
