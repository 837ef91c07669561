"""The order and the units of documents with a common beginning, and their packs."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.packing.shared import BLOCK, SharedBeginnings, block_hashes, find_shared, plan_shared

Documents = list[list[int]]


@st.composite
def tries(draw: Any) -> Documents:
    """Documents that go on from a part of another, or begin anew; duplicates and single tokens among them."""
    token, documents = st.integers(0, 3), [draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))]
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.sampled_from([*documents, []]))
        kept = draw(st.integers(0, len(parent)))
        more = draw(st.lists(token, min_size=0 if kept else 1, max_size=12))
        documents.append(parent[:kept] + more)
    return documents


def lengths_of(documents: Documents) -> np.ndarray:
    return np.array([len(document) for document in documents])


def reader(documents: Documents) -> Any:
    def read(numbers: Any, starts: Any, sizes: Any) -> np.ndarray:
        parts = [documents[d][s : s + n] for d, s, n in zip(numbers, starts, sizes, strict=True)]
        return np.array([token for part in parts for token in part], np.int32)

    return read


def in_common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def check_beginnings(documents: Documents, kin: SharedBeginnings, least: int) -> None:
    assert len(set(kin.documents.tolist())) == len(kin.documents)
    pairs = zip(kin.documents[:-1], kin.documents[1:], kin.shared[1:], strict=True)
    for before, document, shared in pairs:
        assert shared == 0 or least <= shared <= in_common(documents[before], documents[document])
    assert not len(kin.shared) or kin.shared[0] == 0


@given(tries(), st.integers(1, 6))
def test_a_document_shares_what_is_said_with_the_one_before_it(documents: Documents, least: int) -> None:
    kin = find_shared(lengths_of(documents), least, reader(documents))
    check_beginnings(documents, kin, least)
    # Block by block, the order computes as few tokens as the sorted order of the texts.
    by_text = sorted(documents)
    blocks = (in_common(one, other) // least for one, other in pairwise(by_text))
    fewest = sum(number * least for number in blocks)
    assert kin.shared.sum() >= fewest


@given(tries(), st.integers(1, 6), st.data())
def test_tries_without_some_documents_share_what_is_left(documents: Documents, least: int, data: Any) -> None:
    kin = find_shared(lengths_of(documents), least, reader(documents))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))))
    check_beginnings(documents, kin.among(kept), least)
    assert all(kept[kin.among(kept).documents])


@given(tries(), st.integers(1, 6), st.integers(0, 100), st.sampled_from(["best_fit", "sorted_batch"]))
def test_packs_hold_every_document_behind_its_beginning(
    documents: Documents, least: int, spare: int, strategy: str
) -> None:
    lengths = lengths_of(documents)
    budget = int(lengths.max()) + spare
    plan = plan_shared(lengths, find_shared(lengths, least, reader(documents)), budget, strategy, seed=3)
    assert sorted(plan.document_index.tolist()) == list(range(len(documents)))
    assert plan.pack_tokens(lengths).max() <= budget
    begins = np.zeros(len(documents), int) if plan.begins is None else plan.begins
    assert not begins[plan.pack_offsets[:-1]].any()
    packed = [documents[document] for document in plan.document_index]
    for before, document, begin in zip(packed[:-1], packed[1:], begins[1:], strict=True):
        # The last shared token is one of the document's own.
        assert begin == 0 or document[: begin + 1] == before[: begin + 1]
        assert begin < len(document)


def test_a_trie_that_no_pack_holds_is_cut_where_documents_share_least() -> None:
    texts = [[text] * 40 for text in range(4)]
    documents = [[9, 9, *text, *[20 + number] * 3] for text in texts for number in range(4)]
    lengths = lengths_of(documents)
    plan = plan_shared(lengths, find_shared(lengths, 2, reader(documents)), 130, "best_fit", seed=0)
    # Two texts with their questions fit a pack: 42 + 3 + 3·4, and once more without the two tokens that all share.
    assert plan.num_packs == 2
    for pack in range(2):
        assert len({documents[d][2] for d in plan.documents(pack)}) == 2


def test_hashes_of_the_first_blocks_that_are_known_are_not_read_again() -> None:
    documents = [[*range(200), number] for number in range(3)] + [[number] * 100 for number in range(5)] + [[7] * 10]
    read, lengths = reader(documents), lengths_of(documents)
    first = np.array([block_hashes(np.array([d[:BLOCK]]))[0] if len(d) >= BLOCK else 0 for d in documents], np.uint64)
    asked: set[int] = set()

    def noted(numbers: Any, *rest: Any) -> np.ndarray:
        asked.update(map(int, numbers))
        return read(numbers, *rest)

    kin = find_shared(lengths, 128, noted, first)
    assert asked == {0, 1, 2}
    assert sorted(kin.documents.tolist()) == [0, 1, 2]
    assert kin.shared.tolist() == [0, 200, 200]
    assert find_shared(lengths, 128, read).shared.tolist() == [0, 200, 200]


def test_the_order_is_the_same_whatever_is_read_at_once(monkeypatch: Any) -> None:
    documents = [[*range(80), *[number % 7] * 30, number] for number in range(50)]
    expected = find_shared(lengths_of(documents), 8, reader(documents))
    monkeypatch.setattr("verl_ext.packing.shared._READ_TOKENS", 16)
    found = find_shared(lengths_of(documents), 8, reader(documents))
    assert [values.tolist() for values in found] == [values.tolist() for values in expected]
