"""Sources behind URLs: memory://, file:// and a web server of this machine; Hub datasets, from a folder."""

import gzip
import io
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.errors import refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.data.families.pretrain import find_text_files
from verl_ext.options import DataError, UsageError
from verl_ext.text.read.json_records import parse_line
from verl_ext.text.read.readers import ChunkSize, read_chunks
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokenizing import file_facts

TEXTS = [{"text": f"the cat {number}"} for number in range(600)]
LINES = "".join(json.dumps(record) + "\n" for record in TEXTS).encode()


class Files(SimpleHTTPRequestHandler):
    """A server of whole files of a folder, without ranges."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the same records in every format."""
    root = tmp_path / "data"
    (root / "more").mkdir(parents=True)
    (root / "a.jsonl").write_bytes(LINES)
    (root / "more/b.jsonl.gz").write_bytes(gzip.compress(LINES))
    pq.write_table(pa.Table.from_pylist(TEXTS), root / "more/c.parquet", row_group_size=100)
    (root / "more/readme.txt").write_text("a note")
    Dataset.from_list(TEXTS).save_to_disk(root / "arrow")
    return root


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    web.server_close()


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.put(str(folder), "/bucket", recursive=True)
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


def records(*urls: str) -> list[Any]:
    found = []
    for file in find_source_files({"a": list(urls)}):
        for chunk in read_chunks(file):
            found += [parse_line(raw) if isinstance(raw, bytes) else raw for _, raw in chunk.records]
    return found


def test_files_behind_urls_have_the_records_of_local_ones(memory: str, folder: Path) -> None:
    for name in ("a.jsonl", "more/b.jsonl.gz", "more/c.parquet", "arrow"):
        for url in (f"{memory}/{name}", f"file://{folder}/{name}"):
            assert records(url) == TEXTS


def test_folders_and_globs_behind_urls_are_read_in_order(memory: str) -> None:
    found = find_source_files({"a": [memory]})
    ends = ["a.jsonl", "arrow", "more/b.jsonl.gz", "more/c.parquet"]
    assert [file.path for file in found] == [f"memory:///bucket/{end}" for end in ends]
    assert [file.kind for file in found] == ["jsonl", "arrow", "jsonl", "parquet"]
    assert all(file.num_bytes for file in found)
    found = find_source_files({"a": [f"{memory}/*/*.jsonl*", f"{memory}/a.jsonl"]})
    assert [file.path.rpartition("/")[2] for file in found] == ["b.jsonl.gz", "a.jsonl"]
    assert sum(chunk.num_bytes for file in found for chunk in read_chunks(file)) == sum(f.num_bytes or 0 for f in found)


def test_a_web_server_is_read_as_a_stream_by_several_processes(server: str, folder: Path, tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    base = [f"model.path={tmp_path}/model", "num_workers=2"]
    (folder / "long.txt").write_text("the cat sat on the mat\n" * 60_000)  # more than is read at once
    names = ("a.jsonl", "more/b.jsonl.gz", "long.txt")
    for root, out in ((server, "web"), (str(folder), "local")):
        sources = ",".join(f"'{root}/{name}'" for name in names)
        options = read_options(TokenizeOptions, [f"sources={{a:[{sources}]}}", f"output_dir={tmp_path}/{out}", *base])
        tokenize(options, ChunkSize(bytes=20_000))
    web, local = (load_from_disk(str(tmp_path / out)).data.table for out in ("web", "local"))
    assert web.equals(local)
    assert records(f"{server}/a.jsonl?token=1") == TEXTS


def test_what_does_not_answer_or_exist_is_one_line_that_names_the_url(server: str, memory: str) -> None:
    for url in (f"{server}/none.jsonl", f"{memory}/none.jsonl", f"{memory}/*.csv"):
        with refused("sources.a", url, error=UsageError):
            find_source_files({"a": [url]})
    fsspec.filesystem("memory").pipe("/bucket/c.pdf", b"x")
    with refused("sources.a", ".jsonl", f"{memory}/c.pdf", error=UsageError):
        find_source_files({"a": [f"{memory}/c.pdf"]})
    with refused("sources.a", "fsspec", "nothing://a/b.jsonl", error=UsageError):
        find_source_files({"a": ["nothing://a/b.jsonl"]})
    (file,) = find_source_files({"a": [f"{server}/a.jsonl"]})
    closed = f"{server.rpartition(':')[0]}:1/a.jsonl"
    for failing in (lambda: find_source_files({"a": [closed]}), lambda: list(read_chunks(replace(file, path=closed)))):
        with pytest.raises((DataError, UsageError)) as error:
            failing()
        assert closed in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_file_that_comes_in_part_is_refused(memory: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Part(io.BytesIO):
        size = 10_000_000

    fsspec.filesystem("memory").pipe(f"/bucket/{name}", b"[]\n")
    (file,) = find_source_files({"a": [f"{memory}/{name}"]})
    monkeypatch.setattr("verl_ext.text.read.sources.open_remote", lambda url: Part(b"[]\n"))
    with refused(f"{memory}/{name}", "3 of 10000000 bytes", error=DataError):
        list(read_chunks(file))


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with refused("sources.a", "s3://b/a.jsonl", "verl-ext[remote]", error=UsageError):
        find_source_files({"a": ["s3://b/a.jsonl"]})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a Hub with one dataset, owner/name, from a folder."""
    root = tmp_path / "hub"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        (root / split / "a.jsonl").write_bytes(LINES if split == "train" else LINES[: LINES.index(b"\n") + 1])
    load = datasets.load_dataset_builder

    def local(name: str, config: str | None = None, revision: str | None = None) -> Any:
        if name != "hf://datasets/owner/name":
            raise ConnectionError(f"{name} does not answer\nsecond line")
        return load(str(root), config)

    monkeypatch.setattr(datasets, "load_dataset_builder", local)
    return root


def test_a_hub_dataset_is_streamed_by_split(hub: Path) -> None:
    assert records("hf://datasets/owner/name") == TEXTS
    assert records("hf://datasets/owner/name:test") == TEXTS[:1]
    assert records("hf://datasets/owner/name:default:test") == TEXTS[:1]
    (file,) = find_source_files({"a": ["hf://datasets/owner/name"]})
    assert (file.kind, file.path) == ("hub", "hf://datasets/owner/name:train")
    assert next(read_chunks(file)).records[0][0] == "hf://datasets/owner/name:train:1"
    with refused("sources.a", "name:dev", "train, test", error=UsageError):
        find_source_files({"a": ["hf://datasets/owner/name:dev"]})
    with refused("hf://datasets/owner/none", "answer", error=DataError):
        find_source_files({"a": ["hf://datasets/owner/none"]})


def test_a_hub_dataset_has_a_name_without_a_scheme_unless_a_file_of_this_machine_has_it(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert records("owner/name") == TEXTS
    assert records("owner/name:default:test") == TEXTS[:1]
    (file,) = find_source_files({"a": ["owner/name:test"]})
    assert (file.kind, file.path) == ("hub", "hf://datasets/owner/name:test")
    with refused("owner/none", "a file", "answer", error=DataError):
        find_source_files({"a": ["owner/none"]})
    for local in ("owner/none.jsonl", "./owner/name", "owner/name/more", "name", "owner/na*"):
        with refused("sources.a", local, error=UsageError):
            find_source_files({"a": [local]})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "owner/name/b.jsonl").write_bytes(LINES[: LINES.index(b"\n") + 1])
    assert records("owner/name") == TEXTS[:1]
    assert records("hf://datasets/owner/name") == TEXTS
    assert len(records("owner/name[:9]")) == 9
    (tmp_path / "owner/name").rename(tmp_path / "owner/name[:9]")
    assert records("owner/name[:9]") == TEXTS[:1]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("[:10]", TEXTS[:10]),
        ("[590:]", TEXTS[590:]),
        ("[20:25]", TEXTS[20:25]),
        ("[:]", TEXTS),
        ("[-5:]", TEXTS[-5:]),
        ("[:10%]", TEXTS[:60]),
        ("[99%:]", TEXTS[594:]),
        ("[550:9999]", TEXTS[550:]),
    ],
)
def test_a_slice_of_a_hub_dataset_has_the_rows_that_datasets_gives(
    hub: Path, monkeypatch: pytest.MonkeyPatch, rows: str, expected: list[Any]
) -> None:
    load = datasets.load_dataset_builder

    def with_sizes(*given: Any, **options: Any) -> Any:
        builder = load(*given, **options)
        builder.info.splits = datasets.SplitDict()
        builder.info.splits.add(datasets.SplitInfo("train", num_bytes=60_000, num_examples=600))
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", with_sizes)
    assert records(f"owner/name:train{rows}") == expected
    assert records(f"hf://datasets/owner/name{rows}") == expected
    (file,) = find_source_files({"a": [f"owner/name{rows}"]})
    assert file.path == f"hf://datasets/owner/name:train{rows}"
    assert file.num_bytes == 100 * len(expected)


def test_a_slice_that_cannot_be_counted_or_has_no_rows_is_refused(hub: Path) -> None:
    for rows in ("[:10%]", "[-5:]"):
        with refused("sources.a", f"owner/name:train{rows}", error=UsageError):
            find_source_files({"a": [f"owner/name:train{rows}"]})
    with refused("sources.a", "owner/name[9:9]", error=UsageError):
        find_source_files({"a": ["owner/name[9:9]"]})


def test_a_source_of_unknown_size_has_a_bar_without_an_end(hub: Path, tmp_path: Path, capsys: Any) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    base = [f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model", "num_workers=1"]
    report = tokenize(read_options(TokenizeOptions, ["sources={a:hf://datasets/owner/name:train}", *base]))
    assert report.total.records == 600
    assert "600 records" in capsys.readouterr().err


def test_pretraining_takes_urls_and_sees_that_their_files_change(memory: str) -> None:
    found = find_text_files([f"{memory}/a.jsonl", f"{memory}/more/"], "data.train_dir")
    assert [category for _, category in found] == ["a", "b", "c"]
    before = file_facts(file.path for file, _ in found)
    assert before == file_facts(file.path for file, _ in found)
    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", LINES + LINES)
    assert before != file_facts(file.path for file, _ in found)


def test_an_output_folder_that_holds_a_file_url_source_is_not_replaced(tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.jsonl").write_bytes(LINES)
    with refused("output_dir", "source", f"{tmp_path}/out", error=UsageError):
        read_options(
            TokenizeOptions,
            [
                f"sources={{a:'file://{tmp_path}/out/a.jsonl'}}",
                f"output_dir={tmp_path}/out",
                f"model.path={tmp_path}/model",
                "overwrite=true",
            ],
        )


@pytest.mark.parametrize("path", ["hdfs://host/x.jsonl", "hdfs://host/x/*.jsonl", "hdfs://host/folder"])
def test_a_path_of_hdfs_that_cannot_be_read_is_refused_with_the_command_that_copies_it(path: str) -> None:
    with refused(path, "`hdfs dfs -get`", error=DataError):
        find_source_files({"a": [path]})
