"""Small models with random weights, their tokenizer, and the names of what runs them; no import of verl."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch.optim.optimizer import _default_to_fused_or_foreach
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from verl_ext.attention.kernels import unusable
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


def kernel_of_peers() -> str:
    """Return the attention that verl and TRL choose where it can run."""
    return "flash_attention_2" if torch.cuda.is_available() and not unusable("flash_attn") else "sdpa"


def kernel_of(model: Any, packed: bool) -> dict[str, Any]:
    """Name a model's attention; tell whether its mask is quadratic.

    transformers gives sdpa a mask of all tokens by all tokens if a row holds several documents.
    """
    name = model.config._attn_implementation
    quadratic = packed and name == "sdpa"
    return {"kernel": f"{name}, T × T mask" if quadratic else name, "quadratic": quadratic}


def optimizer_of(optimizer: Any) -> str:
    """Name an optimizer and its implementation, by options or torch's default."""
    group = optimizer.param_groups[0]
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        fused, foreach = _default_to_fused_or_foreach(group["params"], differentiable=False)
    form = "fused" if fused else "foreach" if foreach else "loop"
    return f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} {form}"
