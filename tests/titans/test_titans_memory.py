"""The memory's mathematics: gradients in closed form, the recurrence of a sub-chunk, reads and writes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from verl_ext.titans.configuration import MemoryOptions
from verl_ext.titans.memory import (
    LongTermMemory,
    WriteCoefficients,
    WriteRates,
    recall,
    stream_matrix,
    stream_network,
    write_coefficients,
    write_limit,
)

HIDDEN = 12
SETTINGS = MemoryOptions(chunk_size=16, layers=(0,), heads=2, head_dim=3, expansion=2, sub_chunk=4, conv_tokens=3)


def _memory(seed: int = 0, dtype: torch.dtype = torch.float64, **fields) -> LongTermMemory:
    """Build a memory whose parameters are all moved from their start."""
    torch.manual_seed(seed)
    memory = LongTermMemory(HIDDEN, MemoryOptions(**{**vars(SETTINGS), **fields})).to(dtype)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return memory


def _hidden(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _state(w1, w2, s1, s2) -> torch.Tensor:
    """Join a state's tensor from its four parts; a part is None if a memory of depth 1 lacks it."""
    layers = [torch.cat([w1, s1], -2)] + ([] if w2 is None else [torch.cat([w2.mT, s2.mT], -2)])
    return torch.stack(layers, 2)


def _parts(state: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return W1, W2, S1 and S2 of a state."""
    (w1, s1), (w2, s2) = state[:, :, 0].chunk(2, -2), state[:, :, -1].mT.chunk(2, -1)
    return (w1, None, s1, None) if state.shape[2] == 1 else (w1, w2, s1, s2)


def _random_state(generator: torch.Generator, heads: int = 2, size: int = 3, hidden: int = 6) -> torch.Tensor:
    return torch.randn(1, heads, 2, 2 * size, hidden, dtype=torch.float64, generator=generator)


def _matrix_state(generator: torch.Generator) -> torch.Tensor:
    """Draw a random state of depth 1."""
    return torch.randn(1, 2, 1, 6, 3, dtype=torch.float64, generator=generator)


def _plain_recall(x, w1, w2=None) -> torch.Tensor:
    return x @ w1 if w2 is None else 2 * F.silu(x @ w1) @ w2


def _token_gradients(k, v, *weights) -> tuple[torch.Tensor, ...]:
    """Return ``[s, ...]`` by autograd: the gradient of ‖M(k_t) - v_t‖² for each token t of ``k, v [1, H, s, dk]``."""
    gradients = []
    for t in range(k.shape[2]):
        leaves = [w.detach().clone().requires_grad_() for w in weights if w is not None]
        error = _plain_recall(k[:, :, t : t + 1], *leaves) - v[:, :, t : t + 1]
        gradients.append(torch.autograd.grad(error.square().sum(), leaves))
    return tuple(torch.stack(parts) for parts in zip(*gradients, strict=True))


def _written(k, v, state, by, limit=math.inf) -> torch.Tensor:
    """Return the state ``[1, H, L, 2dk, e]`` after one sub-chunk of ``k, v [1, H, s, dk]``."""
    stream = stream_matrix if state.shape[2] == 1 else stream_network
    qk, v, *by = (x.flatten(0, 1).unsqueeze(1) for x in (torch.cat([k, k], 2), v, *by))
    return stream(qk, v, state.flatten(0, 1), WriteCoefficients(*by), limit)[1].view_as(state)


def _gradients(k, v, state, limit=math.inf) -> tuple[torch.Tensor, ...]:
    """Return the closed form's gradients as ``[s, 1, H, ...]``: what each token alone takes from the momentum."""
    kept, gradients = torch.eye(2, dtype=k.dtype).expand(1, k.shape[1], 2, 2), []
    for t in range(k.shape[2]):
        rates = torch.zeros(1, *k.shape[1:3], 2, dtype=k.dtype)
        rates[:, :, t, 1] = 1
        after = _written(k, v, state, WriteCoefficients(kept, rates), limit)
        assert torch.equal(after.chunk(2, -2)[0], state.chunk(2, -2)[0])
        gradients.append((state - after).chunk(2, -2)[1])
    first, *second = torch.stack(gradients).unbind(3)
    return first, *(transposed.mT for transposed in second)


STATES = pytest.mark.parametrize("state_of", [_matrix_state, _random_state], ids=["depth 1", "depth 2"])


@STATES
@pytest.mark.parametrize("seed", range(5))
def test_inner_gradients_are_those_of_autograd(seed, state_of):
    generator = torch.Generator().manual_seed(seed)
    state = state_of(generator)
    k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    w1, w2, *_ = _parts(state)
    for own, exact in zip(_gradients(k, v, state), _token_gradients(k, v, w1, w2), strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-12, atol=1e-12)


@STATES
def test_surprise_is_scaled_down_to_its_largest_norm_and_never_turned(state_of):
    generator = torch.Generator().manual_seed(0)
    state = state_of(generator)
    k, v = (0.3 * torch.randn(1, 2, 50, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    free, clamped = (
        torch.cat([part.flatten(3) for part in _gradients(k, v, state, limit)], -1) for limit in (1e9, 2.0)
    )
    norm = free.norm(dim=-1, keepdim=True)
    assert (norm < 2).any()
    assert (norm > 2).any()
    torch.testing.assert_close(clamped, free * (2 / norm).clamp(max=1), rtol=1e-12, atol=1e-12)


def _by_token(state, k, v, theta, eta, alpha, written, max_surprise=1e9) -> torch.Tensor:
    """Apply S_t = η S - θ u_t, W_t = (1 - α) W + S_t token by token, with all u_t at ``state``'s weights."""
    gradients = _gradients(k, v, state, max_surprise)
    w1, w2, s1, s2 = _parts(state)
    weights, momenta = [w1, w2], [s1, s2]
    for t in filter(written.__getitem__, range(k.shape[2])):
        keep, rate, momentum = ((x[:, :, t, None, None]) for x in (1 - alpha, theta, eta))
        for layer, gradient in enumerate(gradients):
            momenta[layer] = momentum * momenta[layer] - rate * gradient[t]
            weights[layer] = keep * weights[layer] + momenta[layer]
    return _state(*weights, *momenta)


def _assert_same(state: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(state, other, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    written=st.lists(st.booleans(), min_size=1, max_size=9),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
    state_of=st.sampled_from([_matrix_state, _random_state]),
)
def test_a_sub_chunk_at_once_is_the_recurrence_token_by_token(seed, written, scale, state_of):
    generator = torch.Generator().manual_seed(seed)
    state, length = state_of(generator), len(written)
    k, v = (torch.randn(1, 2, length, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    raw = scale * torch.randn(3, 1, 2, length, dtype=torch.float64, generator=generator)
    rates = WriteRates(raw[0].sigmoid(), F.logsigmoid(raw[1]), F.logsigmoid(-raw[2]))
    by = write_coefficients(rates, torch.tensor(written))
    theta, eta, alpha = raw.sigmoid()
    limited = theta * _limit(k, state, by.rates[..., 0])
    _assert_same(_written(k, v, state, by), _by_token(state, k, v, limited, eta, alpha, written))


def test_fp32_coefficients_keep_their_digits_beside_a_token_that_forgets_all():
    raw = torch.tensor([5.0, -1e4, 5.0, 5.0])  # the second token's η is 0
    rates = WriteRates(torch.ones(4), F.logsigmoid(raw), torch.zeros(4))
    by = write_coefficients(rates, torch.tensor(True))
    exact = write_coefficients(WriteRates(*(rate.double() for rate in rates)), torch.tensor(True))
    torch.testing.assert_close(by.rates, exact.rates.float(), rtol=1e-6, atol=0)
    assert by.carry[1, 1] == 0


def test_a_momentum_that_forgets_soon_has_no_subnormal_coefficients():
    log_eta = torch.full((64,), 0.1).log()
    by = write_coefficients(WriteRates(torch.ones(64), log_eta, torch.zeros(64)), torch.tensor(True))
    assert by.rates[-1].all()
    assert not by.rates[0, 1]
    assert not any(((part > 0) & (part < 1e-37)).any() for part in by)


def _limit(k, state, c) -> torch.Tensor:
    """Return ``[1, H, 1]``: the factor to ``c [1, H, s]`` that limits the tokens' change of their errors to 1."""
    w1, w2, *_ = _parts(state)
    z = k if w2 is None else 2 * F.silu(k @ w1)
    scaled = z * c.sqrt().unsqueeze(-1)
    tokens = range(c.shape[-1])
    sums = [sum(2 * (scaled[:, :, t] * scaled[:, :, j]).sum(-1).abs() for j in tokens) for t in tokens]
    return 1 / torch.stack(sums, -1).amax(-1, keepdim=True).clamp(min=1)


def _seen_by(memory: LongTermMemory) -> list[tuple[torch.nn.Module, torch.nn.Conv1d]]:
    return [(memory.q_proj, memory.q_conv), (memory.k_proj, memory.k_conv)]


def _plain_convolution(x: torch.Tensor, projection: torch.nn.Module, convolution: torch.nn.Conv1d) -> torch.Tensor:
    """Sum the projections of each token and the tokens before it, by the channels' weights for each lag."""
    weights = convolution.weight[:, 0].flip(-1).unbind(-1)  # of the token itself first
    return sum(w * F.pad(projection(x), (0, 0, lag, 0))[:, : x.shape[1]] for lag, w in enumerate(weights))


def _plain_rates(memory: LongTermMemory, x: torch.Tensor) -> torch.Tensor:
    """Return θ, η and α ``[3, 1, H, T]`` of ``x[1, T, d]``, each from its token and the tokens before it."""
    weights = memory.rates.weight.flip(-1).unbind(-1)  # of the token itself first
    raw = torch.stack(
        [
            memory.rates.bias + sum(w @ x[0, t - lag] for lag, w in enumerate(weights) if lag <= t)
            for t in range(x.shape[1])
        ]
    )
    theta, eta, alpha = raw.sigmoid().view(1, -1, 3, memory.options.heads).permute(2, 0, 3, 1)
    least = memory.least_write
    theta = (theta - least).clamp(min=0) / (1 - least)
    return torch.stack([theta, eta, theta * alpha])


def _naive_forward(memory: LongTermMemory, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Process one row ``[1, T, d]`` with plain loops over sub-chunks and tokens."""
    x = F.rms_norm(hidden, (HIDDEN,), memory.norm.weight, 1e-6)
    heads, size = memory.options.heads, memory.options.sub_chunk
    q, k = (_plain_convolution(x, *layers) for layers in _seen_by(memory))
    q, k, v = (each.view(1, -1, heads, 3).transpose(1, 2) for each in (q, k, memory.v_proj(x)))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    theta, eta, alpha = _plain_rates(memory, x)
    starts = [memory.initial_w1[None], None if memory.initial_w2 is None else memory.initial_w2[None]]
    state = _state(*starts, *(start if start is None else torch.zeros_like(start) for start in starts))
    recalled = []
    for start in range(0, hidden.shape[1], size):
        part = slice(start, start + size)
        own = [values[:, :, part] for values in (k, v, theta, eta, alpha)]
        recalled.append(_plain_recall(q[:, :, part], *_parts(state)[:2]))
        rates = WriteRates(own[2], own[3].log(), (1 - own[4]).log())
        own[2] = own[2] * _limit(own[0], state, write_coefficients(rates, torch.tensor(True)).rates[..., 0])
        state = _by_token(state, *own, [True] * own[0].shape[2], memory.options.max_surprise)
    merged = torch.cat(recalled, 2)
    merged = merged / (merged.square().mean(-1, keepdim=True) + 1 / 3).sqrt()
    return memory.out_proj(merged.transpose(1, 2).flatten(2)), state


@pytest.mark.parametrize(("depth", "conv_tokens"), [(1, 1), (1, 3), (2, 1), (2, 6)])
@pytest.mark.parametrize("length", [1, 4, 11, 16])
def test_the_memory_is_what_plain_loops_give_at_any_length(length, depth, conv_tokens):
    memory, hidden = _memory(max_surprise=1.0, depth=depth, conv_tokens=conv_tokens), _hidden(1, length)
    output, state = memory(hidden, None, None)
    naive_output, naive_state = _naive_forward(memory, hidden)
    torch.testing.assert_close(output, naive_output, rtol=1e-10, atol=1e-10)
    _assert_same(state, naive_state)


@pytest.mark.parametrize("cuts", [(4,), (8, 4), (4, 4, 4)])
def test_streamed_is_one_pass(cuts):
    memory, hidden = _memory(), _hidden(2, 15)
    whole, end = memory(hidden, None, None)
    parts, state, before = [], None, hidden.new_zeros(2, 2, HIDDEN)
    for part in hidden.split([*cuts, 15 - sum(cuts)], 1):
        output, state = memory(part, state, None, before=before)
        parts.append(output)
        before = part[:, -2:]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    _assert_same(state, end, 1e-12)


@settings(max_examples=20, deadline=None)
@given(real=st.integers(0, 12), padding=st.integers(0, 9))
def test_padding_never_writes(real, padding):
    memory, hidden = _memory(), _hidden(1, real + padding + 1)[:, : real + padding]
    if not real + padding:
        return
    written = (torch.arange(real + padding) < real)[None]
    output, padded = memory(hidden, None, written)
    if real:
        alone_output, alone = memory(hidden[:, :real], None, None)
        torch.testing.assert_close(output[:, :real], alone_output, rtol=1e-12, atol=1e-12)
    else:
        alone = memory.initial_state(1)
    _assert_same(padded, alone, 1e-12)


def test_each_sample_has_a_memory_of_its_own():
    memory, hidden = _memory(), _hidden(2, 13)
    output, state = memory(hidden, None, None)
    for row in range(2):
        alone, own = memory(hidden[row : row + 1], None, None)
        torch.testing.assert_close(output[row : row + 1], alone, rtol=1e-12, atol=1e-12)
        _assert_same(state[row : row + 1], own, 1e-12)


def test_a_token_is_read_by_later_sub_chunks_alone():
    memory, hidden = _memory(conv_tokens=1), _hidden(1, 12)
    changed = hidden.clone()
    changed[:, 5] += 1
    moved = (memory(changed, None, None)[0] != memory(hidden, None, None)[0]).any(-1)[0]
    assert moved.tolist() == [False] * 5 + [True] + [False] * 2 + [True] * 4


def _with_rates(memory: LongTermMemory, theta: float, eta: float, alpha: float) -> LongTermMemory:
    """Set the same rates (as logits) for every token."""
    with torch.no_grad():
        memory.rates.weight.zero_()
        memory.rates.bias.copy_(torch.tensor([theta, eta, alpha]).repeat_interleave(2))
    return memory


def test_a_token_that_writes_nothing_forgets_nothing():
    memory = _memory()
    filled = memory(_hidden(1, 8), None, None)[1]
    state = _with_rates(memory, theta=-1e4, eta=-1e4, alpha=1e4)(_hidden(1, 8), filled, None)[1]
    (weights, momentum), before = state.chunk(2, -2), filled.chunk(2, -2)[0]
    assert torch.equal(weights, before)
    assert not momentum.any()


def test_a_sigmoid_of_less_than_the_least_write_writes_nothing():
    memory = LongTermMemory(HIDDEN, SETTINGS).double()
    least = torch.tensor(memory.least_write).logit()
    for logit, writes in ((least - 0.01, False), (least + 0.01, True)):
        state = _with_rates(memory, theta=logit, eta=-1e4, alpha=0.0)(_hidden(1, 8), None, None)[1]
        assert state.any() == writes


def test_what_is_written_once_is_recalled_by_its_key():
    torch.manual_seed(0)
    memory = LongTermMemory(HIDDEN, MemoryOptions(**{**vars(SETTINGS), "expansion": 200})).double()
    _with_rates(memory, theta=0.0, eta=-1e4, alpha=-1e4)  # θ = ½
    hidden = _hidden(1, 1)
    state = memory(hidden, None, None)[1]
    x = memory.norm(hidden)
    v = memory.v_proj(x).view(1, 1, 2, 3).transpose(1, 2)
    k = _plain_convolution(x, memory.k_proj, memory.k_conv).view(1, 1, 2, 3).transpose(1, 2)
    torch.testing.assert_close(recall(F.normalize(k, dim=-1), state), v, rtol=0.3, atol=0)


def test_a_new_memory_recalls_nothing_and_adds_nothing():
    memory = LongTermMemory(HIDDEN, SETTINGS)
    hidden = _hidden(1, 12).float()
    state = memory(hidden, None, None)[1]
    q = F.normalize(torch.randn(1, 2, 4, 3), dim=-1)
    assert not recall(q, memory.initial_state(1)).any()
    assert recall(q, state).any()
    assert not memory(hidden, state, None)[0].any()


def test_a_query_starts_as_the_key_of_the_same_tokens():
    memory = LongTermMemory(HIDDEN, SETTINGS)
    assert torch.equal(memory.q_proj.weight, memory.k_proj.weight)
    assert torch.equal(memory.q_conv.weight, memory.k_conv.weight)
    assert memory.k_conv.weight.any()


def test_reading_alone_leaves_the_state_as_it_was():
    memory, hidden = _memory(sub_chunk=8, chunk_size=16), _hidden(1, 8)
    start = memory(_hidden(1, 8, seed=1), None, None)[1]
    alone, state = memory(hidden, start, None, write=False)
    torch.testing.assert_close(alone, memory(hidden, start, None)[0])
    assert state is start


@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_of_every_parameter_are_right_by_finite_differences(depth):
    memory, hidden = _memory(depth=depth, sub_chunk=2, chunk_size=16, max_surprise=2.0), _hidden(1, 5)
    with torch.no_grad():  # every token writes, too weakly to be limited: that scale is a constant to back-propagation
        memory.rates.weight *= 0.02
        memory.rates.bias[:2] = torch.tensor(memory.least_write + 0.04).logit()
    theta = _plain_rates(memory, F.rms_norm(hidden, (HIDDEN,), memory.norm.weight, 1e-6))[0]
    assert ((theta > 0) & (theta < 0.1)).all()
    names = [name for name, _ in memory.named_parameters()]

    def call(hidden, *parameters):
        output, state = torch.func.functional_call(
            memory, dict(zip(names, parameters, strict=True)), (hidden, None, None)
        )
        return output, state

    inputs = [hidden.requires_grad_(), *(p.detach().clone().requires_grad_() for p in memory.parameters())]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e18])
def test_sixteen_thousand_random_tokens_stay_finite(scale):
    memory = _memory(dtype=torch.float32, sub_chunk=64, chunk_size=64)
    with torch.no_grad():
        memory.v_proj.weight *= 1e3
        memory.rates.weight *= 10
    hidden = scale * _hidden(1, 16384).float()
    with torch.no_grad():
        output, state = memory(hidden, None, None)
    assert all(part.isfinite().all() for part in (output, state))


@pytest.mark.parametrize("alike", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("theta", [-3.0, 3.0])
def test_gradients_over_many_sub_chunks_do_not_explode_also_where_keys_are_alike(alike, theta):
    torch.manual_seed(0)
    memory = LongTermMemory(32, MemoryOptions(chunk_size=4096, heads=2, head_dim=8, sub_chunk=32))
    torch.nn.init.normal_(memory.out_proj.weight)
    with torch.no_grad():
        memory.rates.bias[:2] = theta
    hidden = (1e4 * (torch.randn(1, 4096, 32) + alike * torch.randn(32))).requires_grad_()
    memory(hidden, None, None)[0][:, -32:].mean().backward()
    assert hidden.grad.isfinite().all()
    assert all(parameter.grad.norm() < 100 for parameter in memory.parameters())


def test_a_sub_chunk_of_one_key_is_written_without_overshoot():
    z = torch.ones(1, 1, 5, 4, dtype=torch.float64) / 2
    c = torch.full((1, 1, 5), 0.9, dtype=torch.float64)
    torch.testing.assert_close(c * write_limit(c, z), torch.full_like(c, 0.1))  # 2 · 5 · 0.1 · |z|² = 1
    assert write_limit(c / 100, z) == 1


def test_hidden_states_of_zeros_have_finite_gradients():
    memory = _memory(dtype=torch.float32)
    hidden = torch.zeros(1, 12, HIDDEN, requires_grad=True)
    memory(hidden, None, None)[0].sum().backward()
    assert hidden.grad.isfinite().all()


def test_a_bf16_memory_computes_and_keeps_its_state_in_fp32_also_under_autocast():
    memory, hidden = _memory(dtype=torch.bfloat16), _hidden(1, 12).bfloat16()
    output, state = memory(hidden, None, None)
    assert output.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, same = memory(hidden, None, None)
    assert torch.equal(output, under_autocast)
    assert state.dtype == torch.float32
    assert torch.equal(state, same)
    exact = _memory(dtype=torch.bfloat16).float()(hidden.float(), None, None)[0]
    torch.testing.assert_close(output.float(), exact, rtol=0.1, atol=0.1)
