"""Files from which no record can be read: they give a one-line error, and no content is lost in silence."""

import bz2
import gzip
import json
import lzma
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.document_texts import zstd
from tests.lib.errors import names, refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, main, tokenize
from verl_ext.options import DataError, UsageError
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.json_records import parse_line
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.read.text_file import TextFile


def read(path: Path | str) -> list[tuple[str, Any]]:
    """Return (place, record or the reason why there is none) for everything that a path stands for."""
    found = []
    for file in find_source_files({"a": [str(path)]}):
        for chunk in read_chunks(file):
            for place, raw in chunk.records:
                try:
                    record = read_record(raw) if isinstance(raw, (bytes, TextFile, BadRecord)) else raw
                except BadRecord as error:
                    record = f"{error.reason}: {error}"
                found.append((place, record))
    return found


def assert_refused(path: Path | str, *things: Any, error: type[Exception] = DataError) -> None:
    with refused(*things, error=error):
        read(path)


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("fields", "things"),
    [
        ('"a": 1, "a": 2', ("duplicate_key", "'a'")),
        ('"b": [{"a": 1, "c": 0, "a": 2}]', ("duplicate_key", "'a'")),
        ('"a": NaN', ("malformed_json", "NaN")),
        ('"a": -Infinity', ("malformed_json", "-Infinity")),
        ('"a": 1e400', ("malformed_json", "1e400")),
        ('"a": ' + "1" * 5000, ("malformed_json", "digits")),
    ],
)
def test_json_that_python_would_change_unsaid_is_a_bad_record_and_the_next_is_read(
    tmp_path: Path, fields: str, things: tuple[str, ...]
) -> None:
    for name, content in (("a.jsonl", '{{{}}}\n{{"text": "b"}}\n'), ("a.json", '[{{{}}}, {{"text": "b"}}]')):
        path = written(tmp_path / name, content.format(fields))
        ((place, bad), following) = read(path)
        assert (place, following) == (f"{path}:1", (f"{path}:2", {"text": "b"}))
        assert names(bad, *things)


def test_whole_numbers_are_read_exactly() -> None:
    assert parse_line(b'{"a": 18446744073709551617, "b": 1e3}') == {"a": 18446744073709551617, "b": 1000.0}


@pytest.mark.parametrize("blanks", [0, 5000])
def test_an_error_in_a_json_list_names_the_record(tmp_path: Path, blanks: int) -> None:
    path = written(tmp_path / "a.json", "\n" * blanks + '[{"text": "a"}, {"text": }]')
    assert_refused(path, path, "malformed", "record 2")
    path = written(tmp_path / "b.json", " " * blanks + '{"text": "a"}\n{"text": "b"}\n')
    assert [record for _, record in read(path)] == [{"text": "a"}, {"text": "b"}]


def test_an_error_early_in_a_long_json_list_is_found_without_reading_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json.gz", gzip.compress(b'[{"text" 1}' + b" " * (8 << 20) + b"]")[:-64])
    assert_refused(path, path, "malformed", "':' delimiter in record 1")  # and not of the cut end


@pytest.mark.parametrize(
    ("name", "content", "things"),
    [
        ("a.json", b'{\n "data": []\n}', ("a list", "first object")),
        ("a.json", b"", ("JSON", "empty")),
        ("a.json", b"[" * 100_000, ("nested",)),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), ("UTF-8", "UTF-16")),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), ("UTF-8", "NUL")),
        ("a.json", '[{"text": "a"}]'.encode("utf-32"), ("UTF-8", "UTF-32")),
        ("a.csv", "text\na\n".encode("utf-16"), ("UTF-8", "UTF-16")),
        ("a.csv", b"\nid,text,text\n1,a,b\n", ("a.csv:2", "header", "'text'")),
        ("a.tsv", b'text\tid\n"a\n', ("a.tsv:2", "malformed")),
        ("a.csv", b"text\n" + b"a\n" * 100 + b"caf\xe9\n", ("a.csv:102", "UTF-8", "byte 4")),
        ("a.parquet", b"", ("parquet",)),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, content: bytes, things: tuple[str, ...]
) -> None:
    assert_refused(written(tmp_path / name, content), tmp_path / name, *things)


@pytest.mark.parametrize(
    ("name", "content", "things"),
    [
        ("a.txt", "text".encode("utf-16"), ("not_utf8", "UTF-16")),
        ("a.txt", b"text one\0two", ("nul_byte", "byte 9")),
        ("a.csv", b"id,text\n1,a\0b\n", ("nul_byte", "cell")),
        ("a.csv", b"id,text\n1\n", ("malformed_row", "1 cells", 2)),
        ("a.jsonl", b'{"text": "a"}\r{"text": "b"}\r', ("LF or CR LF", "CR alone")),
    ],
)
def test_text_that_no_record_can_be_made_of_is_a_bad_record(
    tmp_path: Path, name: str, content: bytes, things: tuple[Any, ...]
) -> None:
    ((_, record),) = read(written(tmp_path / name, content))
    assert names(record, *things)


def test_tab_separated_values_are_read_as_comma_separated_ones_are(tmp_path: Path) -> None:
    content = 'question\tanswer\nthe, cat\t"sat\ton\na mat"\n'
    plain = written(tmp_path / "a.tsv", content)
    packed = written(tmp_path / "B.TSV.GZ", gzip.compress(content.encode()))
    expected = {"question": "the, cat", "answer": "sat\ton\na mat"}
    assert [read(path)[0] for path in (plain, packed)] == [(f"{path}:2", expected) for path in (plain, packed)]


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_damaged_member_after_the_first_is_not_taken_for_the_end(tmp_path: Path, ending: str) -> None:
    first, second = (COMPRESS[ending](b'{"text": "%d"}\n' % number) for number in range(2))
    whole = written(tmp_path / f"a.jsonl{ending}", first + second)
    assert len(read(whole)) == 2
    damaged = written(tmp_path / f"b.jsonl{ending}", first + b"X" + second[1:])
    assert_refused(damaged, damaged)


def test_zeros_between_and_after_members_are_padding(tmp_path: Path) -> None:
    member = lzma.compress(b'{"text": "a"}\n')
    assert len(read(written(tmp_path / "a.jsonl.xz", member + bytes(4) + member + bytes(8)))) == 2


def strings(values: list[bytes]) -> pa.Array:
    """Draw text as bytes, which need not be UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


def test_a_table_row_that_is_not_utf8_is_a_bad_record_that_names_its_column(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], "text": strings([b"a", b"\xff", b"c"])})
    pq.write_table(table, tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "arrow")
    for path in (tmp_path / "a.parquet", tmp_path / "arrow"):
        (_, first), (_, second), (_, third) = read(path)
        assert (first, third) == ({"id": 1, "text": "a"}, {"id": 3, "text": "c"})
        assert (second["id"], second["text"].reason) == (2, "not_utf8")
        assert names(str(second["text"]), "column text")


def test_tables_of_other_types_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["a", "b"]).dictionary_encode(),
            "large": pa.array(["x", None], pa.large_string()),
            "binary": [b"x", b"\xff"],
            "nested": [{"a": [1]}, {"a": None}],
            "when": pa.array([0, 2**62], pa.timestamp("ms")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (_, first), (_, second) = read(tmp_path / "a.parquet")
    assert {**first, "when": 0} == {"text": "a", "large": "x", "binary": b"x", "nested": {"a": [1]}, "when": 0}
    assert names(str(second.pop("when")), "column when")
    assert second == {"text": "b", "large": None, "binary": b"\xff", "nested": {}}


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    assert_refused(tmp_path / "a.parquet", tmp_path / "a.parquet", "columns", "'text'")


def arrow_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=300):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("damage", ["cut between two batches", "ended early", "cut", "missing", "no state"])
def test_an_arrow_folder_with_a_broken_shard_is_not_read_in_part(tmp_path: Path, damage: str) -> None:
    table = pa.table({"text": [str(number) for number in range(1000)]})
    Dataset(table).save_to_disk(tmp_path / "a")
    (shard,) = (tmp_path / "a").glob("*.arrow")
    whole, part = arrow_stream(table), arrow_stream(table[:300])
    shard.write_bytes(whole)
    assert len(read(tmp_path / "a")) == 1000
    if damage == "missing":
        shard.unlink()
    elif damage == "no state":
        (tmp_path / "a/state.json").write_text("{}")
    else:
        cut = whole[: len(part) - 8]  # without its end mark
        shard.write_bytes({"cut": whole[:-2000], "ended early": part + whole[len(cut) :]}.get(damage, cut))
    with refused(error=DataError) as raised:
        read(tmp_path / "a")
    assert str(raised.value).startswith(str(tmp_path / "a"))  # the folder or the shard


def test_the_shards_of_an_arrow_folder_must_have_the_same_columns(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}, {"text": "b"}]).save_to_disk(tmp_path / "a", num_shards=2)
    last = max((tmp_path / "a").glob("*.arrow"))
    last.write_bytes(arrow_stream(pa.table({"txt": ["b"]})))
    assert_refused(tmp_path / "a", last, "columns")


def test_what_links_lead_to_several_times_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    written(folder / "a.jsonl", '{"text": "a"}\n')
    (folder / "again.jsonl").symlink_to(folder / "a.jsonl")
    (folder / "self").symlink_to(folder)
    for pattern in (folder, f"{folder}/**/*.jsonl"):
        assert [place for place, _ in read(pattern)] == [f"{folder}/a.jsonl:1"]
    twice = find_source_files({"a": [f"{folder}/a.jsonl"] * 2})
    assert len(twice) == 2  # once for each request


def test_what_would_be_waited_for_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket.jsonl"))
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("fifo.jsonl", "socket.jsonl", "zero.txt"):
        assert_refused(tmp_path / name, "sources.a", "regular files", tmp_path / name, error=UsageError)
    assert_refused(tmp_path, "sources.a", "regular files", error=UsageError)


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jsonl", "wb") as file:
        file.write(b'{"text": "a"}\n')
    assert_refused(tmp_path, "sources.a", "UTF-8", rf"b'{tmp_path}/caf\xe9.jsonl'", error=UsageError)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
@pytest.mark.parametrize("change", ["grows", "shrinks", "vanishes"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str, change: str) -> None:
    path = tmp_path / name
    lines = b"".join(b'{"text": "line %d"}\n' % number for number in range(80_000))
    table = {"text": [str(number) for number in range(2000)]}
    if name == "a.parquet":
        pq.write_table(pa.table(table), path, row_group_size=500)
    else:
        path.write_bytes({"a.jsonl.gz": gzip.compress(lines), "a.csv": lines.replace(b'"', b"")}.get(name, lines))
    (file,) = find_source_files({"a": [str(path)]})
    chunks = read_chunks(file)
    next(chunks)
    content = path.read_bytes()
    if change == "vanishes":
        path.unlink()
    else:
        path.write_bytes(content + lines if change == "grows" else content[: len(content) // 2])
    with refused(path, error=DataError):
        list(chunks)


def test_names_from_the_data_that_are_no_text_do_not_break_the_report(tmp_path: Path, capsys: Any) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    source = written(tmp_path / "a.jsonl", '{"\\ud800": 1}\n{"text": "the cat"}\n')
    base = [f"sources={{a:{source}}}", f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model", "num_workers=1"]
    assert main([*base, "on_bad_record=skip"]) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    (example,) = report["categories"]["a"]["examples"]["unknown_fields"]
    assert r"the fields: \ud800;" in example
    assert r"\ud800" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "thing"),
    [
        ("/bin/ls", "/bin/ls"),
        ("/dev/zero", "regular file"),
        ("{tmp}", "regular file"),
        ("{tmp}/none.jinja", "exists"),
        ("{tmp}/large.jinja", "1,048,576 bytes"),
        ("{tmp}/latin.jinja", "byte 1"),
    ],
)
def test_a_chat_template_that_is_no_text_is_refused_before_anything_is_read(
    tmp_path: Path, template: str, thing: str
) -> None:
    (tmp_path / "large.jinja").write_bytes(b" " * (1 << 20) + b" ")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    named = template.format(tmp=tmp_path)
    with refused("chat_template", named, thing, error=UsageError):
        read_options(
            TokenizeOptions,
            ["sources.a=x.jsonl", f"output_dir={tmp_path}/out", f"model.path={tmp_path}", f"chat_template={named}"],
        )


def test_a_chat_template_that_is_no_jinja_is_refused_with_its_line(tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    written(tmp_path / "a.jinja", CHATML + "\n{% if %}\n")
    source = written(tmp_path / "a.jsonl", '{"question": "q", "answer": "a"}\n')
    base = [f"sources={{a:{source}}}", f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model", "num_workers=1"]
    with refused("chat_template", f"{tmp_path}/a.jinja, line 5", error=UsageError):
        tokenize(read_options(TokenizeOptions, [*base, f"chat_template={tmp_path}/a.jinja"]))


def test_a_zst_file_with_a_window_that_is_not_read_says_how_to_unpack_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00")  # a window of 2 GiB
    assert_refused(tmp_path / "a.jsonl.zst", tmp_path / "a.jsonl.zst", "128 MiB", "zstd -d --long=31")
