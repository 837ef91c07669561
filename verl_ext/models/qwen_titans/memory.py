"""A memory that learns while it reads: a small network per head whose weights are the state (Titans).

    depth 1    M(k) = k W1
    depth 2    M(k) = g(k W1) W2        g(a) = 2·silu(a), which is a + a²/2 - … near 0

The surprise of a token is the gradient of ‖M(k_t) - v_t‖² with respect to the weights, in closed form, at the weights
of the sub-chunk's beginning; ``write_coefficients`` has the recurrence that it enters. A sub-chunk is read before it is
written, so no token ever sees itself or a later one. https://arxiv.org/abs/2501.00663, §3.1-3.2.

Legend: B samples, T tokens, d hidden size of the model, H heads, dk key and value size of a head, e columns of W1 (dk
at depth 1, else the network's hidden size), n sub-chunks, s tokens of a sub-chunk.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_ext.models.qwen_titans.configuration import MemoryOptions

# Rates before training. θ = INITIAL_WRITE / tokens of a sub-chunk, just below the limit of `limit_writes`. A token is
# forgotten over FORGETTING_CHUNKS chunks; at a fixed rate such as 0.01, nothing would outlive a chunk of 4,096 tokens.
INITIAL_WRITE = 1.6
INITIAL_ETA = 0.1
FORGETTING_CHUNKS = 8


class MemoryState(NamedTuple):
    """One layer's state in fp32 (fp64 for an fp64 model); a memory of depth 1 has no second layer.

    A tuple of tensors, so that FSDP2 and checkpointing find every tensor that enters and leaves a layer.
    """

    w1: torch.Tensor  # [B, H, dk, e]
    w2: torch.Tensor | None  # [B, H, e, dk]
    s1: torch.Tensor  # as w1
    s2: torch.Tensor | None  # as w2

    def detached(self) -> "MemoryState":
        """Return the same values without their graph."""
        return MemoryState(*(tensor if tensor is None else tensor.detach() for tensor in self))  # type: ignore[arg-type]


class StreamState:
    """The states of all memory layers after ``tokens`` tokens, from which reading goes on.

    It is no tuple or dataclass: FSDP2 casts tensors that it finds in arguments, and a state must stay in fp32.
    """

    __slots__ = ("layers", "tokens")

    def __init__(self, layers: Sequence[MemoryState | None], tokens: int) -> None:
        self.layers = tuple(layers)
        self.tokens = tokens

    def __iter__(self) -> Iterator[MemoryState | None]:
        return iter(self.layers)


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
        P[j, t] = Π_{i=t+1..j} η_i                       c_t = θ_t Σ_{j≥t} Q[j] P[j, t]
        Q[j]    = Π_{i=j+1..s} (1 - α_i)                 B   = Σ_j Q[j] Π_{i≤j} η_i

    ``written``, broadcastable to the rates, is False for a token (padding) that leaves S and W as they are: θ = 0,
    η = 1, α = 0, and no "+ S" of its own.
    """
    theta, log_eta, log_keep = (rate.masked_fill(~written, 0.0) for rate in rates)
    # P[j, t] sums log η over t < i ≤ j directly, because differences of one running sum would cancel.
    s = theta.shape[-1]
    lower = torch.ones(s, s, dtype=torch.bool, device=theta.device).tril()
    later = log_eta.unsqueeze(-1).expand(*log_eta.shape, s).masked_fill(~lower.tril(-1), 0.0)
    p = later.cumsum(-2).masked_fill(~lower, float("-inf")).exp()  # [..., j, t]
    after = F.pad(log_keep[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    q = after.exp() * written
    carried = log_eta.cumsum(-1).exp()
    return WriteCoefficients(
        a=log_keep.sum(-1).exp(),
        b=(q * carried).sum(-1),
        e=carried[..., -1],
        c=theta * (q.unsqueeze(-2) @ p).squeeze(-2),
        m=theta * p[..., -1, :],
    )


class Surprise(NamedTuple):
    """The gradients of a sub-chunk's tokens, each an outer product: u_t = (k_t ⊗ da_t, z_t ⊗ dp_t).

    Depth 1 has the first one only: its last layer is W1, and its features are the keys.
    """

    da: torch.Tensor  # [B, H, s, e], gradient at k W1
    z: torch.Tensor | None = None  # [B, H, s, e], g(k W1)
    dp: torch.Tensor | None = None  # [B, H, s, dk], gradient at M(k)


def recall(q: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor | None) -> torch.Tensor:
    """Compute M(q) ``[B, H, s, dk]`` for queries of that shape."""
    return q @ w1 if w2 is None else 2 * F.silu(q @ w1) @ w2


def surprise(
    k: torch.Tensor, v: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor | None, max_surprise: float = math.inf
) -> Surprise:
    """Return the gradient of ‖M(k_t) - v_t‖² for every token, its norm over all weights clamped to ``max_surprise``.

    ``k``, ``v``: ``[B, H, s, dk]``. The norm of an outer product is the product of the norms. Without the clamp, one
    outlier would make the weights, and so the next gradients, grow without bound.
    """
    a = k @ w1
    if w2 is None:
        dp = 2 * (a - v)
        return Surprise(dp * _shrink(_squared(k) * _squared(dp), max_surprise))
    sigmoid = torch.sigmoid(a)
    z = 2 * a * sigmoid
    dp = 2 * (z @ w2 - v)
    da = 2 * (dp @ w2.transpose(-1, -2)) * sigmoid * (1 + a * (1 - sigmoid))
    shrink = _shrink(_squared(k) * _squared(da) + _squared(z) * _squared(dp), max_surprise)
    return Surprise(da * shrink, z, dp * shrink)


def _squared(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(-1, keepdim=True)


def _shrink(squared_norm: torch.Tensor, most: float) -> torch.Tensor:
    """Return the factor that brings a norm down to ``most``; from its square, whose derivative at 0 is a number."""
    return (squared_norm / most**2).clamp(min=1).rsqrt()


def limit_writes(by: WriteCoefficients, z: torch.Tensor) -> WriteCoefficients:
    """Scale down θ of a whole sub-chunk until its tokens, measured at the same weights, together do not overshoot.

    Through the last layer, whose inputs are z ``[B, H, s, e]`` (depth 1:
    the keys), the error of token t changes by Σ_j 2 c_j (z_t·z_j) error_j. The eigenvalues of that map are those of the
    symmetric 2 √(c_t c_j) (z_t·z_j), and at most its largest row sum of magnitudes, which is held to 1. If many keys
    are alike, the memory would otherwise oscillate at its clamp. Back-propagation takes the scale as a constant: with
    its own gradient, the memory of a small recall task was not learned.
    """
    with torch.no_grad():
        root = by.c.sqrt()
        change = 2 * (z @ z.transpose(-1, -2)).abs() * root.unsqueeze(-1) * root.unsqueeze(-2)
        scale = change.sum(-1).amax(-1, keepdim=True).clamp(min=1).reciprocal()
    return by._replace(c=by.c * scale, m=by.m * scale)


def write(state: MemoryState, k: torch.Tensor, gradient: Surprise, by: WriteCoefficients) -> MemoryState:
    """Return the state after a sub-chunk, for keys ``[B, H, s, dk]``, coefficients ``[B, H]`` and ``[B, H, s]``."""
    w1, s1 = _written(state.w1, state.s1, k, gradient.da, by)
    if gradient.z is None or gradient.dp is None or state.w2 is None or state.s2 is None:
        return MemoryState(w1, None, s1, None)
    w2, s2 = _written(state.w2, state.s2, gradient.z, gradient.dp, by)
    return MemoryState(w1, w2, s1, s2)


def _written(
    weights: torch.Tensor, momentum: torch.Tensor, left: torch.Tensor, right: torch.Tensor, by: WriteCoefficients
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, e = (x[..., None, None] for x in (by.a, by.b, by.e))
    left = left.transpose(-1, -2)
    return (
        a * weights + b * momentum - left @ (by.c.unsqueeze(-1) * right),
        e * momentum - left @ (by.m.unsqueeze(-1) * right),
    )


class LongTermMemory(nn.Module):
    """The module that reads and writes a :class:`MemoryState` from hidden states, in fp32 without autocast.

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
        state: MemoryState | None,
        written: torch.Tensor | None,
        read: bool = True,
        write: bool = True,
    ) -> tuple[torch.Tensor | None, MemoryState]:
        """Return the recalled values for each token, and the state after the tokens.

        The values are W_o M(h) ``[B, T, d]``, or M(h) ``[B, T, H * dk]`` for mag, in the parameters' dtype; None if not
        ``read``. Without ``write``, all tokens read the same state. hidden is ``[B, T, d]``; state is None for a new
        sample; written is bool ``[B, T]``, False for tokens (padding) that must not be written, or None to write all.
        """
        dtype = self.q_proj.weight.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            x = self.norm(hidden.to(dtype))
            state = self.initial_state(len(hidden)) if state is None else state
            q = F.normalize(self._heads(self.q_proj(x)), dim=-1) if read else None
            if write:
                recalled, state = self._stream(x, q, state, written)
            else:
                recalled = None if q is None else recall(q, state.w1, state.w2)
            if recalled is None:
                return None, state
            merged = _merge_heads(recalled).to(dtype)
            return (merged if self.out_proj is None else self.out_proj(merged)), state

    def _stream(
        self, x: torch.Tensor, q: torch.Tensor | None, state: MemoryState, written: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, MemoryState]:
        """Read, measure the surprise and write, sub-chunk by sub-chunk; ``q`` is ``[B, H, T, dk]``."""
        length, size = x.shape[1], self.options.sub_chunk
        k = F.normalize(self._heads(self.k_proj(x)), dim=-1)
        v = self._heads(self.v_proj(x))
        coefficients = self._coefficients(x, written)
        recalled = []
        for index, start in enumerate(range(0, length, size)):
            part = slice(start, start + size)
            if q is not None:
                recalled.append(recall(q[:, :, part], state.w1, state.w2))
            keys = k[:, :, part]
            gradient = surprise(keys, v[:, :, part], state.w1, state.w2, self.options.max_surprise)
            by = WriteCoefficients(*(values[:, :, index] for values in coefficients))
            by = by._replace(c=by.c[..., : keys.shape[2]], m=by.m[..., : keys.shape[2]])
            state = write(state, keys, gradient, limit_writes(by, keys if gradient.z is None else gradient.z))
        return (torch.cat(recalled, 2) if recalled else None), state

    def _coefficients(self, x: torch.Tensor, written: torch.Tensor | None) -> WriteCoefficients:
        """Return ``[B, H, n]`` and ``[B, H, n, s]`` for ``x[B, T, d]``; the last sub-chunk's filling is not written."""
        (batch, length), size = x.shape[:2], self.options.sub_chunk
        fill = -length % size
        if written is None:
            written = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        written = F.pad(written.bool(), (0, fill)).view(batch, 1, -1, size)
        raw = _upcast(self.rates(x)).view(batch, length, 3, -1).permute(2, 0, 3, 1)  # [3, B, H, T]
        theta, eta, alpha = F.pad(raw, (0, fill)).unflatten(-1, (-1, size))
        rates = WriteRates(torch.sigmoid(theta), F.logsigmoid(eta), F.logsigmoid(-alpha))
        return write_coefficients(rates, written)

    def initial_state(self, batch: int) -> MemoryState:
        """Make the state of ``batch`` new samples."""
        # Copies, not views: FSDP2 frees the parameters' storage when this module's forward ends.
        w1 = _upcast(self.initial_w1).repeat(batch, 1, 1, 1)
        if self.initial_w2 is None:
            return MemoryState(w1, None, torch.zeros_like(w1), None)
        w2 = _upcast(self.initial_w2).repeat(batch, 1, 1, 1)
        return MemoryState(w1, w2, torch.zeros_like(w1), torch.zeros_like(w2))

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
        self, hidden: torch.Tensor, state: MemoryState | None, written: torch.Tensor | None, write_only: bool = False
    ) -> tuple[Contribution | None, MemoryState]:
        """Return the contribution to the layer and the state after these tokens; state and written are the memory's.

        hidden is ``[B, T, d]`` of one chunk, the layer's input. mac reads alone in a first call; its second call of a
        chunk has ``write_only`` and takes the layer's output.
        """
        if write_only:
            return None, self.long_term_memory(hidden, state, written, read=False)[1]
        recalled, state = self.long_term_memory(hidden, state, written, write=self.variant != "mac")
        with torch.autocast(hidden.device.type, enabled=False):
            gate = self.memory_gate(recalled if self.variant == "mag" else hidden.to(recalled.dtype))
        if self.variant == "mag":
            return Contribution(torch.tanh(gate)), state
        if self.variant == "mac":
            persistent = self.long_term_memory.persistent.repeat(len(hidden), 1, 1)  # a copy, as the state
            return Contribution(recalled, torch.tanh(gate), persistent), state
        return Contribution(torch.sigmoid(gate) * recalled), state
