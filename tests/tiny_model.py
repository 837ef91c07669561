"""A folder with a small random Qwen3 (or a relative of it) and a word-level tokenizer with a chat template."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 128
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write_tiny_model(
    folder: Path, seed: int = 0, config_class: type[PreTrainedConfig] = Qwen3Config, **config: object
) -> Path:
    """Save a model and a tokenizer; ``config`` overrides fields of the configuration."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
    words = special + [f"w{i}" for i in range(VOCABULARY - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", unk_token="<|unk|>"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config_class(**{**fields, **config})).save_pretrained(folder)
    return folder
