"""Measure memory and time of a language model's head and token loss, from hidden states to gradients.

Gradients are those of hidden states and weight. A cell has a process, and so a peak, of its own. See README.md.
"""

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cells import in_own_process, measured, parsed
from verl_ext.losses import head_terms, token_nll

Loss = Callable[..., torch.Tensor]


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Compute the logits of every token, then our token loss."""
    nll = token_nll(hidden @ weight.t(), labels, inplace_backward=True)
    return (coefficients * nll).sum()


def targets(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """Compute the logits of target tokens, then our token loss."""
    at = coefficients.nonzero().flatten()
    return plain(hidden[at], weight, labels[at], coefficients[at])


def fused(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Run our fused head on target tokens."""
    at = coefficients.nonzero().flatten()
    return head_terms([(hidden[at], weight)], labels[at], coefficients[at])[0].sum()


def verl(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Compute the logits of every token, then stock verl 0.9.1's token losses."""
    from verl.utils.torch_functional import logprobs_from_logits

    log_probs = logprobs_from_logits(hidden @ weight.t(), labels, inplace_backward=True)
    return -(coefficients * log_probs).sum()


def trl(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Run TRL's fused head on target tokens as its SFTTrainer does, without the metrics."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    at = coefficients.nonzero().flatten()
    log_probs = ChunkedLogProbFunction.apply(hidden[at], weight, None, labels[at], 1.0, CHUNK, None, 1.0, ())[0]
    return -(coefficients[at] * log_probs).sum()


HEADS: dict[str, Loss] = {"plain": plain, "targets": targets, "fused": fused, "verl": verl, "trl": trl}


def measure(head: str, tokens: int, share: float, hidden_size: int, vocabulary: int, threads: int) -> dict[str, Any]:
    """Return processor seconds, MiB above weight and hidden states, and the loss of one forward and backward."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.empty(vocabulary, hidden_size).normal_(std=0.02).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    coefficients = (torch.rand(tokens) < share).float()
    few = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    HEADS[head](*few, torch.arange(8), torch.ones(8)).backward()  # pays for imports and first calls
    with measured() as figures:
        loss = HEADS[head](hidden, weight, labels, coefficients)
        loss.backward()
    assert weight.grad is not None
    return {
        "head": head,
        "tokens": tokens,
        "targets": share,
        **figures,
        "loss": loss.item(),
        "gradient": weight.grad.norm().item(),
    }


def table(cells: list[dict[str, Any]]) -> str:
    """Format a row for each head, number of tokens and share, with its ratios to `plain`."""
    lines = [
        f"{'tokens':>7} {'targets':>8}  {'head':<8}{'seconds':>9}{'to plain':>10}{'MiB above':>11}{'to plain':>10}"
    ]
    for cell in cells:
        row = f"{cell['tokens']:>7,} {cell['targets']:>8.0%}  {cell['head']:<8}"
        if "failed" in cell:
            lines.append(f"{row}  not run: {cell['failed']}")
            continue
        same = [
            c for c in cells if (c["tokens"], c["targets"]) == (cell["tokens"], cell["targets"]) and "failed" not in c
        ]
        base = next((c for c in same if c["head"] == "plain"), cell)
        seconds, memory = cell["seconds"] / base["seconds"], cell["peak_mib"] / max(base["peak_mib"], 1)
        lines.append(f"{row}{cell['seconds']:>9.2f}{seconds:>9.2f}×{cell['peak_mib']:>11,.0f}{memory:>9.2f}×")
    return "\n".join(lines)


def check_equal(cells: list[dict[str, Any]]) -> None:
    """Raise ValueError if two heads differ in loss or weight gradient on the same input."""
    for cell in cells:
        same = [c for c in cells if (c["tokens"], c["targets"]) == (cell["tokens"], cell["targets"])]
        for other in same:
            for name in ("loss", "gradient"):
                if name in cell and name in other and abs(cell[name] - other[name]) > 1e-4 * abs(other[name]):
                    raise ValueError(
                        f"{cell['head']} and {other['head']} differ in {name}: {cell[name]}, {other[name]}"
                    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Memory and time of the head and its token loss.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--targets", type=float, nargs="+", default=[0.1, 0.3, 1.0], help="shares of the tokens")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parsed(parser, measure)
    heads = [head for head in arguments.heads if head != "trl" or find_spec("trl")]
    sizes = (arguments.hidden, arguments.vocabulary, arguments.threads)
    cells = [
        {"head": head, "tokens": tokens, "targets": share, **in_own_process(__file__, head, tokens, share, *sizes)}
        for tokens in arguments.tokens
        for share in arguments.targets
        for head in heads
    ]
    check_equal(cells)
    print(table(cells))
    if "trl" not in heads:
        print("trl is not installed: pip install trl")
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(cells, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
