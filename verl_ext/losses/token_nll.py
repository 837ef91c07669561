"""The negative log-likelihood of tokens in fp32, a block of rows at a time: from logits, or from hidden states.

`token_nll`, from logits of T tokens. verl's fallback takes a bf16 log-softmax row by row, which keeps three digits;
``F.cross_entropy`` in fp32 keeps a second ``[T, V]`` tensor for its backward (10 GB for 16k tokens of a 151k
vocabulary). Here the forward keeps two numbers a row, and the backward writes the gradient over the logits, which
nothing reads afterwards.

`head_terms`, head and loss in one, with no ``[N, V]`` tensor:

```
hidden [N, H]   rows 0…R ──► logits [R, V] ──► nll[R] ──► (softmax - onehot)·a ──► d hidden[R, H], added to d weight
                rows R…2R ─► …
```

A block of rows has its logits in memory once: its gradients are computed on the spot, so that the backward pass needs
no second product with the weight. That is possible where the loss is Σ a_t·nll_t with coefficients known beforehand, up
to one common factor that arrives with the backward pass. Liger's fused linear cross-entropy goes the same way; here
d weight is summed in fp32, tokens without a target never enter, and coefficients differ by token.

The scale of fp16 arrives with that factor, after gradients have been written in fp16. So coefficients are multiplied by
a power of two beforehand which puts the largest at 2^7 to 2^8: those of 1/N for documents of N targets would underflow.

Legend: N target tokens, H hidden size, V vocabulary, R rows of a block.
"""

from collections.abc import Sequence
from typing import Any

import torch

ROWS = 512  # 512 rows of a 151k vocabulary are 0.3 GB in fp32, and two such slices are alive at once


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool, rows: int
    ) -> torch.Tensor:
        peak = logits.amax(-1).float()
        # The peak is taken off first: logits that share a large offset would cancel in fp32.
        parts = zip(logits.split(rows), peak.unsqueeze(-1).split(rows), strict=True)
        log_sum = torch.cat([(part.float() - top).exp_().sum(-1).log_() for part, top in parts])
        target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
        ctx.save_for_backward(logits, labels, peak, log_sum)
        ctx.inplace_backward, ctx.rows = inplace_backward, rows
        return log_sum - (target - peak)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, peak, log_sum = ctx.saved_tensors
        logits = logits.detach()
        gradient = logits if ctx.inplace_backward else torch.empty_like(logits)
        per_row = (x.unsqueeze(-1) for x in (labels, peak, log_sum, grad_outputs[0]))
        parts = (x.split(ctx.rows) for x in (logits, gradient, *per_row))
        for part, out, label, top, log, grad in zip(*parts, strict=True):
            softmax = (part.float() - top).sub_(log).exp_()
            softmax.scatter_add_(-1, label, torch.full_like(grad, -1.0))
            out.copy_(softmax.mul_(grad))
        return gradient, None, None, None


def token_nll(
    logits: torch.Tensor, labels: torch.Tensor, *, inplace_backward: bool = False, rows: int = ROWS
) -> torch.Tensor:
    """``nll[T]`` in fp32 of ``labels[T]`` under ``logits[T, V]`` of any floating type, `rows` of them at a time.

    Matches ``F.cross_entropy(logits.float(), labels, reduction="none")`` in value and gradient; `inplace_backward`
    writes the gradient over ``logits``, for callers who own them.
    """
    assert logits.dim() == 2
    assert labels.shape == logits.shape[:1]
    return _TokenNLL.apply(logits, labels, inplace_backward, rows)


BLOCK_BYTES = 256 * 2**20
_ROWS = 4096  # of a gradient that are scaled at a time


class _HeadTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        labels: torch.Tensor,
        coefficients: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
        learns: bool,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weights = factors[::2], factors[1::2]
        wants_bias, *wants = (learns and needed for needed in (ctx.needs_input_grad[2], *ctx.needs_input_grad[5:]))
        gradients = [
            None if not wanted else torch.empty_like(x) if index % 2 == 0 else torch.zeros_like(x, dtype=torch.float32)
            for index, (x, wanted) in enumerate(zip(factors, wants, strict=True))  # hidden, weight, hidden, weight, …
        ]
        bias_gradient = None if bias is None or not wants_bias else torch.zeros_like(bias, dtype=torch.float32)
        nll = torch.empty_like(coefficients)
        enlarged = _enlargement(coefficients)
        for first in range(0, len(labels), rows):
            block = slice(first, first + rows)
            label, coefficient = labels[block, None], coefficients[block, None] * enlarged
            probability = _logits(hidden, weights, bias, block)
            peak, target = probability.amax(-1, keepdim=True), probability.gather(1, label)
            total = probability.sub_(peak).exp_().sum(-1, keepdim=True)
            nll[block] = (total.log() - (target - peak)).squeeze(1)
            if wants_bias or any(wants):
                slope = probability.mul_(coefficient / total).scatter_add_(1, label, -coefficient)
                if bias_gradient is not None:
                    bias_gradient += slope.sum(0)
                slope = slope.to(weights[0].dtype)
                for x, weight, dx, dw in zip(hidden, weights, gradients[::2], gradients[1::2], strict=True):
                    if dx is not None:
                        torch.mm(slope, weight, out=dx[block])
                    if dw is not None:
                        _add_product(dw, slope.t(), x[block])
                del slope
            del probability  # or the next block would be in memory beside it
        ctx.gradients, ctx.bias_gradient, ctx.enlarged = gradients, bias_gradient, enlarged
        ctx.dtypes = [*(x.dtype for x in factors), None if bias is None else bias.dtype]
        ctx.mark_non_differentiable(nll)
        # Where nothing is learnt, an infinite nll must not become NaN by a product with 0.
        return torch.where(coefficients != 0, coefficients * nll, 0.0), nll

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = grad_outputs[0][:1]  # the same for every term; none of no terms
        scale = factor.sum() / ctx.enlarged
        gradients = [*ctx.gradients, ctx.bias_gradient]
        del ctx.gradients, ctx.bias_gradient  # of a weight's size: scaled in place
        *scaled, bias = (
            None if x is None else _scale(x, scale).to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, None, bias, None, None, *scaled


def head_terms(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    labels: torch.Tensor,
    coefficients: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(coefficients · nll, nll)`` of ``labels``, both fp32[N], under the logits Σ hidden·weightᵀ + bias.

    Args:
        factors: pairs of hidden[N, H] and weight[V, H] of one floating type: the head's, and a low-rank adapter's.
        labels: int64[N]; coefficients: fp32[N].
        bias: [V].
        block_bytes: of the logits that are in memory at a time; at least one row is.

    Only the first result is differentiable, and its terms must all have the same upstream gradient, as under a sum.
    Matches ``coefficients * F.cross_entropy(logits.float(), labels, reduction="none")`` in value and gradient.
    """
    assert labels.shape == coefficients.shape
    weight = factors[0][1]
    rows = max(1, block_bytes // row_bytes(weight.shape[0], weight.dtype, weight.is_cpu))
    with torch.autocast(labels.device.type, enabled=False):
        learns = torch.is_grad_enabled()  # asked here: inside forward it never is
        return _HeadTerms.apply(labels, coefficients, bias, rows, learns, *(x for pair in factors for x in pair))


def row_bytes(vocabulary: int, dtype: torch.dtype, on_cpu: bool = True) -> int:
    """Bytes of one row of a block: its logits in fp32; of a shorter type, also their gradient, and on a CPU, whose
    products have the type of their factors, the logits as they are."""
    return vocabulary * (4 if dtype == torch.float32 else 4 + (1 + on_cpu) * dtype.itemsize)


def _logits(
    hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], bias: torch.Tensor | None, block: slice
) -> torch.Tensor:
    """fp32[R, V], owned by the caller."""
    half: Any = {} if weights[0].is_cpu or weights[0].dtype.itemsize >= 4 else {"out_dtype": torch.float32}
    parts = [torch.mm(x[block], weight.t(), **half) for x, weight in zip(hidden, weights, strict=True)]
    logits = parts[0]
    for part in parts[1:]:
        logits += part
    if bias is not None:
        logits += bias
    return logits.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right; total is fp32."""
    if total.is_cpu or left.dtype == total.dtype:
        total.addmm_(left.float(), right.float())
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _enlargement(coefficients: torch.Tensor) -> torch.Tensor:
    """The power of two that brings the largest of fp32[N] to between 2^7 and 2^8; 2^8 where none is above 0."""
    largest = torch.cat([coefficients.abs(), coefficients.new_zeros(1)]).amax()
    return torch.exp2(8 - torch.where(largest > 0, largest, 1.0).log2().ceil())


def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The gradient times fp32[], in place and in fp32: a product in half precision would round the factor."""
    if gradient.dtype.itemsize >= 4:
        return gradient.mul_(factor)
    for part in gradient.split(_ROWS):
        part.copy_(part.float() * factor)
    return gradient
