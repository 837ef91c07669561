"""A pack split over groups of ranks: each group holds some tokens, and together they compute whole attention."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, chain, pairwise, product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.utils import _apply_to_tensors

from tests.lib.attention_packs import of_all_scores
from tests.lib.collectives import recorded_all_to_alls
from tests.lib.flash_stand_ins import register_flash_stand_ins
from tests.lib.ranks import run_cases
from verl_ext.attention.kernels import KERNELS, KernelOptions, sdpa
from verl_ext.attention.packed import packed_attention, set_backend
from verl_ext.attention.sinks import FLASH, LseAttention
from verl_ext.parallel.exchange import KnownRows, parts_of, with_returned
from verl_ext.parallel.key_exchange import ContextGroups, ContextLayout
from verl_ext.parallel.key_plan import KeyExchange
from verl_ext.parallel.shards import DocumentLayout, SequenceShards, TokenRange

shapes = st.tuples(st.integers(1, 3), st.integers(1, 4))


def _seen(lengths, window):
    """Return ``[T, T]``: whether a token of the pack sees another."""
    tokens = torch.arange(sum(lengths))
    document = torch.repeat_interleave(torch.tensor(lengths))
    distance = tokens[:, None] - tokens[None, :]
    return (document[:, None] == document[None, :]) & (distance >= 0) & (distance < (window or len(tokens)))


def _foreign_keys(lengths, window, shards):
    """Return the keys that groups see from other groups, counted once for each group."""
    place = torch.arange(sum(lengths))
    group = shards.by_position(place // (len(place) // shards.context))
    foreign = _seen(lengths, window) & (group[:, None] != group[None, :])
    return sum(int(foreign[group == each].any(0).sum()) for each in range(shards.context))


def _crosses(lengths, window, shards):
    """Return whether a token sees a token of another group."""
    return _foreign_keys(lengths, window, shards) > 0


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
    for shard, part in zip(shards, held, strict=True):
        assert [*chain(*(range(*span) for span in shard.spans(tokens)))] == part.tolist()


def test_a_single_group_holds_the_pack_in_its_order():
    assert SequenceShards(4, 1, 2).slice(torch.arange(12)).tolist() == [6, 7, 8]
    assert SequenceShards(4, 1).multiple == 4


def test_groups_share_the_attention_of_one_document_evenly():
    """Counts query-key pairs; each group has an early and a late chunk."""
    shares = [SequenceShards(1, 4, rank).slice(torch.arange(1, 65)).sum() for rank in range(4)]
    assert len(set(map(int, shares))) == 1


def compositions(tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield all lists of document lengths that fill a pack."""
    for edges in product((False, True), repeat=tokens - 1):
        ends = [0, *(place for place, edge in enumerate(edges, 1) if edge), tokens]
        yield tuple(end - start for start, end in pairwise(ends))


def _attended(attend, lengths, context, window, query, key, value):
    """Return attention ``[T, H, E]`` of all groups, by an exchange in this process, and whether any group sent data."""
    ranks = [SequenceShards(1, context, rank) for rank in range(context)]
    pack = DocumentLayout.from_lengths(lengths, "cpu")
    layouts = [ContextLayout.from_layout(pack, ContextGroups(rank, None, rank)) for rank in ranks]
    exchanges = [layout.exchange(window) for layout in layouts]
    sent = []

    def exchange(received, _, output_split_sizes, input_split_sizes, group, async_op=False):
        whole = torch.cat([key, value], dim=-1)
        sent.append(input_split_sizes)
        come = [_sent(other, e.rows, whole, group.rank) for other, e in zip(ranks, exchanges, strict=True)]
        received.fill_(-1)  # not valid before the wait
        work = SimpleNamespace(wait=lambda: received.copy_(torch.cat(come)))
        return work if async_op else work.wait()

    with patch("torch.distributed.all_to_all_single", exchange):
        outputs = [
            attend(layout, *map(rank.slice, (query, key, value)), KernelOptions(window=window))
            for rank, layout in zip(ranks, layouts, strict=True)
        ]
    return ranks[0].by_position(torch.cat(outputs)), any(map(any, sent))


def _of_whole_keys(kernel):
    """Return attention whose kernel is called once all keys have arrived."""
    return lambda layout, *given: layout.attend(kernel, *given)


def _in_parts(layout, query, key, value, options):
    """Return attention that, if possible, uses own keys before those of other groups have arrived."""
    register_flash_stand_ins(torch.float64)
    kernel = layout.overlapped(FLASH, options)
    if kernel is None:
        return layout.attend(sdpa, query, key, value, options)
    return LseAttention.apply(query, key, value, None, layout, options, kernel)


def _keys_seen(query, key, value, layout, options):
    """Stand in for a kernel, with positions as queries and keys: return the first and last key that a query sees."""
    seen = []
    for (first_query, last_query), (first, last) in zip(
        pairwise(layout.offsets), pairwise(layout.keys.offsets), strict=True
    ):
        keys = key[first:last].flatten().tolist()
        assert keys == list(range(keys[0], keys[0] + len(keys)))
        for before_end in range(last_query - first_query, 0, -1):
            end = len(keys) - before_end
            seen.append([keys[max(0, end - options.window + 1) if options.window else 0], keys[end]])
    return torch.tensor(seen)[:, None]


@pytest.mark.parametrize(("tokens", "context"), [(8, 2), (12, 2), (6, 3), (12, 3), (8, 4)])
def test_every_query_of_every_small_pack_sees_the_keys_of_its_document_and_no_others(tokens, context):
    position = torch.arange(tokens)
    rows = position[:, None, None]
    # Of the longer packs those of up to four documents: more of them are shorter, and cross fewer edges of chunks.
    for lengths in (pack for pack in compositions(tokens) if tokens < 12 or len(pack) < 5):
        start = torch.cat([torch.full((n,), end - n) for n, end in zip(lengths, accumulate(lengths), strict=True)])
        for window in (None, 1, 2, 5) if tokens < 12 else (None,):
            first = start if window is None else start.maximum(position - window + 1)
            seen, sent = _attended(
                _of_whole_keys(_keys_seen), lengths, context, window, rows, rows, rows.expand(-1, 1, 2)
            )
            assert torch.equal(seen.squeeze(1), torch.stack([first, position], dim=1)), (lengths, window)
            assert sent is _crosses(lengths, window, SequenceShards(1, context)), (lengths, window)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 4), st.sampled_from([None, 1, 2, 5, 17, 60])
)
def test_groups_that_exchange_keys_compute_the_attention_of_the_whole_pack(lengths, context, window):
    pad = -sum(lengths) % (2 * context)
    lengths = [*lengths, pad] if pad else lengths
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = (
        torch.randn(sum(lengths), heads, size, generator=generator, dtype=torch.float64)
        for heads, size in ((4, 16), (2, 16), (2, 8))
    )
    expected = of_all_scores(
        query, key, value, DocumentLayout.from_lengths(lengths, "cpu"), KernelOptions(window=window)
    )
    for attend in (_of_whole_keys(sdpa), _in_parts):
        whole, _ = _attended(attend, lengths, context, window, query, key, value)
        torch.testing.assert_close(whole, expected)


def test_copies_that_fsdp_makes_of_a_layout_share_its_exchanges():
    layout = ContextLayout.from_layout(
        DocumentLayout.from_lengths([16], "cpu"), ContextGroups(SequenceShards(1, 2), *"ab")
    )
    copied = _apply_to_tensors(torch.clone, layout)
    assert copied is not layout
    assert copied.exchange(None) is layout.exchange(None)


def test_a_layout_that_leaves_rows_of_a_kernel_uncovered_is_refused():
    """A flash kernel would leave such rows uninitialized."""
    rows = torch.ones(6, 1, 2)
    for layout in (
        DocumentLayout.from_lengths([5], "cpu"),
        DocumentLayout.from_lengths([6], "cpu", [7]),
        DocumentLayout.from_lengths([4, 3], "cpu"),
    ):
        with pytest.raises(AssertionError):
            layout.attend(sdpa, rows, rows, rows, KernelOptions())
    with pytest.raises(AssertionError):
        DocumentLayout.from_lengths([6], "cpu").attend(lambda query, *_: query[:5], rows, rows, rows, KernelOptions())
    exchange = KeyExchange.from_offsets((0, 24, 72, 96), SequenceShards(1, 2, 1), None, "cpu")
    with pytest.raises(AssertionError):
        replace(exchange, calls=exchange.calls[:1])


def _sent(shards: SequenceShards, rows: KnownRows, x: torch.Tensor, group: int) -> torch.Tensor:
    """Return a rank's data for a group."""
    return parts_of(shards.slice(x), rows.own, rows.route.outgoing).split(rows.route.send_sizes)[group]


@pytest.mark.parametrize(("window", "received"), [(None, [[0, 8], [4, 0]]), (4, [[0, 3], [3, 0]]), (1, [[0, 0]] * 2)])
def test_only_keys_that_are_seen_travel(window, received):
    """One document of 16 tokens in chunks of 4: group 0 has the first and the last, group 1 the two between."""
    sizes = [
        KeyExchange.from_offsets((0, 16), SequenceShards(1, 2, rank), window, "cpu").rows.route.receive_sizes
        for rank in range(2)
    ]
    assert sizes == received


# --- on ranks -------------------------------------------------------------------------------------------------------

# In the last two, only one document crosses a chunk's edge: that of the last group, of two and of four groups.
PACKS = ((24,), (3, 1, 20), (8, 8, 8), (11, 2, 10, 1), (3,) * 8, (6, 12, 6), (3, 3, 3, 6, 3, 3, 3))
SHAPES = ((1, 4), (2, 2))  # (ranks of a Ulysses group, groups)
DTYPES = {torch.float64: 1e-12, torch.bfloat16: 1e-2}  # relative errors
CASES = [
    (*shape, pack, window, dtype) for shape in SHAPES for pack in PACKS for window in (None, 4) for dtype in DTYPES
]
CASES += [(2, 2, pack, None, torch.float64) for pack in compositions(8) if len(pack) < 4]
HEADS = ((4, 16), (2, 16), (2, 8), (4, 8))  # (heads, size) of queries, keys, values, outputs


def _tensors(dtype: torch.dtype, tokens: int) -> tuple[torch.Tensor, ...]:
    """Make a pack's queries, keys and values ``[T, heads, E]``, and weights of their attention."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in HEADS)


def _attend(backend: str) -> dict:
    """Return by case this rank's attention, gradients of its queries, keys and values, and collectives' bytes."""
    register_flash_stand_ins(torch.float64)
    set_backend(KERNELS[backend])
    answers = {}
    meshes = {shape: init_device_mesh("cpu", shape[::-1], mesh_dim_names=("across", "inside")) for shape in SHAPES}
    for case in CASES:
        ulysses, groups, lengths, window, dtype = case
        mesh = meshes[ulysses, groups]
        shards = SequenceShards(ulysses, groups, dist.get_rank())
        owned = ContextGroups(shards, mesh.get_group("inside"), mesh.get_group("across"))
        layout = ContextLayout.from_layout(DocumentLayout.from_lengths(lengths, "cpu"), owned)
        *tensors, weights = (shards.slice(x) for x in _tensors(dtype, sum(lengths)))
        inputs = [x.transpose(0, 1)[None].requires_grad_() for x in tensors]
        with recorded_all_to_alls() as sent:
            output, _ = packed_attention(torch.nn.Module(), *inputs, sliding_window=window, document_layout=layout)
            (output[0] * weights).sum().backward()
        gradients = [x.grad[0].transpose(0, 1) for x in inputs]
        answers[case] = [output[0].detach(), *gradients], sent
    return answers


BACKENDS = ["sdpa", "varlen"]


@pytest.fixture(scope="module")
def found():
    return run_cases({backend: (4, _attend, backend) for backend in BACKENDS})


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_have_the_attention_and_the_gradients_of_the_whole_pack(backend, found):
    answers = found[backend]
    for case in CASES:
        ulysses, groups, lengths, window, dtype = case
        *tensors, weights = (x.double() for x in _tensors(dtype, sum(lengths)))
        inputs = [x.requires_grad_() for x in tensors]
        expected = of_all_scores(*inputs, DocumentLayout.from_lengths(lengths, "cpu"), KernelOptions(window=window))
        (expected * weights).sum().backward()
        of_ranks = [answer[case] for answer in answers]
        whole = SequenceShards(ulysses, groups)
        for index, want in enumerate([expected.detach(), *(x.grad for x in inputs)]):
            have = whole.by_position(torch.cat([tensors[index] for tensors, _ in of_ranks])).double()
            assert (have - want).norm() <= DTYPES[dtype] * want.norm(), (case, index)
        # One exchange of queries, keys and values and one of the output inside a group, with one of keys and values
        # between groups if a document crosses; the gradients take as many.
        inside = [sum(lengths) // 4 * heads * size * dtype.itemsize for heads, size in HEADS]
        a_key = sum(heads * size * dtype.itemsize for heads, size in HEADS[1:3])
        edges = [sum(inside[:3]), inside[3]]
        for direction in (0, 1):
            across = []
            for _, sent in of_ranks:
                half = sent[direction * len(sent) // 2 : (direction + 1) * len(sent) // 2]
                if ulysses > 1:
                    assert [half[0], half[-1]] == edges[:: 1 - 2 * direction]
                    half = half[1:-1]
                assert len(half) == _crosses(lengths, window, whole), case
                across += half
            assert sum(across) == _foreign_keys(lengths, window, whole) * a_key, case


def test_returned_parts_of_a_half_precision_gradient_are_rounded_once():
    token = TokenRange(0, 1)
    own, returned = torch.ones(1, 1, 1).bfloat16(), torch.full((2, 1, 1), 0.75 * 2**-8).bfloat16()
    assert with_returned(own, returned, [token], [token, token], copy=True).item() == 1 + 2**-7
