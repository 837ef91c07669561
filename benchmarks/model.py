"""The contest's model: a small Qwen3 with random weights, and a tokenizer that verl can load."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 1024
HEAD = 64


def write_model(folder: Path, hidden: int, layers: int, positions: int, seed: int) -> None:
    """Save the model in fp32, with query heads of size 64, half as many key/value heads, and an MLP of 3 × hidden.

    Raises:
        ValueError: If `hidden` does not divide into whole heads.
    """
    if hidden < 2 * HEAD or hidden % (2 * HEAD):
        raise ValueError(f"--hidden must be a multiple of {2 * HEAD}; got {hidden}")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD // 2,
        head_dim=HEAD,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
