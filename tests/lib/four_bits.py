"""Small models whose base lies in NF4, by plain PEFT with bitsandbytes: what training here is compared with."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from tests.lib.reference import documents_of_answers, fill_adapters
from tests.lib.tiny_model import write_tiny_model

DOCUMENTS = documents_of_answers(19, 5, 12, 7, 8, 3, 16, 4)
PACKS = [DOCUMENTS[at : at + 2] for at in (0, 2, 4, 6)]
_SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_attention_heads": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config_class": LlamaConfig},
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "gemma3": {"config_class": Gemma3TextConfig, "sliding_window": 8, "tie_word_embeddings": True},
    "qwen3_moe": {"config_class": Qwen3MoeConfig, **_MOE},
    "gpt_oss": {"config_class": GptOssConfig, **_OSS},
}


def write_model(folder: Path, name: str, **config: Any) -> str:
    """Write one of the models, in bf16 as most are; return its folder."""
    write_tiny_model(folder, **_SIZES | MODELS[name] | config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def bitsandbytes_base(folder: str, nested: bool = False) -> Any:
    """Return transformers' model with bitsandbytes' layers; experts, which those leave, have the numbers of NF4."""
    import bitsandbytes.functional as bnb

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=config
    )
    for name, weight in model.named_parameters():
        if weight.ndim == 3 and "expert" in name:
            assert weight.dtype == torch.float32
            of_experts = (bnb.quantize_4bit(one.contiguous(), quant_type="nf4") for one in weight)
            weight.copy_(torch.stack([bnb.dequantize_4bit(*one) for one in of_experts]))
    return model.train()  # because bitsandbytes computes a product without gradients in bf16 on some CPUs


def with_factors(model: Any, **options: Any) -> Any:
    """Put filled adapters of PEFT on a model."""
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options)).train()
    fill_adapters(adapted)
    return adapted


@torch.no_grad()
def in_fp64(adapted: Any) -> Any:
    """Give PEFT's model the numbers of bitsandbytes' layers in fp64, in place."""
    import bitsandbytes

    for layer in [layer for layer in adapted.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]:
        weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        layer.__class__ = nn.Linear
        del layer.weight
        layer.weight = nn.Parameter(weight, requires_grad=False)
    adapted.get_base_model().set_experts_implementation("eager")
    return adapted.double()
