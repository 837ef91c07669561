"""Compare the gradient of a pack with that of its documents alone in transformers, TRL, verl and this project.

    python benchmarks/leaks.py

A small random model of each type gets one row of five documents. `transformers` gets position_ids that restart with
every document, and no mask; `trl` gets the batch of its collator with padding_free=True, which packing implies; `verl`
is stock verl 0.9.1's forward of Qwen3.5's layers with the cumulative lengths that its engine passes (on a CPU,
transformers' recurrence accepts and ignores these; with flash-linear-attention on a GPU it does not). The error is
‖g − g'‖ / ‖g'‖ over all parameters in fp32; g' is from plain transformers, document by document, with eager attention.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_ext.attention import document_layout
from verl_ext.layers.probe import trial_model
from verl_ext.layers.shrink import shrunk

KINDS = ("qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_next", "falcon_h1", "lfm2", "gpt_oss", "gemma2", "llama4_text")
LENGTHS = (13, 7, 41, 29, 18)
_VALUES = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": None}}


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


def errors(kind: str, contestants: list[str]) -> dict[str, float]:
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
        "trl": (default, lambda: of_trl(default)),
        "ours": (ours, lambda: packed(ours, document_layout=layout)),
    }
    if kind == "qwen3_5_text":
        ways["verl"] = (default, lambda: of_verl(default))
    return {
        name: float((_gradient(*ways[name]) - expected).norm() / expected.norm())
        for name in contestants
        if name in ways
    }


def table(found: dict[str, dict[str, float]], contestants: list[str]) -> str:
    """Format the rows as text."""
    lines = [f"{'model type':<16}" + "".join(f"{name:>14}" for name in contestants)]
    for kind, of_kind in found.items():
        cells = (f"{of_kind[name]:>14.1e}" if name in of_kind else f"{'–':>14}" for name in contestants)
        lines.append(f"{kind:<16}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Errors of packed gradients against documents alone.")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="model types of transformers")
    parser.add_argument("--output", help="a JSON file with every figure")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    contestants = [name for name in ("transformers", "trl", "verl", "ours") if name != "trl" or find_spec("trl")]
    found = {kind: errors(kind, contestants) for kind in arguments.kinds}
    print(table(found, contestants))
    if "trl" not in contestants:
        print("trl is not installed: pip install trl")
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
