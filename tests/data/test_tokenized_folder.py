"""Opening tokenized folders of any writer: the scan, the category table, and one line for each bad folder."""

import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, List, Sequence, Value, concatenate_datasets, load_from_disk
from datasets.features import LargeList
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import SFTDataSet, check_vocabulary
from verl_ext.data.tokenized.arrow import ListColumn, TokenizedData
from verl_ext.data.tokenized.facts import OverLength, OverLengthCount, scan_documents, sum_by_category
from verl_ext.packing import cut_spans
from verl_ext.text import tokenizing as tokenized
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.tokens.documents import Document, join_documents


def document(mask, category=1, tokens=None, **more):
    """Make a document with this loss_mask; its targets have `category`."""
    tokens = list(range(1, len(mask) + 1)) if tokens is None else tokens
    return {"input_ids": tokens, "loss_mask": mask, "category_ids": [category * bit for bit in mask], **more}


@pytest.fixture
def documents():
    return random_documents(np.random.default_rng(0), [5, 1, 9, 16, 3, 7, 2, 12], vocab=50, categories=3)


def slow_scan(documents, spans):
    """Apply the scan's definition, token by token."""
    targets, categories, ids = [], set(), []
    for row, start, length in zip(spans.row, spans.start, spans.length, strict=True):
        part = slice(start + 1, start + length)
        mask = np.asarray(documents[row]["loss_mask"])[part]
        targets.append(int(mask.sum()))
        categories |= set(np.asarray(documents[row]["category_ids"])[part][mask == 1].tolist())
        ids += np.asarray(documents[row]["input_ids"])[start : start + length].tolist()
    return targets, min(ids), max(ids), tuple(sorted(categories - {0}))


def scan_of(folder, max_tokens=100, policy="error", block_tokens=1 << 22):
    data = TokenizedData([folder])
    spans = cut_spans(data.lengths, max_tokens, policy)
    return scan_documents(data, spans, longer_than(data, max_tokens, policy), block_tokens=block_tokens)


def longer_than(data, max_tokens, policy):
    return OverLength(np.flatnonzero(data.lengths > max_tokens), max_tokens, policy)


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
@pytest.mark.parametrize("block_tokens", [1, 10, 1000])
def test_the_scan_counts_the_targets_of_every_span(tmp_path, documents, policy, block_tokens):
    folder = write_tokenized(tmp_path / "data", documents, num_shards=3)
    data = TokenizedData([folder])
    spans = cut_spans(data.lengths, 6, policy)
    over_length = longer_than(data, 6, policy)
    scan = scan_documents(data, spans, over_length, block_tokens=block_tokens)
    found = (scan.targets.tolist(), scan.min_token_id, scan.max_token_id, scan.category_ids)
    assert found == slow_scan(documents, spans)
    assert scan.targets.dtype == np.int32


def test_tokens_of_dropped_documents_do_not_count(tmp_path):
    documents = [document([0, 1]), document([0, 1, 1], category=7, tokens=[1, 999, -5]), document([0, 1], category=2)]
    folder = write_tokenized(tmp_path / "data", documents)
    scan = scan_of(folder, max_tokens=2, policy="drop")
    assert (scan.min_token_id, scan.max_token_id, scan.category_ids) == (1, 2, (1, 2))


def test_a_first_token_is_never_a_target_and_its_category_does_not_occur(tmp_path):
    documents = [{"input_ids": [1, 2], "loss_mask": [1, 1], "category_ids": [9, 4]}, document([1])]
    scan = scan_of(write_tokenized(tmp_path / "data", documents))
    assert scan.targets.tolist() == [1, 0]
    assert scan.category_ids == (4,)


def slow_count(documents, rows, max_tokens, policy):
    """Apply the definition of the over-length counts, document by document."""
    counts = []
    for row in rows:
        categories = np.asarray(documents[row]["category_ids"])
        of_category = Counter(categories[categories != 0].tolist())
        category = min(of_category, key=lambda number: (-of_category[number], number), default=0)
        kept = {"split": len(categories), "truncate": max_tokens, "drop": 0}[policy]
        counts.append(OverLengthCount(category, 1, len(categories), kept))
    return counts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 14), min_size=1, max_size=12),
    st.integers(0, 1000),
    st.sampled_from(["drop", "truncate", "split"]),
    st.integers(2, 7),
    st.sampled_from([1, 12, 1000]),
    st.sampled_from([1, 70000]),
)
def test_over_length_counts_are_those_of_each_document(
    tmp_path_factory, lengths, seed, policy, max_tokens, block_tokens, category_factor
):
    rng = np.random.default_rng(seed)
    rate = rng.choice([0.1, 0.6])
    documents = [
        {
            "input_ids": np.ones(length, np.int32),
            "loss_mask": (rng.random(length) < rate).astype(np.int8),
            "category_ids": (rng.integers(0, 3, length) * category_factor).astype(np.int32),
        }
        for length in lengths
    ]
    documents.append(document([0, 1]))  # it fits and has a target
    folder = write_tokenized(tmp_path_factory.mktemp("over") / "data", documents, num_shards=min(2, len(documents)))
    data = TokenizedData([folder])
    over = longer_than(data, max_tokens, policy)
    scan = scan_documents(data, cut_spans(data.lengths, max_tokens, policy), over, block_tokens=block_tokens)
    wanted = np.array(slow_count(documents, over.rows, max_tokens, policy), np.int64).reshape(-1, 4)
    assert np.array(scan.over_length).reshape(-1, 4).tolist() == sum_by_category(wanted).tolist()


OTHER_WRITERS = {
    "int64": (List(Value("int64")), List(Value("int64")), List(Value("int64")), Value("int64")),
    "large_list": (LargeList(Value("int32")), LargeList(Value("uint8")), LargeList(Value("uint16")), Value("int16")),
    "bool_mask": (Sequence(Value("uint32")), Sequence(Value("bool")), Sequence(Value("uint64")), Value("uint32")),
}


@pytest.mark.parametrize("writer", OTHER_WRITERS)
def test_folders_of_other_writers_give_the_same_rows(tmp_path, documents, writer):
    names = ("input_ids", "loss_mask", "category_ids", "length")
    features = Features(dict(zip(names, OTHER_WRITERS[writer], strict=True)))
    ours = write_tokenized(tmp_path / "ours", documents)
    load_from_disk(ours).cast(features).save_to_disk(str(tmp_path / "theirs"), num_shards=2)
    assert_same_packs(SFTDataSet(ours, 20), SFTDataSet(str(tmp_path / "theirs"), 20))


def test_documents_of_one_fixed_length_give_the_same_rows(tmp_path):
    documents = random_documents(np.random.default_rng(1), [6] * 5, vocab=50, categories=2)
    ours = write_tokenized(tmp_path / "ours", documents)
    fixed = {"input_ids": "int32", "loss_mask": "int8", "category_ids": "int32"}
    features = {name: List(Value(kind), length=6) for name, kind in fixed.items()} | {"length": Value("int32")}
    load_from_disk(ours).cast(Features(features)).save_to_disk(str(tmp_path / "fixed"))
    assert_same_packs(SFTDataSet(ours, 13), SFTDataSet(str(tmp_path / "fixed"), 13))


@pytest.mark.parametrize("large", [False, True])
def test_columns_of_sliced_arrays_are_read_from_their_own_rows(large):
    kind = pa.large_list(pa.int32()) if large else pa.list_(pa.int32())
    whole = pa.array([[1, 2], [3], [], [4, 5, 6], [7]], kind)
    fixed = pa.array([[8, 9], [10, 11], [12, 13]], pa.list_(pa.int64(), 2))
    column = ListColumn([whole.slice(1, 3), fixed.slice(1, 2)], "input_ids", ("integer",), "data.train_dir")
    assert column.row_lengths().tolist() == [1, 0, 3, 2, 2]
    assert [column.block(row, row + 1).tolist() for row in range(5)] == [[3], [], [4, 5, 6], [10, 11], [12, 13]]
    out = np.zeros(4, np.int64)
    pieces = column.pieces(np.asarray([4, 2, 0]), np.asarray([1, 1, 0]), np.asarray([1, 2, 1]))
    column.gather(pieces, out)
    assert out.tolist() == [13, 5, 6, 3]


def test_a_dataset_with_an_indices_mapping_is_read_in_its_order(tmp_path, documents):
    ours = write_tokenized(tmp_path / "ours", documents)
    chosen = load_from_disk(ours).shuffle(seed=3).select([6, 0, 4])
    chosen.save_to_disk(str(tmp_path / "chosen"))
    rows = SFTDataSet(str(tmp_path / "chosen"), 100, strategy="none")
    assert [row["input_ids"].tolist() for row in rows] == list(chosen["input_ids"])


def test_several_folders_are_one_dataset(tmp_path, documents):
    parts = [write_tokenized(tmp_path / str(at), documents[at::2], {1: "one", 2: "two", 3: "three"}) for at in (0, 1)]
    concatenate_datasets([load_from_disk(part) for part in parts]).save_to_disk(str(tmp_path / "both"))
    both = SFTDataSet(parts, 20)
    assert_same_packs(both, SFTDataSet(str(tmp_path / "both"), 20))
    assert both.categories.names[0] == "one"


def test_tokenized_data_pickles_as_its_paths(tmp_path, documents):
    data = TokenizedData([write_tokenized(tmp_path / "data", documents)])
    text = pickle.dumps(data)
    assert len(text) < 500
    assert pickle.loads(text).columns["input_ids"].block(3, 4).tolist() == documents[3]["input_ids"].tolist()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=20).filter(any), st.integers(1, 30))
def test_blocks_cover_every_row_once_within_their_budget(tmp_path_factory, lengths, budget):
    documents = random_documents(np.random.default_rng(0), lengths, vocab=9, categories=1)
    folder = tmp_path_factory.mktemp("blocks") / "data"
    data = TokenizedData([write_tokenized(folder, documents, num_shards=min(3, len(lengths)))])
    blocks = list(data.blocks(0, len(lengths), budget))
    assert [row for begin, end in blocks for row in range(begin, end)] == list(range(len(lengths)))
    for begin, end in blocks:
        assert end == begin + 1 or sum(lengths[begin:end]) <= budget


# Bad folders


def assert_refused(folder, *things, **options):
    with refused(options.get("key", "data.train_dir"), *things):
        SFTDataSet(str(folder), **{"max_tokens": 100, **options}).scan()


def test_a_missing_folder_is_refused(tmp_path):
    for key in ("data.train_dir", "data.val_dir"):
        assert_refused(tmp_path / "no", tmp_path / "no", "exist", key=key)


def test_a_file_an_empty_folder_and_any_other_folder_are_refused(tmp_path):
    (tmp_path / "train.parquet").write_text("")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "train.parquet", tmp_path / "train.parquet", "a file")
    assert_refused(tmp_path / "empty", tmp_path / "empty", "is empty")
    assert_refused(tmp_path, tmp_path, "state.json", "dataset_info.json")


def test_a_dataset_dict_is_refused_with_its_splits(tmp_path, documents):
    one = load_from_disk(write_tokenized(tmp_path / "one", documents))
    DatasetDict({"validation": one, "train": one}).save_to_disk(str(tmp_path / "dict"))
    assert_refused(tmp_path / "dict", "DatasetDict of train, validation", tmp_path / "dict/train")
    assert len(SFTDataSet(str(tmp_path / "dict" / "train"), 100)) == 1


def test_a_folder_whose_arrow_file_is_missing_or_cut_is_refused(tmp_path, documents):
    folder = tmp_path / "data"
    write_tokenized(folder, documents)
    arrow = next(folder.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:200])
    assert_refused(folder, folder, "opened")
    arrow.unlink()
    assert_refused(folder, folder, "opened")


@pytest.mark.parametrize(("damaged", "thing"), [(b"gull_length", "lacks full_length"), (b"\xffull_length", "opened")])
def test_a_folder_of_ours_with_a_damaged_name_of_a_column_is_refused(tmp_path, documents, damaged, thing):
    folder = tmp_path / "data"
    folder.mkdir()
    writer = DatasetWriter(folder)
    writer.add(join_documents([Document(documents[0]["input_ids"], documents[0]["loss_mask"])], 1, 0))
    writer.close()
    arrow = next(folder.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes().replace(b"full_length", damaged))
    assert_refused(folder, folder, thing)


def test_a_broken_state_file_is_refused(tmp_path, documents):
    folder = tmp_path / "data"
    write_tokenized(folder, documents)
    (folder / "state.json").write_text("{}")
    assert_refused(folder, folder, "opened")


def test_missing_columns_are_named(tmp_path):
    Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}).save_to_disk(str(tmp_path / "data"))
    assert_refused(tmp_path / "data", "lacks loss_mask, category_ids, length", "it has input_ids, text")


def test_a_dataset_without_documents_is_refused(tmp_path):
    for shards in (0, 1):
        folder = write_tokenized(tmp_path / str(shards), [], num_shards=shards or None)
        assert_refused(folder, folder, "none")


@pytest.mark.parametrize("column", ["loss_mask", "category_ids", "loss_weight", "length"])
def test_lengths_that_disagree_name_the_first_row(tmp_path, documents, column):
    documents[2][column] = 4 if column == "length" else documents[2][column][:4]
    documents[5][column] = 3 if column == "length" else documents[5][column][:3]
    folder = write_tokenized(tmp_path / "data", documents, loss_weight=True)
    named = "length 4 and 9 input_ids" if column == "length" else f"length 9 and 4 {column}"
    assert_refused(folder, f"row 2 has {named}", "2 such rows")


@pytest.mark.parametrize(
    ("column", "values", "things"),
    [
        ("input_ids", ["a b"], ("list of integer", "string")),
        ("input_ids", [[0.5, 1.5]], ("list of integer", "got list")),
        ("loss_mask", [["x", "y"]], ("list of integer or boolean", "got list")),
        ("length", [2.0], ("integer", "double")),
        ("length", [None], (None,)),
        ("input_ids", [[1, None]], (None, "rows 0..0")),
        ("category_ids", [None], ()),
    ],
)
def test_columns_of_a_wrong_type_are_named(tmp_path, column, values, things):
    columns = {"input_ids": [[1, 2]], "loss_mask": [[0, 1]], "category_ids": [[0, 1]], "length": [2]}
    Dataset.from_dict({**columns, column: values}).save_to_disk(str(tmp_path / "data"))
    assert_refused(tmp_path / "data", f"column {column}", *things)


def test_loss_weight_in_one_of_two_folders_is_refused(tmp_path, documents):
    folders = [write_tokenized(tmp_path / str(at), documents, loss_weight=bool(at)) for at in (0, 1)]
    with refused("data.train_dir", "loss_weight", folders[0]):
        SFTDataSet(folders, 100)


def test_a_loss_mask_that_is_zero_everywhere_is_refused(tmp_path):
    folder = write_tokenized(tmp_path / "data", [document([0, 0]), document([1, 0])])
    assert_refused(folder, "target", "loss_mask", "2 documents")


@pytest.mark.parametrize(
    ("column", "values", "got"),
    [
        ("loss_mask", [0, 2], 2),
        ("loss_mask", [0, -1], -1),
        ("category_ids", [0, -3], -3),
        ("loss_weight", [1.0, -0.5], -0.5),
        ("loss_weight", [1.0, float("nan")], "nan"),
        ("loss_weight", [float("inf"), 1.0], "inf"),
    ],
)
def test_values_out_of_range_name_their_row(tmp_path, column, values, got):
    documents = [document([0, 1, 1]), {**document([0, 1]), column: values}, document([0, 1])]
    assert_refused(write_tokenized(tmp_path / "data", documents, loss_weight=True), column, f"{got} in row 1")


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path):
    scan = scan_of(write_tokenized(tmp_path / "data", [document([0, 1], tokens=[3, 40])]))
    check_vocabulary((scan.min_token_id, scan.max_token_id), 41)
    with refused("data.val_dir", "0..39", "3 to 40"):
        check_vocabulary((scan.min_token_id, scan.max_token_id), 40, key="data.val_dir")
    negative = scan_of(write_tokenized(tmp_path / "negative", [document([0, 1], tokens=[-1, 40])]))
    with refused("-1 to 40"):
        check_vocabulary((negative.min_token_id, negative.max_token_id), 100)


def assert_same_packs(ours, theirs):
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].tolist() == right[name].tolist()
            assert left[name].dtype == right[name].dtype
    assert ours.scan().targets.tolist() == theirs.scan().targets.tolist()
    assert ours.scan().category_ids == theirs.scan().category_ids


def test_the_name_of_cached_documents_follows_the_code_that_makes_them(tmp_path, monkeypatch):
    digests = [tokenized.code_digest(__name__)]
    for change in ("", "# mended"):
        package = tmp_path / f"text{len(digests)}"
        shutil.copytree(Path(tokenized.__file__).parent, package)
        (package / "chat" / "spans.py").write_text((package / "chat" / "spans.py").read_text() + change)
        monkeypatch.setattr(tokenized, "__file__", str(package / "tokenizing.py"))
        digests.append(tokenized.code_digest.__wrapped__(__name__))
    assert digests[0] == digests[1]
    assert digests[1] != digests[2]
