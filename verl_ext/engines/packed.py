"""The engine of packs: document boundaries in attention, fp32 token losses.

It is registered beside verl's own engines under vendor ``verl_ext``.

Legend: T tokens of a micro-batch with padding, n the sequence-parallel size, V vocabulary.
"""

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.ulysses import gather_outputs_and_unpad
from verl.workers.config import HFModelConfig
from verl.workers.engine.base import EngineRegistry

from verl_ext.attention.packed import require_layout
from verl_ext.attention.rope import choose_rope_by_document, restore_rope_precision
from verl_ext.engines import upstream
from verl_ext.engines.head import FusedHead, HeadInputs, TargetRows, cheapest_head
from verl_ext.engines.lora import as_written, given_settings, modules_to_save, separate_tied_rows
from verl_ext.engines.new_rows import trained_rows
from verl_ext.engines.nf4 import hand_over_adapters, whole_shapes
from verl_ext.engines.nf4_reading import quantize_rest, quantized_while_read
from verl_ext.engines.router import RouterLoss, RoutingSums, asks_for_router_loss
from verl_ext.engines.step import StepEngine, on_device, wants_token_stats
from verl_ext.layers import UNAWARE, RunningPack, attach, install, torch_forms
from verl_ext.layers.experts import choose_experts
from verl_ext.layers.towers import freeze, model_class, text_alone, text_parts
from verl_ext.losses import BLOCK_BYTES, HEADS, TOKEN_STATS, Coefficients, nll_and_stats, row_coefficients
from verl_ext.options import must
from verl_ext.parallel.key_exchange import ContextGroups, ContextLayout
from verl_ext.parallel.shards import SequenceShards, document_layout, pinned
from verl_ext.parallel.trees import TreeLayout, tree_layout

# The outputs that only verl's reinforcement learning asks for; verl's own code computes them.
_VERL_OUTPUTS = ("use_fused_kernels", "calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")


@dataclass(frozen=True)
class PackedInputs:
    """A micro-batch's inputs on the device, beside the model's arguments.

    Attributes:
        labels: int64[T/n], the token after each position of this rank.
        pad_size: the padding among the T tokens.
        positions, local: those of :class:`TargetRows`; None if the head computes logits of all tokens.
        head: the inputs of a fused head; None if the head computes logits.
    """

    labels: torch.Tensor
    pad_size: int
    positions: torch.Tensor | None = None
    local: torch.Tensor | None = None
    head: HeadInputs | None = None


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu", "cuda"], vendor="verl_ext")
class PackedEngine(StepEngine):
    """The engine of packs, whose documents restart ``position_ids`` at 0."""

    def __init__(self, model_config: HFModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, *args, **kwargs)
        require_layout()

    def _init_device_mesh(self) -> None:
        """Make verl's meshes, and one for groups that exchange keys."""
        super()._init_device_mesh()
        groups = getattr(self.engine_config, "context_parallel_size", 1)  # verl's own config has none
        ulysses = self.ulysses_sequence_parallel_size // groups
        rank = self.ulysses_device_mesh.get_local_rank("sp") if self.use_ulysses_sp else 0
        self.shards = SequenceShards(ulysses, groups, rank)
        self._groups: ContextGroups | None = None
        if groups > 1:
            shape = (self.get_data_parallel_size(), groups, ulysses)
            mesh = init_device_mesh(get_device_name(), shape, mesh_dim_names=("dp", "across", "inside"))
            self.context_device_mesh = mesh
            self._groups = ContextGroups(self.shards, mesh.get_group("inside"), mesh.get_group("across"))

    def _build_module(self) -> torch.nn.Module:
        """Build verl's module with fp32 rotary frequencies by document, partly frozen."""
        with (
            upstream.patched({upstream.MONKEY_PATCH: _patch_fused_kernels}),
            torch_forms(model_class(self.model_config.hf_config), UNAWARE),
            self._quantized_while_read(),
        ):
            module: Any = super()._build_module()
        choose_experts(module, getattr(self.model_config, "experts", "auto"))  # verl's own config has none
        if self._nf4 is not None:
            quantize_rest(module, **self._nf4)
        for part in text_parts(module):
            restore_rope_precision(part)
        choose_rope_by_document(module, self.shards)
        pack = RunningPack(self.shards, self.ulysses_parallel_group if self.use_ulysses_sp else None)
        attach(module, pack)
        install(module, pack)
        if not self._is_lora:  # PEFT freezes all but its adapters
            freeze(module, getattr(self.model_config, "freeze", ()))  # verl's own config has none
        return module

    @property
    def _nf4(self) -> dict[str, Any] | None:
        """The options of a base in NF4; None for another."""
        model: Any = self.model_config
        if getattr(model, "quantization", None) is None:  # verl's own config has none
            return None
        return {"nested": model.quantization_nested, "whole": modules_to_save(model)}

    def _quantized_while_read(self) -> AbstractContextManager[None]:
        """Quantize the weights that verl reads; all ranks of tied ends keep them, else the first of each shard."""
        if self._nf4 is None:
            return nullcontext()
        hf_config, coordinate = self.model_config.hf_config, self.device_mesh.get_coordinate()
        is_empty = not hf_config.tie_word_embeddings and coordinate is not None and coordinate[-1] != 0
        return quantized_while_read(hf_config, **self._nf4, is_empty=is_empty)

    def _build_lora_module(self, module: Any) -> Any:
        """Add verl's adapters to the text model alone, with the LoraOptions."""
        config = self.model_config
        self.model_config = copy.copy(config)
        vars(self.model_config)["exclude_modules"] = text_alone(module, config.exclude_modules)
        settings = given_settings(config)
        settings |= trained_rows(module, getattr(config, "new_pieces", {}), settings.get("modules_to_save", ()))
        lora_config = upstream.LORA_CONFIG.original

        def complete(**of_verl: Any) -> Any:
            return as_written(module, lora_config(**of_verl, **settings))

        try:
            with upstream.patched({upstream.LORA_CONFIG: complete}), whole_shapes(module):
                adapted = super()._build_lora_module(module)
        finally:
            self.model_config = config
        hand_over_adapters(adapted)
        separate_tied_rows(adapted)
        # Exported adapters name their base, also for a reader in another working directory.
        for lora in adapted.peft_config.values():
            if os.path.isdir(lora.base_model_name_or_path or ""):
                lora.base_model_name_or_path = os.path.abspath(lora.base_model_name_or_path)
        return adapted

    def initialize(self) -> None:
        """Initialise as the parent does, with a head and router loss.

        The router loss is there if the config of a mixture of experts asks for it.
        """
        super().initialize()
        self.cheapest_head = cheapest_head(self.module)
        self._fused_head = FusedHead(self.module) if self.cheapest_head == "fused" else None
        embedding = self.module.get_input_embeddings()
        if isinstance(embedding, FSDPModule) and isinstance(embedding, torch.nn.Embedding):
            embedding.set_unshard_in_backward(False)  # its gradient needs the ids alone
        hf_config = self.model_config.hf_config.get_text_config()
        if asks_for_router_loss(hf_config):
            self.router_loss = RouterLoss(self.module, hf_config)

    def accumulate(self, micro_batches: Sequence[TensorDict], loss_function: Callable) -> None:
        """Accumulate as the parent does, after the count of routers' choices.

        A router loss belongs to the whole step. With several micro-batches, extra forwards count the choices of all of
        them first; the choices of a single micro-batch are counted in its own forward.
        """
        if self.router_loss is not None:
            self.router_loss.begin_step()
            if len(micro_batches) > 1:
                self.router_loss.measure(self._routing(micro_batches))
        super().accumulate(micro_batches, loss_function)

    @torch.no_grad()
    def _routing(self, micro_batches: Sequence[TensorDict]) -> list[RoutingSums]:
        """Return each micro-batch's part of the routing; keep dropout's random numbers."""
        assert self.router_loss is not None
        device: Any = get_device_id()
        sums = []
        with torch.random.fork_rng([device] if isinstance(device, int) else []):
            for micro_batch in micro_batches:
                arguments, _, _ = self.prepare_micro_batch(micro_batch, device)
                with self._autocast(), self.router_loss.recording() as logits:
                    self.module(**{**arguments, "logits_to_keep": 1}, use_cache=False)
                sums.append(self.router_loss.sums(logits, self._copies(micro_batch)))
        return sums

    def training_loss(self, micro_batch: TensorDict, loss_function: Callable) -> torch.Tensor:
        """Return the micro-batch's share of the loss and of the router loss."""
        if self.router_loss is None:
            return super().training_loss(micro_batch, loss_function)
        with self.router_loss.recording() as logits:
            loss = super().training_loss(micro_batch, loss_function)
        return loss + self.router_loss.share(logits, self._copies(micro_batch))

    def prepare_micro_batch(self, micro_batch: TensorDict, device: Any) -> tuple[dict, Any, TensorDict]:
        """Return the model's arguments, :class:`PackedInputs`, and the micro-batch on the device.

        The arguments are ids and positions ``[1, T/n]``, the layout of all T tokens, and the positions that the head
        sees. For outputs of verl's own, its arguments take the place of PackedInputs. Raises ValueError if a batch asks
        for those while groups share packs.
        """
        # Read documents and targets on the host, so that it never waits for the device.
        shares = tu.get_non_tensor_data(micro_batch, "shares_prefixes", default=False)
        read_layout = tree_layout if shares else document_layout
        layout = read_layout(micro_batch["position_ids"].values().cpu(), device)
        if self._groups and isinstance(layout, TreeLayout):
            needed = f"be false with {self.shards.context} context-parallel groups"
            raise ValueError(must("data.share_prefixes", needed, True))
        rows = self._target_rows(micro_batch)
        micro_batch = on_device(micro_batch, device)
        inputs: Any
        if _needs_verl(micro_batch):
            if self._groups:
                needed = "be 1 where a batch asks for entropies, a temperature or other outputs of verl's own"
                raise ValueError(must("parallel.context_parallel_size", needed, self.shards.context))
            arguments, inputs = self.prepare_model_inputs(micro_batch)
            layout = layout.padded(inputs["pad_size"])
        else:
            arguments, inputs = self._packed_inputs(micro_batch, rows, device)
            layout = layout.padded(inputs.pad_size)
        arguments["document_layout"] = ContextLayout.from_layout(layout, self._groups) if self._groups else layout
        return arguments, inputs, micro_batch

    def _packed_inputs(
        self, micro_batch: TensorDict, rows: TargetRows | None, device: Any
    ) -> tuple[dict, PackedInputs]:
        """Return the arguments and inputs of this rank's slice of the pack."""
        ids, positions = micro_batch["input_ids"].values(), micro_batch["position_ids"].values()
        pad_size = self._pad_size(len(ids))
        arguments: dict[str, Any] = {
            "input_ids": self._sequence_slice(ids, pad_size).unsqueeze(0),
            "attention_mask": None,
            "position_ids": self._sequence_slice(positions, pad_size).unsqueeze(0),
        }
        if getattr(self.model_config.hf_config.get_text_config(), "output_router_logits", False):
            arguments["output_router_logits"] = False  # or transformers would add its own loss of this batch
        next_ids = micro_batch["next_ids"].values() if "next_ids" in micro_batch else ids.roll(-1)
        labels = self._sequence_slice(next_ids, pad_size)
        if rows is None:
            return arguments, PackedInputs(labels, pad_size)
        targets, local = (pinned(x, device).to(device, non_blocking=True) for x in (rows.positions, rows.local))
        arguments["logits_to_keep"] = local
        head = None
        if self._head_form(micro_batch) == "fused":
            head = HeadInputs(
                next_ids[targets[rows.part]],
                self._coefficients(micro_batch, targets[rows.part]),
                rows,
                self.ulysses_parallel_group if self.use_ulysses_sp else None,
                tu.get_non_tensor_data(micro_batch, "head_block_bytes", default=BLOCK_BYTES),
                wants_token_stats(micro_batch),
            )
        return arguments, PackedInputs(labels, pad_size, targets, local, head)

    def _coefficients(self, micro_batch: TensorDict, of_rank: torch.Tensor) -> Coefficients:
        """Return the coefficients of the targets that this rank's head computes, or a function of their losses."""
        tokens = len(micro_batch["input_ids"].values())
        if (function := tu.get_non_tensor_data(micro_batch, "coefficients_of", default=None)) is None:
            rows, of_targets = (micro_batch[name].values() for name in ("target_row", "target_coefficient"))
            return row_coefficients(rows, of_targets, tokens)[of_rank]

        def coefficients(nll: torch.Tensor) -> torch.Tensor:
            whole = nll.new_zeros(tokens).index_put((of_rank,), nll)
            return function(micro_batch, whole, self._sum_over_pack if self.use_ulysses_sp else None)[of_rank]

        return coefficients

    def _sum_over_pack(self, values: torch.Tensor) -> None:
        """Sum values over the ranks that share a pack, in place."""
        dist.all_reduce(values, group=self.ulysses_parallel_group)

    def _target_rows(self, micro_batch: TensorDict) -> TargetRows | None:
        """Read the targets on the host; None for a plain head.

        Outputs of verl's own code give None too.
        """
        if self._head_form(micro_batch) == "plain" or _needs_verl(micro_batch):
            return None
        rows, tokens = micro_batch["target_row"].values().cpu(), len(micro_batch["input_ids"].values())
        return TargetRows.from_rows(rows, tokens + self._pad_size(tokens), self.shards)

    def _head_form(self, micro_batch: TensorDict) -> str:
        """Return the batch's form of head, or the model's next best."""
        return max(tu.get_non_tensor_data(micro_batch, "head", default="plain"), self.cheapest_head, key=HEADS.index)

    def run_module(self, model_inputs: dict, output_args: Any) -> Any:
        """Run the model; a fused head returns loss terms for logits."""
        if self._fused_head is None:
            return super().run_module(model_inputs, output_args)
        with self._fused_head.computing_loss(output_args.head if isinstance(output_args, PackedInputs) else None):
            return super().run_module(model_inputs, output_args)

    def _pad_size(self, tokens: int) -> int:
        """Return the padding of `engine.pad_to_length` and then for the ranks."""
        bucket = self._get_packed_pad_size(tokens)
        return bucket + -(tokens + bucket) % self.shards.multiple

    def _sequence_slice(self, values: torch.Tensor, pad_size: int) -> torch.Tensor:
        """Pad ``[T - pad_size]`` and return the rank's ``[T/n]``."""
        return self.shards.slice(torch.nn.functional.pad(values, (0, pad_size)))

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        """Gather ``[T/n]`` of ranks to ``[T - pad_size]`` in order."""
        whole = gather_outputs_and_unpad(tensor, gather_dim=0) if self.use_ulysses_sp else tensor
        return self.shards.by_position(whole)[: len(whole) - pad_size]

    def _copies(self, micro_batch: TensorDict) -> torch.Tensor:
        """Return int64``[T/n]`` on the device, the documents that have each token; 0 for the rank's padding."""
        device: Any = get_device_id()
        if "copies" in micro_batch:
            copies = micro_batch["copies"].values().to(device, non_blocking=True)
        else:
            copies = torch.ones(len(micro_batch["input_ids"].values()), dtype=torch.int64, device=device)
        return self._sequence_slice(copies, self._pad_size(len(copies)))

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Callable | None
    ) -> dict[str, torch.Tensor]:
        """Return ``log_probs`` of next tokens of all ranks, jagged as ``input_ids``.

        If the batch asks for target tokens alone, the others are 0. A fused head also returns ``loss_terms``, the
        coefficient times the loss of each token, through which the gradients flow. If the batch asks for them, the
        outputs include TOKEN_STATS.
        """
        if not isinstance(output_args, PackedInputs):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        inputs, ids = output_args, micro_batch["input_ids"]
        columns: dict[str, torch.Tensor] = {}
        if inputs.head is not None:
            terms = self._gathered_terms(output.logits.squeeze(0), inputs.head.rows)  # [N, loss term, nll, …]
            terms = terms.new_zeros(len(ids.values()), terms.shape[1]).index_put((inputs.positions,), terms)
            columns["loss_terms"], nll, *stats = terms.unbind(-1)
            nll = nll.detach()
        else:
            logits, local, labels = output.logits.squeeze(0), inputs.local, inputs.labels  # [T/n, V], or of targets
            next_ids, with_stats = labels if local is None else labels[local], wants_token_stats(micro_batch)
            of_rows = nll_and_stats(logits, next_ids, inplace_backward=True, with_stats=with_stats)
            if local is not None:
                of_rows = tuple(x.new_zeros(len(labels)).index_put((local,), x) for x in of_rows)
            nll, *stats = (self._gather_and_unpad_packed(x, inputs.pad_size) for x in of_rows)
        columns |= {"log_probs": -nll, **dict(zip(TOKEN_STATS, stats, strict=bool(stats)))}
        return {name: torch.nested.nested_tensor_from_jagged(x, ids.offsets()) for name, x in columns.items()}

    def _gathered_terms(self, terms: torch.Tensor, rows: TargetRows) -> torch.Tensor:
        """Gather all targets' ``[N, columns]`` from each rank's ``[≤ R, columns]``."""
        if not self.use_ulysses_sp:
            return terms
        padded = torch.nn.functional.pad(terms, (0, 0, 0, rows.most - len(terms)))
        return gather_outputs_and_unpad(padded, gather_dim=0)[: len(rows.positions)]


def _patch_fused_kernels(model: Any, use_fused_kernels: bool = False, **others: Any) -> None:
    """Patch as verl does, but only if fused kernels are requested."""
    if use_fused_kernels:
        apply_monkey_patch(model, use_fused_kernels=True, **{**others, "ulysses_sp_size": 1})


def _needs_verl(micro_batch: TensorDict) -> bool:
    """Tell whether the batch asks for outputs of verl's own code."""
    if any(tu.get_non_tensor_data(micro_batch, key, default=False) for key in _VERL_OUTPUTS):
        return True
    temperature = tu.get_non_tensor_data(micro_batch, "temperature", default=1.0)
    return isinstance(temperature, torch.Tensor) or temperature != 1.0
