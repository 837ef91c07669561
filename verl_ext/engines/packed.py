"""The engine of packs: document boundaries handed down to every attention layer, fp32 token losses.

Registered beside verl's own under vendor ``verl_ext``.

Legend: T tokens of a micro-batch with padding, n the sequence-parallel size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.ulysses import gather_outputs_and_unpad
from verl.workers.config import HFModelConfig
from verl.workers.engine.base import EngineRegistry

from verl_ext.attention import SequenceShards, document_layout
from verl_ext.attention.context import ContextGroups, ContextLayout
from verl_ext.attention.layout import pinned
from verl_ext.attention.packed import require_layout
from verl_ext.attention.rope import choose_rope_by_document, restore_rope_precision
from verl_ext.engines.head import FusedHead, HeadWork, TargetRows, head_use
from verl_ext.engines.router import RouterLoss, RoutingSums, asks_for_router_loss
from verl_ext.engines.step import StepEngine, on_device
from verl_ext.losses import BLOCK_BYTES, HEADS, token_nll

# What only verl's reinforcement learning asks of prepare_model_outputs; verl's own code computes it.
_VERL_OUTPUTS = ("use_fused_kernels", "calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu", "cuda"], vendor="verl_ext"
)
class PackedEngine(StepEngine):
    """Runs micro-batches of packs; a pack's documents restart ``position_ids`` at 0."""

    def __init__(self, model_config: HFModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, *args, **kwargs)
        require_layout()

    def _init_device_mesh(self) -> None:
        """verl's meshes, and where keys and values travel between groups of ranks, theirs."""
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
        """verl's module, with rotary frequencies in fp32 and by document."""
        # verl's patch of flash attention for Ulysses is not used, and refuses heads that are padded here.
        ranks, self.ulysses_sequence_parallel_size = self.ulysses_sequence_parallel_size, 1
        try:
            module = super()._build_module()
        finally:
            self.ulysses_sequence_parallel_size = ranks
        restore_rope_precision(module)
        choose_rope_by_document(module, self.shards)
        return module

    def initialize(self) -> None:
        """As the parent; a mixture of experts whose config asks for it has a router loss."""
        super().initialize()
        self.head_use = head_use(self.module)
        self._fused_head = FusedHead(self.module) if self.head_use == "fused" else None
        hf_config = self.model_config.hf_config.get_text_config()
        if asks_for_router_loss(hf_config):
            self.router_loss = RouterLoss(self.module, hf_config)

    def accumulate(self, micro_batches: Sequence[TensorDict], loss_function: Callable) -> None:
        """As the parent. A router loss is of the whole step: with several micro-batches, a forward of each before them
        all counts its choices of experts; a single one is counted in its own forward."""
        if self.router_loss is not None:
            self.router_loss.begin_step()
            if len(micro_batches) > 1:
                self.router_loss.measure(self._routing(micro_batches))
        super().accumulate(micro_batches, loss_function)

    @torch.no_grad()
    def _routing(self, micro_batches: Sequence[TensorDict]) -> list[RoutingSums]:
        """What each micro-batch adds to the step's routing; leaves the random numbers of dropout as they were."""
        assert self.router_loss is not None
        device: Any = get_device_id()
        sums = []
        with torch.random.fork_rng([device] if isinstance(device, int) else []):
            for micro_batch in micro_batches:
                model_inputs, _, _ = self.prepare_micro_batch(micro_batch, device)
                with self._autocast(), self.router_loss.recording() as logits:
                    self.module(**{**model_inputs, "logits_to_keep": 1}, use_cache=False)
                sums.append(self.router_loss.sums(logits, self._real_tokens(micro_batch)))
        return sums

    def training_loss(self, micro_batch: TensorDict, loss_function: Callable) -> torch.Tensor:
        """The micro-batch's share of the loss and of the router loss."""
        if self.router_loss is None:
            return super().training_loss(micro_batch, loss_function)
        with self.router_loss.recording() as logits:
            loss = super().training_loss(micro_batch, loss_function)
        return loss + self.router_loss.share(logits, self._real_tokens(micro_batch))

    def prepare_micro_batch(self, micro_batch: TensorDict, device: Any) -> tuple[dict, dict, TensorDict]:
        """The inputs ``[1, T/n]`` and the layout of all T tokens, for every attention layer to read."""
        layout = document_layout(micro_batch["position_ids"].values().cpu(), device)
        rows = self._target_rows(micro_batch)
        micro_batch = on_device(micro_batch, device)
        model_inputs, output_args = self.prepare_model_inputs(micro_batch)
        layout = layout.padded(output_args["pad_size"])
        model_inputs["document_layout"] = ContextLayout.shared(layout, self._groups) if self._groups else layout
        if rows is not None:
            model_inputs["logits_to_keep"] = pinned(rows.held, device).to(device, non_blocking=True)
            output_args |= self._target_args(micro_batch, rows, device) | {"held": model_inputs["logits_to_keep"]}
        return model_inputs, output_args, micro_batch

    def _target_rows(self, micro_batch: TensorDict) -> TargetRows | None:
        """The target tokens of a batch whose head gives nothing for others, `loss.head`; read on the host."""
        if "category_index" not in micro_batch or self._head_of(micro_batch) == "plain" or _needs_verl(micro_batch):
            return None
        is_target = micro_batch["category_index"].values().cpu() >= 0
        padded = torch.nn.functional.pad(is_target, (0, self._pad_size(len(is_target))))
        return TargetRows.of(padded, self.shards)

    def _head_of(self, micro_batch: TensorDict) -> str:
        """What the batch asks of the head, or the next best that the model allows."""
        asked = tu.get_non_tensor_data(micro_batch, "head", default="plain")
        return max(asked, self.head_use, key=HEADS.index)

    def _target_args(self, micro_batch: TensorDict, rows: TargetRows, device: Any) -> dict[str, Any]:
        """What :meth:`prepare_model_outputs` reads of the targets, and the work of a fused head."""
        at = pinned(rows.at, device).to(device, non_blocking=True)
        args: dict[str, Any] = {"rows": rows, "at": at, "work": None}
        if self._head_of(micro_batch) == "fused":
            mine = at[rows.rows]
            args["work"] = HeadWork(
                _next_ids(micro_batch)[mine],
                micro_batch["loss_coefficients"].values()[mine],
                rows,
                self.ulysses_parallel_group if self.use_ulysses_sp else None,
                tu.get_non_tensor_data(micro_batch, "head_block_bytes", default=BLOCK_BYTES),
            )
        return args

    def run_module(self, model_inputs: dict, output_args: dict) -> Any:
        """The model's output; loss terms of the targets stand in its logits where the head is fused."""
        if self._fused_head is None:
            return super().run_module(model_inputs, output_args)
        with self._fused_head.doing(output_args.get("work")):
            return super().run_module(model_inputs, output_args)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        """verl's inputs ``[1, T/n]`` of a micro-batch on the device, by shapes alone: nothing waits for the device."""
        if _needs_verl(micro_batch):
            if self._groups:
                raise ValueError(
                    "parallel.context_parallel_size must be 1 where a batch asks for entropies, a temperature or other "
                    f"outputs of verl's own; got {self.shards.context}"
                )
            return super().prepare_model_inputs(micro_batch)
        ids, positions = micro_batch["input_ids"].values(), micro_batch["position_ids"].values()
        pad = self._pad_size(len(ids))
        model_inputs: dict[str, Any] = {
            "input_ids": self._sequence_slice(ids, pad).unsqueeze(0),
            "attention_mask": None,
            "position_ids": self._sequence_slice(positions, pad).unsqueeze(0),
        }
        if getattr(self.model_config.hf_config, "output_router_logits", False):
            model_inputs["output_router_logits"] = False  # transformers would compute its own loss of this batch
        return model_inputs, {"pad_size": pad, "labels": self._sequence_slice(_next_ids(micro_batch), pad)}

    def _pad_size(self, tokens: int) -> int:
        """Padding after all tokens: to verl's bucket (`engine.pad_to_length`), then to a multiple that ranks share."""
        bucket = self._get_packed_pad_size(tokens)
        return bucket + -(tokens + bucket) % self.shards.multiple

    def _sequence_slice(self, values: torch.Tensor, pad_size: int) -> torch.Tensor:
        """``[T/n]``: what this sequence-parallel rank holds of ``[T - pad_size]`` and the padding after it."""
        return self.shards.slice(torch.nn.functional.pad(values, (0, pad_size)))

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        """``[T - pad_size]`` in the pack's order, of ``[T/n]`` of each rank."""
        whole = gather_outputs_and_unpad(tensor, gather_dim=0) if self.use_ulysses_sp else tensor
        return self.shards.by_position(whole)[: len(whole) - pad_size]

    def _real_tokens(self, micro_batch: TensorDict) -> torch.Tensor:
        """bool``[T/n]`` on the device: which tokens of this sequence-parallel rank are no padding."""
        device: Any = get_device_id()
        if "is_real" in micro_batch:
            is_real = micro_batch["is_real"].values().to(device, non_blocking=True)
        else:
            is_real = torch.ones(len(micro_batch["input_ids"].values()), dtype=torch.bool, device=device)
        return self._sequence_slice(is_real, self._pad_size(len(is_real)))

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, logits_processor_func: Callable | None
    ) -> dict[str, torch.Tensor]:
        """``log_probs`` of the next token for every position, jagged as ``input_ids``, gathered over the SP ranks.

        Of target tokens alone where the batch asks for no more; the others are 0. A fused head gives ``loss_terms``,
        coefficients times the loss of each token, through which its gradients go.
        """
        if _needs_verl(micro_batch):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        offsets = micro_batch["input_ids"].offsets()
        rows: TargetRows | None = output_args.get("rows")
        if output_args.get("work") is not None:
            assert rows is not None
            pairs = self._gathered_terms(output.logits.squeeze(0), rows)
            whole = pairs.new_zeros(len(micro_batch["input_ids"].values()), 2).index_put((output_args["at"],), pairs)
            terms, nll = whole.unbind(-1)
            return {
                "log_probs": torch.nested.nested_tensor_from_jagged(-nll.detach(), offsets),
                "loss_terms": torch.nested.nested_tensor_from_jagged(terms, offsets),
            }
        logits, labels = output.logits.squeeze(0), output_args["labels"]  # [T/n, V], or of the targets in it
        if rows is None:
            nll = token_nll(logits, labels, inplace_backward=True)
        else:
            held = output_args["held"]
            of_targets = token_nll(logits, labels[held], inplace_backward=True)
            nll = of_targets.new_zeros(len(labels)).index_put((held,), of_targets)
        nll = self._gather_and_unpad_packed(nll, output_args["pad_size"])
        return {"log_probs": torch.nested.nested_tensor_from_jagged(-nll, offsets)}

    def _gathered_terms(self, pairs: torch.Tensor, rows: TargetRows) -> torch.Tensor:
        """``[N, 2]`` of all targets, from the ``[≤ R, 2]`` of this sequence-parallel rank."""
        if not self.use_ulysses_sp:
            return pairs
        padded = torch.nn.functional.pad(pairs, (0, 0, 0, rows.padded - len(pairs)))
        return gather_outputs_and_unpad(padded, gather_dim=0)[: len(rows.at)]


def _next_ids(micro_batch: TensorDict) -> torch.Tensor:
    """int64[T]: the token after each position."""
    return micro_batch["next_ids"].values() if "next_ids" in micro_batch else micro_batch["input_ids"].values().roll(-1)


def _needs_verl(micro_batch: TensorDict) -> bool:
    """Whether the batch asks for outputs that only verl's own code computes."""
    if any(tu.get_non_tensor_data(micro_batch, key, default=False) for key in _VERL_OUTPUTS):
        return True
    temperature = tu.get_non_tensor_data(micro_batch, "temperature", default=1.0)
    return isinstance(temperature, torch.Tensor) or temperature != 1.0
