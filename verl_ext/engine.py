"""verl's FSDP engine for packs: document boundaries handed down, fp32 token losses, the loss left on the device.

A subclass of ``FSDPEngineWithLMHead``, registered beside verl's own under vendor ``verl_ext``; everything that it does
not name here (sharding, offload, LoRA, checkpoints, clipping, the learning-rate schedule) is verl's.

Legend: T tokens of a micro-batch with padding, n the sequence-parallel size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from verl_ext.attention import document_layout
from verl_ext.attention.packed import require_layout
from verl_ext.lora_export import export_merged
from verl_ext.losses import token_nll

# What only verl's reinforcement learning asks of prepare_model_outputs; its own code answers there.
_UPSTREAM_OUTPUTS = ("use_fused_kernels", "calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu", "cuda"], vendor="verl_ext"
)
class PackedEngine(FSDPEngineWithLMHead):
    """Runs micro-batches of packs; a pack's documents restart ``position_ids`` at 0."""

    def __init__(self, model_config: HFModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, *args, **kwargs)
        require_layout()
        # verl also copies the override onto the config as a plain attribute, which an export would write to disk and
        # which plain transformers then refuses; the implementation itself is kept elsewhere.
        vars(self.model_config.hf_config).pop("attn_implementation", None)

    def accumulate(self, micro_batches: Sequence[TensorDict], loss_function: Callable) -> None:
        """Forward and backward over one rank's micro-batches of a step; gradients add up.

        Ranks must hold equally many micro-batches: FSDP's collectives are one per layer and micro-batch.
        """
        for index, micro_batch in enumerate(micro_batches):
            with self._gradient_sync_context(is_last_micro_batch=index == len(micro_batches) - 1):
                loss, _ = self.forward_step(micro_batch, loss_function, forward_only=False)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[TensorDict], loss_function: Callable) -> None:
        """Forward alone; what it gives is what ``loss_function`` collects."""
        for micro_batch in micro_batches:
            self.forward_step(micro_batch, loss_function, forward_only=True)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """verl's forward step, with its inputs laid out on the host and without its ``loss.item()``.

        On a device verl's layout repeats a tensor by lengths that lie there, which waits for it in every micro-batch.
        """
        device: Any = get_device_id()  # an index on accelerators, "cpu" on ours
        self._layout = document_layout(micro_batch["position_ids"].values().cpu(), device)
        model_inputs, output_args = (_moved(part, device) for part in self.prepare_model_inputs(micro_batch))
        micro_batch = micro_batch.to(device, non_blocking=True)
        with self._autocast():
            raw_output = self.module(**model_inputs, use_cache=False)
            model_output = self.prepare_model_outputs(raw_output, output_args, micro_batch, loss_function)
            if loss_function is None:
                assert forward_only, "training needs a loss function"
                loss, metrics = torch.ones((), device=device), {}
            else:
                loss, metrics = loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach(), "metrics": metrics}

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint; ``hf_model`` of a LoRA run has its adapters merged."""
        manager = self.checkpoint_manager
        if not (self._is_lora and manager.should_save_hf_model):
            return super().save_checkpoint(local_path, *args, **kwargs)
        contents = manager.checkpoint_save_contents
        manager.checkpoint_save_contents = [content for content in contents if content != "hf_model"]
        try:
            super().save_checkpoint(local_path, *args, **kwargs)
        finally:
            manager.checkpoint_save_contents = contents
        export_merged(self.module, Path(local_path) / "huggingface", self.model_config.trust_remote_code)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        """verl's inputs ``[1, T/n]`` plus the layout of all T tokens, for every attention layer to read."""
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        model_inputs["document_layout"] = self._layout.padded(output_args["pad_size"])
        return model_inputs, output_args

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

    def _autocast(self) -> Any:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _moved(part: dict[str, Any], device: Any) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in part.items()
    }
