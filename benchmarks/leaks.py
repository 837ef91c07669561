"""The gradient of a pack beside that of its documents alone, in transformers, TRL, verl and this project.

A small random model of each type gets one row of five documents (108 tokens). `transformers` gets position_ids that
restart with every document, and no mask; `trl` gets the batch of its collator with padding_free=True, which packing
implies; `verl` is stock verl 0.9.1's forward of Qwen3.5's layers with the cumulative lengths that its engine passes (on
a CPU, transformers' recurrence accepts and ignores these; with flash-linear-attention on a GPU it does not). The error
is ‖g − g'‖ / ‖g'‖ over all parameters in fp32; g' is plain transformers', document by document, with eager attention.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.harness import Row, table
from verl_ext import options
from verl_ext.layers.trial import shrunk, trial_model
from verl_ext.options import option
from verl_ext.parallel.shards import document_layout

KINDS = ("qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_next", "falcon_h1", "lfm2", "gpt_oss", "gemma2", "llama4_text")
LENGTHS = (13, 7, 41, 29, 18)
QUICK = ["kinds=[llama]"]
_VALUES = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": None}}


@dataclass(frozen=True)
class Options(options.Options):
    """The models."""

    kinds: list[str] = option(list(KINDS), "model types of transformers")

    def problems(self) -> Iterable[str]:
        """Yield a line for each unknown type."""
        return (f"kinds must be model types of transformers; got {k}" for k in self.kinds if k not in CONFIG_MAPPING)


CONTESTANTS = ("transformers", "trl", "verl", "ours")


@table("model type {kind} | transformers {transformers:.1e} | trl {trl:.1e} | verl {verl:.1e} | ours {ours:.1e}")
def leaks(options: Options, folder: Path) -> Iterable[Row]:
    """Relative error of a pack's gradient."""
    transformers.logging.set_verbosity_error()
    for kind in options.kinds:
        yield {"kind": kind, **errors(kind)}


def _documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 190, (length,), generator=generator) for length in LENGTHS]


def _gradient(model: nn.Module, backward: Callable[[], None]) -> torch.Tensor:
    model.zero_grad()
    backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def alone(model: nn.Module) -> None:
    """Run backward on the documents one by one."""
    for ids in _documents():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        F.cross_entropy(logits[:-1], ids[1:], reduction="sum").backward()


def packed(model: nn.Module, **inputs: object) -> None:
    """Run backward on one row of all documents."""
    ids = torch.cat(_documents())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **inputs).logits[0]
    is_target = positions.roll(-1) != 0
    F.cross_entropy(logits[is_target], ids.roll(-1)[is_target], reduction="sum").backward()


def of_trl(model: nn.Module) -> None:
    """Run backward on TRL's batch of the same documents, with transformers' own loss."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": ids.tolist()} for ids in _documents()])
    targets = int((batch["labels"][:, 1:] != -100).sum())
    (model(**batch, use_cache=False).loss * targets).backward()


def of_verl(model: nn.Module) -> None:
    """Run backward through verl's forwards of Qwen3.5's layers, which it patches into transformers' classes."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from verl.models.transformers.qwen3_5 import qwen3_5_decoder_layer_forward, qwen3_5_gated_delta_net_forward

    lengths = torch.tensor((0, *LENGTHS)).cumsum(0)
    with ExitStack() as patches:
        patches.enter_context(patch.object(modeling.Qwen3_5DecoderLayer, "forward", qwen3_5_decoder_layer_forward))
        patches.enter_context(patch.object(modeling.Qwen3_5GatedDeltaNet, "forward", qwen3_5_gated_delta_net_forward))
        packed(model, cu_seqlens=lengths, cu_seqlens_cpu=lengths)


def errors(kind: str) -> dict[str, float]:
    """Return the relative error of each contestant's gradient on a small model of a type."""
    config = CONFIG_MAPPING[kind](**_VALUES.get(kind, {}))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    ours = trial_model(config, cls)

    def plain(attention: str | None) -> nn.Module:
        model = cls._from_config(shrunk(config), attn_implementation=attention)
        model.load_state_dict(ours.state_dict())
        return model.eval()

    eager, default = plain("eager"), plain(None)  # None lets transformers choose the kernel
    expected = _gradient(eager, lambda: alone(eager))
    layout = document_layout(torch.cat([torch.arange(length) for length in LENGTHS]))
    ways: dict[str, tuple[nn.Module, Callable[[], None]]] = {
        "transformers": (default, lambda: packed(default)),
        "ours": (ours, lambda: packed(ours, document_layout=layout)),
    }
    if find_spec("trl"):
        ways["trl"] = (default, lambda: of_trl(default))
    if kind == "qwen3_5_text":
        ways["verl"] = (default, lambda: of_verl(default))
    return {name: float((_gradient(*way) - expected).norm() / expected.norm()) for name, way in ways.items()}
