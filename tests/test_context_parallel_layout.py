"""A pack cut over ranks: every token lies with one of them, and what they compute together is whole attention."""

from itertools import accumulate, chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.attention import SequenceShards
from verl_ext.attention.context import KeyExchange
from verl_ext.attention.kernels import KernelOptions, sdpa

packs = st.lists(st.integers(1, 40), min_size=1, max_size=7)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4))


def whole_attention(query, key, value, offsets, window):
    """``[T, H, E]`` in fp64 from all scores of a pack and one mask."""
    groups, tokens = query.size(1) // key.size(1), torch.arange(offsets[-1])
    document = torch.bucketize(tokens, torch.tensor(offsets), right=True)
    distance = tokens[:, None] - tokens[None, :]
    seen = (document[:, None] == document[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.einsum("qhe,khe->hqk", query, key) * query.size(-1) ** -0.5
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@given(shapes, st.integers(0, 40))
def test_every_token_lies_with_one_rank_and_is_found_again(shape, more):
    ulysses, context = shape
    tokens = SequenceShards(ulysses, context).multiple * (more + 1)
    pack = torch.arange(tokens)
    shards = [SequenceShards(ulysses, context, rank) for rank in range(ulysses * context)]
    held = [shard.slice(pack) for shard in shards]
    assert {len(part) for part in held} == {tokens // len(shards)}
    by_rank = torch.cat(held)
    assert torch.equal(by_rank, shards[0].by_rank(pack))
    assert torch.equal(shards[0].by_position(by_rank), pack)
    assert torch.equal(shards[0].positions(torch.arange(tokens), tokens), by_rank)
    for shard, part in zip(shards, held, strict=True):
        assert [*chain(*(range(*span) for span in shard.spans(tokens)))] == part.tolist()


def test_a_single_group_holds_the_pack_in_its_order():
    pack = torch.arange(12)
    assert SequenceShards(4, 1, 2).slice(pack).tolist() == [6, 7, 8]
    assert SequenceShards(4, 1).multiple == 4


@settings(deadline=None)
@given(packs, st.integers(2, 4), st.sampled_from([None, 1, 2, 5, 17, 60]))
def test_shards_that_exchange_keys_compute_the_attention_of_the_whole_pack(lengths, context, window):
    lengths = [*lengths, *[-sum(lengths) % (2 * context)]]
    offsets = (0, *accumulate(length for length in lengths if length))
    generator = torch.Generator().manual_seed(len(offsets))
    query, key, value = (
        torch.randn(offsets[-1], heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    expected = whole_attention(query, key, value, offsets, window)
    ranks = [SequenceShards(1, context, rank) for rank in range(context)]
    exchanges = [KeyExchange.of(offsets, rank, window, "cpu") for rank in ranks]
    outputs = []
    for rank, exchange in zip(ranks, exchanges, strict=True):
        known = []
        for x in (key, value):
            rows = x.new_full((exchange.known, *x.shape[1:]), torch.nan)
            for place, part in zip(exchange.own, rank.slice(x).chunk(2), strict=True):
                rows[place] = part
            # What the others send to this rank, in their order.
            sent = [
                [other.slice(x)[part] for part in _sent_to(rank.group, e)]
                for other, e in zip(ranks, exchanges, strict=True)
            ]
            assert [sum(map(len, parts)) for parts in sent] == exchange.receive_sizes
            for place, part in zip(exchange.received, chain(*sent), strict=True):
                rows[place] = part
            known.append(rows)
        q = rank.slice(query)
        assert [row for call in exchange.calls for row in range(*call.queries.indices(len(q)))] == list(range(len(q)))
        outputs += [
            sdpa(q[call.queries], *(x[call.keys] for x in known), call.layout, KernelOptions(window=window))
            for call in exchange.calls
        ]
        assert exchange.is_silent is not any(sum(e.send_sizes) for e in exchanges)
    torch.testing.assert_close(ranks[0].by_position(torch.cat(outputs)), expected)


def _sent_to(group: int, exchange: KeyExchange) -> list[slice]:
    """The rows that a group is sent."""
    ends = [0, *accumulate(exchange.send_sizes)]
    filled = [0, *accumulate(part.stop - part.start for part in exchange.send)]
    return [part for part, start in zip(exchange.send, filled, strict=False) if ends[group] <= start < ends[group + 1]]
