"""Memory and time of a head and its token loss; README.md has the heads.

Losses and gradients must agree. verl 0.9.1 builds no model if TRL 1.16 is installed: `pip install --no-deps --target
trl_only trl`, then `PYTHONPATH=trl_only` for this command alone.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cells import in_own_process
from benchmarks.harness import Row, Sizes, equal, option, relative, table
from benchmarks.meters import measured
from verl_ext.losses import head_terms, token_nll

QUICK = ["tokens=[128]", "targets=[0.3]", "hidden=64", "vocabulary=1000"]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    return coefficients * token_nll(hidden @ weight.t(), labels, inplace_backward=True)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    return head_terms([(hidden, weight)], labels, coefficients)[0]


def pairs(hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    return head_terms([(hidden, weight)], labels, lambda nll: coefficients)[0]


def verl(hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    from verl.utils.torch_functional import logprobs_from_logits

    return -coefficients * logprobs_from_logits(hidden @ weight.t(), labels, inplace_backward=True)


def trl(hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    return -coefficients * ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, CHUNK, None, 1.0, ())[0]


# name: (the terms of tokens' loss, by hidden states [T, h] and coefficients [T]; whether it gets target tokens alone)
HEADS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "plain": (plain, False),
    "targets": (plain, True),
    "fused": (fused, True),
    "pairs": (pairs, True),
    "verl": (verl, False),
    "trl": (trl, True),
}


class Options(Sizes, heads=HEADS):
    tokens: list[int] = option([1024, 2048, 4096], "tokens, a row each")
    targets: list[float] = option([0.1, 0.3, 1.0], "shares of the tokens that are targets, a row each")
    hidden: int = option(1024, "hidden size")
    vocabulary: int = option(151_936, "size of the vocabulary", least=2)
    heads: list[str] = option(list(HEADS), "heads")
    threads: int = option(1, "threads of torch")


@table(
    "tokens {tokens:,} | targets {share:.0%} | head {head} | seconds {seconds:.2f} | to first {× seconds:.2f} | "
    "MiB above {peak_mib:,.0f} | MiB to first {× peak_mib:.2f}"
)
def heads(options: Options, folder: Path) -> Iterable[Row]:
    """One forward and backward of each head."""
    for tokens in options.tokens:
        for share in options.targets:
            work = [{"tokens": tokens, "share": share, "head": head} for head in options.heads]
            rows = [{**one, **in_own_process(measure, *one.values(), options)} for one in work]
            equal(rows, ("loss", "gradient"), 1e-4)
            yield from relative(rows, "seconds", "peak_mib")


def measure(tokens: int, share: float, head: str, options: Options) -> Row:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, options.hidden, requires_grad=True)
    weight = torch.empty(options.vocabulary, options.hidden).normal_(std=0.02).requires_grad_()
    labels = torch.randint(options.vocabulary, (tokens,))
    coefficients = (torch.rand(tokens) < share).float()
    few = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    loss_of(head, *few, torch.arange(8), torch.ones(8)).backward()  # pays for imports and first calls
    with measured() as figures:
        loss = loss_of(head, hidden, weight, labels, coefficients)
        loss.backward()
    return {**figures, "loss": loss.item(), "gradient": weight.grad.norm().item()}


def loss_of(head: str, hidden: Tensor, weight: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    terms, targets_alone = HEADS[head]
    at = coefficients.nonzero().flatten() if targets_alone else slice(None)
    return terms(hidden[at], weight, labels[at], coefficients[at]).sum()
