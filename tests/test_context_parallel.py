"""A pack cut over groups of ranks: every token lies with one of them, and together they compute whole attention."""

from itertools import accumulate, chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import run_ranks
from verl_ext.attention import DocumentLayout, SequenceShards
from verl_ext.attention.context import ContextGroups, ContextLayout, KeyExchange
from verl_ext.attention.kernels import KernelOptions, sdpa
from verl_ext.attention.packed import packed_attention

shapes = st.tuples(st.integers(1, 3), st.integers(1, 4))


def whole_attention(query, key, value, offsets, window):
    """``[T, H, E]`` from all scores of a pack and one mask."""
    tokens = torch.arange(offsets[-1])
    document = torch.bucketize(tokens, torch.tensor(offsets), right=True)
    distance = tokens[:, None] - tokens[None, :]
    seen = (document[:, None] == document[None, :]) & (distance >= 0) & (distance < (window or len(tokens)))
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
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
    assert SequenceShards(4, 1, 2).slice(torch.arange(12)).tolist() == [6, 7, 8]
    assert SequenceShards(4, 1).multiple == 4


def test_groups_share_the_attention_of_one_document_evenly():
    """Query-key pairs: an early and a late chunk each."""
    shares = [SequenceShards(1, 4, rank).slice(torch.arange(1, 65)).sum() for rank in range(4)]
    assert len(set(map(int, shares))) == 1


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7),
    st.integers(2, 4),
    st.sampled_from([None, 1, 2, 5, 17, 60]),
)
def test_groups_that_exchange_keys_compute_the_attention_of_the_whole_pack(lengths, context, window):
    pad = -sum(lengths) % (2 * context)
    offsets = (0, *accumulate([*lengths, pad] if pad else lengths))
    generator = torch.Generator().manual_seed(len(offsets))
    query, key, value = (
        torch.randn(offsets[-1], heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    ranks = [SequenceShards(1, context, rank) for rank in range(context)]
    exchanges = [KeyExchange.of(offsets, rank, window, "cpu") for rank in ranks]
    outputs = []
    for rank, exchange in zip(ranks, exchanges, strict=True):
        known = []
        for x in (key, value):
            come = [part for other, e in zip(ranks, exchanges, strict=True) for part in _sent(other, e, x, rank.group)]
            rows = x.new_full((exchange.known, *x.shape[1:]), torch.nan)
            for place, part in zip(exchange.own + exchange.received, (*rank.slice(x).chunk(2), *come), strict=True):
                rows[place] = part
            known.append(rows)
        q = rank.slice(query)
        assert [row for call in exchange.calls for row in range(*call.queries.indices(len(q)))] == list(range(len(q)))
        options = KernelOptions(window=window)
        outputs += [sdpa(q[c.queries], *(x[c.keys] for x in known), c.layout, options) for c in exchange.calls]
        assert exchange.is_silent is not any(sum(e.send_sizes) for e in exchanges)
    whole = ranks[0].by_position(torch.cat(outputs))
    torch.testing.assert_close(whole, whole_attention(query, key, value, offsets, window))


def _sent(shards: SequenceShards, exchange: KeyExchange, x: torch.Tensor, group: int) -> list[torch.Tensor]:
    """What a rank sends to a group."""
    first = sum(exchange.send_sizes[:group])
    starts = [0, *accumulate(part.stop - part.start for part in exchange.send)]
    return [
        shards.slice(x)[part]
        for part, start in zip(exchange.send, starts[:-1], strict=True)
        if first <= start < first + exchange.send_sizes[group]
    ]


@pytest.mark.parametrize(("window", "received"), [(None, [[0, 8], [4, 0]]), (4, [[0, 3], [3, 0]]), (1, [[0, 0]] * 2)])
def test_only_keys_that_are_seen_travel(window, received):
    """One document of 16 tokens, chunks of 4: group 0 has the first and the last, group 1 those between."""
    sizes = [KeyExchange.of((0, 16), SequenceShards(1, 2, rank), window, "cpu").receive_sizes for rank in range(2)]
    assert sizes == received


# --- on ranks -------------------------------------------------------------------------------------------------------

PACKS = ((24,), (3, 1, 20), (8, 8, 8), (11, 2, 10, 1), (3,) * 8)
SHAPES = ((1, 4), (2, 2))  # ranks of a Ulysses group, groups
DTYPES = {torch.float64: 1e-12, torch.bfloat16: 1e-2}  # relative errors
CASES = [
    (*shape, pack, window, dtype) for shape in SHAPES for pack in PACKS for window in (None, 4) for dtype in DTYPES
]


def _tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values ``[24, heads, E]`` of a pack, and weights of their attention."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, 6), (4, 6))
    return tuple(torch.randn(24, *shape, generator=generator).to(dtype) for shape in shapes)


def _attend() -> dict:
    """By case: this rank's attention, gradients of its queries, keys and values, and its exchanges between groups."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    answers = {}
    meshes = {shape: init_device_mesh("cpu", shape[::-1], mesh_dim_names=("across", "inside")) for shape in SHAPES}
    exchanges: list[int] = []
    all_to_all = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: exchanges.append(1) or all_to_all(*args, **kwargs)
    for case in CASES:
        ulysses, groups, lengths, window, dtype = case
        mesh = meshes[ulysses, groups]
        shards = SequenceShards(ulysses, groups, dist.get_rank())
        owned = ContextGroups(shards, mesh.get_group("inside"), mesh.get_group("across"))
        layout = ContextLayout.shared(DocumentLayout.of(lengths, "cpu"), owned)
        *tensors, weights = (shards.slice(x) for x in _tensors(dtype))
        inputs = [x.transpose(0, 1)[None].requires_grad_() for x in tensors]
        exchanges.clear()
        output, _ = packed_attention(torch.nn.Module(), *inputs, sliding_window=window, document_layout=layout)
        (output[0] * weights).sum().backward()
        gradients = [x.grad[0].transpose(0, 1) for x in inputs]
        answers[case] = [output[0].detach(), *gradients], len(exchanges)
    return answers


def test_ranks_have_the_attention_and_the_gradients_of_the_whole_pack():
    answers = run_ranks(_attend, 4)
    for case in CASES:
        ulysses, groups, lengths, window, dtype = case
        *tensors, weights = (x.double() for x in _tensors(dtype))
        inputs = [x.requires_grad_() for x in tensors]
        expected = whole_attention(*inputs, (0, *accumulate(lengths)), window)
        (expected * weights).sum().backward()
        found = [answer[case] for answer in answers]
        whole = SequenceShards(ulysses, groups)
        for index, want in enumerate([expected.detach(), *(x.grad for x in inputs)]):
            have = whole.by_position(torch.cat([tensors[index] for tensors, _ in found])).double()
            deviation = (have - want).norm() / want.norm()
            assert deviation < DTYPES[dtype], (case, index)
        is_silent = lengths == (3,) * 8  # no document crosses a chunk's edge
        assert [exchanges for _, exchanges in found] == [0 if is_silent else 2] * 4  # there and, of gradients, back
