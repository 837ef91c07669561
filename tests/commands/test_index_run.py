"""From sources to indices in this process: files, report, formats, workers, policies, and leftovers of failed runs."""

import filecmp
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.lib.chat_templates import tiny_tokenizer
from tests.lib.document_texts import write_lines
from tests.lib.errors import refused
from tests.lib.megatron_peer import indexed_dataset
from verl_ext.commands.command_line import read_options
from verl_ext.commands.index import IndexOptions, index_texts
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.options import DataError, UsageError
from verl_ext.text.read.readers import ChunkSize

TEXTS = [f"the cat {number} sat on the mat\n" * (number % 4 + 1) for number in range(20)]
EOS = tiny_tokenizer().eos_token_id


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def index(sources: dict[str, Any], output: Path, model: Path, *overrides: str) -> str:
    """Run, and return the closing table."""
    items = ",".join(f"{name}:'{path}'" for name, path in sources.items())
    base = [f"sources={{{items}}}", f"output_dir={output}", f"model.path={model}", "num_workers=1"]
    return index_texts(read_options(IndexOptions, [*base, *overrides]))


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


def documents(prefix: Path) -> list[list[int]]:
    found = TokenIndex(prefix)
    return [found.tokens(number).tolist() for number in range(found.num_documents)]


def expected(texts: list[str]) -> list[list[int]]:
    tokenizer = tiny_tokenizer()
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], EOS] for text in texts]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_source_has_an_index_and_the_report_accounts_for_it(tmp_path: Path, model: Path) -> None:
    records = write_lines(tmp_path / "in.jsonl", [{"text": "sat"}, {"text": ""}])
    sources = {"books": write_texts(tmp_path / "books", TEXTS), "web": records}
    table = index(sources, tmp_path / "out", model, "on_bad_record=skip").splitlines()
    assert names(tmp_path / "out") == ["books.bin", "books.idx", "report.json", "web.bin", "web.idx"]
    assert documents(tmp_path / "out/books") == expected(TEXTS)
    assert documents(tmp_path / "out/web") == expected(["sat"])
    written = json.loads((tmp_path / "out/report.json").read_text())
    lengths = [len(document) for document in expected(TEXTS)]
    assert written["sources"]["books"]["tokens"] == sum(lengths)
    assert written["sources"]["books"]["length"]["max"] == max(lengths)
    assert written["sources"]["web"]["bad_records"] == {"empty": 1}
    assert written["sources"]["web"]["examples"] == {"empty": [f"{records}:2: the text is empty"]}
    assert written["total"]["documents"] == 21
    assert {key: written[key] for key in ("tokenizer", "vocabulary", "dtype", "eos_token_id", "bos_token_id")} == {
        "tokenizer": str(model),
        "vocabulary": len(tiny_tokenizer()),
        "dtype": "uint16",
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    assert written["options"]["add_eos"] is True
    assert table[0].split() == ["source", "records", "bad", "documents", "tokens", "median", "p95", "max"]
    assert table[2].split()[:4] == ["web", "2", "1", "1"]
    assert table[-3].split()[:3] == ["web", "empty", "1"]
    assert table[-1] == f"written to {tmp_path / 'out'}"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "json", "parquet", "arrow", "glob"])
def test_every_format_gives_the_same_bytes(tmp_path: Path, model: Path, kind: str) -> None:
    records = [{"body": text} for text in TEXTS]
    index({"a": write_lines(tmp_path / "plain.jsonl", records)}, tmp_path / "expected", model, "text_key=body")
    source = tmp_path / f"in.{kind}"
    if kind in ("txt", "glob"):
        write_texts(source, TEXTS)
        source = source / "*.txt" if kind == "glob" else source
    elif kind == "jsonl":
        write_lines(source, records)
    elif kind == "jsonl.gz":
        source.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    elif kind == "json":
        source.write_text(json.dumps(records))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), source, row_group_size=7)
    else:
        Dataset.from_list(records).save_to_disk(source)
    index({"a": source}, tmp_path / "out", model, "text_key=body")
    assert filecmp.cmpfiles(tmp_path / "out", tmp_path / "expected", ["a.bin", "a.idx"], shallow=False)[0] == [
        "a.bin",
        "a.idx",
    ]


def test_workers_do_not_change_a_byte(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.text.tokenizing.CHUNK", ChunkSize(records=3))
    sources = {"a": write_texts(tmp_path / "a", TEXTS), "b": write_lines(tmp_path / "b.jsonl", [{"text": "cat"}, 3])}
    overrides = ["on_bad_record=skip", "max_corpus_tokens=150"]
    for workers in (1, 2):
        index(sources, tmp_path / "out", model, f"num_workers={workers}", *overrides)
        (tmp_path / "out").rename(tmp_path / str(workers))
    assert names(tmp_path / "1") == ["a.bin", "a.idx", "b.bin", "b.idx", "report.json"]
    same = filecmp.cmpfiles(tmp_path / "1", tmp_path / "2", names(tmp_path / "1"), shallow=False)
    assert same == (names(tmp_path / "1"), [], [])
    with refused(f"{tmp_path}/b.jsonl:2", "object", error=DataError):
        index(sources, tmp_path / "out", model, "num_workers=2")


def test_a_source_is_cut_after_max_corpus_tokens_and_what_follows_is_not_read(tmp_path: Path, model: Path) -> None:
    texts = write_texts(tmp_path / "a", [*TEXTS, ""])
    (tmp_path / "a/020.txt").write_bytes(b"\xff")  # would end the run if read
    whole = [token for document in expected(TEXTS) for token in document]
    for size in (1, 100, len(whole)):
        index({"a": texts, "b": texts}, tmp_path / "out", model, f"max_corpus_tokens={size}", "overwrite=true")
        for name in ("a", "b"):
            found = TokenIndex(tmp_path / "out" / name)
            assert np.concatenate(documents(tmp_path / "out" / name)).tolist() == whole[:size]
            assert found.num_tokens == size
    with refused("020.txt", "byte 1", error=DataError):
        index({"a": texts}, tmp_path / "out", model, f"max_corpus_tokens={len(whole) + 1}", "overwrite=true")
    assert len(names(tmp_path / "out")) == 5  # unchanged


def test_a_source_without_a_document_is_an_error_and_nothing_is_left(tmp_path: Path, model: Path) -> None:
    good = write_texts(tmp_path / "good", TEXTS[:2])
    none = write_lines(tmp_path / "none.jsonl", [])
    unusable = write_lines(tmp_path / "bad.jsonl", [{"text": ""}, {"text": 1}])
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    before = names(tmp_path)
    found_in = {none: "no record", "none.parquet": "no record", unusable: "empty: 1; non_string_text: 1"}
    for source, found in found_in.items():
        with refused("sources.b", found, error=DataError):
            index({"a": good, "b": tmp_path / source}, tmp_path / "out", model, "on_bad_record=skip")
    assert names(tmp_path) == before


def test_a_file_that_cannot_be_read_on_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "the cat"},\n {"text" 3}]')
    with refused(f"{tmp_path}/a.json", "malformed", "record 2", error=DataError):
        index({"a": tmp_path / "a.json"}, tmp_path / "out", model, "on_bad_record=skip")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with refused(f"{tmp_path}/a.parquet", "parquet", error=DataError):
        index({"a": tmp_path / "a.parquet"}, tmp_path / "out", model)
    with refused("sources.a", tmp_path / "nowhere", error=UsageError):
        index({"a": tmp_path / "nowhere"}, tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "things"),
    [
        (["sources={a/b:in.txt}"], ("sources.a/b", "name")),
        (["sources={.a:in.txt}"], ("sources..a", "name")),
        (['sources={"a.bin":in.txt}'], ("sources.a.bin", "name")),  # an index is named with either suffix
        (["text_keys=a"], ("text_keys", "nearest: text_key")),
        (["model.path=nowhere"], ("model.path", "nowhere")),
    ],
)
def test_mistakes_are_told_in_one_line_each(tmp_path: Path, overrides: list[str], things: tuple[str, ...]) -> None:
    base = [f"output_dir={tmp_path}/out", f"model.path={tmp_path}"]
    if not overrides[0].startswith("sources"):
        base.append("sources={a:in.txt}")
    with refused(*things, error=UsageError):
        read_options(IndexOptions, [*base, *overrides])


def test_a_folder_without_a_tokenizer_is_not_taken_for_one_of_a_single_token(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "qwen3"}')
    texts = write_texts(tmp_path / "a", TEXTS[:2])
    with refused("model.path", tmp_path / "bare", error=UsageError):
        index({"a": texts}, tmp_path / "out", tmp_path / "bare")
    with refused("model.tokenizer_path", tmp_path / "bare", error=UsageError):
        index({"a": texts}, tmp_path / "out", tmp_path, f"model.tokenizer_path={tmp_path / 'bare'}")
    assert not (tmp_path / "out").exists()


def test_only_a_folder_of_this_command_is_replaced(tmp_path: Path, model: Path) -> None:
    source, output = write_texts(tmp_path / "a", ["the cat"]), tmp_path / "out"
    index({"a": source}, output, model)
    with refused("output_dir", "overwrite=true", output, error=UsageError):
        index({"a": source}, output, model)
    (source / "000.txt").write_text("sat")
    index({"b": source}, output, model, "overwrite=true")
    assert names(output) == ["b.bin", "b.idx", "report.json"]
    assert documents(output / "b") == expected(["sat"])
    (output / "categories.json").touch()  # as in a tokenized dataset of Megatron's format
    with refused("output_dir", output, error=UsageError):
        index({"a": source}, output, model, "overwrite=true")
    (output / "categories.json").unlink()
    (output / "b.idx").unlink()  # now it looks like a tokenized dataset, whose report has the same name
    with refused("output_dir", output, error=UsageError):
        index({"a": source}, output, model, "overwrite=true")


def test_megatron_opens_the_index_and_its_builder_writes_the_same_bytes(tmp_path: Path, model: Path) -> None:
    index({"a": write_texts(tmp_path / "a", TEXTS)}, tmp_path / "out", model)
    opened = indexed_dataset.IndexedDataset(str(tmp_path / "out/a"))
    assert [opened[number].tolist() for number in range(len(opened))] == expected(TEXTS)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{tmp_path}/peer.bin", dtype=np.uint16)
    for document in expected(TEXTS):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{tmp_path}/peer.idx")
    for suffix in ("bin", "idx"):
        assert filecmp.cmp(tmp_path / f"peer.{suffix}", tmp_path / f"out/a.{suffix}", shallow=False)
