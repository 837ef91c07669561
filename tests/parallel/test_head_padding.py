"""Heads that ranks do not divide: padded, split over ranks and joined again, they give the attention of all heads."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config
from verl.utils.ulysses import set_ulysses_sequence_parallel_group

from tests.lib.checked import typed
from tests.lib.collectives import recorded_all_to_alls
from tests.lib.ranks import run_cases
from verl_ext.attention.packed import packed_attention
from verl_ext.config.compose import compose
from verl_ext.config.model import PackedModel
from verl_ext.parallel.shards import DocumentLayout
from verl_ext.parallel.ulysses import HeadPadding


def attention(query, key, value):
    """Compute causal attention of ``[1, T, heads, E]``; neighbouring query heads share key/value heads."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


def test_split_over_ranks_it_is_the_attention_of_all_heads_and_has_its_gradients():
    for group, kv_heads, ranks in product(range(1, 7), range(1, 8), range(1, 9)):
        heads = group * kv_heads
        generator = torch.Generator().manual_seed(0)
        shapes = ((heads, 4), (kv_heads, 4), (kv_heads, 3), (heads, 3))
        *inputs, weights = (torch.randn(1, 5, *s, generator=generator, dtype=torch.float64) for s in shapes)
        query, key, value = (x.requires_grad_() for x in inputs)
        expected = attention(query, key, value)
        gradients = torch.autograd.grad((expected * weights).sum(), inputs)
        padding = HeadPadding.from_heads(heads, kv_heads, ranks)
        whole = padding.query(query), padding.key_value(key), padding.key_value(value)
        assert [x.size(2) for x in whole] == [padding.heads, padding.kv_heads, padding.kv_heads]
        assert padding.heads == -(-heads // ranks) * ranks == heads + padding.zero_heads
        joined = [attention(*of_rank) for of_rank in zip(*(x.chunk(ranks, dim=2) for x in whole), strict=True)]
        assert {part.size(2) for part in joined} == {padding.heads // ranks}
        output = padding.output(torch.cat(joined, dim=2))
        found = torch.autograd.grad((output * weights).sum(), inputs)
        torch.testing.assert_close((output, *found), (expected, *gradients))


@pytest.mark.parametrize(
    ("given", "padded"),
    [
        ((25, 25, 8), (32, 32)), ((40, 40, 16), (48, 48)), ((20, 20, 8), (24, 24)),  # multi-head: the next multiple
        ((28, 4, 8), (32, 8)), ((28, 4, 16), (32, 16)), ((14, 2, 4), (16, 4)),  # key/value heads repeated
        ((25, 5, 8), (32, 16)),  # both: five parts of two heads, the last half empty, and one part of zero heads
        ((32, 8, 8), (32, 8)), ((32, 8, 16), (32, 16)), ((28, 4, 4), (28, 4)), ((12, 2, 4), (12, 4)),
        ((7, 7, 1), (7, 7)),
    ],
)  # fmt: skip
def test_the_fewest_heads_are_computed_and_then_the_fewest_keys_travel(given, padded):
    padding = HeadPadding.from_heads(*given)
    assert (padding.heads, padding.kv_heads) == padded


# Query heads, key/value heads, head size of queries and keys, of values.
SHAPES = ((8, 4, 4, 4), (7, 7, 4, 6), (6, 2, 8, 3), (4, 1, 2, 2), (3, 3, 5, 5))


def _on_ranks() -> list:
    """Return by shape this rank's output, gradients, and bytes of collectives forward and backward."""
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    answers = []
    for shape in SHAPES:
        *inputs, weights = (x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()] for x in _tensors(*shape))
        inputs = [x.transpose(1, 2).requires_grad_() for x in inputs]
        layout = DocumentLayout.from_lengths([8, 4], "cpu")
        with recorded_all_to_alls() as sent:
            output, _ = packed_attention(torch.nn.Module(), *inputs, document_layout=layout)
            forward = len(sent)
            gradients = torch.autograd.grad((output * weights).sum(), inputs)
        gradients = [x.transpose(1, 2) for x in gradients]
        answers.append(([output.detach(), *gradients], sent[:forward], sent[forward:]))
    return answers


def _tensors(heads: int, kv_heads: int, size: int, value_size: int) -> tuple[torch.Tensor, ...]:
    """Make queries, keys and values ``[1, 12, heads, E]``, and weights of the output."""
    generator = torch.Generator().manual_seed(heads)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size))
    return tuple(torch.randn(1, 12, *shape, generator=generator) for shape in shapes)


@pytest.fixture(scope="module")
def by_rank():
    return run_cases({ranks: (ranks, _on_ranks) for ranks in (2, 3)})


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_sends_queries_keys_and_values_at_once_and_its_output_back(ranks, by_rank):
    for shape, *answers in zip(SHAPES, *by_rank[ranks], strict=True):
        *inputs, weights = _tensors(*shape)
        inputs = [x.requires_grad_() for x in inputs]
        expected = torch.cat(
            [attention(*parts) for parts in zip(*(x.split([8, 4], dim=1) for x in inputs), strict=True)], dim=1
        )
        gradients = torch.autograd.grad((expected * weights).sum(), inputs)
        for index, want in enumerate([expected, *gradients]):
            found = torch.cat([tensors[index] for tensors, _, _ in answers], dim=1)
            torch.testing.assert_close(found, want)
        heads, kv_heads, size, value_size = shape
        padding = HeadPadding.from_heads(heads, kv_heads, ranks)
        numbers = padding.heads * size + padding.kv_heads * (size + value_size), padding.heads * value_size
        to_heads, to_tokens = (12 // ranks * count * 4 for count in numbers)  # bytes, including the rank's own share
        for _, forward, backward in answers:
            assert forward == [to_heads, to_tokens]
            assert backward == [to_tokens, to_heads]


def test_what_the_padding_costs_is_said_once():
    config = compose(["model.path=x", "data.train_dir=x", "parallel=cpu", "engine.ulysses_sequence_parallel_size=8"])
    model = Qwen2Config(num_attention_heads=28, num_key_value_heads=4, hidden_size=56, num_hidden_layers=1)
    (notice,) = PackedModel.examine(typed(config, 8), model).notices
    assert notice.endswith("28 attention heads of 4 key/value heads: 4 zero heads are added, 14% more attention")
