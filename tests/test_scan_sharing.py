"""The scan over ranks, each with a share of the tokens, and its memo beside the data."""

import itertools
import os
import zipfile

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import run_ranks
from tests.tokenised_data import random_documents, write_tokenised
from verl_ext.data import SFTDataSet
from verl_ext.data.stats import FILE_NAME, ScanMemo

LENGTHS = (5, 1, 9, 16, 3, 7, 2, 12, 30, 4)


@pytest.fixture
def documents():
    return random_documents(np.random.default_rng(0), LENGTHS, vocab=50, categories=3)


@pytest.fixture
def folder(tmp_path, documents):
    return write_tokenised(tmp_path / "data", documents, num_shards=3)


def shared_scan(folder, **options):
    """On a rank: (scan as a tuple, tokens that this rank read, what it printed before it left or None)."""
    from contextlib import redirect_stderr
    from io import StringIO

    from verl_ext.trainer.distributed import share_scan

    dataset = CountingDataset(folder, **{"max_tokens": 100, **options})
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            share_scan(dataset)
    except SystemExit as left:
        return None, dataset.tokens_read, (left.code, errors.getvalue())
    return as_tuple(dataset.scan), dataset.tokens_read, None


class CountingDataset(SFTDataSet):
    tokens_read = 0

    def scan_part(self, first, last, progress=True):
        self.tokens_read += int(self.spans.length[first:last].sum())
        return super().scan_part(first, last, progress)

    def over_length_part(self, first, last, progress=True):
        self.tokens_read += int(self.over_length.lengths[first:last].sum())
        return super().over_length_part(first, last, progress)


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
    assert sum(read) == alone.spans.length.sum() + sum(over)
    assert max(read) <= sum(read) / ranks + 2 * max(LENGTHS)


def run_shared(folder, options):
    return shared_scan(folder, **options)


def test_more_ranks_than_documents_is_no_problem(tmp_path, documents):
    folder = write_tokenised(tmp_path / "one", documents[2:3])
    results = run_ranks(run_shared, 2, folder, {})
    assert [scan for scan, _, _ in results] == [as_tuple(SFTDataSet(folder, 100).scan)] * 2


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 9))
def test_shares_are_contiguous_and_within_a_document_of_even(lengths, ranks):
    from verl_ext.trainer.distributed import shares

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


def test_a_mistake_in_any_share_is_told_once_and_leaves_no_memo(tmp_path, documents):
    documents[-1]["loss_mask"][2] = 7
    folder = write_tokenised(tmp_path / "data", documents)
    results = run_ranks(run_shared, 2, folder, {})
    told = f"error: data.train_dir must have loss_mask 0 or 1; got 7 in row {len(documents) - 1}\n"
    assert [left for _, _, left in results] == [(2, told), (2, "")]
    assert not os.path.exists(f"{folder}/{FILE_NAME}")


def test_data_without_a_target_in_any_share_is_refused_and_leaves_no_memo(tmp_path, documents):
    for document in documents:
        document["loss_mask"][1:] = 0
    folder = write_tokenised(tmp_path / "data", documents)
    results = run_ranks(run_shared, 2, folder, {})
    assert [left[0] for _, _, left in results] == [2, 2]
    assert "must have target tokens; loss_mask is 0 everywhere" in results[0][2][1]
    assert not os.path.exists(f"{folder}/{FILE_NAME}")


def test_a_share_without_a_target_is_no_mistake(tmp_path, documents):
    for document in documents[5:]:
        document["loss_mask"][:] = 0
    folder = write_tokenised(tmp_path / "data", documents)
    results = run_ranks(run_shared, 2, folder, {})
    assert [scan for scan, _, _ in results] == [as_tuple(SFTDataSet(folder, 100).scan)] * 2


# The memo itself


def memo_of(*folders, **options):
    dataset = SFTDataSet(list(folders), **{"max_tokens": 100, **options})
    return ScanMemo(dataset.folders, dataset.spans, dataset.over_length), dataset


def written(folder, **options):
    memo, dataset = memo_of(folder, **options)
    memo.write(dataset.scan)
    return dataset.scan


@pytest.mark.parametrize("options", [{}, {"max_tokens": 6, "over_length": "drop"}])
def test_a_memo_gives_back_what_was_scanned(folder, options):
    scan = written(folder, **options)
    read = memo_of(folder, **options)[0].read()
    assert bool(read.over_length) == bool(options)
    assert as_tuple(read) == as_tuple(scan)
    assert read.targets.dtype == np.int32
    assert all(type(number) is int for number in (read.min_token_id, read.max_token_id, *read.category_ids))


def test_a_memo_of_other_spans_or_folders_is_not_taken(tmp_path, folder, documents):
    written(folder)
    assert memo_of(folder, max_tokens=200)[0].read() is not None  # the same spans
    assert memo_of(folder, max_samples=9)[0].read() is None
    assert memo_of(folder, max_tokens=6, over_length="drop")[0].read() is None
    written(folder, max_tokens=29, over_length="drop")
    assert memo_of(folder, max_tokens=28, over_length="drop")[0].read() is None  # the same spans, counted differently
    other = write_tokenised(tmp_path / "other", documents[:2])
    assert memo_of(folder, other)[0].read() is None


def test_a_memo_of_data_that_changed_is_not_taken(folder):
    written(folder)
    shard = next(path for path in sorted(os.listdir(folder)) if path.endswith(".arrow"))
    os.utime(f"{folder}/{shard}")
    assert memo_of(folder)[0].read() is None
    written(folder)
    assert memo_of(folder)[0].read() is not None


@pytest.mark.parametrize("damage", ["cut", "flipped", "other_file", "pickle", "wrong_count", "no_key"])
def test_a_broken_memo_is_ignored_and_overwritten(folder, damage):
    scan = written(folder)
    path = f"{folder}/{FILE_NAME}"
    DAMAGES[damage](path)
    memo, _ = memo_of(folder)
    assert memo.read() is None
    memo.write(scan)
    assert as_tuple(memo.read()) == as_tuple(scan)


def _cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def _flip(path):
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("targets.npy").header_offset + 200
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 255]))


def _other_file(path):
    with open(path, "w") as file:
        file.write("not a zip file")


def _change(path, **more):
    with np.load(path) as arrays:
        contents = {**arrays, **more}
    with open(path, "wb") as file:
        np.savez(file, **contents)


DAMAGES = {
    "cut": _cut,
    "flipped": _flip,
    "other_file": _other_file,
    "pickle": lambda path: _change(path, targets=np.array([{}], object)),
    "wrong_count": lambda path: _change(path, targets=np.zeros(3, np.int32)),
    "no_key": lambda path: _change(path, key=np.array(["a", "b"])),
}


def test_a_memo_that_cannot_be_written_leaves_nothing_behind(folder, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(folder))
    monkeypatch.setattr(np, "savez", full_disk)
    written(folder)
    assert sorted(os.listdir(folder)) == before


def test_a_folder_with_a_memo_opens_as_before(folder, documents, tmp_path):
    written(folder)
    assert os.path.exists(f"{folder}/{FILE_NAME}")
    assert len(load_from_disk(folder)) == len(documents)
    assert len(SFTDataSet(folder, 100)) == len(memo_of(folder)[1])
    assert [name for name in os.listdir(folder) if name.startswith(FILE_NAME)] == [FILE_NAME]
