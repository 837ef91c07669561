"""A folder with a small random Qwen3 (or a relative of it) and a word-level tokenizer with a chat template."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from verl_ext.__main__ import main

VOCABULARY = 128
SHAPE = {  # of models that are made in a test
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def init_model(folder: Path, texts: Iterable[str]) -> None:
    """Write MODEL into a folder by `verl-ext init-model`, with a tokenizer trained on texts."""
    (folder / "prose.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    small = "config={num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64}"
    tokenizer = (f"tokenizer.train_on=[{folder}/prose.jsonl]", "tokenizer.vocab_size=300")
    assert main(["init-model", "model=tiny", f"output_dir={folder}/MODEL", small, *tokenizer]) == 0


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
    fields = {**SHAPE, "vocab_size": VOCABULARY, "intermediate_size": 64, "tie_word_embeddings": False}
    fields |= {"max_position_embeddings": 512, **config}
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config_class(**fields)).save_pretrained(folder)
    return folder


def write_scripted_model(folder: Path, said: str) -> Path:
    """Save a model that answers every prompt with the words ``said``, each once, and then with `on` without end.

    Its tokenizer has the EOS of a base model, `<|endoftext|>`; its template ends a turn with `<|im_end|>`.
    """
    words = list(dict.fromkeys(["<|endoftext|>", "<|unk|>", "<|im_end|>", "assistant", *said.split(), "on"]))
    write_tiny_model(folder, vocab_size=len(words))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", unk_token="<|unk|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    fast.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chain = ["assistant", *said.split(), "on", "on"]
    with torch.no_grad():
        for layer in model.model.layers:  # the next token follows from the last one alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for last, following in pairwise(chain):
            vector = model.model.embed_tokens.weight[words.index(last)]
            model.lm_head.weight[words.index(following)] += vector / vector.norm()
    model.save_pretrained(folder)
    return folder


SMALL_CONFIG = "config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, initializer_range: 0.1}"
