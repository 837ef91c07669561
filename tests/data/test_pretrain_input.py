"""Input that PreTrainDataset reads or refuses in one line: formats, records, options, tokenizers."""

import json
import logging

import pytest
from datasets import load_from_disk

from tests.lib.pretrain_files import plain_document, texts_of, word_tokenizer, write_jsonl
from tests.lib.tiny_model import write_tiny_model
from verl_ext.config.compose import compose
from verl_ext.config.run import RunConfig
from verl_ext.data.families.pretrain import PreTrainDataset
from verl_ext.trainer.inputs import open_sets

TOKENIZER = word_tokenizer()


@pytest.fixture
def opened(tmp_path):
    def open_path(path, tokenizer=TOKENIZER, max_length=8, **options):
        return PreTrainDataset(tokenizer, path, max_length, cache_dir=str(tmp_path / "cache"), **options)

    return open_path


@pytest.fixture
def refusal(opened):
    """Return the message of the ValueError, which is one line."""

    def refused(path, *arguments, **options):
        with pytest.raises(ValueError, match=r"\S") as raised:
            opened(path, *arguments, **options)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return refused


def tokens_of(dataset):
    """Return the documents in the order of the files."""
    columns = dataset.data.columns["input_ids"]
    return [columns.block(row, row + 1).tolist() for row in range(len(columns))]


def test_every_format_gives_the_same_documents(tmp_path, opened):
    import bz2
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    texts = texts_of([3, 9, 1])
    records = [{"text": text, "other": number} for number, text in enumerate(texts)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet", "e.csv", "f.jsonl.gz"):
        (tmp_path / name).write_text(lines)
    (tmp_path / "c.json").write_text(json.dumps(records, indent=1))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text("other,text\n" + "".join(f"0,{text}\n" for text in texts))
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "h.JSON.BZ2").write_bytes(bz2.compress(lines.encode()))
    Dataset.from_list(records).save_to_disk(str(tmp_path / "g"))
    wanted = [plain_document(TOKENIZER, text, 8) for text in texts]
    (tmp_path / "i.tsv").write_text("other\ttext\n" + "".join(f"0\t{text}\n" for text in texts))
    for path in [*sorted(tmp_path.glob("?*.*")), tmp_path / "g"]:
        dataset = opened(str(path))
        assert tokens_of(dataset) == wanted, path
        assert dataset.categories.names == (path.name.split(".")[0],)


def test_files_behind_a_url_give_the_same_documents(opened):
    import fsspec

    texts = texts_of([3, 9, 1])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    fsspec.filesystem("memory").pipe("/pretrain/web.jsonl", lines.encode())
    dataset = opened("memory://pretrain/web.jsonl")
    assert tokens_of(dataset) == [plain_document(TOKENIZER, text, 8) for text in texts]
    assert dataset.categories.names == ("web",)
    fsspec.filesystem("memory").pipe("/pretrain/web.jsonl", lines.encode() * 2)
    assert len(tokens_of(opened("memory://pretrain/web.jsonl"))) == 6


def test_folders_globs_and_lists_are_read_in_order_and_a_files_name_is_its_category(tmp_path, opened):
    texts = texts_of([1, 2, 3, 4])
    for name, text in zip(("x/b.jsonl", "x/a.v2.jsonl", "y/b.jsonl", "z.jsonl"), texts, strict=True):
        write_jsonl(tmp_path / name, [text])
    dataset = opened([str(tmp_path / "x"), str(tmp_path / "?.jsonl"), str(tmp_path / "y" / "b.jsonl")])
    order = [texts[1], texts[0], texts[3], texts[2]]
    assert tokens_of(dataset) == [plain_document(TOKENIZER, text, 8) for text in order]
    assert dataset.categories.names == ("a.v2", "b", "z")
    assert load_from_disk(dataset.folders[0])["document_category"][:] == [1, 2, 3, 2]


def test_a_text_file_is_one_document_whatever_the_text_key(tmp_path, opened):
    (tmp_path / "book.txt").write_text("w1 w2\nw3")
    assert tokens_of(opened(str(tmp_path / "book.txt"), text_key="body")) == [[1, 5, 6, 7, 2]]


def test_the_text_key_names_the_field(tmp_path, opened, refusal):
    path = write_jsonl(tmp_path / "web.jsonl", ["w1"], key="body")
    assert tokens_of(opened(path, text_key="body")) == [[1, 5, 2]]
    assert tokens_of(opened(path, text_key=["body", "body"]))[0].count(5) == 2
    assert refusal(path).startswith("data.train_dir must hold records with a text; ")
    assert "data.text_key must name a field of the record; got text, its fields are body" in refusal(path)


BAD = [
    (b'{"text": ""}', "empty"),
    (b'{"text": "  \\n"}', "empty"),
    (b'{"txt": "w1"}', "no_text"),
    (b'{"text": null}', "no_text"),
    (b'{"text": 3}', "non_string_text"),
    (b'{"text": ["w1"]}', "non_string_text"),
    (b"[3]", "not_an_object"),
    (b'{"text": "w1"', "malformed_json"),
    (b'{"text": "\xff"}', "malformed_json"),
    (b'{"text": "\\ud800"}', "invalid_text"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_record_that_cannot_be_used_ends_the_run_with_its_file_and_line(tmp_path, refusal, line, reason):
    path = tmp_path / "web.jsonl"
    path.write_bytes(b'{"text": "w1"}\n\n' + line + b'\n{"text": "w2"}\n')
    message = refusal(str(path), key="data.val_dir")
    assert message.startswith(f"data.val_dir must hold records with a text; {path}:3: ")
    assert message.endswith(f"({reason}; data.on_bad_record=skip leaves such records out)")


def test_records_left_out_are_counted_told_in_one_line_and_reported(tmp_path, opened, caplog):
    path = tmp_path / "web.jsonl"
    path.write_bytes(b'{"text": "w1"}\n' + b"".join(line + b"\n" for line, _ in BAD) + b'{"text": "w2"}\n')
    with caplog.at_level(logging.WARNING):
        dataset = opened(str(path), on_bad_record="skip", train_ratio=0.5, split="train")
        val = opened(str(path), on_bad_record="skip", train_ratio=0.5, split="val")
    assert tokens_of(dataset) == [[1, 5, 2], [1, 6, 2]]
    (line,) = (entry.getMessage() for entry in caplog.records if "left out" in entry.getMessage())
    assert line.startswith("10 of 12 records of data.train_dir are left out (data.on_bad_record=skip): 2 empty, ")
    assert f"one of them is {path}:2: " in line
    report = dataset.omitted_documents()
    assert {row.reason: row.documents for row in report} == {
        "bad record: empty": 2,
        "bad record: no_text": 2,
        "bad record: non_string_text": 2,
        "bad record: not_an_object": 1,
        "bad record: malformed_json": 2,
        "bad record: invalid_text": 1,
    }
    assert {row.category for row in report} == {"web"}
    assert val.omitted_documents() == []


def test_a_file_that_cannot_be_read_on_ends_the_run_under_skip_too(tmp_path, refusal):
    for name, content in (("a.json", b'[{"text": "w1"}, {'), ("b.csv", b'text\n"w1\n'), ("c.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(content)
        message = refusal(str(tmp_path / name), on_bad_record="skip")
        assert message.startswith("data.train_dir must hold records with a text; ")
        assert name in message


def test_files_without_one_usable_record(tmp_path, refusal):
    (tmp_path / "a.jsonl").write_text("\n")
    assert refusal(str(tmp_path / "a.jsonl")).startswith(
        "data.train_dir must hold at least one record with a text; got"
    )
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    message = refusal(str(tmp_path / "a.jsonl"), on_bad_record="skip")
    assert f"of 1 records, such as {tmp_path / 'a.jsonl'}:1: " in message


def test_paths_that_name_no_file(tmp_path, refusal):
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.bin").write_text("")
    for path, said in (
        (str(tmp_path / "none.jsonl"), "does not exist"),
        (str(tmp_path / "*.jsonl"), "matches no file"),
        (str(tmp_path / "folder"), "has none"),
        (str(tmp_path / "model.bin"), "got"),
    ):
        message = refusal(path, key="data.val_dir")
        assert message.startswith("data.val_dir must ")
        assert said in message
    for path in (None, [], "", [3], 3, {"books": "a.jsonl"}):
        assert refusal(path).startswith("data.train_dir must name files of records with a text; got")
    assert "must be given once" in refusal("a.jsonl", parquet_files="b.jsonl")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"text_key": ["a", 3]}, "data.text_key must name a field of a record, or several; got ['a', 3]"),
        ({"split": "test"}, "split must be one of train, val; got test"),
        ({"split": "val"}, "data.train_ratio must leave samples for training"),
        ({"config": {"mixture": {"sources": {}}}}, "data.mixture must be null for data=pretrain"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, line):
    path = write_jsonl(tmp_path / "web.jsonl", texts_of([3, 4]))
    options = {"max_length": 8, "cache_dir": str(tmp_path / "cache"), **options}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as raised:
        PreTrainDataset(TOKENIZER, path, **options)
    assert str(raised.value).startswith(line)


def test_a_tokenizer_must_be_given_and_have_an_eos(tmp_path, refusal):
    path = write_jsonl(tmp_path / "web.jsonl", ["w1"])
    assert refusal(path, None) == "PreTrainDataset must be given a tokenizer (model.path's); got nothing"
    bare = word_tokenizer()
    bare.eos_token = None
    assert refusal(path, bare).startswith("model.path must hold a tokenizer with an eos_token")


def test_a_tokenizer_of_a_later_version_is_told_in_one_line_by_the_trainer(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace('"WordLevel"', '"OfTomorrow"'))
    write_jsonl(tmp_path / "a.jsonl", ["w1 w2"])
    config = compose(["data=pretrain", f"data.train_dir={tmp_path / 'a.jsonl'}", f"model.path={model}"])
    with pytest.raises(ValueError, match=rf"^model\.path must hold a tokenizer; got {model} \([^\n]+\)$"):
        open_sets(RunConfig.from_composed(config))
