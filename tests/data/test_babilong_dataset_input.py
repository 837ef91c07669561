"""The inputs that BABILongDataset refuses, each in one line."""

import pytest

from tests.lib.babilong_files import byte_tokenizer, record, records, write_records
from tests.lib.errors import refused
from verl_ext.data import BABILongDataset

TOKENIZER = byte_tokenizer()
MANY = " ".join(["kitchen"] * 30)


def assert_refused(tmp_path, path, *things, tokenizer=TOKENIZER, max_length=96, **options):
    """Assert that the error line names some things, and return it."""
    options = {"answer_reserve_tokens": 8, "cache_dir": str(tmp_path / "cache"), **options}
    with refused(*things) as raised:
        BABILongDataset(path, tokenizer, max_length, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "things"),
    [
        (b'{"input": "", "question": "", "target": ""}', ("1k.json:1", "list")),
        (b'{\n "data": []}', ("1k.json", "list")),
        (b'"text"', ("1k.json", "malformed", "list")),
        (b"", ("1k.json", "empty")),
        (b'[{"input": "a"', ("1k.json", "malformed")),
        (b'[{"input": "\xff"}]', ("1k.json", "malformed", "UTF-8")),
        (b"[]", ("1k.json", "none")),
        (b"[3]", ("1k.json:1", "object")),
        (b'[{"input": "\\ud800", "question": "", "target": "x"}]', ("1k.json:1", "surrogate")),
    ],
)
def test_a_file_that_is_no_list_of_records(tmp_path, content, things):
    (tmp_path / "1k.json").write_bytes(content)
    assert_refused(tmp_path, str(tmp_path / "1k.json"), "data.train_dir", *things)


JSON_VALUES = [*((3, "3"), (0.5, "0.5"), (True, "true"), (None, "null"), (["x"], '["x"]'), ({"x": 1}, '{"x": 1}'))]


@pytest.mark.parametrize("name", ["input", "question", "target"])
def test_a_record_without_a_field_or_with_one_that_is_no_text(tmp_path, name):
    broken = record(1)
    del broken[name]
    path = write_records(tmp_path / "qa1/1k.json", [*records(3), broken])
    assert_refused(tmp_path, path, "data.val_dir", f"{path}:4", f"no {name}", key="data.val_dir")
    for value, kind in JSON_VALUES:
        write_records(tmp_path / "qa1/1k.json", [*records(2), record(1) | {name: value}])
        assert_refused(tmp_path, path, f"{path}:3: {name}", f"got {kind}")


def test_paths_that_name_no_file(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path, str(tmp_path / "none.json"), "data.train_dir", tmp_path / "none.json", "exist")
    assert_refused(tmp_path, str(tmp_path / "empty"), "data.train_dir", tmp_path / "empty", "*.json or */*.json")
    for path in (None, [], "", [3]):
        assert_refused(tmp_path, path, "data.train_dir", "BABILong JSON file", repr(path))
    assert_refused(tmp_path, "a.json", "data.train_dir", "once", "b.json", parquet_files="b.json")


def test_answers_without_a_token_or_longer_than_the_reserve(tmp_path):
    path = write_records(tmp_path / "1k.json", [record(1), record(1, place=" ")])
    assert_refused(tmp_path, path, f"{path}:2: target", "' '")
    path = write_records(tmp_path / "2k.json", [record(1), record(1, place=MANY)])
    assert_refused(tmp_path, path, "data.answer_reserve_tokens", 8)
    tokens = len(TOKENIZER(" far garden", add_special_tokens=False)["input_ids"])
    path = write_records(tmp_path / "3k.json", [record(1, place="far garden")])
    BABILongDataset(path, TOKENIZER, 96, answer_reserve_tokens=tokens, cache_dir=str(tmp_path / "cache"))
    reserve = {"answer_reserve_tokens": tokens, "append_eos": True}
    assert_refused(tmp_path, path, "data.answer_reserve_tokens", tokens, "EOS", **reserve)


def test_rows_too_short_for_the_question_and_the_reserve(tmp_path):
    path = write_records(tmp_path / "1k.json", [record(1, question="Where is Mary? " * 9)])
    line = assert_refused(tmp_path, path, "data.max_length", "data.answer_reserve_tokens=8", 48, max_length=48)
    needed = int(line.split()[-1])
    cut = BABILongDataset(path, TOKENIZER, needed, answer_reserve_tokens=8, cache_dir=str(tmp_path / "cache"))
    assert cut.omitted_documents()[0].documents == 1
    assert_refused(tmp_path, path, "data.max_length", needed - 1, needed, max_length=needed - 1)


@pytest.mark.parametrize(
    ("options", "things"),
    [
        ({"max_length": None}, ("data.max_length",)),
        ({"max_length": 8}, ("data.max_length", "data.answer_reserve_tokens=8", 8)),
        ({"truncate": "left"}, ("data.truncate", "context, right", "left")),
        ({"split": "test"}, ("split", "train, val", "test")),
        ({"split": "train", "train_ratio": 0.1}, ("data.train_ratio", "0.1 of 4")),
        ({"config": {"strategy": "best_fit"}}, ("data.strategy", "none", "best_fit")),
        ({"config": {"mixture": {"sources": {}}}}, ("data.mixture", "BABILong")),
        ({"max_length": None, "config": {"max_length": 96, "max_tokens": 64}}, ("data.max_tokens", 96, 64)),
    ],
)
def test_options_that_cannot_be(tmp_path, options, things):
    path = write_records(tmp_path / "1k.json", records(4))
    assert_refused(tmp_path, path, *things, **options)


def test_tokenizers_that_cannot_be_used(tmp_path):
    path = write_records(tmp_path / "1k.json", [record(40)])
    assert_refused(tmp_path, path, "BABILongDataset", "tokenizer", tokenizer=None)
    bare = byte_tokenizer()
    bare.pad_token = bare.eos_token = None
    assert_refused(tmp_path, path, "pad_token", "eos_token", tokenizer=bare)
    bare.pad_token = "<pad>"
    assert_refused(tmp_path, path, "data.append_eos=true", "eos_token", tokenizer=bare, append_eos=True)
