"""What the runs of a model with long-term memory share: their options, and the model that they start from."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from verl_ext.models.qwen_titans import QwenTitansConfig, QwenTitansForCausalLM

MEMORY = {"chunk_size": 32, "sub_chunk": 16, "heads": 2, "head_dim": 8, "layers": [1]}
TITANS = (
    *("data=babilong", "model=qwen_titans", "data.max_length=96", "data.max_tokens=${data.max_length}"),
    "data.answer_reserve_tokens=4",
    *(f"model.memory.{name}={value}" for name, value in MEMORY.items()),
    "engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
)


def fresh_model(folder: Path, **memory: Any) -> QwenTitansForCausalLM:
    """The model of a run with TITANS before its first step: the Qwen of ``folder`` and a memory of `trainer.seed`."""
    torch.manual_seed(1)  # trainer.seed
    config = QwenTitansConfig.from_base(AutoConfig.from_pretrained(folder), **{**MEMORY, **memory})
    return QwenTitansForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
