"""PREFIX.bin and PREFIX.idx: the output of IndexWriter, and the input and refusals of TokenIndex."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from verl_ext.data.stream.megatron.index import BLOCK, BLOCK_TOKENS, IndexWriter, TokenIndex
from verl_ext.text.encoder_texts import optimal_dtype

DOCUMENTS = [[5, 6, 7], [], [65535], [1, 2, 3, 4]]
HEADER = 34
LENGTHS, POINTERS, ENDS = HEADER, HEADER + 16, HEADER + 48  # offsets of their first values, for DOCUMENTS


def write(prefix, documents, dtype=np.uint16, batch=2, block=BLOCK):
    writer = IndexWriter(prefix, dtype)
    for first in range(0, len(documents), batch):
        part = documents[first : first + batch]
        flat = np.array([token for document in part for token in document], np.int64)
        writer.add(flat, np.array([len(document) for document in part]))
    writer.close(block)
    return prefix


def read(index):
    return [index.tokens(document).tolist() for document in range(index.num_documents)]


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus", DOCUMENTS)


def patch(path, at, data):
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def assert_refused(prefix, *things, key="data.train_dir", block=BLOCK):
    with refused(key, *things):
        TokenIndex(prefix, key, block=block)


def test_the_idx_file_is_header_lengths_pointers_and_document_indices(corpus):
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 3, 0, 1, 4) + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert corpus.with_suffix(".idx").read_bytes() == expected
    assert corpus.with_suffix(".bin").read_bytes() == struct.pack("<8H", 5, 6, 7, 65535, 1, 2, 3, 4)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=12), st.sampled_from(["uint8", "int32", "int64"]))
def test_what_was_written_is_read_whatever_the_batches_and_blocks(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("corpus")
    index = TokenIndex(write(folder / "a", documents, dtype, batch=4, block=3), block=2)
    assert read(index) == documents
    write(folder / "b", documents, dtype, batch=1)
    flat = [token for document in documents for token in document]
    for block in (4, BLOCK_TOKENS):
        assert index.token_range(block=block) == ((min(flat), max(flat)) if flat else (0, -1))
    assert (folder / "a.idx").read_bytes() == (folder / "b.idx").read_bytes()
    assert index.dtype == dtype
    assert index.num_tokens == len(flat)


def test_tokens_are_parts_of_documents_and_read_only(corpus):
    index = TokenIndex(corpus)
    assert index.tokens(3, 1).tolist() == [2, 3, 4]
    assert index.tokens(3, 1, 3).tolist() == [2, 3]
    assert not index.tokens(0).flags.writeable
    with refused("inside", error=AssertionError):
        index.tokens(0, 2, 4)
    assert index.gather(np.array([3, 1, 0]), np.array([2, 0, 0]), np.array([4, 0, 1])).tolist() == [3, 4, 5]


def test_a_token_range_is_of_the_documents_asked_for(corpus):
    index = TokenIndex(corpus)
    assert index.token_range() == (1, 65535)
    assert index.token_range(0, 1) == (5, 7)
    assert index.token_range(1, 2) == (0, -1)
    assert index.token_range(3) == (1, 4)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ""])
def test_a_prefix_may_end_as_either_file(corpus, suffix):
    index = TokenIndex(f"{corpus}{suffix}")
    assert index.prefix == str(corpus)
    assert read(index) == DOCUMENTS


def test_an_index_pickles_as_its_prefix(corpus):
    index = TokenIndex(corpus, "data.val_dir")
    pickled = pickle.dumps(index)
    assert len(pickled) < 300 + len(str(corpus))
    again = pickle.loads(pickled)
    assert read(again) == DOCUMENTS
    assert (again.key, again.digest) == ("data.val_dir", index.digest)


def test_the_digest_follows_lengths_and_dtype(tmp_path, corpus):
    digest = TokenIndex(corpus).digest
    assert len(digest) == 16
    same_lengths = [[9] * len(document) for document in DOCUMENTS]
    assert TokenIndex(write(tmp_path / "same", same_lengths)).digest == digest
    assert TokenIndex(write(tmp_path / "wider", DOCUMENTS, np.int32)).digest != digest
    assert TokenIndex(write(tmp_path / "other", DOCUMENTS[::-1])).digest != digest


def test_the_dtype_is_megatrons_choice_for_a_vocabulary():
    assert [optimal_dtype(size).name for size in (256, 65499, 65500, 65536)] == ["uint16", "uint16", "int32", "int32"]


def test_the_writer_refuses_tokens_that_the_dtype_cannot_hold(tmp_path):
    writer = IndexWriter(tmp_path / "corpus", np.uint16, key="model.path")
    writer.add(np.array([1, 2]), np.array([1, 1]))
    with refused("model.path", "0..65535", "65536 in document 4", tmp_path / "corpus.bin"):
        writer.add(np.array([7, 8, 9, 65536]), np.array([3, 0, 1]))
    with refused("model.path", "-1 in document 2"):
        writer.add(np.array([-1]), np.array([1]))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_writer_refuses_documents_beyond_int32(tmp_path):
    writer = IndexWriter(tmp_path / "corpus", np.uint16, key="sources.a")
    tokens = np.broadcast_to(np.uint16(0), 2**31 + 1)  # one element in memory
    with refused("sources.a", 2147483647, "2147483648 in document 1"):
        writer.add(tokens, np.array([1, 2**31]))
    writer.abandon()


def test_the_writer_overwrites_nothing(corpus, tmp_path):
    with pytest.raises(FileExistsError):
        IndexWriter(corpus, np.uint16)
    (tmp_path / "half.idx").write_text("mine")
    with pytest.raises(FileExistsError):
        IndexWriter(tmp_path / "half", np.uint16)
    assert (tmp_path / "half.idx").read_text() == "mine"
    assert not (tmp_path / "half.bin").exists()
    assert read(TokenIndex(corpus)) == DOCUMENTS


def test_an_unfinished_corpus_opens_nowhere_and_a_finished_one_is_not_abandoned(tmp_path, corpus):
    writer = IndexWriter(tmp_path / "half", np.uint16)
    writer.add(np.ones(10_000, np.uint16), np.ones(10_000, np.int64))  # more than Python buffers of a file
    assert (tmp_path / "half.idx").stat().st_size > HEADER
    assert_refused(tmp_path / "half", tmp_path / "half.idx", r"b'MMIDIDX\x00\x00'")
    writer.close()
    writer.abandon()
    assert read(TokenIndex(tmp_path / "half")) == [[1]] * 10_000


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_refuses_a_missing_file(corpus, suffix):
    missing = corpus.with_suffix(suffix)
    missing.unlink()
    assert_refused(corpus, f"{missing}: No such file", key="data.blend")


def test_refuses_a_folder_in_place_of_a_file(corpus):
    corpus.with_suffix(".bin").unlink()
    corpus.with_suffix(".bin").mkdir()
    assert_refused(corpus, "Is a directory")


@pytest.mark.parametrize(
    ("at", "data", "things"),
    [
        (0, b"PK", (r"b'MMIDIDX\x00\x00'", r"b'PKIDIDX\x00\x00'")),
        (9, b"\2", ("version 1", 2)),
        (17, b"\x09", ("8 (uint16)", 9)),
        (17, b"\6", ("8 (uint16)", 6)),  # floats
        (18, b"\5", ("134 bytes", "5 sequences", "122 bytes")),
        (25, b"\xff", ("18374686479671623684 sequences", "122 bytes")),
        (26, b"\6", ("6 document indices", "122 bytes")),
        (LENGTHS + 4, b"\xff\xff\xff\xff", ("lengths", "sequence 1", -1)),
        (LENGTHS, b"\4", ("pointer 8", "sequence 1", 6)),
        (POINTERS, b"\2", ("pointer 0", "sequence 0", 2)),
        (POINTERS + 24, b"\xff", ("pointer 8", "sequence 3", 255)),
        (LENGTHS + 12, b"\5", ("18 bytes", "16 bytes", "corpus.bin")),
        (17, b"\4", ("pointer 12", "sequence 1")),  # another dtype
        (LENGTHS + 12, struct.pack("<i", -4), ("lengths", "sequence 3", -4)),
        (POINTERS + 8, struct.pack("<q", -6), ("pointer 6", "sequence 1", -6)),
        (ENDS, b"\1", ("document indices", "4 sequences", "1 at place 0")),
        (ENDS + 8, struct.pack("<q", -1), ("document indices", "-1 at place 1")),
        (ENDS + 8, struct.pack("<q", -(2**63)), ("document indices", "-9223372036854775808 at place 1")),
        (ENDS + 16, b"\0", ("document indices", "0 at place 2")),
        (ENDS + 24, b"\5", ("document indices", "5 at place 3")),
        (ENDS + 24, struct.pack("<q", 2**63 - 1), ("document indices", "9223372036854775807 at place 3")),
        (ENDS + 32, b"\3", ("document indices", "3 at place 4")),
    ],
)
def test_refuses_an_idx_that_is_not_what_the_format_says(corpus, at, data, things):
    patch(corpus.with_suffix(".idx"), at, data)
    for block in (BLOCK, 2):
        assert_refused(corpus, f"{corpus}.idx", *things, block=block)


@pytest.mark.parametrize("size", [0, 5, 20, 60, 121])
def test_refuses_a_truncated_idx(corpus, size):
    path = corpus.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(corpus, path)


@pytest.mark.parametrize("size", [0, 8, 15, 17, 18])
def test_refuses_a_bin_of_another_size(corpus, size):
    path = corpus.with_suffix(".bin")
    path.write_bytes((path.read_bytes() + b"more")[:size])
    assert_refused(corpus, "16 bytes", f"{corpus}.idx", f"{size} bytes", path)


def test_a_pickled_index_still_sees_that_its_files_changed(corpus):
    pickled = pickle.dumps(TokenIndex(corpus))
    path = corpus.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    with refused("data.train_dir", "16 bytes", "14 bytes", path):
        pickle.loads(pickled)
