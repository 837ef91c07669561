"""Folders of sources: every file below them is read, or named and counted, or refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from tests.lib.shown import audit_of
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.options import UsageError
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import files_left_out, find_source_files

READ = (".jsonl", ".jsonlines", ".JSONL", ".json", ".parquet", ".csv", ".txt", "/")  # "/": an Arrow folder
LEFT_OUT = (".log", ".zip", ".lz4", ".yaml", ".png", ".arrow")
HIDDEN = (".jsonl.lz4", ".jsonl.zip", ".parquet.gz", ".csv.bak", "-00004", ".00004", ".jsonl.1", ".gz")
NOTES = ("README.md", "LICENSE", "README.txt", ".hidden.jsonl", "load.py", "_SUCCESS", "sums.md5", "a.jsonl.sha256")
NAMES = st.tuples(st.sampled_from(["", "below/", "below/deep/"]), st.sampled_from("abc"))


def write(path: Path, text: str) -> None:
    """Write a file that holds one record with a text, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record, kind = {"text": text}, path.suffix.lower()
    if kind == ".parquet":
        pq.write_table(pa.table({"text": [text]}), path)
    elif kind == "":
        Dataset.from_list([record]).save_to_disk(path)
    else:
        is_text = {".csv": f"text\n{text}\n", ".txt": text, ".json": json.dumps([record])}
        path.write_text(is_text.get(kind, json.dumps(record) + "\n"))


@settings(max_examples=60, deadline=None)
@given(
    read=st.lists(st.tuples(NAMES, st.sampled_from(READ)), min_size=1, max_size=4, unique=True),
    others=st.lists(st.tuples(NAMES, st.sampled_from(LEFT_OUT)), max_size=3, unique=True),
    notes=st.sets(st.sampled_from(NOTES)),
)
def test_every_file_is_read_or_counted(tmp_path_factory: Any, read: Any, others: Any, notes: Any) -> None:
    folder = tmp_path_factory.mktemp("folder")
    texts = {}
    for (below, name), suffix in read:
        path = folder / below / f"{name}{suffix.rstrip('/')}{'_folder' * (suffix == '/')}"
        texts[path] = f"{below}{name}{suffix}"
        write(path, texts[path])
    for (below, name), suffix in others:
        write(folder / below / f"{name}{suffix}", "x")
    for name in notes:
        (folder / name).write_text(json.dumps({"text": name}))
    files = find_source_files({"a": [str(folder)]})
    found = [read_record(raw)["text"] for file in files for chunk in read_chunks(file) for _, raw in chunk.records]
    kinds = {path.suffix.lower() for path in texts}
    is_beside = kinds != {".txt"}  # texts beside other formats are left out as well
    expected = sorted(text for path, text in texts.items() if not (is_beside and path.suffix == ".txt"))
    left_out = [suffix for _, suffix in others] + [".txt"] * (len(texts) - len(expected))
    if not is_beside and "README.txt" in notes:
        expected = sorted([*expected, json.dumps({"text": "README.txt"})])
    assert sorted(found) == expected
    assert dict(files_left_out(files)) == {suffix: left_out.count(suffix) for suffix in set(left_out)}


@pytest.mark.parametrize("suffix", HIDDEN)
def test_a_file_whose_name_hides_its_format_is_refused(tmp_path: Path, suffix: str) -> None:
    for number in range(3):
        write(tmp_path / f"part{number}.jsonl", "x")
    odd = tmp_path / f"part3{suffix}"
    odd.write_bytes(b"x")
    with refused("sources.a", odd, error=UsageError):
        find_source_files({"a": [str(tmp_path)]})
    assert len(find_source_files({"a": [f"{tmp_path}/*.jsonl"]})) == 3  # the way out


def test_the_table_the_report_and_show_name_what_a_folder_has_beside_its_records(tmp_path: Path, chatml: str) -> None:
    write(tmp_path / "data/a.jsonl", "the cat")
    write(tmp_path / "data/b.log", "x")
    (tmp_path / "data/c.jsonl").write_text("")  # a download that failed
    Dataset.from_list([{"text": "the mat"}]).save_to_disk(tmp_path / "data/arrow")
    write(tmp_path / "data/arrow/more.jsonl", "not of the Arrow folder")
    sources = f"sources={{a:{tmp_path}/data,b:{tmp_path}/data/a.jsonl}}"
    out = tmp_path / "out"
    options = [sources, f"output_dir={out}", f"model.path={chatml}", "num_workers=1"]
    report = tokenize(read_options(TokenizeOptions, options))
    assert "a: files left out, of other formats: .jsonl (1), .log (1)" in report.table()
    assert "a: warning: 1 files without a record" in report.table()
    written = json.loads((out / "report.json").read_text())
    assert written["sources"]["a"]["left_out_files"] == {".jsonl": 1, ".log": 1}
    assert written["sources"]["b"]["left_out_files"] == {}
    found = audit_of(tmp_path, str(out))["findings"]["left_out_files"]
    assert (found["count"], found["details"]) == (2, {".jsonl": 1, ".log": 1})
