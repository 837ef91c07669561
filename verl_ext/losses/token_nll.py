"""Negative log-likelihood of each token in fp32, a slice of rows at a time.

verl's fallback takes a bf16 log-softmax row by row, which keeps three digits; ``F.cross_entropy`` in fp32 keeps a
second ``[T, V]`` tensor for its backward (10 GB for 16k tokens of a 151k vocabulary). Here the forward keeps one number
a row, and the backward writes the gradient over the logits, which nothing reads afterwards.

Legend: T tokens, V vocabulary.
"""

from typing import Any

import torch

ROWS = 1024  # 1024 rows of a 151k vocabulary are 0.6 GB in fp32


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool) -> torch.Tensor:
        logsumexp = torch.cat([rows.float().logsumexp(-1) for rows in logits.split(ROWS)])
        target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
        ctx.save_for_backward(logits, labels, logsumexp)
        ctx.inplace_backward = inplace_backward
        return logsumexp - target

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, logsumexp = ctx.saved_tensors
        logits = logits.detach()
        gradient = logits if ctx.inplace_backward else torch.empty_like(logits)
        columns = (x.split(ROWS) for x in (logits, gradient, labels, logsumexp, grad_outputs[0]))
        for rows, out, label, lse, grad in zip(*columns, strict=True):
            softmax = (rows.float() - lse.unsqueeze(-1)).exp_()
            softmax.scatter_add_(-1, label.unsqueeze(-1), softmax.new_full((len(label), 1), -1.0))
            out.copy_(softmax.mul_(grad.unsqueeze(-1)))
        return gradient, None, None


def token_nll(logits: torch.Tensor, labels: torch.Tensor, *, inplace_backward: bool = False) -> torch.Tensor:
    """``nll[T]`` in fp32 of ``labels[T]`` under ``logits[T, V]`` of any floating type.

    Args:
        inplace_backward: write the gradient over ``logits`` in the backward pass; for callers who own them.

    Matches ``F.cross_entropy(logits.float(), labels, reduction="none")`` in value and gradient.
    """
    assert logits.dim() == 2
    assert labels.shape == logits.shape[:1]
    return _TokenNLL.apply(logits, labels, inplace_backward)
