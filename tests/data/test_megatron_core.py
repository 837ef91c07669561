"""Compatibility with megatron-core in both directions: files, sample indices for the same seed, and blends."""

import pickle
import struct
import types

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.lib.corpora import LONGEST, corpora
from tests.lib.megatron_peer import (
    gpt_dataset,
    helpers,
    indexed_dataset,
    megatron_file,
    open_blend,
    open_gpt_dataset,
    utils,
)
from verl_ext.data import MultiDocDataset
from verl_ext.data.stream.megatron.blend import megatron_blend_order, megatron_helpers, normalised
from verl_ext.data.stream.megatron.index import HEADER, MAGIC, VERSION, IndexWriter, TokenIndex
from verl_ext.data.stream.megatron.samples import build_sample_indices
from verl_ext.text.encoder_texts import optimal_dtype

ARRAYS = ("document_index", "sample_index", "shuffle_index")


def our_file(prefix, sequences, dtype):
    writer = IndexWriter(prefix, dtype)
    for sequence in sequences:
        writer.add(np.array(sequence, np.int64), np.array([len(sequence)]))
    writer.close()
    return prefix


def megatron_indices(lengths, documents, seq_len, num_samples, seed):
    """Return GPTDataset's arrays for lengths alone, as a tuple in the order of ARRAYS."""
    config = types.SimpleNamespace(
        sequence_length=seq_len,
        random_seed=seed,
        mock=True,  # no cache
        path_to_cache=None,
        defer_npy_index_mmap=False,
        add_extra_token_to_sequence=1,
    )
    dataset = object.__new__(gpt_dataset.GPTDataset)
    dataset.config, dataset.num_samples, dataset.index_split = config, num_samples, utils.Split.train
    dataset.dataset, dataset.indices = types.SimpleNamespace(sequence_lengths=lengths), documents
    return dataset._build_document_sample_shuffle_indices()


def assert_equal_indices(lengths, documents, seq_len, num_samples, seed):
    ours = build_sample_indices(lengths, documents, seq_len, num_samples, seed)
    everything = np.arange(len(lengths), dtype=np.int32)
    theirs = megatron_indices(lengths, everything if documents is None else documents, seq_len, num_samples, seed)
    for name, array in zip(ARRAYS, theirs, strict=True):
        np.testing.assert_array_equal(getattr(ours, name), array, strict=True)
    return ours


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_both_write_the_same_bytes(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, vocab_size, length).tolist() for length in (5, 0, 1, 30, 0)]
    assert optimal_dtype(vocab_size) == indexed_dataset.DType.optimal_dtype(vocab_size)
    ours = our_file(tmp_path / "ours", sequences, optimal_dtype(vocab_size))
    kind = indexed_dataset.DType.optimal_dtype(vocab_size)
    theirs = megatron_file(tmp_path / "theirs", [[sequence] for sequence in sequences], kind)
    for suffix in (".bin", ".idx"):
        assert ours.with_suffix(suffix).read_bytes() == theirs.with_suffix(suffix).read_bytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_files_of_sentence_splitting_open_in_ours_document_by_document(tmp_path, dtype):
    documents = [[[1, 2], [3]], [[4, 5, 6]], [], [[]], [[7], [], [8, 9]], []]
    index = TokenIndex(megatron_file(tmp_path / "theirs", documents, dtype))
    joined = [[token for sequence in document for token in sequence] for document in documents if document]
    for opened in (index, pickle.loads(pickle.dumps(index))):
        assert [opened.tokens(number).tolist() for number in range(opened.num_documents)] == joined
        assert (opened.num_documents, opened.num_sequences, opened.num_tokens, opened.dtype) == (4, 7, 9, dtype)
        assert opened.lengths.tolist() == [3, 3, 0, 3]
        assert opened.gather(np.array([3, 0]), np.array([1, 0]), np.array([3, 2])).tolist() == [8, 9, 1, 2]
        assert opened.token_range(3) == (7, 9)


def test_corpora_of_other_documents_have_other_digests(tmp_path):
    apart = TokenIndex(megatron_file(tmp_path / "a", [[[1, 2]], [[3], [4]]], np.int32)).digest
    assert TokenIndex(megatron_file(tmp_path / "b", [[[1, 2], [3]], [[4]]], np.int32)).digest != apart


def test_a_document_may_have_more_tokens_than_a_sequence_can(tmp_path):
    with open(tmp_path / "long.idx", "wb") as file:
        file.write(
            HEADER.pack(MAGIC, VERSION, 1, 3, 3)
            + struct.pack("<3i3q3q", LONGEST, 5, LONGEST, 0, LONGEST, LONGEST + 5, 0, 2, 3)
        )
    with open(tmp_path / "long.bin", "wb") as file:
        file.truncate(2 * LONGEST + 5)  # sparse, so no block is written
    index = TokenIndex(tmp_path / "long")
    assert index.lengths.tolist() == [LONGEST + 5, LONGEST]
    samples = build_sample_indices(index.lengths, None, 2**24, None, seed=1)
    assert samples.sample_index.dtype == np.int64
    pieces = [samples.pieces(k) for k in range(len(samples))]
    assert {int((stop - start).sum()) for _, start, stop in pieces} == {2**24 + 1}


def test_documents_without_a_sequence_leave_megatrons_indices_as_they_are(tmp_path):
    documents = [[[1, 2, 3]], [], [[4, 5]], [[6, 7, 8, 9]], [], []]  # as its tools store empty texts
    prefix = str(megatron_file(tmp_path / "theirs", documents, np.int32))
    assert TokenIndex(prefix).num_documents == 3
    assert_reads_what_the_builder_reads([prefix], None, 5, seed=2, seq_len=2)


def test_files_built_item_by_item_and_merged_open_in_ours(tmp_path):
    part = str(megatron_file(tmp_path / "part", [[[1, 2]], [[3]]], np.int32))
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "all.bin"), dtype=np.int32)
    builder.add_item(torch.tensor([9, 8, 7]))
    builder.end_document()
    builder.add_index(part)
    builder.finalize(str(tmp_path / "all.idx"))
    index = TokenIndex(tmp_path / "all")
    assert [index.tokens(number).tolist() for number in range(index.num_documents)] == [[9, 8, 7], [1, 2], [3]]


def test_multimodal_files_open_in_ours(tmp_path):
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "pictures.bin"), dtype=np.uint16, multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "pictures.idx"))
    assert TokenIndex(tmp_path / "pictures").tokens(0).tolist() == [1, 2]


def test_megatrons_dataset_reads_from_our_files_what_ours_reads(tmp_path):
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 1000, length).tolist() for length in rng.integers(0, 40, 50)]
    prefix = str(our_file(tmp_path / "ours", sequences, np.uint16))
    documents = np.arange(5, 45, dtype=np.int32)
    theirs = open_gpt_dataset(prefix, documents, 16, 70, 5, cache=str(tmp_path / "cache"))
    index = TokenIndex(prefix)
    ours = build_sample_indices(index.lengths, documents, 16, 70, seed=5)
    assert len(ours) == len(theirs) > 70
    for k in range(len(ours)):
        tokens = index.gather(*ours.pieces(k))
        row = theirs[k]
        assert tokens[:-1].tolist() == row["tokens"].tolist()
        assert tokens[1:].tolist() == row["labels"].tolist()


@settings(deadline=None, max_examples=300)
@given(corpora(), st.none() | st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_indices_are_equal_for_the_same_seed(corpus, num_samples, seed):
    lengths, documents, seq_len = corpus
    if int(lengths[slice(None) if documents is None else documents].sum()) > seq_len:
        assert_equal_indices(lengths, documents, seq_len, num_samples, seed)


@pytest.mark.parametrize("num_samples", [None, 5_000, 8_000, 9_500])
def test_indices_are_equal_over_epochs_of_many_documents(num_samples):
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 60, 3000).astype(np.int32)
    assert_equal_indices(lengths, rng.permutation(3000)[:2000].astype(np.int32), 17, num_samples, seed=11)


def test_indices_are_equal_where_positions_pass_2_to_the_40():
    lengths = np.array([LONGEST, 3, LONGEST - 1, 0, LONGEST] * 120, np.int32)
    ours = assert_equal_indices(lengths, None, 2**22, None, seed=3)
    assert (len(ours) + 1) * 2**22 > 360 * (LONGEST - 1) > 2**39
    assert_equal_indices(lengths, None, 2**24, 100_000, seed=4)  # 3 epochs, 2^40.6 tokens


WEIGHTS = st.lists(st.floats(1e-6, 1e6) | st.integers(1, 9).map(float), min_size=1, max_size=12)


@pytest.mark.parametrize("compiled", [True, False])
@settings(deadline=None, max_examples=50)
@given(weights=WEIGHTS, n=st.integers(0, 500))
def test_megatrons_blend_is_equal_for_the_same_weights_with_and_without_megatron_core(compiled, weights, n):
    shares = utils.normalize(weights)
    assert normalised(weights).tolist() == shares
    source, sample = np.empty(n, np.int16), np.empty(n, np.int64)
    helpers.build_blending_indices(source, sample, np.array(shares), len(shares), n, False)
    assert megatron_helpers() is not None
    found = megatron_blend_order(weights, n, compiled=compiled)
    for array, expected in zip(found, (source, sample), strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


def test_megatrons_blend_leaves_out_sources_of_weight_0():
    source, sample = megatron_blend_order([3, 0, 1], 40)
    found, numbers = megatron_blend_order([3, 1], 40)
    assert source.tolist() == (found * 2).tolist()
    assert sample.tolist() == numbers.tolist()


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Write five indices of about 100 to 600 tokens."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("blend")
    return [
        str(our_file(folder / name, [rng.integers(1, 1000, n).tolist() for n in rng.integers(0, 40, count)], np.uint16))
        for name, count in zip("abcde", (6, 9, 14, 20, 30), strict=True)
    ]


def assert_reads_what_the_builder_reads(prefixes, weights, num_samples, seed, seq_len=16):
    theirs = open_blend(prefixes, weights, seq_len, num_samples, seed)
    named = {"blend": list(zip(weights, prefixes, strict=True))} if weights else {"file_paths": prefixes}
    options = {"cache_dir": f"{prefixes[0]}-cache", "config": {"blend_rule": "megatron"}, "seed": seed}
    ours = MultiDocDataset(**named, seq_len=seq_len, num_samples=num_samples, **options)
    assert len(ours) == (num_samples or len(theirs))
    for k in range(len(ours)):
        row, tokens = theirs[k], ours[k]["input_ids"].tolist()
        assert int(ours[k]["category_ids"][1]) == row.get("dataset_id", 0) + 1
        assert tokens[:-1] == row["tokens"].tolist()
        assert tokens[1:] == row["labels"].tolist()


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.floats(0.01, 10) | st.integers(1, 9).map(float), min_size=1, max_size=5),
    num_samples=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)
def test_a_blend_by_megatrons_rule_is_row_by_row_that_of_its_builder(prefixes, weights, num_samples, seed):
    try:
        assert_reads_what_the_builder_reads(prefixes[: len(weights)], weights, num_samples, seed)
    except IndexError:  # the builder draws up to a sample a source more than asked for, and here more than it built
        reject()


@pytest.mark.parametrize("num_samples", [None, 50])
def test_sources_without_weights_are_row_by_row_those_of_megatrons_builder(prefixes, num_samples):
    assert_reads_what_the_builder_reads(prefixes, None, num_samples, seed=6)
