"""A sharded tensor in one piece.

A LoRA run's Hugging Face export: adapters merged into the base weights, under the base model's names.

verl 0.9.1's ``hf_model`` writes a LoRA model's tensors under PEFT's names, which plain transformers cannot load.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.transformers_compat import drop_tied_target_keys


def whole_on_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on rank 0's host memory, nothing elsewhere; every rank takes part in the gather."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
    return full.cpu() if dist.get_rank() == 0 else full.new_empty(0)


def export_merged(module: torch.nn.Module, folder: Path, trust_remote_code: bool) -> None:
    """Write ``module``, a sharded PEFT model, with its adapters merged; collective, rank 0 writes.

    The run's own weights are as before afterwards: base and adapters apart.
    """
    with merged_lora_context(module, backup_adapters=True):
        merged = normalize_peft_param_name(module.state_dict())
        gathered = {name: whole_on_first_rank(tensor) for name, tensor in merged.items()}
    if dist.get_rank() == 0:
        config = module.config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        drop_tied_target_keys(gathered, plain, config)
        plain.save_pretrained(folder, state_dict=gathered)
    dist.barrier()
