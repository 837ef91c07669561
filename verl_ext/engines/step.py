"""verl's FSDP engine as the training loop uses it: micro-batches in, gradients out, the loss left on the device.

A subclass of ``FSDPEngineWithLMHead``; everything that it does not name here (sharding, offload, LoRA, checkpoints,
clipping, the learning-rate schedule) is verl's. What a forward reads and gives is for its subclasses to say.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from verl_ext.lora_export import export_merged


class StepEngine(FSDPEngineWithLMHead):
    """Runs the micro-batches of a step."""

    def __init__(self, model_config: HFModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, *args, **kwargs)
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

    def memory_state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters of a long-term memory in one piece, on rank 0's host memory; collective. Empty without one."""
        return {}

    def _autocast(self) -> Any:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _moved(part: dict[str, Any], device: Any) -> dict[str, Any]:
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in part.items()
    }
