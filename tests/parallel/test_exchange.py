"""Rows that travel between ranks, and their gradients, which travel back."""

import warnings

import torch
import torch.distributed as dist

from tests.lib.ranks import in_turn, run_ranks
from verl_ext.parallel.exchange import exchange_rows

ROWS = torch.tensor([[0, 2, 1], [3, 0, 0], [0, 0, 0]])  # from a rank (row) to another (column); the last sends none


def _exchanged(sizes):
    """Return (rows, what arrives, its gradient, that of the rows) of two columns, and the warnings."""
    rank = dist.get_rank()
    given = [] if sizes is None else [sizes[rank].tolist(), sizes[:, rank].tolist()]
    rows = torch.randn(sum(given[0]) if given else 6, 2, generator=torch.Generator().manual_seed(rank))
    rows = rows.T.contiguous().T.requires_grad_()
    with warnings.catch_warnings(record=True) as told:
        come = exchange_rows(rows, dist.group.WORLD, *given)
    upstream = torch.full_like(come, 10.0 * rank) + torch.arange(come.numel()).view_as(come)
    come.backward(upstream)
    return rows.detach(), come.detach(), upstream, rows.grad, [str(warning.message) for warning in told]


def _expected(parts, sizes):
    """Return by rank what arrives of each rank's parts, which are sent in the order of the ranks."""
    split = [part.split(row.tolist()) for part, row in zip(parts, sizes, strict=True)]
    return [torch.cat([of_rank[rank] for of_rank in split]) for rank in range(len(parts))]


def test_uneven_empty_and_equal_parts_travel_and_their_gradients_return_without_a_warning():
    of_ranks = run_ranks(in_turn, 3, [(_exchanged, ROWS), (_exchanged, None)])
    for sizes, found in zip((ROWS, None), zip(*of_ranks, strict=True), strict=True):
        rows, come, upstream, gradients, told = zip(*found, strict=True)
        sizes = torch.full((3, 3), 2) if sizes is None else sizes
        assert all(map(torch.equal, come, _expected(rows, sizes)))
        assert all(map(torch.equal, gradients, _expected(upstream, sizes.T)))
        assert not [*filter(None, told)]
