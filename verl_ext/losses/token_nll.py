"""The negative log-likelihood of tokens in fp32, by blocks of rows.

`token_nll` starts from the logits of T tokens. verl's fallback takes a bf16 log-softmax row by row, which keeps three
digits; ``F.cross_entropy`` in fp32 keeps a second ``[T, V]`` tensor for its backward (10 GB for 16k tokens of a 151k
vocabulary). Here the forward keeps two numbers a row, and the backward writes the gradient over the logits, which
nothing reads afterwards.

`head_terms` computes head and loss in one, with no ``[N, V]`` tensor:

```
hidden [N, H]   rows 0…R ──► logits [R, V] ──► nll[R] ──► (softmax - onehot)·a ──► d hidden[R, H], added to d weight
                rows R…2R ─► …
```

The logits of a block are in memory once: its gradients are computed on the spot, so that the backward pass needs no
second product with the weight. This is possible because the loss is Σ a_t·nll_t with coefficients known beforehand, up
to one common factor that arrives with the backward pass. Liger's fused linear cross-entropy works the same way; here
d weight is summed in fp32, tokens without a target never enter, and coefficients differ by token.

Both can also return for each token whether the label is the most likely one, and the entropy of the distribution,
log Σ e^z − Σ z·e^z / Σ e^z with z the logits minus their peak. These come from the same logits, in slices that fit
the caches.

In fp16 the loss scale arrives with that common factor, after gradients have been written in fp16. Coefficients of 1/N,
for documents of N targets, would underflow. So they are multiplied by a power of two beforehand, which brings the
largest to between 2^7 and 2^8.

Legend: N target tokens, H hidden size, V vocabulary, R rows of a block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Coefficients = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]

ROWS = 512  # 512 rows of a 151k vocabulary are 0.3 GB in fp32, and two such slices are alive at once
BLOCK_BYTES = 256 * 2**20
# For each token: 1 if its label is the argmax, and the entropy of its distribution in nats.
TOKEN_STATS = ("is_greedy", "entropy")
_SCALED_ROWS = 4096  # rows of a gradient that are scaled at a time
_LEAST = -1e9  # least logit minus its peak, for the entropy: a vocabulary masked by −inf would give −inf · 0
_SLICE_BYTES = {"cpu": 2**20, "cuda": 2**26}  # of logits whose products are held beside them, for the entropy


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool, rows: int, with_stats: bool
    ) -> tuple[torch.Tensor, ...]:
        peak, likeliest = _peak(logits, with_stats)
        peak = peak.float()
        # The peak is subtracted first, because logits that share a large offset would cancel in fp32.
        log_sums, means = [], []
        for part, top in zip(logits.split(rows), peak.split(rows), strict=True):
            exp_logits = part.float() - top
            products = _exp_(exp_logits, with_stats)
            total = exp_logits.sum(-1)
            log_sums.append(total.log())
            means.append(products / total if with_stats else products)
        log_sum, peak = torch.cat(log_sums), peak.squeeze(-1)
        target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()  # [T]
        ctx.save_for_backward(logits, labels, peak, log_sum)
        ctx.inplace_backward, ctx.rows = inplace_backward, rows
        nll = log_sum - (target - peak)
        if not with_stats:
            return (nll,)
        is_greedy, entropy = (likeliest.squeeze(-1) == labels).float(), log_sum - torch.cat(means)
        ctx.mark_non_differentiable(is_greedy, entropy)
        return nll, is_greedy, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, labels, peak, log_sum = ctx.saved_tensors
        logits = logits.detach()
        gradient = logits if ctx.inplace_backward else torch.empty_like(logits)
        per_row = (x.unsqueeze(-1) for x in (labels, peak, log_sum, grad_outputs[0]))
        parts = (x.split(ctx.rows) for x in (logits, gradient, *per_row))
        for part, out, label, top, log, grad in zip(*parts, strict=True):
            softmax = (part.float() - top).sub_(log).exp_()
            softmax.scatter_add_(-1, label, torch.full_like(grad, -1.0))
            out.copy_(softmax.mul_(grad))
        return gradient, None, None, None, None


def token_nll(
    logits: torch.Tensor, labels: torch.Tensor, *, inplace_backward: bool = False, rows: int = ROWS
) -> torch.Tensor:
    """Return fp32 ``nll[T]`` of ``labels[T]`` under ``logits[T, V]``, in slices.

    A slice has `rows` rows; logits have any floating type. The result equals ``F.cross_entropy(logits.float(), labels,
    reduction="none")`` in value and gradient. `inplace_backward` writes the gradient over ``logits``, for callers who
    own them.
    """
    return nll_and_stats(logits, labels, inplace_backward=inplace_backward, rows=rows, with_stats=False)[0]


def nll_and_stats(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    inplace_backward: bool = False,
    rows: int = ROWS,
    with_stats: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Return :func:`token_nll`, and TOKEN_STATS, fp32[T] without gradient."""
    assert logits.dim() == 2
    assert labels.shape == logits.shape[:1]
    return _TokenNLL.apply(logits, labels, inplace_backward, rows, with_stats)


class _HeadTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        labels: torch.Tensor,
        coefficients: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
        learns: bool,
        with_stats: bool,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # Make only the gradients that are needed: one of a weight is as large as the weight.
        hidden, weights = factors[::2], factors[1::2]
        wants_bias, *wants = (learns and needed for needed in (ctx.needs_input_grad[2], *ctx.needs_input_grad[6:]))
        gradients = [
            None if not need else torch.empty_like(x) if index % 2 == 0 else torch.zeros_like(x, dtype=torch.float32)
            for index, (x, need) in enumerate(zip(factors, wants, strict=True))  # hidden, weight, hidden, weight, …
        ]
        bias_gradient = None if bias is None or not wants_bias else torch.zeros_like(bias, dtype=torch.float32)
        nll, *stats = (torch.empty_like(coefficients) for _ in range(3 if with_stats else 1))
        grad_scale = _fp16_grad_scale(coefficients)
        # A block's loss and gradients are computed while its logits are in memory, and never again.
        for first in range(0, len(labels), rows):
            block = slice(first, first + rows)
            label, coefficient = labels[block, None], coefficients[block, None] * grad_scale
            # logits, exp_logits and grad_logits are one tensor [R, V], under the name of its content.
            logits = _logits(hidden, weights, bias, block)
            (peak, likeliest), target = _peak(logits, with_stats), logits.gather(1, label)
            exp_logits = logits.sub_(peak)
            products = _exp_(exp_logits, with_stats)
            total = exp_logits.sum(-1, keepdim=True)
            log_total = total.log()
            nll[block] = (log_total - (target - peak)).squeeze(1)
            if with_stats:
                is_greedy, entropy = stats
                is_greedy[block] = (likeliest == label).squeeze(1)
                entropy[block] = log_total.squeeze(1) - products / total.squeeze(1)
            if wants_bias or any(wants):
                # d logits = (softmax − onehot)·a, for which exponentials and their sum are at hand.
                grad_logits = exp_logits.mul_(coefficient / total).scatter_add_(1, label, -coefficient)
                if bias_gradient is not None:
                    bias_gradient += grad_logits.sum(0)
                grad_logits = grad_logits.to(weights[0].dtype)
                for x, weight, dx, dw in zip(hidden, weights, gradients[::2], gradients[1::2], strict=True):
                    if dx is not None:
                        torch.mm(grad_logits, weight, out=dx[block])
                    if dw is not None:
                        _add_product(dw, grad_logits.t(), x[block])
                del grad_logits
            del logits, exp_logits  # or they would be in memory beside the next block
        ctx.gradients, ctx.bias_gradient, ctx.grad_scale = gradients, bias_gradient, grad_scale
        ctx.dtypes = [*(x.dtype for x in factors), None if bias is None else bias.dtype]
        ctx.mark_non_differentiable(nll, *stats)
        # A token of coefficient 0 is not learnt: an infinite nll must not become NaN by a product with 0.
        return torch.where(coefficients != 0, coefficients * nll, 0.0), nll, *stats

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = grad_outputs[0][:1]  # the same for every term; empty if there are no terms
        scale = factor.sum() / ctx.grad_scale
        gradients = [*ctx.gradients, ctx.bias_gradient]
        del ctx.gradients, ctx.bias_gradient  # as large as a weight, so scaled in place
        *scaled, bias = (
            None if x is None else _scale(x, scale).to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, None, bias, None, None, None, *scaled


def head_terms(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    labels: torch.Tensor,
    coefficients: Coefficients,
    *,
    bias: torch.Tensor | None = None,
    block_bytes: int = BLOCK_BYTES,
    with_stats: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return ``(coefficients · nll, nll)``, fp32[N], under logits Σ hidden·weightᵀ + bias.

    Args:
        factors: pairs of hidden[N, H] and weight[V, H] of one floating type: the head's, and a low-rank adapter's.
        labels: int64[N].
        coefficients: fp32[N], or a function that gives them for the losses fp32[N] of a first pass over the blocks. It
            is called where gradients are enabled; else the coefficients are 0.
        bias: [V].
        block_bytes: the bytes of logits in memory at a time; at least one row is in memory.
        with_stats: whether to return TOKEN_STATS too.

    Only the first result is differentiable, and its terms must all have the same upstream gradient, as under a sum.
    It equals ``coefficients * F.cross_entropy(logits.float(), labels, reduction="none")`` in value and gradient.
    """
    weight = factors[0][1]
    rows = max(1, block_bytes // row_bytes(weight.shape[0], weight.dtype, weight.is_cpu))
    with torch.autocast(labels.device.type, enabled=False):
        learns = torch.is_grad_enabled()  # read here, because it is always False inside forward
        flat = [x for pair in factors for x in pair]
        if callable(coefficients):  # a pass over the blocks for the losses alone, then the pass that learns
            function, coefficients = coefficients, torch.zeros(labels.shape, device=labels.device)
            if learns:
                with torch.no_grad():
                    nll = _HeadTerms.apply(labels, coefficients, bias, rows, False, False, *flat)[1]
                    coefficients = function(nll)
        assert labels.shape == coefficients.shape
        return _HeadTerms.apply(labels, coefficients, bias, rows, learns, with_stats, *flat)


def row_bytes(vocabulary: int, dtype: torch.dtype, on_cpu: bool = True) -> int:
    """Return the bytes of one row of a block, gradients included."""
    return vocabulary * (4 if dtype == torch.float32 else 4 + (1 + on_cpu) * dtype.itemsize)


def _logits(
    hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], bias: torch.Tensor | None, block: slice
) -> torch.Tensor:
    """Return a block's logits, fp32[R, V], which the caller owns."""
    half: Any = {} if weights[0].is_cpu or weights[0].dtype.itemsize >= 4 else {"out_dtype": torch.float32}
    logits, *others = (torch.mm(x[block], weight.t(), **half) for x, weight in zip(hidden, weights, strict=True))
    for part in others if bias is None else (*others, bias):
        logits += part
    return logits.float()


def _peak(logits: torch.Tensor, with_stats: bool) -> tuple[torch.Tensor, Any]:
    """Return the largest logits [R, 1], and with `with_stats` their places."""
    return logits.max(-1, keepdim=True) if with_stats else (logits.amax(-1, keepdim=True), None)


def _exp_(logits: torch.Tensor, with_stats: bool) -> Any:
    """Replace fp32[R, V] by exponentials; with `with_stats` return rows' Σ z·e^z."""
    if not with_stats:
        logits.exp_()
        return None
    rows = max(_SLICE_BYTES.get(logits.device.type, 2**26) // max(logits[:1].nbytes, 1), 1)
    sums = logits.new_empty(len(logits))
    for part, out in zip(logits.split(rows), sums.split(rows), strict=True):
        exponentials = part.exp()
        torch.sum(part.clamp_(min=_LEAST).mul_(exponentials), -1, out=out)
        part.copy_(exponentials)
    return sums


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute total += left @ right in fp32."""
    if total.is_cpu or left.dtype == total.dtype:
        total.addmm_(left.float(), right.float())
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _fp16_grad_scale(coefficients: torch.Tensor) -> torch.Tensor:
    """Return the power of two scaling the largest coefficient to 2^7..2^8."""
    largest = torch.cat([coefficients.abs(), coefficients.new_zeros(1)]).amax()
    return torch.exp2(8 - torch.where(largest > 0, largest, 1.0).log2().ceil())


def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply a gradient by fp32[] in place, in fp32."""
    if gradient.dtype.itemsize >= 4:
        return gradient.mul_(factor)
    for part in gradient.split(_SCALED_ROWS):
        part.copy_(part.float() * factor)
    return gradient
