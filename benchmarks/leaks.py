"""The gradient of a pack beside that of its documents alone.

A small random model of each type gets one row of five documents (108 tokens):

| contestant | what it gets |
|---|---|
| `transformers` | position_ids that restart with every document, and no mask |
| `trl` | the batch of TRL's collator with padding_free=True, which packing implies |
| `verl` | stock verl 0.9.1's forward of Qwen3.5's layers, with the cumulative lengths that its engine passes |
| `ours` | the layout of documents |

The error is ‖g − g'‖ / ‖g'‖ over all parameters in fp32; g' is transformers' with eager attention, by document.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.harness import Row, Sizes, option, table
from verl_ext.layers.trial import shrunk, trial_model
from verl_ext.parallel.shards import document_layout

KINDS = ("qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_next", "falcon_h1", "lfm2", "gpt_oss", "gemma2", "llama4_text")
QUICK = ["kinds=[llama]"]
_VALUES = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": None}}
_LENGTHS = (13, 7, 41, 29, 18)
_DOCUMENTS = torch.randint(3, 190, (sum(_LENGTHS),), generator=torch.Generator().manual_seed(0)).split(_LENGTHS)
_POSITIONS = torch.cat([torch.arange(length) for length in _LENGTHS])


class Options(Sizes):
    kinds: list[str] = option(list(KINDS), "model types of transformers")

    def problems(self) -> Iterable[str]:
        return (f"kinds must be model types of transformers; got {k}" for k in self.kinds if k not in CONFIG_MAPPING)


@table("model type {kind} | transformers {transformers:.1e} | trl {trl:.1e} | verl {verl:.1e} | ours {ours:.1e}")
def leaks(options: Options, folder: Path) -> Iterable[Row]:
    """Relative error of a pack's gradient."""
    transformers.logging.set_verbosity_error()
    for kind in options.kinds:
        yield {"kind": kind, **errors(kind)}


def errors(kind: str) -> Row:
    config = CONFIG_MAPPING[kind](**_VALUES.get(kind, {}))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    ours = trial_model(config, cls)

    def plain(attention: str | None) -> nn.Module:
        model = cls._from_config(shrunk(config), attn_implementation=attention)
        model.load_state_dict(ours.state_dict())
        return model.eval()

    default = plain(None)  # lets transformers choose the kernel
    expected = _gradient(alone, plain("eager"))
    ways = {
        "transformers": (packed, default),
        "ours": (partial(packed, document_layout=document_layout(_POSITIONS)), ours),
        **({"trl": (of_trl, default)} if find_spec("trl") else {}),
        **({"verl": (of_verl, default)} if kind == "qwen3_5_text" else {}),
    }
    return {name: float((_gradient(*way) - expected).norm() / expected.norm()) for name, way in ways.items()}


def _gradient(loss: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss(model).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def alone(model: nn.Module) -> torch.Tensor:
    logits = [model(input_ids=ids[None], use_cache=False).logits[0, :-1] for ids in _DOCUMENTS]
    return F.cross_entropy(torch.cat(logits), torch.cat([ids[1:] for ids in _DOCUMENTS]), reduction="sum")


def packed(model: nn.Module, **inputs: object) -> torch.Tensor:
    ids = torch.cat(_DOCUMENTS)
    logits = model(input_ids=ids[None], position_ids=_POSITIONS[None], use_cache=False, **inputs).logits[0]
    is_target = _POSITIONS.roll(-1) != 0
    return F.cross_entropy(logits[is_target], ids.roll(-1)[is_target], reduction="sum")


def of_trl(model: nn.Module) -> torch.Tensor:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": ids.tolist()} for ids in _DOCUMENTS])
    return model(**batch, use_cache=False).loss * int((batch["labels"][:, 1:] != -100).sum())


def of_verl(model: nn.Module) -> torch.Tensor:
    """Return the loss by verl's forwards, patched into transformers' classes."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from verl.models.transformers.qwen3_5 import qwen3_5_decoder_layer_forward, qwen3_5_gated_delta_net_forward

    lengths = torch.tensor((0, *_LENGTHS)).cumsum(0)
    layer = patch.object(modeling.Qwen3_5DecoderLayer, "forward", qwen3_5_decoder_layer_forward)
    with layer, patch.object(modeling.Qwen3_5GatedDeltaNet, "forward", qwen3_5_gated_delta_net_forward):
        return packed(model, cu_seqlens=lengths, cu_seqlens_cpu=lengths)
