"""The engine of packs: document boundaries handed down to every attention layer, fp32 token losses.

Registered beside verl's own under vendor ``verl_ext``.

Legend: T tokens of a micro-batch with padding, n the sequence-parallel size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import slice_input_tensor
from verl.workers.config import HFModelConfig
from verl.workers.engine.base import EngineRegistry

from verl_ext.attention import document_layout
from verl_ext.attention.packed import require_layout
from verl_ext.attention.rope import choose_rope_by_document
from verl_ext.engines.step import StepEngine
from verl_ext.losses import token_nll

# What only verl's reinforcement learning asks of prepare_model_outputs; its own code answers there.
_UPSTREAM_OUTPUTS = ("use_fused_kernels", "calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu", "cuda"], vendor="verl_ext"
)
class PackedEngine(StepEngine):
    """Runs micro-batches of packs; a pack's documents restart ``position_ids`` at 0."""

    def __init__(self, model_config: HFModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, *args, **kwargs)
        require_layout()

    def _build_module(self) -> torch.nn.Module:
        """verl's module, with rotary frequencies by document."""
        module = super()._build_module()
        choose_rope_by_document(module, self.ulysses_device_mesh.get_local_rank("sp") if self.use_ulysses_sp else 0)
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        """verl's inputs ``[1, T/n]`` plus the layout of all T tokens, for every attention layer to read."""
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        device: Any = get_device_id()
        layout = document_layout(micro_batch["position_ids"].values().cpu(), device)
        model_inputs["document_layout"] = layout.padded(output_args["pad_size"])
        if "next_ids" in micro_batch:
            next_ids = micro_batch["next_ids"].values()
            output_args["input_ids_rmpad_rolled"] = self._share_of_tokens(next_ids, output_args["pad_size"])
        return model_inputs, output_args

    def _share_of_tokens(self, values: torch.Tensor, pad_size: int) -> torch.Tensor:
        """``[T/n]``: what this sequence-parallel rank holds of ``[T - pad_size]``, padded as verl pads the inputs."""
        padded = torch.nn.functional.pad(values, (0, pad_size))
        return slice_input_tensor(padded, dim=0, padding=False) if self.use_ulysses_sp else padded

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, logits_processor_func: Callable | None
    ) -> dict[str, torch.Tensor]:
        """``log_probs`` of the next token for every position, jagged as ``input_ids``, gathered over the SP ranks."""
        if any(tu.get_non_tensor_data(micro_batch, key, default=False) for key in _UPSTREAM_OUTPUTS):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        logits = output.logits.squeeze(0)  # [T/n, V]
        nll = token_nll(logits, output_args["input_ids_rmpad_rolled"], inplace_backward=True)
        nll = self._gather_and_unpad_packed(nll, output_args["pad_size"])
        return {"log_probs": torch.nested.nested_tensor_from_jagged(-nll, micro_batch["input_ids"].offsets())}
