"""A mixture in SFTDataSet: its sources, its folders and its packs."""

import pickle

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.lib.errors import refused
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import SFTDataSet
from verl_ext.data.packs.mixture import mixture_notices
from verl_ext.packing import STRATEGIES, plan_packs


@pytest.fixture
def folders(tmp_path):
    """Write two folders; every document begins with its own token: 1.. in the first, 501.. in the second."""
    rng = np.random.default_rng(0)
    paths = []
    for first_token, sizes in ((1, rng.integers(2, 40, 60)), (501, rng.integers(2, 20, 30))):
        documents = random_documents(rng, sizes, vocab=50, categories=2)
        for number, document in enumerate(documents):
            document["input_ids"][:] = number + first_token
        paths.append(write_tokenized(tmp_path / str(first_token), documents, {1: "one", 2: "two"}))
    return paths


def documents_of(dataset):
    """Return (first token, length) of every document of every pack."""
    found = []
    for row in dataset:
        begins = np.flatnonzero(row["position_ids"].numpy() == 0)
        sizes = np.diff([*begins, len(row["input_ids"])])
        found += zip(row["input_ids"].numpy()[begins].tolist(), sizes.tolist(), strict=True)
    return found


MIXTURE = {
    "sources": {
        "all": {"tokens": 400},
        "long": {"tokens": 1200, "intervals": [10, 20, 40]},
        "papers": {"weight": 1, "train_dir": None},
    }
}


@pytest.fixture
def mixture(folders):
    sources = {**MIXTURE["sources"], "papers": {"weight": 1, "train_dir": folders[1]}}
    return {"sources": sources}


def test_packs_hold_the_documents_drawn_and_every_document_as_often_as_drawn(folders, mixture):
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    found = documents_of(dataset)
    assert len(found) == sum(row.documents for row in dataset.mixture_report) == dataset.facts().documents.sum()
    assert sum(size for _, size in found) == sum(row.tokens_given for row in dataset.mixture_report)
    tokens = dataset.plan().pack_sums(dataset.spans.length)
    assert tokens.tolist() == dataset.facts().tokens.tolist()
    assert tokens.max() <= 50
    assert dataset.facts().targets.tolist() == [int(row["loss_mask"].sum()) for row in dataset]


def test_a_source_draws_from_its_own_folder_or_from_train_dir(folders, mixture):
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    assert dataset.folders == tuple(folders)
    of_papers = [token for token, _ in documents_of(dataset) if token > 500]
    assert len(of_papers) == len(set(of_papers)) == 30  # the weighted source draws each of its documents once
    papers = dataset.mixture_report[-1]
    assert (papers.source, papers.low, papers.high, papers.epochs, papers.off) == ("papers", None, None, 1.0, 0.0)


def test_train_dir_is_not_needed_where_every_source_has_its_own(folders):
    mixture = {"sources": {"one": {"weight": 1, "train_dir": folders[1]}}}
    assert SFTDataSet(None, 50, mixture=mixture).folders == (folders[1],)
    with refused("data.train_dir", "None"):
        SFTDataSet(None, 50, mixture={"sources": {"one": {"weight": 1}}})
    assert SFTDataSet("/no/such", 50, mixture=mixture).folders == (folders[1],)  # nothing draws from it
    missing = {"sources": {"one": {"weight": 1, "train_dir": "/no/such"}}}
    with refused("data.mixture.sources.one.train_dir", "/no/such"):
        SFTDataSet(None, 50, mixture=missing)


def test_a_folder_named_twice_is_read_once(folders):
    mixture = {"sources": {"first": {"tokens": 100}, "second": {"tokens": 100, "train_dir": folders}}}
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    assert dataset.folders == tuple(folders)
    assert len(dataset.spans) == 90


def test_the_config_node_gives_the_same_packs_as_the_keyword(folders, mixture):
    config = OmegaConf.create({"max_tokens": 50, "mixture": mixture})
    theirs = SFTDataSet(parquet_files=folders[0], config=config)
    ours = SFTDataSet(folders[0], 50, mixture=mixture)
    assert theirs.plan().document_index.tolist() == ours.plan().document_index.tolist()
    assert theirs.mixture_report == ours.mixture_report
    none = SFTDataSet(parquet_files=folders[0], config=OmegaConf.create({"max_tokens": 50, "mixture": None}))
    assert (list(none.mixture_report), len(none.plan().document_index)) == ([], 60)


def test_the_lengths_of_a_mixture_are_those_after_over_length_handling(folders):
    mixture = {"sources": {"full": {"tokens": 200, "intervals": [9, 10]}, "tails": {"tokens": 60, "intervals": [0, 9]}}}
    dataset = SFTDataSet(folders[0], 10, over_length="split", mixture=mixture)
    full, tails = dataset.mixture_report
    assert (full.documents, full.tokens_given) == (20, 200)
    assert tails.tokens_given == pytest.approx(60, abs=1)
    assert {size for _, size in documents_of(dataset)} >= {10}
    assert all(size <= 10 for _, size in documents_of(dataset))


def test_what_hinders_is_named_by_row_and_folder(folders, tmp_path):
    own = write_tokenized(tmp_path / "own", random_documents(np.random.default_rng(0), [5, 45], 50, 1))
    mixture = {"sources": {"short": {"tokens": 30}, "own": {"tokens": 30, "intervals": [20, 64], "train_dir": own}}}
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    row = dataset.mixture_report[-1]
    assert (row.tokens_given, row.off) == (45, 0.5)
    assert row.blocked_by == f"row 1 of {own} (45 tokens) drawn once less would make it -100.00%"
    *_, notice = mixture_notices(dataset.mixture_report)
    assert notice.startswith("data.mixture: source own, 20 < length <= 64 gives 45 of 30 tokens (+50.00%); row 1 of ")


def test_a_split_document_that_hinders_is_named_by_where_its_piece_begins(tmp_path):
    own = write_tokenized(tmp_path / "own", random_documents(np.random.default_rng(0), [25], 50, 1))
    sources = {"own": {"tokens": 4, "intervals": [0, 8]}}
    dataset = SFTDataSet(own, 10, over_length="split", mixture={"sources": sources})
    assert dataset.mixture_report[0].blocked_by.startswith(f"row 0 of {own} (5 tokens from 20) drawn once less")


@pytest.mark.parametrize("max_tokens", [2**53 + 1, 2**62, 2**63, 10**30])
@pytest.mark.parametrize("strategy", ["best_fit", "next_fit"])
def test_a_pack_of_more_tokens_than_sums_can_hold_is_one_line(folders, max_tokens, strategy):
    with refused("data.max_tokens", 2**53, max_tokens):
        SFTDataSet(folders[0], max_tokens, strategy=strategy)
    with refused("data.max_tokens", 2**53, max_tokens):
        plan_packs([1, 2], max_tokens, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_largest_pack_is_planned(strategy):
    assert plan_packs([5, 3], 2**53, strategy).pack_sums([5, 3]).sum() == 8


def test_max_samples_is_refused_with_a_mixture(folders, mixture):
    with refused("data.train_max_samples", "data.mixture", 3):
        SFTDataSet(folders[0], 50, mixture=mixture, max_samples=3)


def test_a_worker_gets_the_same_packs(folders, mixture):
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    theirs = pickle.loads(pickle.dumps(dataset))
    assert documents_of(theirs) == documents_of(dataset)
    assert theirs.mixture_report == dataset.mixture_report


def test_a_source_that_is_named_like_a_category_but_would_draw_them_all_is_refused(folders):
    shares = {"one": {"weight": 1}, "two": {"weight": 3}}
    with refused("data.mixture.sources.one", "train_dir=null"):
        SFTDataSet(folders[0], 50, mixture={"sources": shares})
    only = write_tokenized(folders[0] + "_one", random_documents(np.random.default_rng(1), [5] * 9, 50, 1), {1: "one"})
    own = {"one": {"weight": 1, "train_dir": only}, "two": {"weight": 3, "train_dir": folders[1]}}
    assert len(SFTDataSet(None, 50, mixture={"sources": own}).mixture_report) == 2
    assert SFTDataSet(only, 50, mixture={"sources": {"one": {"weight": 1}}}).mixture_report
