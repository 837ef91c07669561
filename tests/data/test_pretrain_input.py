"""Input that PreTrainDataset reads or refuses in one line: formats, records, options, tokenizers."""

import bz2
import gzip
import json
import logging

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from tests.lib.errors import refused
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


def tokens_of(dataset):
    """Return the documents in the order of the files."""
    columns = dataset.data.columns["input_ids"]
    return [columns.block(row, row + 1).tolist() for row in range(len(columns))]


def test_every_format_gives_the_same_documents(tmp_path, opened):
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


def test_the_text_key_names_the_field(tmp_path, opened):
    path = write_jsonl(tmp_path / "web.jsonl", ["w1"], key="body")
    assert tokens_of(opened(path, text_key="body")) == [[1, 5, 2]]
    assert tokens_of(opened(path, text_key=["body", "body"]))[0].count(5) == 2
    with refused("data.train_dir", "data.text_key", "got text", "body"):
        opened(path)


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
def test_a_record_that_cannot_be_used_ends_the_run_with_its_file_and_line(tmp_path, opened, line, reason):
    path = tmp_path / "web.jsonl"
    path.write_bytes(b'{"text": "w1"}\n\n' + line + b'\n{"text": "w2"}\n')
    with refused("data.val_dir", f"{path}:3", reason, "data.on_bad_record=skip"):
        opened(str(path), key="data.val_dir")


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


def test_a_file_that_cannot_be_read_on_ends_the_run_under_skip_too(tmp_path, opened):
    for name, content in (("a.json", b'[{"text": "w1"}, {'), ("b.csv", b'text\n"w1\n'), ("c.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(content)
        with refused("data.train_dir") as raised:
            opened(str(tmp_path / name), on_bad_record="skip")
        assert str(tmp_path / name) in str(raised.value)  # with a line's number where there are lines


def test_files_without_one_usable_record(tmp_path, opened):
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with refused("data.train_dir", "none", path):
        opened(str(path))
    path.write_text('{"text": ""}\n')
    with refused("data.train_dir", "none", "1 records", f"{path}:1"):
        opened(str(path), on_bad_record="skip")


def test_paths_that_name_no_file(tmp_path, opened):
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.bin").write_text("")
    for name, reason in (("none.jsonl", "exist"), ("*.jsonl", "no file"), ("folder", "none"), ("model.bin", "got")):
        with refused("data.val_dir", tmp_path / name, reason):
            opened(str(tmp_path / name), key="data.val_dir")
    for path in (None, [], "", [3], 3, {"books": "a.jsonl"}):
        with refused("data.train_dir", "files", path):
            opened(path)
    with refused("data.train_dir", "once", "b.jsonl"):
        opened("a.jsonl", parquet_files="b.jsonl")


@pytest.mark.parametrize(
    ("options", "things"),
    [
        ({"text_key": ["a", 3]}, ("data.text_key", "['a', 3]")),
        ({"split": "test"}, ("split", "train, val", "test")),
        ({"split": "val"}, ("data.train_ratio", "of 2")),
        ({"config": {"mixture": {"sources": {}}}}, ("data.mixture", "data=pretrain")),
    ],
)
def test_options_that_cannot_be(tmp_path, options, things):
    path = write_jsonl(tmp_path / "web.jsonl", texts_of([3, 4]))
    options = {"max_length": 8, "cache_dir": str(tmp_path / "cache"), **options}
    with refused(*things):
        PreTrainDataset(TOKENIZER, path, **options)


def test_a_tokenizer_must_be_given_and_have_an_eos(tmp_path, opened):
    path = write_jsonl(tmp_path / "web.jsonl", ["w1"])
    with refused("PreTrainDataset", "tokenizer", "model.path"):
        opened(path, None)
    bare = word_tokenizer()
    bare.eos_token = None
    with refused("tokenizer", "eos_token"):
        opened(path, bare)


def test_a_tokenizer_of_a_later_version_is_told_in_one_line_by_the_trainer(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace('"WordLevel"', '"OfTomorrow"'))
    write_jsonl(tmp_path / "a.jsonl", ["w1 w2"])
    config = compose(["data=pretrain", f"data.train_dir={tmp_path / 'a.jsonl'}", f"model.path={model}"])
    with refused("model.path", model):
        open_sets(RunConfig.from_composed(config))
