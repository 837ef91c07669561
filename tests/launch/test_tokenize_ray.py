"""`tokenize backend=ray` on this machine's Ray cluster: it has the local backend's rows and reports; deaths, errors."""

import csv
import gzip
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from tests.lib.document_texts import write_lines
from tests.lib.errors import refused
from tests.lib.ray_cluster import ray_nodes
from verl_ext.commands.command_line import read_options
from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.launch.ray_cluster import ray_cluster
from verl_ext.options import DataError, UsageError
from verl_ext.text import tokenizing
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import ChunkSize
from verl_ext.text.workers import TRIES, ray_results

pytestmark = pytest.mark.slow

QA = [{"question": f"the cat {i}", "answer": "sat on the mat " * (i % 5 + 1), "kind": f"k{i % 3}"} for i in range(24)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start one cluster for all tests, each of which would otherwise start its own."""
    with pytest.MonkeyPatch.context() as patch, ray_nodes(1):
        # As in a command: its process and so its workers do not import torch, which takes seconds.
        patch.setattr(tokenizing, "tokenizer_module", lambda: "verl_ext.text.tokens.torchless_tokenizers")
        with ray_cluster(2):
            yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write records in every format: some bad, some with a late weight, in files of one chunk and of several."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [*QA[:9], {"text": ""}, *QA[9:], {"text": "the cat", "loss_weight": 0.5, "kind": "late"}, {"x": 1}]
    write_lines(folder / "lines.jsonl", lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress("\n\n".join(map(json.dumps, QA)).encode()))
    (folder / "list.json").write_text(json.dumps(QA, indent=1))
    pq.write_table(pa.Table.from_pylist(QA), folder / "rows.parquet", row_group_size=5)
    Dataset.from_list(QA).save_to_disk(folder / "arrow", num_shards=2)
    with open(folder / "cells.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, ["question", "answer", "kind"])
        writer.writeheader()
        writer.writerows(QA)
    (folder / "texts").mkdir()
    for number in range(5):
        (folder / "texts" / f"{number}.txt").write_text(f"the cat {number} sat on the mat")
    return {path.name.partition(".")[0]: path for path in sorted(folder.iterdir())}


def options_of(sources: dict[str, Any], output: Path, model: Path, *overrides: str) -> TokenizeOptions:
    items = ",".join(f"{name}:'{path}'" for name, path in sources.items())
    base = [f"sources={{{items}}}", f"output_dir={output}", f"model.path={model}", "num_workers=2"]
    return read_options(TokenizeOptions, [*base, *overrides])


def on_ray(sources: dict[str, Any], output: Path, model: Path, *overrides: str) -> Report:
    options = options_of(sources, output, model, "backend=ray", *overrides)
    return tokenize(options, ChunkSize(5, 700))


@pytest.mark.parametrize(
    "overrides", [("category_field=kind", "sample={lines:13,rows:0.6,arrow:9,packed:0.5}"), ("turns=last",)]
)
def test_rows_categories_and_report_are_those_of_the_local_backend(
    tmp_path: Path, chatml: Path, sources: dict[str, Path], overrides: tuple[str, ...]
) -> None:
    overrides = (*overrides, "on_bad_record=skip")
    tokenize(options_of(sources, tmp_path / "out", chatml, *overrides))
    (tmp_path / "out").rename(tmp_path / "local")
    report = on_ray(sources, tmp_path / "out", chatml, *overrides)
    ours, local = load_from_disk(str(tmp_path / "out")), load_from_disk(str(tmp_path / "local"))
    assert ours.data.schema == local.data.schema
    assert ours.to_list() == local.to_list()
    for name in ("categories.json", "report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert report.total.documents == len(ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "out"]


@pytest.mark.parametrize("share", ["0.2", "7"])
def test_both_parts_and_what_is_left_out_are_those_of_the_local_backend(
    tmp_path: Path, chatml: Path, sources: dict[str, Path], share: str
) -> None:
    overrides = (f"val_share={share}", "deduplicate=true", "category_field=kind", "min_tokens=12", "system='the dog'")
    overrides = (*overrides, "sample={lines:13,rows:0.6}", "on_bad_record=skip")
    tokenize(options_of(sources, tmp_path / "out", chatml, *overrides))
    (tmp_path / "out").rename(tmp_path / "local")
    report = on_ray(sources, tmp_path / "out", chatml, *overrides)
    assert report.total.duplicates > 0
    for part in ("train", "val"):
        ours, local = (load_from_disk(str(tmp_path / run / part)) for run in ("out", "local"))
        assert ours.data.schema == local.data.schema
        assert ours.to_list() == local.to_list() != []
        for name in (f"{part}/categories.json", f"{part}/report.json", "report.json"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def test_the_first_bad_record_in_order_ends_the_run_with_its_line(tmp_path: Path, chatml: Path) -> None:
    lines = [json.dumps(qa) for qa in QA]
    lines[7], lines[9], lines[20] = "", "{", "no json"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text("[")
    with refused(f"{tmp_path}/a.jsonl:10", "malformed", error=DataError):
        on_ray({"a": tmp_path / "a.jsonl", "b": tmp_path / "b.json"}, tmp_path / "out", chatml)
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_run_with_a_bad_record(tmp_path: Path, chatml: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [*QA, {"text": ""}])
    with refused(f"{tmp_path}/a.jsonl:25", "empty", error=DataError):
        on_ray({"a": source}, tmp_path / "out", chatml)
    assert list(tmp_path.iterdir()) == [source]


def test_a_node_with_another_tokenizer_is_refused(
    tmp_path: Path, chatml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatEncoder, "fingerprint", lambda self: "the driver's")
    with refused("model.path", "node", error=DataError):
        on_ray({"a": write_lines(tmp_path / "a.jsonl", QA)}, tmp_path / "out", chatml)


def die_at_seven(tries: Path, job: int) -> int:
    """Return the job; on job 7 the process ends, as often as the folder's name says."""
    if job == 7 and len([*tries.iterdir()]) < int(tries.name):
        (tries / os.urandom(4).hex()).touch()
        os._exit(1)
    return job


@pytest.mark.parametrize("deaths", [TRIES - 1, TRIES])
def test_a_job_whose_worker_dies_is_done_again_a_few_times(tmp_path: Path, deaths: int) -> None:
    tries = tmp_path / str(deaths)
    tries.mkdir()
    results = ray_results(partial(Path, tries), die_at_seven, range(20), 2, name="test")
    if deaths < TRIES:
        assert list(results) == list(range(20))
        return
    with refused("test worker", f"{TRIES} times", "num_workers=2", error=DataError):
        list(results)


def test_a_source_without_records_is_refused(tmp_path: Path, chatml: Path) -> None:
    with refused("sources.a", tmp_path / "a.jsonl", error=DataError):
        on_ray({"a": write_lines(tmp_path / "a.jsonl", [])}, tmp_path / "out", chatml)


@pytest.fixture
def killed_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a machine on which `ray start` was killed: its recorded address leads nowhere."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def test_where_a_cluster_was_killed_one_is_started(killed_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    joined: list[Any] = []
    monkeypatch.setattr("ray.init", lambda address=None, **_: joined.append(address))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with ray_cluster(1) as is_own:
        assert is_own
    assert joined == ["local"]


@pytest.mark.parametrize("address", ["nonsense", "ray://head:10001", "127.0.0.1:1", "auto"])
def test_an_address_without_a_cluster_is_refused_at_once(
    killed_cluster: None, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with refused("RAY_ADDRESS", "host:port", f"got {address}", error=UsageError):
        ray_cluster(1).__enter__()
