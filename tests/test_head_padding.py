"""Heads that ranks do not divide: padded, split over ranks and joined again, attention is that of all heads."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config

from verl_ext.attention import HeadPadding
from verl_ext.config import compose
from verl_ext.config.model import PackedModel


def attention(query, key, value):
    """Causal attention of ``[1, T, heads, E]``, key/value heads shared by neighbours."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


@given(group=st.integers(1, 8), kv_heads=st.integers(1, 8), ranks=st.integers(1, 9))
def test_split_over_ranks_it_is_the_attention_of_all_heads(group, kv_heads, ranks):
    generator = torch.Generator().manual_seed(group * 100 + kv_heads * 10 + ranks)
    query = torch.randn(1, 5, group * kv_heads, 4, generator=generator)
    key, value = (torch.randn(1, 5, kv_heads, 4, generator=generator) for _ in range(2))
    padding = HeadPadding.of(group * kv_heads, kv_heads, ranks)
    parts = [x.chunk(ranks, dim=2) for x in (padding.query(query), padding.key_value(key), padding.key_value(value))]
    assert all(len({part.size(2) for part in x}) == 1 and len(x) == ranks for x in parts)
    joined = torch.cat([attention(*of_rank) for of_rank in zip(*parts, strict=True)], dim=2)
    assert joined.size(2) == query.size(2) + padding.zero_heads
    torch.testing.assert_close(padding.output(joined), attention(query, key, value))


def test_heads_that_ranks_divide_are_not_padded():
    for heads, kv_heads, ranks in ((32, 8, 8), (32, 8, 16), (28, 4, 4), (12, 2, 4), (7, 7, 1)):
        assert HeadPadding.of(heads, kv_heads, ranks).zero_heads == 0
    assert HeadPadding.of(28, 4, 8).zero_heads == 4


def test_what_the_padding_costs_is_said_once():
    config = compose(["model.path=x", "data.train_dir=x", "parallel=cpu", "engine.ulysses_sequence_parallel_size=8"])
    model = Qwen2Config(num_attention_heads=28, num_key_value_heads=4, hidden_size=56, num_hidden_layers=1)
    (notice,) = PackedModel.notices(config, model, "cpu", None)
    assert notice.endswith("28 attention heads of 4 key/value heads: 4 zero heads are added, 14% more attention")
