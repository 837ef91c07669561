"""The inputs that BABILongDataset refuses, each in one line."""

import pytest

from tests.lib.babilong_files import byte_tokenizer, record, records, write_records
from verl_ext.data import BABILongDataset

TOKENIZER = byte_tokenizer()
MANY = " ".join(["kitchen"] * 30)


def refusal(tmp_path, path, tokenizer=TOKENIZER, max_length=96, **options):
    """Return the message of the ValueError."""
    options = {"answer_reserve_tokens": 8, "cache_dir": str(tmp_path / "cache"), **options}
    with pytest.raises(ValueError, match=r"\S") as raised:
        BABILongDataset(path, tokenizer, max_length, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"input": "", "question": "", "target": ""}', "1k.json:1: the file is not a list"),
        (b'{\n "data": []}', "1k.json: must be a list of records"),
        (b'"text"', "1k.json: malformed JSON: expected a list of records"),
        (b"", "1k.json: must be JSON; it is empty"),
        (b'[{"input": "a"', "1k.json: malformed JSON"),
        (b'[{"input": "\xff"}]', "1k.json: malformed JSON: no UTF-8"),
        (b"[]", "1k.json: must hold at least one record; it has none"),
        (b"[3]", "1k.json:1: a record must be an object"),
        (b'[{"input": "\\ud800", "question": "", "target": "x"}]', "half a surrogate pair"),
    ],
)
def test_a_file_that_is_no_list_of_records(tmp_path, content, line):
    (tmp_path / "1k.json").write_bytes(content)
    message = refusal(tmp_path, str(tmp_path / "1k.json"))
    assert message.startswith("data.train_dir must hold")
    assert line in message
    assert "1k.json" in message


JSON_VALUES = [*((3, "3"), (0.5, "0.5"), (True, "true"), (None, "null"), (["x"], '["x"]'), ({"x": 1}, '{"x": 1}'))]


@pytest.mark.parametrize("name", ["input", "question", "target"])
def test_a_record_without_a_field_or_with_one_that_is_no_text(tmp_path, name):
    broken = record(1)
    del broken[name]
    path = write_records(tmp_path / "qa1/1k.json", [*records(3), broken])
    assert f"{path}:4: the record has no {name}" in refusal(tmp_path, path, key="data.val_dir")
    assert refusal(tmp_path, path, key="data.val_dir").startswith("data.val_dir must hold")
    for value, kind in JSON_VALUES:
        write_records(tmp_path / "qa1/1k.json", [*records(2), record(1) | {name: value}])
        assert f"{path}:3: {name} must be a text; got {kind}" in refusal(tmp_path, path)


def test_paths_that_name_no_file(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "does not exist" in refusal(tmp_path, str(tmp_path / "none.json"))
    assert "has no *.json or */*.json" in refusal(tmp_path, str(tmp_path / "empty"))
    for path in (None, [], "", [3]):
        assert "data.train_dir must name a BABILong JSON file" in refusal(tmp_path, path)
    assert "must be given once" in refusal(tmp_path, "a.json", parquet_files="b.json")


def test_answers_without_a_token_or_longer_than_the_reserve(tmp_path):
    path = write_records(tmp_path / "1k.json", [record(1), record(1, place=" ")])
    assert f"{path}:2: target must be an answer; got ' '" in refusal(tmp_path, path)
    path = write_records(tmp_path / "2k.json", [record(1), record(1, place=MANY)])
    message = refusal(tmp_path, path)
    assert message.startswith("data.answer_reserve_tokens must hold every answer; got 8, but ")
    tokens = len(TOKENIZER(" far garden", add_special_tokens=False)["input_ids"])
    path = write_records(tmp_path / "3k.json", [record(1, place="far garden")])
    BABILongDataset(path, TOKENIZER, 96, answer_reserve_tokens=tokens, cache_dir=str(tmp_path / "cache"))
    assert "EOS included" in refusal(tmp_path, path, answer_reserve_tokens=tokens, append_eos=True)


def test_rows_too_short_for_the_question_and_the_reserve(tmp_path):
    path = write_records(tmp_path / "1k.json", [record(1, question="Where is Mary? " * 9)])
    message = refusal(tmp_path, path, max_length=48)
    assert message.startswith("data.max_length must hold the question and data.answer_reserve_tokens=8; got 48")
    needed = int(message.split()[-1])
    cut = BABILongDataset(path, TOKENIZER, needed, answer_reserve_tokens=8, cache_dir=str(tmp_path / "cache"))
    assert cut.omitted_documents()[0].documents == 1
    assert f"needs at least {needed}" in refusal(tmp_path, path, max_length=needed - 1)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_length": None}, "data.max_length must be given"),
        ({"max_length": 8}, "data.max_length must be above data.answer_reserve_tokens=8; got 8"),
        ({"truncate": "left"}, "data.truncate must be one of context, right; got left"),
        ({"split": "test"}, "split must be one of train, val; got test"),
        ({"split": "train", "train_ratio": 0.1}, "data.train_ratio must leave samples for training"),
        ({"config": {"strategy": "best_fit"}}, "data.strategy must be none; got best_fit"),
        ({"config": {"mixture": {"sources": {}}}}, "data.mixture must be null for BABILong"),
        ({"max_length": None, "config": {"max_length": 96, "max_tokens": 64}}, "data.max_tokens must be"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, line):
    path = write_records(tmp_path / "1k.json", records(4))
    assert refusal(tmp_path, path, **options).startswith(line)


def test_tokenizers_that_cannot_be_used(tmp_path):
    path = write_records(tmp_path / "1k.json", [record(40)])
    assert "BABILongDataset must be given a tokenizer" in refusal(tmp_path, path, tokenizer=None)
    bare = byte_tokenizer()
    bare.pad_token = bare.eos_token = None
    assert "model.path must hold a tokenizer with a pad_token" in refusal(tmp_path, path, tokenizer=bare)
    bare.pad_token = "<pad>"
    assert "data.append_eos=true needs a tokenizer with an eos_token" in refusal(
        tmp_path, path, tokenizer=bare, append_eos=True
    )
