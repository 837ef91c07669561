"""Small models with random weights, and their tokenizer; no import of verl."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from verl_ext.options import UsageError

VOCABULARY = 1024


def config_of(kind: str, hidden: int, layers: int, groups: int = 1, **fields: Any) -> Any:
    """Return a config with heads of size 64, `groups` a key/value head."""
    heads = max(hidden // 64, 1)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCABULARY, "head_dim": hidden // heads}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // groups}
    return AutoConfig.for_model(kind, **{**sizes, **fields})


def write_model(folder: Path, config: Any, words: int = VOCABULARY, dtype: torch.dtype = torch.float32) -> None:
    """Save a model with random weights, and a tokenizer of made-up words."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w0", eos_token="w1").save_pretrained(folder)


def write_qwen3(folder: Path, hidden: int, layers: int, positions: int) -> None:
    """Save a Qwen3 with an MLP of 3 × hidden."""
    if hidden % 128:
        raise UsageError(f"hidden must be a multiple of 128; got {hidden}")
    fields = {"intermediate_size": 3 * hidden, "max_position_embeddings": positions, "tie_word_embeddings": False}
    write_model(folder, config_of("qwen3", hidden, layers, groups=2, **fields))
