"""Text files as sources: finding them, their single record, and their use by `verl-ext tokenize`."""

import bz2
import gzip
import json
import lzma
import pickle
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.document_texts import zstd
from tests.lib.errors import names, refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.options import DataError, UsageError
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks, read_files
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.read.text_file import TextFile


def chunks_of(path: Path) -> list[Chunk]:
    return [chunk for file in find_source_files({"a": [str(path)]}) for chunk in read_chunks(file)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"one\n\ntwo\n", "one\n\ntwo\n"),
        (b"\xef\xbb\xbfa\r\nb\rc", "a\nb\nc"),
        (b"", ""),
        ("\u96ea \U0001f600\n".encode(), "\u96ea \U0001f600\n"),
    ],
)
def test_a_text_file_is_one_record_read_as_pythons_text_mode_reads_it(
    tmp_path: Path, content: bytes, text: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (chunk,) = chunks_of(tmp_path / "a.txt")
    assert chunk.records == [(str(tmp_path / "a.txt"), TextFile(str(tmp_path / "a.txt"), text))]
    assert chunk.num_bytes == len(content)


@pytest.mark.parametrize(("content", "byte"), [(b"\xff", 1), (b"\xef\xbb\xbfab\xc3", 6), (b"ab\xed\xa0\x80", 3)])
def test_text_that_is_not_utf8_is_a_bad_record_that_names_the_byte(tmp_path: Path, content: bytes, byte: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (chunk,) = chunks_of(tmp_path / "a.txt")
    ((_, record),) = chunk.records
    assert (record.reason, names(str(record), f"byte {byte}")) == ("not_utf8", True)


def test_bad_records_reach_the_worker_processes() -> None:
    sent = pickle.loads(pickle.dumps(BadRecord("not_utf8", "text must be UTF-8")))
    assert (sent.reason, str(sent)) == ("not_utf8", "text must be UTF-8")


def test_records_of_other_formats_keep_their_line_as_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "x"}\n')
    (chunk,) = chunks_of(tmp_path / "a.jsonl")
    assert [place for place, _ in chunk.records] == [f"{tmp_path}/a.jsonl:2"]


def test_a_folder_of_text_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("b.txt", "a.txt", "part/c.txt", "note.md"):
        (tmp_path / name).write_text(name)
    found = [Path(file.path).name for file in find_source_files({"a": [str(tmp_path)]})]
    assert found == ["a.txt", "b.txt", "c.txt"]


def test_an_error_names_the_key_that_the_paths_came_from(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    for path, thing in ((tmp_path / "none.txt", "exist"), (tmp_path / "a.md", ".jsonl")):
        with refused("sources.books", path, thing, error=UsageError):
            find_source_files({"books": [str(path)]})
        with refused("data.train_dir", path, thing, error=UsageError):
            find_source_files({"sources.books": [str(path)]}, "data.train_dir")


def test_text_files_beside_records_are_notes_unless_named(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("LICENSE.txt", "train/readme.txt", "train/a.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}')
    folder, licence = str(tmp_path), str(tmp_path / "LICENSE.txt")
    assert [file.kind for file in find_source_files({"a": [folder]})] == ["jsonl"]
    assert [file.kind for file in find_source_files({"a": [folder, licence]})] == ["jsonl", "text"]


def test_the_tokenize_command_takes_a_text_file_as_a_plain_text(tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the cat\nsat\n")
    (tmp_path / "a.jsonl").write_text('{"text": "the cat\\nsat\\n"}\n')
    base = [f"model.path={tmp_path}/model", "num_workers=1"]
    for kind in ("txt", "jsonl"):
        source = f"sources={{a:{tmp_path}/a.{kind}}}"
        tokenize(read_options(TokenizeOptions, [source, f"output_dir={tmp_path}/{kind}", *base]))
    rows = [load_from_disk(str(tmp_path / kind)).to_list() for kind in ("txt", "jsonl")]
    assert rows[0] == rows[1]
    assert rows[0][0]["length"] > 2
    (tmp_path / "a.txt").write_bytes(b"the \xff")
    with refused(f"{tmp_path}/a.txt", "byte 5", "not_utf8", "on_bad_record=skip", error=DataError):
        tokenize(
            read_options(TokenizeOptions, [f"sources={{a:{tmp_path}/a.txt}}", f"output_dir={tmp_path}/bad", *base])
        )
    assert not (tmp_path / "bad").exists()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
TEXTS = [f"line {number}, the caf\u00e9\n" * 20 for number in range(2000)]
CONTENTS = {
    "a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS),
    "a.json": json.dumps([{"text": text} for text in TEXTS], indent=1),
    "lines.json": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS),
    "a.csv": "text\n" + "".join(f'"{text}"\n' for text in TEXTS),
    "a.txt": "".join(TEXTS),
}


def records_of(path: Path) -> list[Any]:
    raws = [raw for chunk in chunks_of(path) for _, raw in chunk.records]
    return [raw.read() if isinstance(raw, TextFile) else raw for raw in raws]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_compressed_file_has_the_records_of_the_plain_one(tmp_path: Path, name: str, ending: str) -> None:
    content = CONTENTS[name].encode()
    (tmp_path / name).write_bytes(content)
    middle = len(content) // 2  # tools that compress in parallel write several members, one after the other
    packed = tmp_path / (name + ending).upper()
    packed.write_bytes(COMPRESS[ending](content[:middle]) + COMPRESS[ending](content[middle:]))
    assert records_of(packed) == records_of(tmp_path / name)
    chunks = chunks_of(packed)
    assert sum(chunk.num_bytes for chunk in chunks) == packed.stat().st_size
    assert max(len(chunk.records) for chunk in chunks) <= 256


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("damage", ["truncated", "not compressed", "empty"])
def test_a_damaged_compressed_file_is_one_line_that_names_it(
    tmp_path: Path, name: str, ending: str, damage: str
) -> None:
    whole = COMPRESS[ending](CONTENTS[name].encode())
    content = {"truncated": whole[: len(whole) // 2], "not compressed": CONTENTS[name].encode(), "empty": b""}[damage]
    (tmp_path / (name + ending)).write_bytes(content)
    with refused(tmp_path / (name + ending), error=DataError):
        records_of(tmp_path / (name + ending))


def test_a_chunk_of_a_compressed_file_is_no_larger_than_one_of_the_plain_file(tmp_path: Path) -> None:
    content = "".join(json.dumps({"text": "the cat " * 10000}) + "\n" for _ in range(64)).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    sizes = {}
    for name in ("a.jsonl", "a.jsonl.gz"):
        files = find_source_files({"a": [str(tmp_path / name)]})
        sizes[name] = [len(chunk.records) for chunk in read_files(files, ChunkSize(bytes=1 << 20))]
    assert sizes["a.jsonl.gz"] == sizes["a.jsonl"]
    assert len(sizes["a.jsonl"]) > 4


def test_a_compressed_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with refused("sources.a", ".jsonl", tmp_path / "a.parquet.gz", error=UsageError):
        find_source_files({"a": [str(tmp_path / "a.parquet.gz")]})
