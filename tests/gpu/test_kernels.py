"""The attention kernels on random packs, against attention of single documents in fp64.

A kernel's error may be at most twice that of the same formula written out in the kernel's own precision.
"""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.flash_stand_ins import register_flash_stand_ins
from verl_ext.attention import unusable
from verl_ext.attention.kernels import KERNELS, KernelOptions
from verl_ext.attention.sinks import LseAttention
from verl_ext.parallel.key_exchange import ContextGroups, ContextLayout
from verl_ext.parallel.shards import DocumentLayout, SequenceShards, document_layout

FLASH = pytest.mark.skipif(unusable("flash_attn") is not None, reason="needs the flash-attn package")
BACKENDS = [pytest.param("flash_attn", marks=FLASH), "varlen", "sdpa"]


@st.composite
def packs(draw):
    """Draw document lengths, (query heads per key/value head, key/value heads, head size), and a window or None."""
    lengths = draw(
        st.one_of(
            st.lists(st.integers(1, 300), min_size=1, max_size=12),
            st.lists(st.just(1), min_size=1, max_size=64),  # only one-token documents
            st.tuples(st.integers(1000, 3000), st.just(1), st.integers(1, 500)).map(list),
        )
    )
    heads = draw(st.sampled_from([1, 2, 3, 4, 7, 8])), draw(st.sampled_from([1, 2]))
    return (
        lengths,
        (*heads, draw(st.sampled_from([64, 80, 96, 128, 192, 256]))),
        draw(st.sampled_from([None, None, 1, 7, 128])),
    )


def kernel(name: str, device: torch.device):
    """Return the kernel, or skip the test if the kernel does not run on the device."""
    if device.type == "cpu" and name != "sdpa":
        pytest.skip("needs a CUDA GPU")
    return KERNELS[name]


def tensors(lengths, shape, device, seed=0):
    """Make bf16 queries, keys and values ``[T, heads, E]`` that need gradients, and an upstream gradient."""
    groups, kv_heads, size = shape
    torch.manual_seed(seed)
    tokens = sum(lengths)
    heads = (groups * kv_heads, kv_heads, kv_heads, groups * kv_heads)
    q, k, v, upstream = (torch.randn(tokens, h, size, device=device, dtype=torch.bfloat16) for h in heads)
    return [x.requires_grad_() for x in (q, k, v)], upstream


def layout_of(lengths, device):
    return document_layout(torch.cat([torch.arange(n) for n in lengths]), device)


def written_out(query, key, value, lengths, window, key_lengths=None):
    """Write out causal attention with its softmax, document by document, in the tensors' own precision; the queries are
    the last ones of their document."""
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    key_lengths = key_lengths or list(lengths)
    outputs = []
    of_documents = (query.split(list(lengths)), key.split(key_lengths), value.split(key_lengths))
    for q, k, v in zip(*of_documents, strict=True):
        at = torch.arange(len(k), device=query.device)
        distance = at[len(k) - len(q) :, None] - at[None, :]
        seen = (distance >= 0) & (distance < (window or len(k)))
        scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) / query.size(-1) ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((weights @ v.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outputs)


def with_gradients(output, inputs, upstream):
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_kernel_is_as_exact_as_its_precision_on_any_pack(name, device):
    function = kernel(name, device)

    @given(packs())
    @settings(max_examples=60 if device.type == "cuda" else 5)
    def on_any_pack(pack):
        lengths, shape, window = pack
        inputs, upstream = tensors(lengths, shape, device)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        want = with_gradients(written_out(*exact, lengths, window), exact, upstream.double())
        same = with_gradients(written_out(*inputs, lengths, window), inputs, upstream)
        output = function(*inputs, layout_of(lengths, device), KernelOptions(window=window))
        for part, ours, plain, truth in zip(
            ("output", "dq", "dk", "dv"), with_gradients(output, inputs, upstream), same, want, strict=True
        ):
            off, allowed = (float((x.double() - truth).norm()) for x in (ours, plain))
            assert off <= 2 * allowed + 1e-3 * float(upstream.norm()), f"{part}: {off} against {allowed}"

    on_any_pack()


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("name", BACKENDS)
def test_queries_may_be_the_last_of_longer_documents(name, window, device):
    function = kernel(name, device)
    lengths, key_lengths = [40, 1, 200, 7], [300, 1, 200, 90]
    (query, *_), upstream = tensors(lengths, (4, 2, 64), device)
    (_, key, value), _ = tensors(key_lengths, (4, 2, 64), device, seed=1)
    inputs = [query, key, value]
    layout = DocumentLayout.from_lengths(lengths, device, key_lengths)
    found = with_gradients(function(*inputs, layout, KernelOptions(window=window)), inputs, upstream)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = with_gradients(written_out(*exact, lengths, window, key_lengths), exact, upstream.double())
    for ours, truth in zip(found, want, strict=True):
        assert float((ours.double() - truth).norm()) <= 1e-2 * float(truth.norm()) + 1e-3 * float(upstream.norm())


@pytest.mark.parametrize("name", BACKENDS)
def test_four_thousand_documents_are_one_call(name, device):
    function = kernel(name, device)
    lengths = [1 + i % 3 for i in range(4096)]
    inputs, upstream = tensors(lengths, (2, 1, 64), device)
    found = with_gradients(function(*inputs, layout_of(lengths, device), KernelOptions()), inputs, upstream)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = with_gradients(written_out(*exact, lengths, None), exact, upstream.double())
    for ours, truth in zip(found, want, strict=True):
        assert float((ours.double() - truth).norm()) <= 1e-2 * float(truth.norm())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_document_is_untouched_by_its_neighbours_to_the_last_bit(name, device):
    function = kernel(name, device)
    lengths = [5, 200, 1, 130, 64]
    inputs, _ = tensors(lengths, (4, 2, 128), device)
    layout = layout_of(lengths, device)
    before = function(*inputs, layout, KernelOptions()).split(lengths)
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x.split(lengths)[1].normal_()
    after = function(*changed, layout, KernelOptions()).split(lengths)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True, True, True]
    for x in torch.autograd.grad(before[3].float().square().sum(), inputs):
        assert [bool(part.any()) for part in x.split(lengths)] == [False, False, False, True, False]


def test_keys_that_come_while_a_kernel_computes_are_joined_as_exactly(device):
    """Run the group of chunks 1 and 2 of two that share a document: chunk 0 arrives, and its gradients leave."""
    if device.type == "cpu":
        register_flash_stand_ins()
    chunk, sent = 130, []
    inputs, upstream = tensors([4 * chunk], (4, 2, 128), device)
    rows = slice(chunk, 3 * chunk)

    def exchange(received, leaving, *sizes, group, async_op):
        sent.append(leaving)
        received.zero_()
        comes = torch.cat([x.detach()[:chunk] for x in inputs[1:]], dim=-1) if len(sent) == 1 else received.clone()
        return SimpleNamespace(wait=lambda: received.copy_(comes))

    groups = ContextGroups(SequenceShards(1, 2, 1), None, None)
    layout = ContextLayout.from_layout(layout_of([4 * chunk], device), groups)
    own = [x.detach()[rows].requires_grad_() for x in inputs]
    with patch("torch.distributed.all_to_all_single", exchange):
        kernel = layout.overlapped(KERNELS["varlen"].lse, KernelOptions())
        output = LseAttention.apply(*own, None, layout, KernelOptions(), kernel)
        found = with_gradients(output, own, upstream[rows])
    exact = [x.detach().double()[: 3 * chunk].requires_grad_() for x in inputs]
    truth = written_out(exact[0][rows], *exact[1:], [2 * chunk], None, [3 * chunk])
    want = with_gradients(truth, exact, upstream[rows].double())
    comes_back = sent[1].split(128, dim=-1)
    pairs = [(found[0], want[0]), *((ours, whole[rows]) for ours, whole in zip(found[1:], want[1:], strict=True))]
    pairs += [(ours, whole[:chunk]) for ours, whole in zip(comes_back, want[2:], strict=True)]
    for ours, true in pairs:
        assert float((ours.double() - true).norm()) <= 1e-2 * float(true.norm())
