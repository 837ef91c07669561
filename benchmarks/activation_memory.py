"""Measure memory and time of a training step of decoder layers, by the activations that the layers keep.

Every cell runs in a process of its own, so that its peak is its own. README.md explains the comparison.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cells import in_own_process, measured, parsed
from verl_ext.engines.activations import ActivationOptions, apply_activation_options

# case: (gradient checkpointing, tiled MLP, checkpoints on the host)
CASES = {
    "plain": (False, False, False),
    "tiles": (False, True, False),
    "checkpoints": (True, False, False),
    "checkpoints+tiles": (True, True, False),
    "checkpoints+tiles+host": (True, True, True),
}


def build(case: str, hidden: int, intermediate: int, layers: int, tile: int) -> LlamaModel:
    """Build Llama layers with random weights, the same in every case."""
    checkpoints, tiles, host = CASES[case]
    torch.manual_seed(0)
    heads = max(hidden // 64, 1)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    model = LlamaModel(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_activation_options(model, ActivationOptions(host, tile if tiles else None))
    return model


def step(model: LlamaModel, tokens: int) -> float:
    """Run forward and backward of one sequence, and return the loss."""
    ids = torch.arange(tokens).remainder(128).unsqueeze(0)
    loss = model(input_ids=ids, use_cache=False).last_hidden_state.square().mean()
    loss.backward()
    return loss.item()


def measure(case: str, tokens: int, hidden: int, intermediate: int, layers: int, tile: int) -> dict[str, Any]:
    """Return a step's processor seconds, MiB above weights and gradients, loss and gradient norm."""
    torch.set_num_threads(1)
    model = build(case, hidden, intermediate, layers, tile)
    step(model, 8)  # pays for first calls and allocates the gradients
    model.zero_grad(set_to_none=False)
    with measured() as figures:
        loss = step(model, tokens)
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return {
        "case": case,
        "tokens": tokens,
        **figures,
        "loss": loss,
        "gradient": torch.stack(norms).norm().item(),
    }


def check_equal(cells: list[dict[str, Any]]) -> None:
    """Raise ValueError if two cases differ in loss or gradient norm on the same tokens."""
    for cell in cells:
        base = next(other for other in cells if other["tokens"] == cell["tokens"])
        for name in ("loss", "gradient"):
            if abs(cell[name] - base[name]) > 1e-5 * abs(base[name]):
                raise ValueError(f"{cell['case']} and {base['case']} differ in {name}: {cell[name]}, {base[name]}")


def table(cells: list[dict[str, Any]]) -> str:
    """Format one row a cell, with its ratios to the first cell of the same tokens."""
    lines = [f"{'tokens':>7}  {'case':<24}{'seconds':>9}{'ratio':>8}{'MiB above':>11}{'ratio':>8}"]
    for cell in cells:
        base = next(other for other in cells if other["tokens"] == cell["tokens"])
        seconds, memory = cell["seconds"] / base["seconds"], cell["peak_mib"] / max(base["peak_mib"], 1)
        lines.append(
            f"{cell['tokens']:>7,}  {cell['case']:<24}{cell['seconds']:>9.2f}{seconds:>7.2f}×"
            f"{cell['peak_mib']:>11,.0f}{memory:>7.2f}×"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Memory and time of a step, by what layers keep of activations.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tile", type=int, default=256, help="tokens of a tile")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parsed(parser, measure)
    sizes = (arguments.hidden, arguments.intermediate, arguments.layers, arguments.tile)
    cells = [in_own_process(__file__, case, tokens, *sizes) for tokens in arguments.tokens for case in arguments.cases]
    if failed := next((cell["failed"] for cell in cells if "failed" in cell), None):
        raise RuntimeError(f"a cell failed: {failed}")
    check_equal(cells)
    print(table(cells))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(cells, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
