"""Soft caps and sinks: values and gradients of every kernel equal the formula over all scores of a document."""

import pytest
import torch

from tests.lib.attention_packs import of_all_scores
from tests.lib.flash_stand_ins import register_flash_stand_ins
from verl_ext.attention.head_groups import backward_by_groups_of_heads, by_groups_of_heads
from verl_ext.attention.kernels import KernelOptions, sdpa
from verl_ext.attention.sinks import FLASH, LseAttention, flash_with_sinks
from verl_ext.parallel.key_exchange import LseKernel
from verl_ext.parallel.shards import DocumentLayout

# Queries and keys of each document: equal numbers, or more keys, as with keys from other groups of ranks.
SHAPES = [((5, 3, 9), (5, 3, 9)), ((5, 3, 9), (12, 3, 20)), ((600,), (640,))]


def _inputs(queries, keys):
    torch.manual_seed(0)
    shapes = ((sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 8), (4,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _compare(attend, queries, keys, options):
    """Assert that outputs and gradients of a form of attention are those of :func:`of_all_scores`."""
    layout = DocumentLayout.from_lengths(queries, "cpu", keys)
    found = []
    for form in (of_all_scores, attend):
        *qkv, sinks = _inputs(queries, keys)
        given = options if options.softcap is not None else options._replace(sinks=sinks)
        output = form(*qkv, layout, given)
        wanted = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        output.backward(wanted)
        found.append([output, *(x.grad for x in (*qkv, sinks) if x.grad is not None)])
    assert len(found[0]) == len(found[1])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_blocks_of_queries_give_what_all_scores_give(queries, keys, window, softcap):
    _compare(sdpa, queries, keys, KernelOptions(window=window, softcap=softcap))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_groups_of_heads_have_their_own_sinks(softcap):
    _compare(by_groups_of_heads(sdpa, group_bytes=1), *SHAPES[1], KernelOptions(softcap=softcap))


@pytest.mark.parametrize(("queries", "keys"), SHAPES[:2])
@pytest.mark.parametrize("window", [None, 6])
def test_a_flash_backward_that_is_handed_the_sink_in_its_log_sum_exp_gives_the_right_gradients(queries, keys, window):
    register_flash_stand_ins(torch.float64)
    _compare(flash_with_sinks, queries, keys, KernelOptions(scale=0.3, window=window))


@pytest.mark.parametrize("group_bytes", [1, 2 * 8 * 4 * 17])  # one query head at a time, two
def test_a_backward_over_groups_of_heads_is_that_of_all_heads(group_bytes):
    register_flash_stand_ins(torch.float64)
    heads = []

    def backward(*given):
        heads.append(given[1].size(1))
        return FLASH.backward(*given)

    def attend(query, key, value, layout, options):
        kernel = backward_by_groups_of_heads(LseKernel(FLASH.forward, backward), group_bytes)
        return LseAttention.apply(query, key, value, options.sinks, layout, options, kernel)

    _compare(attend, *SHAPES[1], KernelOptions())
    assert heads == ([1] * 4 if group_bytes == 1 else [2] * 2)


def test_the_gradient_of_a_scaled_output_would_be_wrong():
    """The backward test can fail: with the sink outside the log-sum-exp, queries get other gradients."""
    register_flash_stand_ins(torch.float64)

    def backward(grad, query, key, value, output, lse, layout, options):
        of_kernel, without = FLASH.forward(query, key, value, layout, options)
        scaled = grad * (without - lse).exp().t()[..., None]
        return FLASH.backward(scaled, query, key, value, of_kernel, without, layout, options)

    def attend(query, key, value, layout, options):
        kernel = LseKernel(FLASH.forward, backward)
        return LseAttention.apply(query, key, value, options.sinks, layout, options, kernel)

    with pytest.raises(AssertionError):
        _compare(attend, *SHAPES[0], KernelOptions())


def test_chunks_are_counted_from_each_documents_first_token():
    layout = DocumentLayout.from_lengths([5, 3], "cpu").in_chunks(2)
    assert layout.offsets == (0, 2, 4, 5, 7, 8)


def test_a_given_scale_holds_for_blocks_of_queries_too():
    torch.manual_seed(0)
    query, layout = torch.randn(5, 2, 8), DocumentLayout.from_lengths([5], "cpu")
    plain, capped = (sdpa(query, query, query, layout, KernelOptions(scale=0.9, softcap=cap)) for cap in (None, 1e6))
    torch.testing.assert_close(capped, plain, rtol=1e-4, atol=1e-4)
