"""Which kernel runs where, and what it is given."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl_ext.attention import (
    AttentionOptions,
    DocumentLayout,
    choose_backend,
    document_layout,
    flash_limit,
    has_flash_attn,
)
from verl_ext.attention.kernels import KERNELS, KernelOptions, by_groups_of_heads, in_autocast_dtype, sdpa, varlen


def test_the_fastest_backend_of_a_device_is_chosen():
    assert choose_backend("auto", "cpu") == "sdpa"
    assert choose_backend("auto", "cuda") == ("flash_attn" if has_flash_attn() else "varlen")
    assert choose_backend("sdpa", "cuda") == "sdpa"
    assert choose_backend("varlen", "cuda") == "varlen"


@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_a_gpu_backend_is_refused_on_cpu(backend):
    with pytest.raises(ValueError, match=rf"^attention\.backend={backend} needs a CUDA GPU; this run is on cpu$"):
        choose_backend(backend, "cpu")


def test_an_unknown_backend_is_refused():
    for refused in (lambda: choose_backend("eager", "cpu"), lambda: AttentionOptions("eager")):
        with pytest.raises(ValueError, match=r"^attention\.backend must be one of auto, flash_attn, .*; got eager$"):
            refused()


@pytest.mark.skipif(has_flash_attn(), reason="the flash-attn package is installed")
def test_flash_attn_without_its_package_is_refused():
    with pytest.raises(ValueError, match=r"^attention\.backend=flash_attn needs the flash-attn package"):
        choose_backend("flash_attn", "cuda")


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"dtype": torch.float32}, "half precision"),
        ({"head_size": 512}, "up to 256"),
        ({"head_size": 12}, "multiple of 8"),
        ({"capability": (7, 0)}, r"compute capability 8\.0 \(Ampere\) or newer; got 7\.0"),  # V100
        ({"capability": (7, 5)}, r"got 7\.5"),  # T4
    ],
)
def test_what_flash_kernels_cannot_compute_goes_to_sdpa_or_is_refused(given, limit):
    found = flash_limit(**given)
    assert choose_backend("auto", "cuda", found) == choose_backend("sdpa", "cuda", found) == "sdpa"
    with pytest.raises(ValueError, match=rf"^attention\.backend=varlen needs .*{limit}"):
        choose_backend("varlen", "cuda", found)


def test_gpus_from_ampere_on_run_flash_kernels():
    assert [flash_limit(capability=capability) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))] == [None] * 4


def test_attention_dropout_goes_to_a_kernel_that_has_it_or_is_refused():
    for installed, chosen in ((True, "flash_attn"), (False, "sdpa")):
        assert choose_backend("auto", "cuda", dropout=0.1, flash_attn_installed=installed) == chosen
    with pytest.raises(ValueError, match=r"^attention\.backend=varlen needs a model without attention dropout"):
        choose_backend("varlen", "cuda", dropout=0.1)


def test_under_autocast_queries_keys_and_values_have_its_type():
    mixed = (torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))
    assert [x.dtype for x in in_autocast_dtype(*mixed)] == [torch.float32, torch.float32, torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        assert {x.dtype for x in in_autocast_dtype(*mixed)} == {torch.bfloat16}


@pytest.mark.parametrize("takes_grouped_heads", [True, False])
def test_varlen_gets_grouped_heads_and_narrow_values_in_the_form_its_torch_takes(monkeypatch, takes_grouped_heads):
    """The kernel itself needs CUDA: what it is given is checked here."""
    import torch.nn.attention.varlen as module

    given = {}

    def plain(query, key, value, *lengths, scale, window_size):
        given.update(heads=(query.size(1), key.size(1)), sizes=(query.size(2), value.size(2)), window=window_size)
        return value

    def grouped(query, key, value, *lengths, scale, window_size, enable_gqa=False):
        assert enable_gqa
        return plain(query, key, value, *lengths, scale=scale, window_size=window_size).repeat_interleave(2, dim=1)

    monkeypatch.setattr(module, "varlen_attn", grouped if takes_grouped_heads else plain)
    query, key, value = torch.rand(6, 4, 16), torch.rand(6, 2, 16), torch.rand(6, 2, 8)
    layout = document_layout(torch.tensor([0, 1, 2, 0, 1, 2]))
    output = varlen(query, key, value, layout, KernelOptions(window=3))
    assert given == {"heads": (4, 2 if takes_grouped_heads else 4), "sizes": (16, 16), "window": (2, 0)}
    assert torch.equal(output, value.repeat_interleave(2, dim=1))


def _last_queries_of_keys(query, key, value, cu_q, cu_k, max_q, max_k, window, scale):
    """What the C++ of flash attention computes of ``[T, heads, E]``, from all scores: a document's queries are those of
    its last keys."""
    outputs = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        distance = torch.arange(k1 - k0)[k1 - k0 - (q1 - q0) :, None] - torch.arange(k1 - k0)
        seen = (distance >= 0) & ((distance <= window[0]) if window[0] >= 0 else True)
        k, v = (x[k0:k1].repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
        scores = torch.einsum("qhe,khe->hqk", query[q0:q1], k) * scale
        outputs.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.fixture
def flash_stand_ins(monkeypatch):
    """CPU functions in place of the two flash kernels, with their signatures."""
    import torch.nn.attention.varlen as module

    def varlen_attn(query, key, value, *lengths, scale, window_size, enable_gqa):
        assert window_size[1] == 0
        return _last_queries_of_keys(query, key, value, *lengths, window_size, scale)

    def flash(query, key, value, *lengths, dropout_p, softmax_scale, causal, window_size, deterministic):
        assert causal
        return _last_queries_of_keys(query, key, value, *lengths, window_size, softmax_scale)

    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash))


@pytest.mark.parametrize("window", [None, 1, 3, 40, 600])
def test_queries_that_are_the_last_of_more_keys_are_attended_to_as_such_by_every_kernel(window, flash_stand_ins):
    queries, keys = (3, 1, 700, 5, 600), (3, 9, 700, 11, 1300)  # of sdpa several blocks
    layout = DocumentLayout.of(queries, "cpu", keys)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)
        for tokens, heads, size in ((sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 6))
    )
    options = KernelOptions(scale=0.3, window=window)
    lengths = (layout.cu_seqlens, layout.keys.cu_seqlens, max(queries), max(keys))
    expected = _last_queries_of_keys(query, key, value, *lengths, options.flash_window, options.scale)
    for kernel in KERNELS.values():
        torch.testing.assert_close(kernel(query, key, value, layout, options), expected)


class Sizes(TorchDispatchMode):
    """Records the bytes of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = output if isinstance(output, (tuple, list)) else [output]
        self.seen += [tensor.untyped_storage().nbytes() for tensor in tensors if torch.is_tensor(tensor)]
        return output


def test_a_window_makes_no_tensor_of_all_tokens_by_all_tokens():
    x = torch.randn(4096, 1, 8)
    with Sizes() as sizes:
        KERNELS["sdpa"](x, x, x, DocumentLayout.of([4096], "cpu"), KernelOptions(window=100))
    assert max(sizes.seen) < 4096 * 4096 / 4


@settings(max_examples=25)
@given(shared=st.sampled_from([1, 2, 4, 6]), keys=st.integers(1, 4), most=st.integers(0, 30))
def test_a_kernel_over_groups_of_heads_is_that_of_all_heads(shared, keys, most):
    """most: query heads of a call by their bytes."""
    layout, size, calls = DocumentLayout.of([3, 7], torch.device("cpu")), 4, []

    def counted(query, key, value, *given):
        calls.append(query.size(1))
        assert query.size(1) % key.size(1) == 0
        return sdpa(query, key, value, *given)

    inputs = [
        torch.randn(10, heads, size, dtype=torch.float64, requires_grad=True) for heads in (keys * shared, keys, keys)
    ]
    answers = []
    for kernel in (sdpa, by_groups_of_heads(counted, most * 10 * size * 4)):
        output = kernel(*inputs, layout, KernelOptions())
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        answers.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum(calls) == keys * shared
    assert max(calls) <= max(most, 1)
