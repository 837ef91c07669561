"""Megatron's sample indices and blends in the cache: those that are built, made anew for anything else."""

import os
import pickle

import numpy as np
import pytest

from tests.lib.errors import refused
from tests.lib.pretrain_files import write_index
from verl_ext.data.stream.megatron.blend import blend_order, megatron_blend_order
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.data.stream.megatron.samples import build_sample_indices, cached_blend, cached_sample_indices

ARRAYS = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture
def index(tmp_path):
    documents = np.split(np.arange(47), np.cumsum([3, 0, 9, 4, 30]))
    return TokenIndex(write_index(tmp_path / "corpus", documents), "data.val_dir")


def made(root):
    """Return the folders of a cache, each with a mark that a new folder would not have."""
    return {path.name: path.stat().st_ino for path in root.iterdir() if path.is_dir()}


@pytest.mark.parametrize("documents", [None, np.array([4, 0, 2])])
def test_cached_indices_are_those_that_are_built(tmp_path, index, documents):
    expected = build_sample_indices(index.lengths, documents, 4, 25, seed=1)
    folders = []
    for _ in range(2):
        cached = cached_sample_indices(tmp_path / "cache", index, documents, 4, 25, seed=1)
        for name in ARRAYS:
            array = getattr(cached, name)
            np.testing.assert_array_equal(array, getattr(expected, name), strict=True)
            assert not array.flags.writeable
        assert [piece.tolist() for piece in cached.pieces(7)] == [piece.tolist() for piece in expected.pieces(7)]
        folders.append(made(tmp_path / "cache"))
    assert folders[0] == folders[1]


def test_cached_indices_pickle_as_their_folder(tmp_path, index):
    cached = cached_sample_indices(tmp_path / "cache", index, None, 2, 5000, seed=1)
    pickled = pickle.dumps(cached)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    assert again.sample_index.tolist() == cached.sample_index.tolist()
    assert [piece.tolist() for piece in again.pieces(9)] == [piece.tolist() for piece in cached.pieces(9)]


def test_everything_that_indices_follow_from_makes_others(tmp_path, index):
    root = tmp_path / "cache"
    usual = {"documents": None, "seq_len": 4, "num_samples": 25, "seed": 1}
    cached_sample_indices(root, index, **usual)
    others = [
        {"documents": np.arange(6)[::-1]},
        {"documents": np.array([2, 4])},
        {"seq_len": 5},
        {"num_samples": None},
        {"seed": 2},
    ]
    for count, change in enumerate(others, 2):
        cached_sample_indices(root, index, **{**usual, **change})
        assert len(made(root)) == count


def test_a_corpus_that_changed_has_other_indices(tmp_path, index):
    cached_sample_indices(tmp_path / "cache", index, None, 4, 25, seed=1)
    changed = os.stat(index.files[0]).st_mtime_ns + 10**9
    os.utime(index.files[0], ns=(changed, changed))
    cached_sample_indices(tmp_path / "cache", index, None, 4, 25, seed=1)
    assert len(made(tmp_path / "cache")) == 2


@pytest.mark.parametrize(("old", "new"), [(b"'<i4'", b"'<f4'"), (b"(36, 2)", b"(2, 36)"), (b"NUMPY", b"NUMPX")])
def test_an_array_of_another_shape_or_dtype_is_refused_in_one_line(tmp_path, index, old, new):
    cached_sample_indices(tmp_path / "cache", index, None, 4, 30, seed=1)
    [path] = (tmp_path / "cache").glob("samples-*/sample_index.npy")
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with refused("data.cache_dir", path):
        cached_sample_indices(tmp_path / "cache", index, None, 4, 30, seed=1)


def test_a_corpus_shorter_than_a_sample_is_refused_before_anything_is_written(tmp_path, index):
    with refused("data.val_dir", "48 tokens", "47 tokens"):
        cached_sample_indices(tmp_path / "cache", index, None, 47, None, seed=1)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("rule", "order"), [("tijdeman", blend_order), ("megatron", megatron_blend_order)])
def test_a_cached_blend_is_the_rules_order(tmp_path, rule, order):
    expected = order([0.5, 0.2, 0.3], 50)
    folders = []
    for _ in range(2):
        for found, wanted in zip(cached_blend(tmp_path, [0.5, 0.2, 0.3], 50, rule), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)
        folders.append(made(tmp_path))
    assert folders[0] == folders[1]
    assert len(list(tmp_path.glob("blend-*/source.npy"))) == 1


def test_a_blend_of_other_weights_is_another_one(tmp_path):
    assert cached_blend(tmp_path, [1, 1], 4)[0].tolist() != cached_blend(tmp_path, [3, 1], 4)[0].tolist()
    with refused("data.val_blend", "[1, -1]"):
        cached_blend(tmp_path, [1, -1], 4, key="data.val_blend")


def test_a_full_disk_is_one_line_with_the_key_and_leaves_no_folder_of_arrays(tmp_path, index, files_end_at):
    root = tmp_path / "cache"
    of_samples = {"root": root, "index": index, "documents": None, "seed": 1}
    of_each = {
        "sample_index": lambda: cached_sample_indices(**of_samples, seq_len=1, num_samples=9000),
        "document_index": lambda: cached_sample_indices(**of_samples, seq_len=40, num_samples=4000),
        "source": lambda: cached_blend(root, [0.5, 0.5], 40_000),
        "sample": lambda: cached_blend(root, [0.5, 0.5], 10_000),
    }
    root.mkdir()
    for name, make in of_each.items():
        before = made(root)
        with files_end_at(1 << 16), refused("data.cache_dir", root, "File too large"):
            make()
        assert made(root) == before
        make()
        assert max(path.stat().st_size for path in root.glob(f"*/{name}.npy")) > 1 << 16
