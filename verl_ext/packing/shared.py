"""Beginnings that documents share: an order in which each follows one that begins alike, and units that fit a pack.

    documents   A: s s s q q a a      B: s s s r r b      C: s s s r u      D: x y
    order       A  B  C               shared  0  3  4     D shares nothing and is not in it
    own tokens  A: s s s q q a a      B: s r r b          C: r u            from tokens 0, 2 and 3 on

A document shares tokens with the whole text of the document before it, which may share its own with the one before.
The last shared token is repeated, because here it predicts another one. Documents come in depth-first order of their
trie, so that one number a document describes any tree. Siblings come in the order of hashes, which is random and the
same everywhere.

Blocks of tokens are compared by hash, round by round, among the documents that agree so far: the work is the tokens
that are shared. Whoever lays a document beside the one before it compares the tokens themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.plan import Bools, Indices, Ints, PackPlan, index_type, offsets_of
from verl_ext.packing.strategies import deal_copies, plan_packs, plan_repeated

BLOCK = 64  # tokens compared at once
MOST_KEYS = 8  # tokens of a unit's texts for each that is computed: attention holds the keys of whole texts
SHORTER = np.uint64(0)  # the hash of a document of fewer tokens than a block
_READ_TOKENS = 1 << 22  # most tokens in memory at once
_FACTORS = np.random.default_rng(0).integers(0, 1 << 63, BLOCK, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

# (documents int64[n], first tokens int64[n], numbers of tokens int64[n]) -> the tokens one after the other, integer[T]
ReadTokens = Callable[[Ints, Ints, Ints], Indices]


class SharedBeginnings(NamedTuple):
    """The documents with a common beginning, int64[G] in order, and the tokens that each shares, int64[G].

    `shared` counts the tokens in common with the document before; 0 begins a trie. A trie has at least two documents.
    """

    documents: Ints
    shared: Ints

    @property
    def saved_tokens(self) -> int:
        """The tokens that are not computed again if each document follows the one before in a pack."""
        return int(np.maximum(self.shared - 1, 0).sum())

    def among(self, is_kept: Bools) -> "SharedBeginnings":
        """Return the tries of the kept documents alone; is_kept bool[D] of all documents."""
        kept = np.flatnonzero(is_kept[self.documents])
        if not len(kept):
            return NOTHING
        # A document shares with the one that now stands before it what all from there on share.
        shared = np.minimum.reduceat(self.shared[: kept[-1] + 1], np.append(0, kept[:-1] + 1))
        return _without_single(self.documents[kept], shared)


NOTHING = SharedBeginnings(np.zeros(0, np.int64), np.zeros(0, np.int64))


def block_hashes(blocks: Indices) -> NDArray[np.uint64]:
    """Return uint64[n], never `SHORTER`: a hash of each row of integer[n, ≤ BLOCK]."""
    value = blocks.astype(np.uint64) @ _FACTORS[: blocks.shape[1]]
    value ^= value >> np.uint64(29)
    value *= np.uint64(0x9E3779B97F4A7C15)
    return value | np.uint64(1)


def find_shared(
    lengths: Indices, least: int, read: ReadTokens, first: NDArray[np.uint64] | None = None
) -> SharedBeginnings:
    """Find the documents that share at least `least` tokens; lengths integer[D].

    first: uint64[D], the hashes of each document's first BLOCK tokens if they are known, `SHORTER` without so many; not
    used where `least` is below BLOCK.
    """
    block = min(BLOCK, least)
    if first is None or block < BLOCK:
        first = _hashes(np.arange(len(lengths)), 0, block, lengths, read)
    candidates = repeated_hashes(first)
    documents, shared = _depth_first(candidates, first[candidates], block, lengths, read)
    _extend(documents, shared, block, lengths, read)
    shared[shared < least] = 0
    return _without_single(documents, shared)


def _hashes(documents: Ints, depth: int, block: int, lengths: Indices, read: ReadTokens) -> NDArray[np.uint64]:
    """Return the hash of block `depth` of each document, `SHORTER` where it does not have it whole."""
    hashes = np.full(len(documents), SHORTER)
    whole = np.flatnonzero(lengths[documents] >= (depth + 1) * block)
    for part in np.array_split(whole, -(-len(whole) * block // _READ_TOKENS) or 1):
        same = np.ones(len(part), np.int64)
        tokens = read(documents[part], same * (depth * block), same * block)
        hashes[part] = block_hashes(tokens.reshape(-1, block))
    return hashes


def repeated_hashes(hashes: NDArray[np.uint64]) -> Ints:
    """Return the places of hashes that occur more than once."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != SHORTER)])
    if not len(repeated):
        return np.zeros(0, np.int64)
    at = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
    return np.flatnonzero(repeated[at] == hashes)


def _depth_first(
    documents: Ints,
    first: NDArray[np.uint64],
    block: int,
    lengths: Indices,
    read: ReadTokens,
) -> tuple[Ints, Ints]:
    """Return documents in depth-first order of their tries, and the whole blocks' tokens that each shares."""
    by_hash = np.lexsort((documents, first))
    order, first = documents[by_hash], first[by_hash]
    shared = np.zeros(len(order), np.int64)
    places = np.arange(len(order))  # of the documents that may share more
    trie = np.cumsum(np.append(False, first[1:] != first[:-1]))  # of each place, documents that agree so far
    depth = 1
    while len(places):
        keys = _hashes(order[places], depth, block, lengths, read)
        # Documents that end here come in a random order too: after all siblings, they would end every trie.
        ended = keys == SHORTER
        keys[ended] = block_hashes(order[places][ended, None])
        by_key = np.lexsort((ended, keys, trie))
        order[places], keys, trie, ended = order[places][by_key], keys[by_key], trie[by_key], ended[by_key]
        in_trie = np.append(False, trie[1:] == trie[:-1])
        agrees = in_trie & np.append(False, (keys[1:] == keys[:-1]) & ~ended[1:] & ~ended[:-1])
        shared[places[in_trie & ~agrees]] = depth * block  # siblings part here
        group = np.cumsum(~agrees) - 1
        goes_on = np.bincount(group)[group] > 1
        places, trie = places[goes_on], group[goes_on]
        depth += 1
    return order, shared


def _extend(
    documents: Ints,
    shared: Ints,
    block: int,
    lengths: Indices,
    read: ReadTokens,
) -> None:
    """Add to `shared` the tokens of the next block that a document has in common with the one before it."""
    followers = np.flatnonzero(shared)
    for part in np.array_split(followers, -(-len(followers) * block // _READ_TOKENS) or 1):
        one, other, start = documents[part - 1], documents[part], shared[part]
        size = np.minimum(np.minimum(lengths[one], lengths[other]) - start, block)
        shared[part] += _in_common(one, other, start, size, read)


def _in_common(one: Ints, other: Ints, start: Ints, size: Ints, read: ReadTokens) -> Ints:
    """Return int64[n], how many of `size` tokens from `start` on each two documents have in common."""
    differs = read(one, start, size) != read(other, start, size)
    place = np.arange(len(differs)) - np.repeat(np.cumsum(size) - size, size)
    common = size.copy()
    np.minimum.at(common, np.repeat(np.arange(len(size)), size)[differs], place[differs])
    return common


def shared_with_before(documents: Ints, lengths: Indices, read: ReadTokens) -> Ints:
    """Return int64[n], the tokens that each document has in common with the one numbered before it.

    documents: int64[n], each at least 1. lengths: integer[D] of all documents.
    """
    shared = np.zeros(len(documents), np.int64)
    least = np.minimum(lengths[documents - 1], lengths[documents]).astype(np.int64)
    block, going = BLOCK, np.arange(len(documents))
    while len(going):
        agrees = []
        for part in np.array_split(going, -(-len(going) * block // _READ_TOKENS) or 1):
            size = np.minimum(least[part] - shared[part], block)
            common = _in_common(documents[part] - 1, documents[part], shared[part], size, read)
            shared[part] += common
            agrees.append(common == size)
        going = going[np.concatenate(agrees)]
        going, block = going[shared[going] < least[going]], min(2 * block, _READ_TOKENS)
    return shared


def _without_single(documents: Ints, shared: Ints) -> SharedBeginnings:
    """Leave out tries of one document."""
    begins = shared == 0
    single = begins & np.append(begins[1:], True)
    return SharedBeginnings(documents[~single], shared[~single])


def unit_starts(lengths: Indices, shared: Ints, max_tokens: int) -> Bools:
    """Return bool[G], True where a unit begins.

    lengths: integer[G] of the documents in order, each at most max_tokens. A unit is a run of a trie whose own tokens
    fit a pack, and whose texts have at most MOST_KEYS times as many; its first document owns all of its tokens. A trie
    that does not fit is cut where the documents share least, within the last quarter of what fits.
    """
    own = lengths - np.maximum(shared - 1, 0)
    starts = shared == 0
    begins = np.flatnonzero(starts)
    ends = np.append(begins[1:], len(shared))
    before = offsets_of(own)
    keys_over = offsets_of(lengths) - MOST_KEYS * before
    for begin, end in zip(begins, ends, strict=True):
        first = begin
        while True:
            again = lengths[first] - own[first]  # the tokens that its first document owns again
            fitting = min(np.searchsorted(before, before[first] + max_tokens - again, side="right") - 1, end)
            over = keys_over[first + 1 : fitting + 1] > keys_over[first] + MOST_KEYS * again
            if over.any():
                fitting = first + int(over.argmax())
            if fitting >= end:
                break
            quarter = np.searchsorted(before, before[fitting] - max_tokens // 4)
            earliest = max(first + 1, min(quarter, fitting))
            least = shared[earliest : fitting + 1]
            first = fitting - int(least[::-1].argmin())
            starts[first] = True
    return starts


def plan_shared(lengths: Indices, kin: SharedBeginnings, max_tokens: int, strategy: str, seed: int) -> PackPlan:
    """Return packs of all documents, those that share a beginning together; lengths integer[D].

    The strategy packs units and single documents alike, by the tokens that are computed. Raises as `plan_packs` does.
    """
    if not len(kin.documents):
        return plan_packs(lengths, max_tokens, strategy, seed)
    starts = unit_starts(lengths[kin.documents], kin.shared, max_tokens)
    begins = np.where(starts, 0, kin.shared - 1)
    single = np.ones(len(lengths), bool)
    single[kin.documents] = False
    # Units first, then single documents, as runs of one list of documents.
    documents = np.concatenate([kin.documents, np.flatnonzero(single)]).astype(index_type(len(lengths)))
    begins = np.concatenate([begins, np.zeros(len(documents) - len(begins), np.int64)])
    first = np.concatenate([np.flatnonzero(starts), np.arange(len(starts), len(documents))])
    sizes = np.diff(first, append=len(documents))
    plan = plan_packs(np.add.reduceat(lengths[documents] - begins, first), max_tokens, strategy, seed)
    return plan.expanded((first, sizes), begins).renumbered(documents)


def plan_drawn(
    lengths: Indices, documents: Ints, kin: SharedBeginnings, max_tokens: int, strategy: str, seed: int
) -> PackPlan:
    """Return the plan of `documents` int64[D] as `plan_repeated` does, those that share a beginning together.

    Of a document that a part holds several times, one copy alone shares tokens.
    """
    if not len(kin.documents):
        return plan_repeated(lengths, documents, max_tokens, strategy, seed)
    plans = []
    for part in deal_copies(lengths, documents, max_tokens, strategy, seed):
        place = np.full(len(lengths), -1)
        place[part[::-1]] = np.arange(len(part))[::-1]  # of its first copy in the part
        of_part = kin.among(place >= 0)
        numbered = SharedBeginnings(place[of_part.documents], of_part.shared)
        plans.append(plan_shared(lengths[part], numbered, max_tokens, strategy, seed).renumbered(part))
    return PackPlan.joined(plans)
