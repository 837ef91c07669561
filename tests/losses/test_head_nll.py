"""The fused head against plain logits and cross-entropy, values and gradients."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.tensor_calls import MadeTensors
from verl_ext.losses.token_nll import _fp16_grad_scale, head_terms, nll_and_stats, row_bytes


def plain_terms(factors, labels, coefficients, bias=None):
    logits = sum(hidden @ weight.t() for hidden, weight in factors)
    logits = (logits if bias is None else logits + bias).float()
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.where(coefficients != 0, coefficients * nll, 0.0), nll


def inputs(targets, vocabulary, sizes, dtype, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    factors = [(random(targets, size), random(vocabulary, size)) for size in sizes]
    bias = random(vocabulary) if with_bias else None
    labels = torch.randint(vocabulary, (targets,), generator=generator)
    coefficients = torch.rand(targets, generator=generator) * (torch.rand(targets, generator=generator) > 0.2)
    return factors, labels, coefficients, bias


def leaves(factors, bias):
    return [x for pair in factors for x in pair] + ([] if bias is None else [bias])


@given(
    targets=st.integers(0, 40),
    vocabulary=st.integers(1, 70),
    block_bytes=st.sampled_from((1, 300, 10**9)),
    scale=st.sampled_from((0.0, 1.0, 30.0)),
    seed=st.integers(0, 1000),
)
def test_measures_are_the_argmax_and_the_entropy_of_plain_logits_and_change_no_loss(
    targets, vocabulary, block_bytes, scale, seed
):
    factors, labels, coefficients, bias = inputs(targets, vocabulary, [5], torch.float32, True, seed)
    factors = [(hidden * scale, weight) for hidden, weight in factors]
    logits = factors[0][0] @ factors[0][1].t() + bias
    right, logs = (logits.argmax(-1) == labels).float(), logits.double().log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).float()
    terms, nll = head_terms(factors, labels, coefficients, bias=bias, block_bytes=block_bytes)
    fused = head_terms(factors, labels, coefficients, bias=bias, block_bytes=block_bytes, with_stats=True)
    assert torch.equal(fused[0], terms)
    assert torch.equal(fused[1], nll)
    plain = nll_and_stats(logits, labels, rows=3)
    torch.testing.assert_close(plain[0], nll, rtol=1e-5, atol=1e-5)
    for is_greedy, found in (fused[2:], plain[1:]):
        assert torch.equal(is_greedy, right)
        torch.testing.assert_close(found, entropy, rtol=1e-4, atol=1e-4)
        assert not found.requires_grad
    wanted = torch.autograd.grad(terms.sum(), leaves(factors, bias), retain_graph=True)
    for gradient, one in zip(torch.autograd.grad(fused[0].sum(), leaves(factors, bias)), wanted, strict=True):
        assert torch.equal(gradient, one)


@given(
    targets=st.integers(0, 40),
    vocabulary=st.integers(1, 70),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    with_bias=st.booleans(),
    block_bytes=st.sampled_from((1, 300, 2000, 10**9)),
    factor=st.sampled_from((1.0, 0.01, 65536.0)),
    seed=st.integers(0, 1000),
)
def test_terms_and_gradients_are_those_of_plain_logits(
    targets, vocabulary, sizes, with_bias, block_bytes, factor, seed
):
    factors, labels, coefficients, bias = inputs(targets, vocabulary, sizes, torch.float32, with_bias, seed)
    expected, expected_nll = plain_terms(factors, labels, coefficients, bias)
    terms, nll = head_terms(factors, labels, coefficients, bias=bias, block_bytes=block_bytes)
    torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nll, expected_nll, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected.sum() * factor, leaves(factors, bias))
    for gradient, plain in zip(torch.autograd.grad(terms.sum() * factor, leaves(factors, bias)), wanted, strict=True):
        torch.testing.assert_close(gradient / factor, plain / factor, rtol=1e-4, atol=1e-5)
        assert gradient.dtype == plain.dtype


@pytest.mark.parametrize(
    ("dtype", "share", "scale"),
    [
        (torch.bfloat16, 1, 1),
        (torch.float16, 1, 1),
        (torch.float16, 1e-5, 65536),  # like a document of 100,000 targets: gradients need the scale to survive
    ],
)
def test_half_precision_is_as_close_to_fp64_as_plain_logits_are(dtype, share, scale):
    factors, labels, coefficients, bias = inputs(200, 301, (32,), dtype, True, 1)
    coefficients *= share
    exact = [(x.detach().double().requires_grad_(), w.detach().double().requires_grad_()) for x, w in factors]
    exact_bias = bias.detach().double().requires_grad_()
    exact_logits = exact[0][0] @ exact[0][1].t() + exact_bias
    nll = torch.nn.functional.cross_entropy(exact_logits, labels, reduction="none")
    truth = torch.autograd.grad((coefficients * nll).sum(), leaves(exact, exact_bias))

    def error(terms):
        gradients = torch.autograd.grad(terms.sum() * scale, leaves(factors, bias))
        return [((g.double() / scale - t).norm() / t.norm()).item() for g, t in zip(gradients, truth, strict=True)]

    plain = error(plain_terms(factors, labels, coefficients, bias)[0])
    fused = error(head_terms(factors, labels, coefficients, bias=bias, block_bytes=50_000)[0])
    assert all(mine < 1.3 * theirs for mine, theirs in zip(fused, plain, strict=True)), (fused, plain)


def test_a_frozen_weight_gets_no_gradient_and_its_hidden_states_do():
    factors, labels, coefficients, _ = inputs(9, 20, (4, 2), torch.float32, False, 2)
    factors[0][1].requires_grad_(False)
    terms, _ = head_terms(factors, labels, coefficients)
    terms.sum().backward()
    assert factors[0][1].grad is None
    assert all(x.grad is not None for x in (factors[0][0], *factors[1]))


def test_without_gradients_only_the_losses_are_computed():
    factors, labels, coefficients, bias = inputs(9, 20, (4,), torch.float32, True, 3)
    with torch.no_grad():
        terms, nll = head_terms(factors, labels, coefficients, bias=bias)
    assert not terms.requires_grad
    torch.testing.assert_close(nll, plain_terms(factors, labels, coefficients, bias)[1])


def test_an_infinite_loss_of_a_token_that_weighs_nothing_is_left_out():
    weight = torch.tensor([[1e30], [-1e30]])
    hidden = torch.tensor([[1e10], [0.0]], requires_grad=True)
    terms, _ = head_terms([(hidden, weight)], torch.tensor([1, 0]), torch.tensor([0.0, 1.0]))
    assert terms.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_the_product_itself_gives_a_blocks_logits_in_fp32(dtype, monkeypatch):
    """Uses the meta device, like any non-CPU device. A half-precision product would round logits to 8 or 11 bits."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # the meta device has none
    targets, vocabulary, rows = 100, 50, 30
    with MadeTensors() as made, torch.no_grad():
        hidden, weight = (torch.empty(n, 16, dtype=dtype, device="meta") for n in (targets, vocabulary))
        labels = torch.zeros(targets, dtype=torch.int64, device="meta")
        terms, nll = head_terms(
            [(hidden, weight)],
            labels,
            torch.ones(targets, device="meta"),
            block_bytes=rows * row_bytes(vocabulary, dtype, on_cpu=False),
        )
    products = [each for each in made.seen if each.operation in (torch.ops.aten.mm, torch.ops.aten.addmm)]
    assert [(each.dtype, each.shape) for each in products] == [(torch.float32, (n, 50)) for n in (30, 30, 30, 10)]
    assert terms.dtype == nll.dtype == torch.float32


def test_the_factor_of_a_half_precision_gradient_is_not_rounded():
    torch.manual_seed(0)
    hidden = torch.randn(256, 64).bfloat16().requires_grad_()
    weight, labels, gradients = torch.randn(17, 64).bfloat16(), torch.randint(17, (256,)), []
    for factor in (1.0, 1.5039):  # bf16 has 1.5 and 1.5078
        terms, _ = head_terms([(hidden, weight)], labels, torch.ones(256))
        gradients.append(torch.autograd.grad(terms.sum() * factor, hidden)[0].double())
    one, scaled = gradients
    assert float((scaled * one).sum() / (one * one).sum()) == pytest.approx(1.5039, rel=5e-4)


def test_the_entropy_of_logits_of_minus_infinity_is_finite():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    share = logits.softmax(-1)[0, :2]
    torch.testing.assert_close(nll_and_stats(logits, torch.tensor([1]))[2], -(share * share.log()).sum()[None])


@pytest.mark.parametrize("largest", [0.75, 0.5, 1 / 3, 1e-6, 3.0])
def test_fp16_gradients_are_scaled_to_the_upper_half_of_its_range(largest):
    weights = torch.tensor([largest])
    assert 2**7 <= float(_fp16_grad_scale(weights) * largest) <= 2**8
