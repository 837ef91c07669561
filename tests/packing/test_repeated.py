"""Packs of documents that a mixture draws several times: copies lie in different packs. Pure functions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.packing import plan_packs
from verl_ext.packing.strategies import MOST_PARTS, PART_PACKS, plan_repeated


def test_copies_of_a_document_go_into_different_packs():
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 60, 3000)
    documents = np.concatenate([np.arange(3000), np.arange(3000)[lengths > 30], np.arange(1000)])
    plan = plan_repeated(lengths, documents, 100, "best_fit", seed=0)
    assert sorted(plan.document_index) == sorted(documents)
    assert plan.pack_sums(lengths).max() <= 100
    for pack in range(plan.num_packs):
        assert len(set(plan.documents(pack))) == len(plan.documents(pack))
    assert plan.num_packs <= plan_packs(lengths[documents], 100).num_packs * 1.02


def test_short_documents_repeated_as_often_as_there_are_parts_never_meet_and_fill_their_packs():
    lengths = np.random.default_rng(0).integers(20, 301, 4000)
    documents = np.repeat(np.arange(4000), 1 + np.arange(4000) % MOST_PARTS)
    assert lengths[documents].sum() > 1000 * MOST_PARTS * PART_PACKS
    plan = plan_repeated(lengths, documents, 1000, "best_fit", seed=0)
    assert plan.num_packs <= plan_packs(lengths[documents], 1000).num_packs * 1.003
    assert all(len(np.unique(plan.documents(pack))) == len(plan.documents(pack)) for pack in range(plan.num_packs))


def test_one_document_repeated_far_more_often_than_the_rest_does_not_split_them_all():
    lengths = np.random.default_rng(0).integers(20, 301, 40_000)
    documents = np.concatenate([np.arange(40_000), np.full(600, 7)])
    plan = plan_repeated(lengths, documents, 1000, "best_fit", seed=0)
    assert plan.num_packs <= plan_packs(lengths[documents], 1000).num_packs * 1.003


def test_documents_that_cannot_meet_themselves_are_packed_as_one_list():
    lengths = np.random.default_rng(0).integers(51, 101, 1000)
    documents = np.tile(np.arange(1000), 3)
    plan, one_list = plan_repeated(lengths, documents, 100, "best_fit", 0), plan_packs(lengths[documents], 100)
    assert plan.document_index.tolist() == documents[one_list.document_index].tolist()


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.lists(st.integers(0, 10**6), max_size=60),
    st.sampled_from(["best_fit", "next_fit", "none"]),
)
def test_a_plan_of_repeated_documents_holds_each_as_often_as_it_is_drawn(lengths, drawn, strategy):
    documents = np.array(drawn, np.int64) % len(lengths)
    plan = plan_repeated(np.array(lengths), documents, 20, strategy, seed=0)
    assert sorted(plan.document_index) == sorted(documents)
    assert plan.pack_offsets[-1] == len(documents)
    assert (plan.pack_sums(lengths) <= 20).all()
    assert (np.diff(plan.pack_offsets) > 0).all()


def test_few_packs_are_planned_as_one_list():
    lengths, documents = np.array([60, 40]), np.array([0, 0, 1, 1])
    assert plan_repeated(lengths, documents, 100, "best_fit", seed=0).num_packs == 2
