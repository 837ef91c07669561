"""Triton kernels of flash-linear-attention and Liger, called as in a run, in Triton's interpreter on the CPU.

`make test-triton` runs these in an environment with the packages. The interpreter computes a kernel's program in fp32
with numpy: order and layout of arguments, scales, signs and boundaries are the real ones. A compiler's faults are not
seen.
"""

import builtins
import os
import sys
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.lib.packed_engine import build_worker, train_step
from tests.lib.ranks import run_ranks
from tests.lib.reference import documents_of_answers, pack_row
from verl_ext.data import CategoryTable
from verl_ext.layers import scans
from verl_ext.layers.convolution import convolution_kernel, convolve_documents
from verl_ext.layers.pack import RunningPack
from verl_ext.losses import LossSpec
from verl_ext.parallel.shards import DocumentLayout
from verl_ext.trainer.collator import StepCollator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1" or not (find_spec("fla") and find_spec("liger_kernel")),
        reason="make test-triton",
    ),
]
LENGTHS = (13, 1, 70, 5)  # more than a chunk of 64, less than a convolution
LAYOUT, TOKENS = DocumentLayout.from_lengths(LENGTHS, "cpu"), sum(LENGTHS)


class _Index(int):
    """A loop's index, which kernels cast; the interpreter loops over Python's integers."""

    def to(self, *_: object, **__: object) -> int:
        return self


def interpret() -> None:
    """Let the interpreter run kernels that it cannot: benchmarks need a driver, and numbers are no tensors there."""
    import triton.language as tl
    from triton.runtime import autotuner, interpreter

    whole, convert = autotuner.Autotuner.__init__, interpreter._implicit_cvt

    def first(self, fn, names, configs, *more, **named):
        whole(self, fn, names, configs[:1], *more, **named)

    def converted(value):
        if type(value) is not float:
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    autotuner.Autotuner.__init__, interpreter._implicit_cvt = first, converted


def _complete(prefix: str) -> None:
    """Give the modules that kernels lie in a range of indices, and a function that CUDA's library has."""
    import triton.language as tl

    for name, module in list(sys.modules.items()):
        if name.startswith(prefix) and module is not None:
            module.range = lambda *given: [_Index(i) for i in builtins.range(*map(int, given))]
            if hasattr(module, "rsqrt"):
                module.rsqrt = lambda x: tl.rsqrt(x)


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    interpret()
    convolution_kernel.cache_clear()
    scans._fla.cache_clear()
    for module, name in ((*scans._GATED,), (*scans._KIMI,), ("simple_gla", "chunk_simple_gla")):
        assert scans._fla(module, name) is not None
    convolution_kernel("cuda")
    _complete("fla.")


@pytest.fixture
def on_gpu(monkeypatch):
    """Let every tensor say that it is on a GPU, which chooses the packages' kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


def _pack() -> RunningPack:
    pack = RunningPack()
    pack.layout = DocumentLayout.from_lengths(LENGTHS, "cpu")
    return pack


def _leaf(*shape, seed, function=lambda x: x):
    torch.manual_seed(seed)
    return function(torch.randn(shape)).requires_grad_()


def _compare(output, reference, inputs, exact_inputs, tolerance=1e-5):
    """Assert that outputs, and gradients with respect to inputs, are those in fp64."""
    torch.manual_seed(9)
    upstream = torch.randn(output.shape)
    found = [output, *torch.autograd.grad(output, inputs, upstream)]
    expected = [reference, *torch.autograd.grad(reference, exact_inputs, upstream.double())]
    for ours, exact in zip(found, expected, strict=True):
        assert float((ours.double() - exact).norm()) <= tolerance * float(exact.norm())


def _exact(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_a_convolution_of_documents_has_torchs_values_and_gradients(activation, has_bias):
    inputs = [_leaf(TOKENS, 24, seed=0), _leaf(24, 4, seed=1), *[_leaf(24, seed=2)] * has_bias]
    exact = _exact(inputs)
    pairs = [(*each, *[None] * (not has_bias), activation) for each in (inputs, exact)]
    _compare(convolution_kernel("cuda")(*pairs[0], LAYOUT), convolve_documents(*pairs[1], LAYOUT), inputs, exact)


def _delta_rule(query, key, value, g, beta):
    """Return the rule token by token, in documents: S = exp(g) S + k β (v - (exp(g) S)ᵀ k)ᵀ, o = Sᵀ q / √N."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    outputs = []
    for start, end in pairwise(LAYOUT.offsets):
        state = value.new_zeros(value.size(2), key.size(3), value.size(3))
        for at in range(start, end):
            q, k, v, rate = query[0, at], key[0, at], value[0, at], beta[0, at, :, None]
            decay = g[0, at].exp()
            state = state * (decay.unsqueeze(-1) if decay.dim() == 2 else decay[:, None, None])
            state = state + k.unsqueeze(-1) * (rate * (v - torch.einsum("hnp,hn->hp", state, k))).unsqueeze(1)
            outputs.append(torch.einsum("hnp,hn->hp", state, q) * key.size(3) ** -0.5)
    return torch.stack(outputs).unsqueeze(0)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule_of_documents_has_the_values_and_gradients_of_its_formula(by_channel, on_gpu):
    heads, size = 2, 32
    decays = (1, TOKENS, heads, *[size] * by_channel)
    inputs = [_leaf(1, TOKENS, heads, size, seed=seed) for seed in range(3)]
    inputs += [
        _leaf(*decays, seed=3, function=lambda x: -F.softplus(x)),
        _leaf(1, TOKENS, heads, seed=4, function=torch.sigmoid),
    ]
    exact = _exact(inputs)
    output, _ = scans.delta_rule(_pack(), None, *inputs, use_qk_l2norm_in_kernel=True)
    _compare(output, _delta_rule(*exact), inputs, exact)


def test_a_state_space_of_documents_has_torchs_values_and_gradients(monkeypatch):
    heads, groups, size, state = 4, 2, 32, 16
    inputs = [_leaf(1, TOKENS, heads, size, seed=0), _leaf(1, TOKENS, heads, seed=1)]
    inputs += [
        _leaf(heads, seed=2, function=lambda x: -x.exp()),
        *(_leaf(1, TOKENS, groups, state, seed=s) for s in (3, 4)),
    ]
    inputs += [_leaf(heads, seed=5), _leaf(heads, seed=6)]
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x.to(torch.promote_types(x.dtype, torch.float32)))
    exact = _exact(inputs)
    reference = scans.state_space(_pack(), *exact, dt_softplus=True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    output = scans.state_space(_pack(), *inputs, dt_softplus=True)
    _compare(output, reference, inputs, exact)


PACKS = [documents_of_answers(9, 3, 6), documents_of_answers(7)]


def _steps(model: str) -> list:
    """Return the gradients of a step without Liger and with it."""
    interpret()
    import liger_kernel.transformers  # noqa: F401

    _complete("liger_kernel.")
    found = []
    for liger in (False, True):
        engine = build_worker(model, overrides=[f"model.use_liger={liger}"]).engine
        names = {type(part).forward.__module__ for part in engine.module.modules()}
        names |= {part.forward.__module__ for part in engine.module.modules() if "forward" in vars(part)}
        assert any(name.startswith("liger_kernel") for name in names) is liger
        collate = StepCollator(LossSpec("token", np.ones(1)), CategoryTable((), ()))
        found.append(train_step(engine, [pack_row(pack) for pack in PACKS], collate, 2, "fused").gradients)
    return found


def test_a_step_with_liger_has_the_gradients_of_one_without(tiny_model):
    ((plain, with_liger),) = run_ranks(_steps, 1, str(tiny_model))
    assert plain.keys() == with_liger.keys()
    for name, gradient in plain.items():
        assert float((with_liger[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name
