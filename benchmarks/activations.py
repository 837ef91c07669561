"""Memory and time of a step, by what layers keep; README.md has the cases.

A cell is the forward and backward pass of Llama layers with random weights, in a process of its own. Losses and
gradients of the cases must agree.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModel

from benchmarks.cells import in_own_process
from benchmarks.harness import Row, Sizes, equal, option, relative, table
from benchmarks.meters import measured
from benchmarks.models import config_of
from verl_ext.engines.activations import ActivationOptions, apply_activation_options

CASES = ("plain", "tiles", "checkpoints", "checkpoints+tiles", "checkpoints+tiles+host")
QUICK = ["tokens=[512]", "hidden=64", "intermediate=128", "layers=1"]


class Options(Sizes):
    tokens: list[int] = option([2048, 4096], "tokens of the sequence, a row each")
    hidden: int = option(512, "hidden size")
    intermediate: int = option(2048, "hidden size of the MLP")
    layers: int = option(4, "layers")
    tile: int = option(256, "tokens of a tile")


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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = config_of("llama", options.hidden, options.layers, intermediate_size=options.intermediate, vocab_size=128)
    model = AutoModel.from_config(config).train()
    if "checkpoints" in case:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_activation_options(model, ActivationOptions("host" in case, options.tile if "tiles" in case else None))

    def step(length: int) -> float:
        ids = torch.arange(length).remainder(128).unsqueeze(0)
        loss = model(input_ids=ids, use_cache=False).last_hidden_state.square().mean()
        loss.backward()
        return loss.item()

    step(8)  # pays for first calls and allocates the gradients
    model.zero_grad(set_to_none=False)
    with measured() as figures:
        loss = step(tokens)
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return {**figures, "loss": loss, "gradient": torch.stack(norms).norm().item()}
