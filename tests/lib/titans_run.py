"""The shared options and initial model of runs with long-term memory."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM

MEMORY = {"chunk_size": 32, "sub_chunk": 16, "heads": 2, "head_dim": 8, "layers": [1]}
TITANS = (
    *("data=babilong", "model=qwen_titans", "data.max_length=96", "data.max_tokens=${data.max_length}"),
    "data.answer_reserve_tokens=4",
    *(f"model.memory.{name}={value}" for name, value in MEMORY.items()),
    "engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
)


def fresh_model(folder: Path, **memory: Any) -> QwenTitansForCausalLM:
    """Build the model of a run with TITANS before its first step: ``folder``'s Qwen and a new memory."""
    torch.manual_seed(1)  # the value of trainer.seed
    config = QwenTitansConfig.from_base(AutoConfig.from_pretrained(folder), **{**MEMORY, **memory})
    return QwenTitansForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
