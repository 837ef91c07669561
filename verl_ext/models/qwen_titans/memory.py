"""A memory that learns while it reads: a small network per head whose weights are the state (Titans).

    depth 1    M(k) = k W1
    depth 2    M(k) = g(k W1) W2        g(a) = 2·silu(a), which is a + a²/2 - … near 0

The surprise of a token is the gradient of ‖M(k_t) - v_t‖² with respect to the weights, in closed form, at the weights
of the sub-chunk's beginning; ``write_coefficients`` has the recurrence that it enters. A sub-chunk is read before it is
written, so no token ever sees itself or a later one. https://arxiv.org/abs/2501.00663, §3.1-3.2.

The state of a layer is one tensor ``[B, H, L, 2dk, e]`` in fp32 (fp64 for an fp64 model), which FSDP2 and checkpointing
find: the weights W1 and W2ᵀ in the first dk rows, their momenta S in the others. One product then writes all four.

Departures from the paper: of q, k and v only k has a short convolution, and none a SiLU, because neither changed what a
memory learned (recipes/babilong_cpu); the output is not gated as y ⊗ M(y), but by the layer's own gate (see
:class:`MemoryLayer`), so that the base model's attention and output stay what they were.

Legend: B samples, T tokens, d hidden size of the model, H heads, L weight matrices (the depth), dk key and value size
of a head, e columns of W1 (dk at depth 1, else the network's hidden size), n sub-chunks, s tokens of a sub-chunk, r
tokens before a key's own that it sees.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_ext.models.qwen_titans.configuration import MemoryOptions

# Rates before training. θ = INITIAL_WRITE / tokens of a sub-chunk, just below the limit of `write_limit`. A token is
# forgotten over FORGETTING_CHUNKS chunks: a write replaces what its key recalled, so that forgetting is seldom needed,
# and a rate that training must first bring down ends the reach of the memory.
INITIAL_WRITE = 1.6
INITIAL_ETA = 0.1
FORGETTING_CHUNKS = 1024


class WriteRates(NamedTuple):
    """Rates by token ``[..., s]``; logarithms, because products of many factors near 0 or 1 lose digits."""

    theta: torch.Tensor  # θ, the strength of a write
    log_eta: torch.Tensor  # log η, the share of the momentum that stays
    log_keep: torch.Tensor  # log(1 - α), the share of the memory that stays


class WriteCoefficients(NamedTuple):
    """Weights of one sub-chunk's sums: a, b, e ``[...]`` and c, m ``[..., s]`` of :func:`write_coefficients`."""

    a: torch.Tensor
    b: torch.Tensor
    e: torch.Tensor
    c: torch.Tensor
    m: torch.Tensor


def write_coefficients(rates: WriteRates, written: torch.Tensor) -> WriteCoefficients:
    """Return the weights with which the tokens of one sub-chunk enter the memory, for rates ``[..., s]``.

    Every token t is measured against the weights W_0 of the sub-chunk's beginning, which gives the surprise u_t. The
    paper's recurrence (eq. 9-14)

        S_t = η_t S_{t-1} - θ_t u_t        W_t = (1 - α_t) W_{t-1} + S_t

    is then linear in the u_t, and the state after s tokens is two weighted sums:

        S_s = E·S_0 - Σ_t m_t u_t                        E   = Π η_i
        W_s = A·W_0 + B·S_0 - Σ_t c_t u_t                A   = Π (1 - α_i)
                                                         m_t = θ_t P[s, t]
        P[j, t] = Π_{i=t+1..j} η_i                       c_t = θ_t R_t,  R_t = Σ_{j≥t} Q[j] P[j, t]
        Q[j]    = Π_{i=j+1..s} (1 - α_i)                 B   = η_1 R_1

    R_t = Q[t] + η_{t+1} R_{t+1} is summed over 2, 4, 8, … tokens at once. Nothing is divided, no sums are subtracted,
    so that a token with η = 0 costs no digits.

    ``written``, broadcastable to the rates, is False for a token (padding) that leaves S and W as they are: θ = 0,
    η = 1, α = 0, and no "+ S" of its own.
    """
    theta, log_eta, log_keep = (rate.masked_fill(~written, 0.0) for rate in rates)
    from_behind, size = _sum_from_behind(log_keep[..., 1:]), theta.shape[-1]
    total = from_behind.exp() * written
    eta = log_eta.exp()
    factor, reach = F.pad(eta[..., 1:], (0, 1)), 1
    while reach < size:
        total = torch.addcmul(total, factor, F.pad(total[..., reach:], (0, reach)))
        factor, reach = factor * F.pad(factor[..., reach:], (0, reach)), 2 * reach
    return WriteCoefficients(
        a=log_keep.sum(-1).exp(),
        b=eta[..., 0] * total[..., 0],
        e=log_eta.sum(-1).exp(),
        c=theta * total,
        m=theta * _sum_from_behind(log_eta[..., 1:]).exp(),
    )


def _sum_from_behind(x: torch.Tensor) -> torch.Tensor:
    """Return Σ_{i≥t} x_i for every t, and 0 after the last."""
    return F.pad(x, (0, 1)).flip(-1).cumsum(-1).flip(-1)


def recall(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Compute M(x) ``[B, H, s, dk]`` for queries of that shape."""
    w = state[..., : x.shape[-1], :]
    if w.shape[2] == 1:
        return x @ w[:, :, 0]
    return 2 * F.silu(x @ w[:, :, 0]) @ w[:, :, 1].mT


class Surprise(NamedTuple):
    """The gradients of a sub-chunk's tokens, each an outer product in every weight matrix: u_t = left_t ⊗ right_t."""

    left: torch.Tensor  # [B, H, L, s, dk]: the keys, and at depth 2 the gradients at M(k)
    right: torch.Tensor  # [B, H, L, s, e]: the gradients at k W1, and at depth 2 the features z = g(k W1)
    shrink: torch.Tensor  # [B, H, s], the factor that brings its norm over all weights down to the largest allowed one


def surprise(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, max_surprise: float = math.inf
) -> tuple[torch.Tensor | None, Surprise]:
    """Return M(q), and the gradient of ‖M(k_t) - v_t‖² for every token, its norm clamped to ``max_surprise``.

    ``q``, ``k``, ``v``: ``[B, H, s, dk]``. The norm of an outer product is the product of the norms. Without the clamp,
    one outlier would make the weights, and so the next gradients, grow without bound.
    """
    w = state[..., : k.shape[-1], :]
    first = 0 if q is None else q.shape[2]  # queries and keys go through the network together
    a = (k if q is None else torch.cat([q, k], 2)) @ w[:, :, 0]
    if w.shape[2] == 1:
        out = a
    else:
        sigmoid = torch.sigmoid(a)
        z = 2 * a * sigmoid
        out = z @ w[:, :, 1].mT
    dp = 2 * (out[:, :, first:] - v)
    if w.shape[2] == 1:
        left, right = k.unsqueeze(2), dp.unsqueeze(2)
    else:
        z, sigmoid = z[:, :, first:], sigmoid[:, :, first:]
        da = (dp @ w[:, :, 1]) * torch.addcmul(z, sigmoid, 2 - z)  # g'(a) = z + σ(a) (2 - z)
        left, right = torch.stack([k, dp], 2), torch.stack([da, z], 2)
    squared_norm = (left.square().sum(-1) * right.square().sum(-1)).sum(2)
    # From the square, whose derivative at 0 is a number.
    shrink = (squared_norm / max_surprise**2).clamp(min=1).rsqrt()
    return (out[:, :, :first] if first else None), Surprise(left, right, shrink)


@torch.no_grad()
def write_limit(c: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the factor ``[..., 1]`` to θ of a whole sub-chunk with which its tokens together do not overshoot.

    All are measured at the same weights. Through the last layer, whose inputs are z ``[..., s, e]`` (depth 1: the
    keys), the error of token t changes by Σ_j 2 c_j (z_t·z_j) error_j. The eigenvalues of that map are those of the
    symmetric 2 √(c_t c_j) (z_t·z_j), and at most its largest row sum of magnitudes, which is held to 1. If many keys
    are alike, the memory would otherwise oscillate at its clamp. Back-propagation takes the factor as a constant: with
    its own gradient, the memory of a small recall task was not learned.
    """
    root = c.sqrt().unsqueeze(-1)
    change = 2 * root * ((z @ z.mT).abs() @ root)
    return change.amax(-2).clamp(min=1).reciprocal()


def write(state: torch.Tensor, gradient: Surprise, by: WriteCoefficients) -> torch.Tensor:
    """Return the state after a sub-chunk, for coefficients ``[B, H]`` and ``[B, H, s]``."""
    w, s = state.chunk(2, -2)
    a, b, e = (x[..., None, None, None] for x in (by.a, by.b, by.e))
    kept = torch.cat([torch.addcmul(a * w, b, s), e * s], -2)
    rates = torch.stack([by.c, by.m], -1) * gradient.shrink.unsqueeze(-1)  # [B, H, s, 2]
    left = rates[:, :, None, :, :, None] * gradient.left.unsqueeze(-2)  # [B, H, L, s, 2, dk]
    left, right = left.flatten(-2).flatten(0, 2), gradient.right.flatten(0, 2)
    return torch.baddbmm(kept.flatten(0, 2), left.mT, right, alpha=-1).view_as(state)


class LongTermMemory(nn.Module):
    """The module that reads and writes a :class:`torch.Tensor` from hidden states, in fp32 without autocast.

    Its parameters are used inside ``forward`` alone, because FSDP2 gathers them there.
    """

    def __init__(self, hidden_size: int, options: MemoryOptions, eps: float = 1e-6) -> None:
        super().__init__()
        heads, size = options.heads, options.head_dim
        self.options = options
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.q_proj = nn.Linear(hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(hidden_size, heads * size, bias=False)
        self.v_proj = nn.Linear(hidden_size, heads * size, bias=False)
        channels, width = heads * size, options.key_tokens
        self.k_conv = nn.Conv1d(channels, channels, width, groups=channels, bias=False) if width > 1 else None
        self.rates = nn.Linear(hidden_size, 3 * heads)
        inner = options.expansion * size if options.depth == 2 else size
        self.initial_w1 = nn.Parameter(torch.empty(heads, size, inner))
        self.initial_w2 = nn.Parameter(torch.empty(heads, inner, size)) if options.depth == 2 else None
        self.out_proj = None if options.variant == "mag" else nn.Linear(heads * size, hidden_size, bias=False)
        if options.variant == "mac":
            self.persistent = nn.Parameter(torch.empty(options.persistent_tokens, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with values of unit size, an empty memory (M = 0) and the same rates for every token.

        W_o starts at 0 unless `output_std` is given, so that the memory adds nothing; mac's gate starts at 0 instead.
        """
        width, size = self.q_proj.in_features, self.options.head_dim
        init.ones_(self.norm.weight)
        init.normal_(self.q_proj.weight, std=width**-0.5)
        init.normal_(self.k_proj.weight, std=width**-0.5)
        init.normal_(self.v_proj.weight, std=(width * size) ** -0.5)
        if self.k_conv is not None:
            init.uniform_(self.k_conv.weight, -(self.options.key_tokens**-0.5), self.options.key_tokens**-0.5)
        init.zeros_(self.rates.weight)
        alpha = 1 / (FORGETTING_CHUNKS * self.options.chunk_size)
        theta = min(0.5, INITIAL_WRITE / self.options.sub_chunk)
        biases = torch.tensor([math.log(rate / (1 - rate)) for rate in (theta, INITIAL_ETA, alpha)])
        init.copy_(self.rates.bias, biases.repeat_interleave(self.options.heads))
        if self.initial_w2 is None:
            init.zeros_(self.initial_w1)
        else:
            # Orthonormal rows: keys that share nothing start as features that share almost nothing.
            columns = torch.randn(self.initial_w1.mT.shape, dtype=torch.float32)
            init.copy_(self.initial_w1, torch.linalg.qr(columns).Q.mT)
            init.zeros_(self.initial_w2)
        if self.options.variant == "mac":
            init.normal_(self.persistent, std=0.02)
        if self.out_proj is not None:
            least = 0.02 if self.options.variant == "mac" else 0.0
            init.normal_(self.out_proj.weight, std=max(least, self.options.output_std))

    def forward(
        self,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
        written: torch.Tensor | None,
        read: bool = True,
        write: bool = True,
        before: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the recalled values for each token, and the state after the tokens.

        The values are W_o M(h) ``[B, T, d]``, or M(h) ``[B, T, H * dk]`` for mag, in the parameters' dtype; None if not
        ``read``. Without ``write``, all tokens read the same state. hidden is ``[B, T, d]``; state is None for a new
        sample; written is bool ``[B, T]``, False for tokens (padding) that must not be written, or None to write all.
        before, ``[B, r, d]``, are the hidden states of the r tokens before these, 0 where the text begins, or None.
        """
        dtype = self.q_proj.weight.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            state = self.initial_state(len(hidden)) if state is None else state
            if write:
                recalled, state = self._stream(hidden.to(dtype), state, written, read, before)
            else:
                recalled = recall(self._directions(self.q_proj(self.norm(hidden.to(dtype)))), state) if read else None
            if recalled is None:
                return None, state
            merged = _merge_heads(recalled).to(dtype)
            return (merged if self.out_proj is None else self.out_proj(merged)), state

    def _stream(
        self,
        hidden: torch.Tensor,
        state: torch.Tensor,
        written: torch.Tensor | None,
        read: bool,
        before: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Read, measure the surprise and write, sub-chunk by sub-chunk; return ``[B, H, T, dk]`` and the state."""
        batch, length = hidden.shape[:2]
        size = min(self.options.sub_chunk, length)
        fill = -length % size  # what fills the last sub-chunk is not written
        if written is None:
            written = torch.ones(batch, length, dtype=torch.bool, device=hidden.device)
        x = self.norm(F.pad(hidden, (0, 0, 0, fill)))
        by = self._coefficients(x, F.pad(written.bool(), (0, fill)), size)
        k = self._keys(x, before).unflatten(2, (-1, size))  # [B, H, n, s, dk]
        v = self._heads(self.v_proj(x)).unflatten(2, (-1, size))
        queries = [None] * k.shape[2]
        if read:
            queries = self._directions(self.q_proj(x)).unflatten(2, (-1, size)).unbind(2)
        if self.initial_w2 is None:
            limit = write_limit(by.c, k)
            by = by._replace(c=by.c * limit, m=by.m * limit)
        recalled: list[Any] = []
        # One unbind a tensor: the gradient of a slice would fill a tensor of the whole chunk with zeros.
        parts = zip(queries, k.unbind(2), v.unbind(2), *(x.unbind(2) for x in by), strict=True)
        for q_part, k_part, v_part, *coefficients in parts:
            out, gradient = surprise(q_part, k_part, v_part, state, self.options.max_surprise)
            now = WriteCoefficients(*coefficients)
            if self.initial_w2 is not None:
                limit = write_limit(now.c, gradient.right[:, :, 1])
                now = now._replace(c=now.c * limit, m=now.m * limit)
            state = write(state, gradient, now)
            recalled.append(out)
        # A copy: FSDP2 warns of a module that returns a view.
        return (torch.cat(recalled, 2)[:, :, :length] if read else None), state.clone()

    def _coefficients(self, x: torch.Tensor, written: torch.Tensor, size: int) -> WriteCoefficients:
        """Return ``[B, H, n]`` and ``[B, H, n, s]`` for ``x[B, T, d]`` and ``written[B, T]``, T whole sub-chunks."""
        raw = _upcast(self.rates(x)).unflatten(-1, (3, -1)).permute(2, 0, 3, 1)  # [3, B, H, T]
        theta, eta, alpha = raw.unflatten(-1, (-1, size))
        rates = WriteRates(torch.sigmoid(theta), F.logsigmoid(eta), F.logsigmoid(-alpha))
        return write_coefficients(rates, written.view(len(x), 1, -1, size))

    def initial_state(self, batch: int) -> torch.Tensor:
        """Make the state of ``batch`` new samples."""
        w1, w2 = self.initial_w1, self.initial_w2
        w = _upcast(w1.unsqueeze(1) if w2 is None else torch.stack([w1, w2.mT], 1))
        # Copies, not views: FSDP2 frees the parameters' storage when this module's forward ends.
        return torch.cat([w, torch.zeros_like(w)], -2).repeat(batch, 1, 1, 1, 1)

    def _keys(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Return k ``[B, H, T, dk]``: projections of a token and of the r before it, weighted channel by channel."""
        k = self.k_proj(x)
        if self.k_conv is not None:
            if before is None:
                earlier = k.new_zeros(len(k), self.options.key_tokens - 1, k.shape[-1])
            else:
                earlier = self.k_proj(self.norm(before.to(x.dtype)))
            k = self.k_conv(torch.cat([earlier, k], 1).mT).mT
        return self._directions(k)

    def _directions(self, projected: torch.Tensor) -> torch.Tensor:
        return F.normalize(self._heads(projected), dim=-1)

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return _upcast(projected).unflatten(-1, (self.options.heads, -1)).transpose(1, 2)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _merge_heads(recalled: torch.Tensor) -> torch.Tensor:
    """Put heads side by side, ``[B, T, H * dk]``, each divided by the root of its mean square plus 1 / dk.

    An empty memory gives 0, a value recalled whole (norm 1) about 0.7 a channel, and an overshoot at most 1.
    """
    size = recalled.shape[-1]
    scaled = recalled * (recalled.square().mean(-1, keepdim=True) + 1 / size).rsqrt()
    return scaled.transpose(1, 2).flatten(2)


class Contribution(NamedTuple):
    """The tensors that a memory hands to its decoder layer; a tuple, so that FSDP2 finds them."""

    values: torch.Tensor  # [B, T, d]: the summand (residual, mal), the gate (mag), or the memory tokens (mac)
    gate: torch.Tensor | None = None  # [B, T, d], for mac alone
    persistent: torch.Tensor | None = None  # [B, P, d], the persistent tokens of mac


class MemoryLayer(GradientCheckpointingLayer):
    """The memory of one decoder layer: a pure function of hidden states and state; ``forward`` is its only entry.

        residual  h' = layer(h) + σ(memory_gate(h)) ⊙ W_o M(h)
        mal       h' = layer(h + σ(memory_gate(h)) ⊙ W_o M(h))                       W_o = 0 at the start
        mag       h' = layer(h) + tanh(memory_gate(M(h))) ⊙ (layer(h) - h)           memory_gate = 0 at the start
        mac       h' = layer(h) + tanh(memory_gate(h)) ⊙ (layer(context)_h - layer(h))

    At the start all four equal the plain layer exactly. They differ from the paper (§4) to keep that start, and to keep
    causality:

    - mag gates the layer's *addition* to the residual stream, by 1 + tanh(·), from 0 to 2.
    - mac's context is ``persistent | m_0 h_0 m_1 h_1 …``: the memory token m_t = W_o M(h_t), read from the state at the
      chunk's beginning, stands just before h_t and shares its position. The paper puts all memory tokens before the
      segment, where a token would see those of later tokens, and so the answer that it is to predict. A plain causal
      mask over the interleaved order prevents that. The layer's output h' is written, after the chunk.

    The decoder layer is not a part of this module: its recomputation under checkpointing writes nothing twice.
    """

    def __init__(self, hidden_size: int, options: MemoryOptions, eps: float = 1e-6) -> None:
        super().__init__()
        self.variant = options.variant
        self.long_term_memory = LongTermMemory(hidden_size, options, eps)
        gated_by = options.heads * options.head_dim if self.variant == "mag" else hidden_size
        self.memory_gate = nn.Linear(gated_by, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with gates of 0 weights; together with the memory's start, the variant equals the plain layer."""
        init.zeros_(self.memory_gate.weight)
        init.zeros_(self.memory_gate.bias)

    def forward(
        self,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
        written: torch.Tensor | None,
        read: bool = True,
        write: bool = True,
        before: torch.Tensor | None = None,
    ) -> tuple[Contribution | None, torch.Tensor]:
        """Return the contribution to the layer and the state after these tokens, as the memory's ``forward`` does.

        hidden is ``[B, T, d]`` of one chunk, the layer's input; what mac writes is the layer's output.
        """
        recalled, state = self.long_term_memory(hidden, state, written, read, write, before)
        if recalled is None:
            return None, state
        with torch.autocast(hidden.device.type, enabled=False):
            gate = self.memory_gate(recalled if self.variant == "mag" else hidden.to(recalled.dtype))
        if self.variant == "mag":
            return Contribution(torch.tanh(gate)), state
        if self.variant == "mac":
            persistent = self.long_term_memory.persistent.repeat(len(hidden), 1, 1)  # a copy, as the state
            return Contribution(recalled, torch.tanh(gate), persistent), state
        return Contribution(torch.sigmoid(gate) * recalled), state
