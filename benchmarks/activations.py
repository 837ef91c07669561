"""Memory and time of a training step of decoder layers, by what they keep of their activations.

The forward and backward pass of Llama layers with random weights in fp32, whose loss and gradients are compared. A cell
has a process of its own: its figures are processor seconds on one thread, and the peak above weights and gradients.
`checkpoints` is gradient checkpointing, `tiles` is `model.tile_tokens`, `host` is `model.activation_offload=true`; on a
CPU the host's memory is the device's, so `host` shows the cost of the copies and not what they save.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaModel

from benchmarks.cells import in_own_process
from benchmarks.harness import Row, equal, relative, table
from benchmarks.meters import measured
from verl_ext import options
from verl_ext.engines.activations import ActivationOptions, apply_activation_options
from verl_ext.options import option

CASES = ("plain", "tiles", "checkpoints", "checkpoints+tiles", "checkpoints+tiles+host")
QUICK = ["tokens=[512]", "hidden=64", "intermediate=128", "layers=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """Sizes of the layers."""

    tokens: list[int] = option([2048, 4096], "tokens of the sequence, a row each")
    hidden: int = option(512, "hidden size", least=1)
    intermediate: int = option(2048, "hidden size of the MLP", least=1)
    layers: int = option(4, "layers", least=1)
    tile: int = option(256, "tokens of a tile", least=1)


@table(
    "tokens {tokens:,} | case {case} | seconds {seconds:.2f} | to plain {× seconds:.2f} | MiB above {peak_mib:,.0f} | "
    "MiB to plain {× peak_mib:.2f}"
)
def kept(options: Options, folder: Path) -> Iterable[Row]:
    """A step of the same layers in five cases."""
    for tokens in options.tokens:
        rows = [{"tokens": tokens, "case": case, **in_own_process(measure, case, tokens, options)} for case in CASES]
        equal(rows, ("loss", "gradient"), 1e-5)
        yield from relative(rows, "seconds", "peak_mib")


def measure(case: str, tokens: int, options: Options) -> Row:
    """Return the figures of a step, with its loss and gradient norm."""
    torch.set_num_threads(1)
    model = build(case, options)
    step(model, 8)  # pays for first calls and allocates the gradients
    model.zero_grad(set_to_none=False)
    with measured() as figures:
        loss = step(model, tokens)
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return {**figures, "loss": loss, "gradient": torch.stack(norms).norm().item()}


def build(case: str, options: Options) -> LlamaModel:
    """Build layers with random weights, the same in every case."""
    torch.manual_seed(0)
    heads = max(options.hidden // 64, 1)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    model = LlamaModel(config).train()
    if "checkpoints" in case:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_activation_options(model, ActivationOptions("host" in case, options.tile if "tiles" in case else None))
    return model


def step(model: LlamaModel, tokens: int) -> float:
    """Run forward and backward of one sequence, and return the loss."""
    ids = torch.arange(tokens).remainder(128).unsqueeze(0)
    loss = model(input_ids=ids, use_cache=False).last_hidden_state.square().mean()
    loss.backward()
    return loss.item()
