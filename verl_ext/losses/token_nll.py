"""Negative log-likelihood of each token in fp32, a slice of rows at a time.

verl's fallback takes a bf16 log-softmax row by row, which keeps three digits; ``F.cross_entropy`` in fp32 keeps a
second ``[T, V]`` tensor for its backward (10 GB for 16k tokens of a 151k vocabulary). Here the forward keeps two
numbers a row, and the backward writes the gradient over the logits, which nothing reads afterwards.

Legend: T tokens, V vocabulary.
"""

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
