"""The Titans memory: weights of a small network that learn while reading.

    depth 1    M(k) = k W1
    depth 2    M(k) = g(k W1) W2        g(a) = 2·silu(a), which is a + a²/2 - … near 0

The surprise of a token is the gradient of ‖M(k_t) - v_t‖² with respect to the weights, in closed form, at the weights
of the sub-chunk's beginning; ``write_coefficients`` has the recurrence that it enters. A sub-chunk is read before it is
written, so no token ever sees itself or a later one. https://arxiv.org/abs/2501.00663, §3.1-3.2.

The state of a layer is one tensor ``[B, H, L, 2dk, e]`` in fp32 (fp64 for an fp64 model), which FSDP2 and checkpointing
find: the weights W1 and W2ᵀ in the first dk rows, their momenta S in the others. One product then writes all four.

Departures from the paper, each tried in recipe=babilong_cpu (its README has the figures): the memory's output is a
summand of the layer's, so that a pretrained model starts as what it was, in place of a gate y ⊗ M(y), of tokens before
the segment (MAC) or of a layer before attention (MAL). q, k and the rates have the short convolution, without a SiLU, v
has none. A small θ is 0, and α = θ σ(…): a token that writes nothing forgets nothing.

Legend: B samples, T tokens, d hidden size of the model, H heads, N = B H, L weight matrices (the depth), dk key and
value size of a head, e columns of W1 (dk at depth 1, else the network's hidden size), n sub-chunks, s tokens of a
sub-chunk, r tokens before a key's own that it sees.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_ext.titans.configuration import MemoryOptions

# Rates before training, measured in recipe=babilong_cpu. θ starts at INITIAL_WRITE / tokens of a sub-chunk: training
# raises it for the tokens that answers need. For all others it has to be 0, and so has α: over a long text, whatever is
# written or forgotten besides wears facts away. A sigmoid comes near to 0 only ever more slowly, so that one below
# LEAST_WRITE times the start writes nothing, and a token forgets a share of what it writes.
INITIAL_WRITE = 0.4
LEAST_WRITE = 2.0
INITIAL_ETA = 0.1
INITIAL_FORGETTING = 1 / 32

# Smaller weights become 0: beside others near 1 they are not seen, and they make subnormal numbers, of which a CPU's
# matrix products take ten times as long. The momentum forgets a sub-chunk's first tokens by factors below 1e-38.
NEGLIGIBLE = 1e-30


class WriteRates(NamedTuple):
    """Rates by token ``[..., s]``, as logarithms where factors multiply."""

    theta: torch.Tensor  # θ, the strength of a write
    log_eta: torch.Tensor  # log η, the share of the momentum that stays
    log_keep: torch.Tensor  # log(1 - α), the share of the memory that stays


class WriteCoefficients(NamedTuple):
    """The weights of one sub-chunk's sums, of :func:`write_coefficients`."""

    carry: torch.Tensor  # [..., 2, 2]: A and B, by which W_0 and S_0 enter W_s, then 0 and E, by which they enter S_s
    rates: torch.Tensor  # [..., s, 2]: c and m


def write_coefficients(rates: WriteRates, is_written: torch.Tensor) -> WriteCoefficients:
    """Return the weights with which a sub-chunk's tokens enter the memory.

    Every token t is measured against the weights W_0 of the sub-chunk's beginning, which gives the surprise u_t. The
    paper's recurrence (eq. 9-14)

        S_t = η_t S_{t-1} - θ_t u_t        W_t = (1 - α_t) W_{t-1} + S_t

    is then linear in the u_t, and the state after s tokens is two weighted sums:

        S_s = E·S_0 - Σ_t m_t u_t                        E   = Π η_i
        W_s = A·W_0 + B·S_0 - Σ_t c_t u_t                A   = Π (1 - α_i)
                                                         m_t = θ_t P[s, t]
        P[j, t] = Π_{i=t+1..j} η_i                       c_t = θ_t R_t,  R_t = Σ_{j≥t} Q[j] P[j, t]
        Q[j]    = Π_{i=j+1..s} (1 - α_i)                 B   = η_1 R_1

    Weights below `NEGLIGIBLE` become 0. rates are ``[..., s]``. ``is_written``, broadcastable to them, is False for a
    token (padding) that leaves S and W as they are: θ = 0, η = 1, α = 0, and no "+ S" of its own.
    """
    theta, log_eta, log_keep = (rate.masked_fill(~is_written, 0.0) for rate in rates)
    total, size = _sum_from_behind(log_keep[..., 1:]).exp() * is_written, theta.shape[-1]
    eta = log_eta.exp()
    # R_t = Q[t] + η_{t+1} R_{t+1} is summed over 2, 4, 8, … tokens at once. Nothing is divided and no sums are
    # subtracted, so that a token with η = 0 costs no digits.
    factor, reach = F.pad(eta[..., 1:], (0, 1)), 1
    while reach < size:
        total = torch.addcmul(total, factor, F.pad(total[..., reach:], (0, reach)))
        factor, reach = factor * F.pad(factor[..., reach:], (0, reach)), 2 * reach
    c, m = theta * total, theta * _sum_from_behind(log_eta[..., 1:]).exp()
    a, b, e = log_keep.sum(-1).exp(), eta[..., 0] * total[..., 0], log_eta.sum(-1).exp()
    carry = torch.stack([a, b, torch.zeros_like(e), e], -1).unflatten(-1, (2, 2))
    return WriteCoefficients(*(F.threshold(x, NEGLIGIBLE, 0.0) for x in (carry, torch.stack([c, m], -1))))


def _sum_from_behind(x: torch.Tensor) -> torch.Tensor:
    """Return Σ_{i≥t} x_i for every t, and 0 after the last."""
    return F.pad(x, (0, 1)).flip(-1).cumsum(-1).flip(-1)


def recall(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Compute M(x) for queries ``x[B, H, s, dk]``, in their shape."""
    first, *second = state[..., : x.shape[-1], :].unbind(2)  # W1 and W2ᵀ: [B, H, dk, e]
    return 2 * F.silu(x @ first) @ second[0].mT if second else x @ first


@torch.no_grad()
def write_limit(c: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the factor to θ that keeps a sub-chunk from overshooting.

    It is ``[..., 1]``: all tokens are measured at the same weights. Through the last layer, whose inputs are z ``[...,
    s, e]`` (depth 1: the keys), the error of token t changes by Σ_j 2 c_j (z_t·z_j) error_j. The eigenvalues of that
    map are those of the symmetric 2 √(c_t c_j) (z_t·z_j), and at most its largest row sum of magnitudes, which is held
    to 1. If many keys are alike, the memory would otherwise oscillate at its clamp. Back-propagation takes the factor
    as a constant: with its own gradient, the memory of a small recall task was not learned.
    """
    root = c.sqrt().unsqueeze(-1)  # [..., s, 1]
    change = 2 * root * ((z @ z.mT).abs_() @ root)
    return change.amax(-2).clamp(min=1).reciprocal()


def stream_matrix(
    qk: torch.Tensor, v: torch.Tensor, state: torch.Tensor, coefficients: WriteCoefficients, max_surprise: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and write sub-chunk by sub-chunk at depth 1.

    ``qk[N, n, 2s, dk]`` has each sub-chunk's queries before its keys: one product reads for both. ``v`` is ``[N, n, s,
    dk]``, the state ``[N, 1, 2dk, dk]``. Returns M(q) ``[N, n s, dk]`` and the state after all tokens. The gradient is
    u_t = k_t ⊗ 2 (M(k_t) - v_t); its norm, at most ``max_surprise``, is the product of both norms. Without the clamp,
    one outlier would make the weights, and so the next gradients, grow without bound.
    """
    size = v.shape[2]
    k, now, recalled = qk[:, :, size:], state.squeeze(1), []  # [N, n, s, dk], [N, 2dk, dk]
    carries, rates = coefficients
    rates = rates * (2 * write_limit(rates[..., 0], k)).unsqueeze(-1)
    left = (rates.unsqueeze(-1) * k.unsqueeze(-2)).flatten(-2)  # [N, n, s, 2dk]
    scale = torch.linalg.vector_norm(k, dim=-1, keepdim=True) * (2 / max_surprise)
    # One unbind a tensor: the gradient of a slice would fill a tensor of the whole chunk with zeros.
    for qk_i, v_i, left_i, scale_i, carry in zip(*(x.unbind(1) for x in (qk, v, left, scale, carries)), strict=True):
        values, at_keys = torch.bmm(qk_i, now[:, : v.shape[-1]]).split(size, 1)
        recalled.append(values)
        error = at_keys - v_i
        right = error / (torch.linalg.vector_norm(error, dim=-1, keepdim=True) * scale_i).clamp(min=1)
        now = torch.bmm(carry, now.view(len(now), 2, -1)).view_as(now).baddbmm_(left_i.mT, right, alpha=-1)
    return torch.cat(recalled, 1), now.unsqueeze(1)


def stream_network(
    qk: torch.Tensor, v: torch.Tensor, state: torch.Tensor, coefficients: WriteCoefficients, max_surprise: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and write sub-chunk by sub-chunk at depth 2.

    With a = k W1, z = g(a) and p = 2 (M(k) - v), the gradients are k ⊗ (p W2ᵀ ⊙ g'(a)) for W1 and p ⊗ z for W2ᵀ.
    """
    size, recalled = v.shape[2], []
    for qk_i, v_i, carry, rates in zip(*(x.unbind(1) for x in (qk, v, *coefficients)), strict=True):
        first, second = state[:, :, : v.shape[-1]].unbind(1)  # W1 and W2ᵀ: [N, dk, e]
        inner = torch.bmm(qk_i, first)
        sigmoid = torch.sigmoid(inner)
        features = 2 * inner * sigmoid
        values, at_keys = torch.bmm(features, second.mT).split(size, 1)
        recalled.append(values)
        p, z, sigmoid = 2 * (at_keys - v_i), features[:, size:], sigmoid[:, size:]
        at_inner = torch.bmm(p, second) * torch.addcmul(z, sigmoid, 2 - z)  # g'(a) = z + σ(a) (2 - z)
        left, right = torch.stack([qk_i[:, size:], p], 1), torch.stack([at_inner, z], 1)  # [N, 2, s, dk or e]
        norms = torch.linalg.vector_norm(left, dim=-1) * torch.linalg.vector_norm(right, dim=-1)
        norm = torch.linalg.vector_norm(norms, dim=1)  # its derivative at 0 is 0
        rates = rates * (write_limit(rates[..., 0], z) / (norm / max_surprise).clamp(min=1)).unsqueeze(-1)
        left = (rates[:, None, :, :, None] * left.unsqueeze(3)).flatten(3)  # [N, 2, s, 2dk]
        # [N, 1, 2, 2] times [N, 2, 2, dk·e], and back to [N, 2, 2dk, e]
        state = (carry.unsqueeze(1) @ state.unflatten(2, (2, -1)).flatten(3)).view_as(state)
        state.flatten(0, 1).baddbmm_(left.flatten(0, 1).mT, right.flatten(0, 1), alpha=-1)
    return torch.cat(recalled, 1), state


class LongTermMemory(nn.Module):
    """The module that reads and writes a layer's state.

    It computes in fp32 without autocast. FSDP2 gathers its parameters inside ``forward`` alone.
    """

    def __init__(self, hidden_size: int, options: MemoryOptions, eps: float = 1e-6) -> None:
        super().__init__()
        heads, size, channels = options.heads, options.head_dim, options.heads * options.head_dim
        self.options = options
        self.initial_write = min(0.1, INITIAL_WRITE / options.sub_chunk)
        self.least_write = LEAST_WRITE * self.initial_write
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.q_proj = nn.Linear(hidden_size, channels, bias=False)
        self.k_proj = nn.Linear(hidden_size, channels, bias=False)
        self.v_proj = nn.Linear(hidden_size, channels, bias=False)
        self.q_conv = nn.Conv1d(channels, channels, options.conv_tokens, groups=channels, bias=False)
        self.k_conv = nn.Conv1d(channels, channels, options.conv_tokens, groups=channels, bias=False)
        self.rates = nn.Conv1d(hidden_size, 3 * heads, options.conv_tokens)
        inner = options.expansion * size if options.depth == 2 else size
        self.initial_w1 = nn.Parameter(torch.empty(heads, size, inner))
        self.initial_w2 = nn.Parameter(torch.empty(heads, inner, size)) if options.depth == 2 else None
        self.out_proj = nn.Linear(channels, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with an empty memory (M = 0) and equal rates.

        Values have unit size. A query starts as the key of the same tokens, so that equal words recall each other from
        the first step on. W_o starts at 0 unless `output_std` is given.
        """
        width, size = self.q_proj.in_features, self.options.head_dim
        init.ones_(self.norm.weight)
        init.normal_(self.k_proj.weight, std=width**-0.5)
        init.normal_(self.v_proj.weight, std=(width * size) ** -0.5)
        bound = self.options.conv_tokens**-0.5
        init.uniform_(self.k_conv.weight, -bound, bound)
        init.copy_(self.q_proj.weight, self.k_proj.weight)
        init.copy_(self.q_conv.weight, self.k_conv.weight)
        init.zeros_(self.rates.weight)
        theta = self.least_write + (1 - self.least_write) * self.initial_write
        biases = torch.tensor([math.log(rate / (1 - rate)) for rate in (theta, INITIAL_ETA, INITIAL_FORGETTING)])
        init.copy_(self.rates.bias, biases.repeat_interleave(self.options.heads))  # type: ignore[arg-type]
        if self.initial_w2 is None:
            init.zeros_(self.initial_w1)
        else:
            # Orthonormal rows: keys that share nothing start as features that share almost nothing.
            columns = torch.randn(self.initial_w1.mT.shape, dtype=torch.float32)
            init.copy_(self.initial_w1, torch.linalg.qr(columns).Q.mT)
            init.zeros_(self.initial_w2)
        init.normal_(self.out_proj.weight, std=self.options.output_std)

    def forward(
        self,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
        is_written: torch.Tensor | None,
        write: bool = True,
        before: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_o M(h) ``[B, T, d]``, and the state after the tokens.

        - hidden: ``[B, T, d]``
        - state: None for a new sample
        - is_written: bool ``[B, T]``, False for tokens (padding) that must not be written; None: all are written
        - write: False lets all tokens read the same state
        - before: ``[B, r, d]``, hidden states of the r tokens before these, 0 before the text begins; None: all 0
        """
        batch, length, width = hidden.shape
        size = min(self.options.sub_chunk, length)
        fill = -length % size if write else 0  # what fills the last sub-chunk is not written
        if before is None:
            before = hidden.new_zeros(batch, self.options.conv_tokens - 1, width)
        if is_written is None:
            is_written = torch.ones(batch, length, dtype=torch.bool, device=hidden.device)
        dtype = self.q_proj.weight.dtype
        # Without autocast: a state in bf16 would lose what thousands of writes add up.
        with torch.autocast(hidden.device.type, enabled=False):
            state = self.initial_state(batch) if state is None else state
            normed = self.norm(torch.cat([before, hidden, hidden.new_zeros(batch, fill, width)], 1).to(dtype))
            q = self._directions(self.q_proj, self.q_conv, normed)
            if write:
                recalled, state = self._stream(q, normed, state, F.pad(is_written.bool(), (0, fill)), size)
            else:
                recalled = recall(q, state)
            return self.out_proj(_merge_heads(recalled[:, :, :length]).to(dtype)), state

    def _stream(
        self, q: torch.Tensor, normed: torch.Tensor, state: torch.Tensor, is_written: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read and write sub-chunks; return M(q) ``[B, H, T, dk]`` and state."""
        v = self._heads(self.v_proj(normed[:, self.options.conv_tokens - 1 :]))
        k = self._directions(self.k_proj, self.k_conv, normed)
        # [B, H, T, dk] to sub-chunks [B, H, n, s, dk], the queries of each before its keys
        qk, v = torch.cat([x.unflatten(2, (-1, size)) for x in (q, k)], 3), v.unflatten(2, (-1, size))
        by_head = (qk, v, state, *self._coefficients(normed, is_written, size))  # [B, H, …] to [N, …]
        qk, v, new, *coefficients = (x.flatten(0, 1) for x in by_head)
        stream = stream_matrix if self.initial_w2 is None else stream_network
        recalled, new = stream(qk, v, new, WriteCoefficients(*coefficients), self.options.max_surprise)
        # A copy: FSDP2 warns of a module that returns a view.
        return recalled.view_as(q), new.view_as(state).clone()

    def _coefficients(self, normed: torch.Tensor, is_written: torch.Tensor, size: int) -> WriteCoefficients:
        """Return coefficients ``[B, H, n, …]`` for ``normed[B, r + T, d]``."""
        raw = _upcast(_convolved(self.rates, normed)).unflatten(-1, (3, -1)).permute(2, 0, 3, 1)  # [3, B, H, T]
        theta, eta, alpha = raw.unflatten(-1, (-1, size))  # [B, H, n, s]
        theta = (torch.sigmoid(theta) - self.least_write).relu() / (1 - self.least_write)
        forgotten = (theta * torch.sigmoid(alpha)).clamp(max=1 - 1e-6)  # a logarithm of 0 has no derivative
        rates = WriteRates(theta, F.logsigmoid(eta), torch.log1p(-forgotten))
        return write_coefficients(rates, is_written.view(len(normed), 1, -1, size))

    def initial_state(self, batch: int) -> torch.Tensor:
        """Make the state of ``batch`` new samples."""
        w1, w2 = self.initial_w1, self.initial_w2
        w = _upcast(w1.unsqueeze(1) if w2 is None else torch.stack([w1, w2.mT], 1))  # [H, L, dk, e]
        # Copies, not views: FSDP2 frees the parameters' storage when this module's forward ends.
        return torch.cat([w, torch.zeros_like(w)], -2).repeat(batch, 1, 1, 1, 1)

    def _directions(self, projection: nn.Module, convolution: nn.Conv1d, normed: torch.Tensor) -> torch.Tensor:
        """Return unit vectors ``[B, H, T, dk]``; each sees r tokens before."""
        x = self._heads(_convolved(convolution, projection(normed)))
        # F.normalize makes the norms as large as x, which its gradient reads six times.
        return x * torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12).reciprocal()

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return _upcast(projected).unflatten(-1, (self.options.heads, -1)).transpose(1, 2)  # [B, H, T, dk]


def _convolved(convolution: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, channels out]`` for ``x[B, r + T, channels in]``."""
    # As a picture one pixel high: a convolution in 2D takes channels side by side in memory as they lie.
    weight = convolution.weight.unsqueeze(2)
    return F.conv2d(x.mT.unsqueeze(2), weight, convolution.bias, groups=convolution.groups).squeeze(2).mT


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _merge_heads(recalled: torch.Tensor) -> torch.Tensor:
    """Put heads side by side, ``[B, T, H * dk]``, each scaled.

    A head is divided by the root of its mean square plus 1 / dk. An empty memory gives 0, a value recalled whole (norm
    1) about 0.7 a channel, and an overshoot at most 1.
    """
    norm = torch.linalg.vector_norm(recalled, dim=-1, keepdim=True)
    scaled = recalled * ((norm.square() + 1) / recalled.shape[-1]).rsqrt()
    return scaled.transpose(1, 2).flatten(2)  # [B, T, H * dk]


class MemoryLayer(GradientCheckpointingLayer):
    """The memory of a decoder layer, entered by ``forward`` alone.

        h' = layer(h) + σ(memory_gate(h)) ⊙ W_o M(h)

    It is a pure function of hidden states and state. With W_o = 0 at the start this equals the plain layer exactly. The
    decoder layer is not a part of this module: its recomputation under checkpointing writes nothing twice.
    """

    def __init__(self, hidden_size: int, options: MemoryOptions, eps: float = 1e-6) -> None:
        super().__init__()
        self.long_term_memory = LongTermMemory(hidden_size, options, eps)
        self.memory_gate = nn.Linear(hidden_size, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with a gate of one half."""
        init.zeros_(self.memory_gate.weight)
        init.zeros_(self.memory_gate.bias)

    def forward(self, hidden: torch.Tensor, *others: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summand ``[B, T, d]`` and later state, as :class:`LongTermMemory` does."""
        recalled, state = self.long_term_memory(hidden, *others, **kwargs)
        with torch.autocast(hidden.device.type, enabled=False):
            gate = torch.sigmoid(self.memory_gate(hidden.to(recalled.dtype)))
        return gate * recalled, state
