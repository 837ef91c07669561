"""Qwen2 or Qwen3 that remembers earlier chunks in a Titans memory.

Chunks share no keys or values (https://arxiv.org/abs/2501.00663). Importing this package registers the model with
transformers: ``AutoConfig`` and ``AutoModelForCausalLM`` then open its folders.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from verl_ext.titans.checkpoint import (
    load_memory_checkpoint,
    read_memory_checkpoint,
    save_memory_checkpoint,
)
from verl_ext.titans.configuration import MemoryOptions, QwenTitansConfig, settings_of_today
from verl_ext.titans.modeling import QwenTitansForCausalLM, QwenTitansOutput, is_memory_parameter
from verl_ext.titans.stream import StreamCache

AutoConfig.register(QwenTitansConfig.model_type, QwenTitansConfig, exist_ok=True)
AutoModelForCausalLM.register(QwenTitansConfig, QwenTitansForCausalLM, exist_ok=True)
