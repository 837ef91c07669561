"""The scan over ranks, each with a share of the tokens, and its entries in the cache."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import run_ranks
from tests.tokenized_data import random_documents, write_tokenized
from verl_ext.data import SFTDataSet
from verl_ext.data.facts import shares
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.tokens.documents import Document, join_documents

pytestmark = pytest.mark.slow

LENGTHS = (5, 1, 9, 16, 3, 7, 2, 12, 30, 4)


@pytest.fixture
def cache(tmp_path):
    """Set the folder in which the ranks keep scans: see `shared_scan`."""
    return tmp_path / "cache" / "verl_ext_facts"


def kept(cache):
    """Return the folders in the cache."""
    return [path for path in cache.glob("*") if path.is_dir()]


@pytest.fixture
def documents():
    return random_documents(np.random.default_rng(0), LENGTHS, vocab=50, categories=3)


@pytest.fixture
def folder(tmp_path, documents):
    return write_tokenized(tmp_path / "data", documents, num_shards=3)


def shared_scan(folder, **options):
    """Return, on a rank, (scan as a tuple, tokens that this rank read, its output before it left or None)."""
    from contextlib import redirect_stderr
    from io import StringIO

    import datasets.config

    first = folder if isinstance(folder, str) else folder[0]
    datasets.config.HF_DATASETS_CACHE = Path(first).parent / "cache"
    from verl_ext.trainer.distributed import RunRanks

    dataset = SFTDataSet(folder, **{"max_tokens": 100, **options})
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            dataset.read_together(RunRanks())
    except SystemExit as left:
        return None, None, (left.code, errors.getvalue())
    return as_tuple(dataset.scan), dataset.scan.tokens_read, None


def as_tuple(scan):
    return scan.targets.tolist(), scan.min_token_id, scan.max_token_id, scan.category_ids, scan.over_length


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("policy", ["error", "drop", "truncate", "split"])
def test_every_rank_reads_a_share_and_gets_the_whole_scan(folder, ranks, policy):
    options = {} if policy == "error" else {"max_tokens": 6, "over_length": policy}
    alone = SFTDataSet(folder, **{"max_tokens": 100, **options})
    results = run_ranks(run_shared, ranks, folder, options)
    assert [scan for scan, _, _ in results] == [as_tuple(alone.scan)] * ranks
    read = [tokens for _, tokens, _ in results]
    over = [] if policy == "error" else [length for length in LENGTHS if length > 6]
    assert sum(count.tokens for count in alone.scan.over_length) == sum(over)
    assert sum(read) == sum(LENGTHS)
    assert max(read) <= sum(read) / ranks + 2 * max(LENGTHS)


def run_shared(folder, options):
    return shared_scan(folder, **options)


def test_more_ranks_than_documents_is_no_problem(tmp_path, documents):
    folder = write_tokenized(tmp_path / "one", documents[2:3])
    results = run_ranks(run_shared, 2, folder, {})
    assert [scan for scan, _, _ in results] == [as_tuple(SFTDataSet(folder, 100).scan)] * 2


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 9))
def test_shares_are_contiguous_and_within_a_document_of_even(lengths, ranks):
    edges = shares(np.asarray(lengths, np.int32), ranks)
    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    assert (np.diff(edges) >= 0).all()
    tokens = [sum(lengths[a:b]) for a, b in itertools.pairwise(edges)]
    assert max(tokens) < sum(lengths) / ranks + max(lengths)


@pytest.mark.parametrize("options", [{}, {"max_tokens": 6, "over_length": "truncate"}])
def test_a_second_start_reads_no_token(folder, options):
    (first, _, _), (second, _, _) = run_ranks(run_shared, 2, folder, options)
    results = run_ranks(run_shared, 2, folder, options)
    assert [(scan, tokens) for scan, tokens, _ in results] == [(first, 0), (second, 0)]


def test_a_mistake_in_any_share_is_told_once_and_nothing_is_kept(tmp_path, documents, cache):
    documents[-1]["loss_mask"][2] = 7
    folder = write_tokenized(tmp_path / "data", documents)
    results = run_ranks(run_shared, 2, folder, {})
    told = f"error: data.train_dir must have loss_mask 0 or 1; got 7 in row {len(documents) - 1}\n"
    assert [left for _, _, left in results] == [(2, told), (2, "")]
    assert kept(cache) == []


def test_data_without_a_target_in_any_share_is_refused(tmp_path, documents):
    for document in documents:
        document["loss_mask"][1:] = 0
    folder = write_tokenized(tmp_path / "data", documents)
    results = run_ranks(run_shared, 2, folder, {})
    assert [left[0] for _, _, left in results] == [2, 2]
    assert "must have target tokens; loss_mask is 0 everywhere" in results[0][2][1]


def test_a_share_without_a_target_is_no_mistake(tmp_path, documents):
    for document in documents[5:]:
        document["loss_mask"][:] = 0
    folder = write_tokenized(tmp_path / "data", documents)
    results = run_ranks(run_shared, 2, folder, {})
    assert [scan for scan, _, _ in results] == [as_tuple(SFTDataSet(folder, 100).scan)] * 2


# Entries of the cache


def start(folder, **options):
    """Start one rank, and return (scan as a tuple, tokens read)."""
    (result,) = run_ranks(run_shared, 1, folder, options)
    return result[:2]


@pytest.mark.parametrize("options", [{}, {"max_tokens": 6, "over_length": "drop"}])
def test_a_kept_scan_gives_back_what_was_read(folder, options):
    scan, tokens = start(folder, **options)
    assert tokens == sum(LENGTHS)
    assert start(folder, **options) == (scan, 0)
    assert scan == as_tuple(SFTDataSet(folder, **{"max_tokens": 100, **options}).scan)


def test_a_kept_scan_of_other_spans_or_folders_is_not_taken(tmp_path, folder, documents):
    start(folder)
    assert start(folder, max_tokens=200)[1] == 0  # the same spans
    assert start(folder, max_samples=9)[1] > 0
    assert start(folder, max_tokens=6, over_length="drop")[1] > 0
    start(folder, max_tokens=29, over_length="drop")
    assert start(folder, max_tokens=28, over_length="drop")[1] > 0  # the same spans, counted differently
    other = write_tokenized(tmp_path / "other", documents[:2])
    assert start([folder, other])[1] > 0


def test_a_kept_scan_of_data_that_changed_is_not_taken(folder):
    start(folder)
    shard = next(path for path in sorted(os.listdir(folder)) if path.endswith(".arrow"))
    os.utime(f"{folder}/{shard}")
    assert start(folder)[1] > 0
    assert start(folder)[1] == 0


DAMAGES = {
    "cut": lambda content: content[:-8],
    "flipped": lambda content: content[:-1] + b"\xff",
    "other": lambda _: b"1",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["targets.npy", "arrays.json"])
def test_a_broken_scan_is_ignored_and_overwritten(folder, damage, name, cache):
    scan, _ = start(folder)
    (file,) = cache.glob(f"*/{name}")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert start(folder) == (scan, sum(LENGTHS))
    assert start(folder) == (scan, 0)


def test_a_scan_that_cannot_be_kept_is_made_again(folder, cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    scan, tokens = start(folder)
    assert tokens == sum(LENGTHS)
    assert start(folder) == (scan, tokens)


def test_nothing_is_written_beside_the_data(folder):
    names = sorted(os.listdir(folder))
    start(folder)
    assert sorted(os.listdir(folder)) == names


# Folders that verl-ext has written


@pytest.fixture
def ours(tmp_path, documents):
    """Write documents of one category each as `verl-ext tokenize` does, and the same ones by another writer."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.mkdir()
    writer = DatasetWriter(ours)
    for number, document in enumerate(documents):
        category = number % 3 + 1
        document["category_ids"] = document["loss_mask"] * np.int32(category)
        ids, mask = document["input_ids"].astype(np.int32), document["loss_mask"].astype(np.int8)
        writer.add(join_documents([Document(ids, mask)], category, 0))
    writer.close()
    return str(ours), write_tokenized(other, documents)


@pytest.mark.parametrize("policy", ["error", "drop", "truncate", "split"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_our_folders_only_documents_longer_than_a_pack_are_read(ours, policy, ranks):
    options = {} if policy == "error" else {"max_tokens": 6, "over_length": policy}
    results = run_ranks(run_shared, ranks, ours[0], options)
    expected = as_tuple(SFTDataSet(ours[1], **{"max_tokens": 100, **options}).scan)
    assert [scan for scan, _, _ in results] == [expected] * ranks
    over = [] if policy == "error" else [length for length in LENGTHS if length > 6]
    assert sum(tokens for _, tokens, _ in results) == sum(over)


def test_a_folder_of_ours_and_one_of_another_writer_are_one_dataset(ours):
    both = SFTDataSet(list(ours), 100, strategy="none")
    other = SFTDataSet([ours[1], ours[1]], 100, strategy="none")
    assert as_tuple(both.scan) == as_tuple(other.scan)
    assert (both.scan.tokens_read, other.scan.tokens_read) == (sum(LENGTHS), 2 * sum(LENGTHS))


def test_a_folder_that_was_changed_with_datasets_is_read(ours, tmp_path):
    changed = load_from_disk(ours[0]).map(lambda row: {"loss_mask": [0] + [1] * (len(row["loss_mask"]) - 1)})
    changed.save_to_disk(str(tmp_path / "changed"))
    scan = SFTDataSet(str(tmp_path / "changed"), 100).scan
    assert scan.targets.tolist() == [length - 1 for length in LENGTHS]
    assert scan.tokens_read == sum(LENGTHS)
