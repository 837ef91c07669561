"""The weights with which the tokens of one sub-chunk enter the memory, from their rates.

Every token t of a sub-chunk is measured against the weights W_0 of its beginning, which gives the surprise u_t. Titans'
recurrence (https://arxiv.org/abs/2501.00663, eq. 9-14)

    S_t = η_t S_{t-1} - θ_t u_t        W_t = (1 - α_t) W_{t-1} + S_t

is then linear in the u_t, and the state after s tokens is two weighted sums:

    S_s = E·S_0 - Σ_t m_t u_t                        E   = Π η_i
    W_s = A·W_0 + B·S_0 - Σ_t c_t u_t                A   = Π (1 - α_i)
                                                     m_t = θ_t P[s, t]
    P[j, t] = Π_{i=t+1..j} η_i                       c_t = θ_t Σ_{j≥t} Q[j] P[j, t]
    Q[j]    = Π_{i=j+1..s} (1 - α_i)                 B   = Σ_j Q[j] Π_{i≤j} η_i

A token that is not written (padding) leaves S and W as they are: θ = 0, η = 1, α = 0, and no "+ S" of its own.

Legend: ... leading axes (B samples, H heads, n sub-chunks), s tokens of a sub-chunk.
"""

from typing import NamedTuple

import torch


class WriteRates(NamedTuple):
    """Rates by token ``[..., s]``; logarithms, because products of many factors near 0 or 1 lose digits."""

    theta: torch.Tensor  # θ, how strongly a token is written
    log_eta: torch.Tensor  # log η, how much of the momentum stays
    log_keep: torch.Tensor  # log(1 - α), how much of the memory stays


class WriteCoefficients(NamedTuple):
    """Weights of one sub-chunk's sums, named as in the module's docstring."""

    a: torch.Tensor  # [...]
    b: torch.Tensor  # [...]
    e: torch.Tensor  # [...]
    c: torch.Tensor  # [..., s]
    m: torch.Tensor  # [..., s]


def write_coefficients(rates: WriteRates, written: torch.Tensor) -> WriteCoefficients:
    """Coefficients for rates ``[..., s]``; ``written``, broadcastable to them, is True where a token is written."""
    theta, log_eta, log_keep = (rate.masked_fill(~written, 0.0) for rate in rates)
    # P[j, t] sums log η over t < i ≤ j alone: differences of one running sum would cancel.
    s = theta.shape[-1]
    lower = torch.ones(s, s, dtype=torch.bool, device=theta.device).tril()
    later = log_eta.unsqueeze(-1).expand(*log_eta.shape, s).masked_fill(~lower.tril(-1), 0.0)
    p = later.cumsum(-2).masked_fill(~lower, float("-inf")).exp()  # [..., j, t]
    after = torch.nn.functional.pad(log_keep[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    q = after.exp() * written
    carried = log_eta.cumsum(-1).exp()
    return WriteCoefficients(
        a=log_keep.sum(-1).exp(),
        b=(q * carried).sum(-1),
        e=carried[..., -1],
        c=theta * (q.unsqueeze(-2) @ p).squeeze(-2),
        m=theta * p[..., -1, :],
    )
