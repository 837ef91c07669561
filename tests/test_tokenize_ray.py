"""`tokenize backend=ray` on a Ray cluster of this machine: the local backend's rows and reports, restarts, errors."""

import csv
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk
from filelock import FileLock

from tests.ray_cluster import ray_nodes
from tests.test_tokenize_templates import CHATML, tiny_tokenizer
from verl_ext.commands import tokenize_ray
from verl_ext.commands.command_line import read_options
from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.commands.tokenize_ray import tokenize_on_ray
from verl_ext.ray_cluster import ray_cluster
from verl_ext.text.dataset_folder import SHARD_BYTES
from verl_ext.text.readers import CHUNK
from verl_ext.values import DataError, UsageError

pytestmark = pytest.mark.slow

QA = [{"question": f"the cat {i}", "answer": "sat on the mat " * (i % 5 + 1), "kind": f"k{i % 3}"} for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests: each would start its own."""
    with pytest.MonkeyPatch.context() as patch, ray_nodes(1):
        # As in a command, whose process has no torch and whose workers then need none: importing it takes seconds.
        patch.setattr(tokenize_ray, "tokenizer_module", lambda: "verl_ext.text.torchless_tokenizers")
        with ray_cluster(2):
            yield


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Records in every format: some bad, some with a weight late in their source, files of one unit and of several."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [*QA[:9], {"text": ""}, *QA[9:], {"text": "the cat", "loss_weight": 0.5, "kind": "late"}, {"x": 1}]
    write_jsonl(folder / "lines.jsonl", lines)
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


def on_ray(sources: dict[str, Any], output: Path, model: Path, *overrides: str, size: int = 700) -> Report:
    options = options_of(sources, output, model, "backend=ray", *overrides)
    return tokenize_on_ray(options, CHUNK, SHARD_BYTES, size)


def shards(folder: Path) -> list[int]:
    """The files that a dataset's shards are, by whatever name."""
    return [path.stat().st_ino for path in sorted(folder.rglob("data-*.arrow"))]


@pytest.mark.parametrize(
    "overrides",
    [
        ("category_field=kind", "sample={lines:13,rows:0.6,arrow:9,packed:0.5}"),
        ("max_tokens=16", "over_length=split"),
    ],
)
def test_rows_categories_and_report_are_those_of_the_local_backend(
    tmp_path: Path, model: Path, sources: dict[str, Path], overrides: tuple[str, ...]
) -> None:
    overrides = (*overrides, "on_bad_record=skip")
    tokenize(options_of(sources, tmp_path / "out", model, *overrides))
    (tmp_path / "out").rename(tmp_path / "local")
    report = on_ray(sources, tmp_path / "out", model, *overrides)
    ours, local = load_from_disk(str(tmp_path / "out")), load_from_disk(str(tmp_path / "local"))
    assert ours.data.schema == local.data.schema
    assert ours.to_list() == local.to_list()
    assert len(shards(tmp_path / "out")) > 9  # of 7 sources
    for name in ("categories.json", "report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert report.total.documents == len(ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "out"]


def test_the_first_bad_record_in_order_ends_the_run_with_its_line(tmp_path: Path, model: Path) -> None:
    lines = [json.dumps(qa) for qa in QA]
    lines[7], lines[9], lines[20] = "", "{", "no json"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text("[")
    with pytest.raises(DataError, match=r"a\.jsonl:10: malformed JSON"):
        on_ray({"a": tmp_path / "a.jsonl", "b": tmp_path / "b.json"}, tmp_path / "out", model, size=200)
    assert not (tmp_path / "out").exists()


def test_a_restart_goes_on_from_finished_units_and_redoes_those_of_a_changed_file(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture
) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", QA)
    bad = write_jsonl(tmp_path / "b.jsonl", [*QA, {"text": ""}])
    with pytest.raises(DataError, match=r"b\.jsonl:25: text is empty"):
        on_ray({"a": good, "b": bad}, tmp_path / "out", model)
    kept = tmp_path / ".out.units"
    assert f"finished parts stay in {kept}: the same command goes on from there" in capfd.readouterr().err
    before = set(shards(kept))
    assert before
    (kept / ".killed.unfinished-here-1").mkdir()
    write_jsonl(bad, QA[:3])
    on_ray({"a": good, "b": bad}, tmp_path / "out", model)
    of_a = [shard for shard in shards(tmp_path / "out") if shard in before]
    assert len(of_a) > 2
    assert shards(tmp_path / "out")[: len(of_a)] == of_a
    lengths = load_from_disk(str(tmp_path / "out"))["length"]
    assert lengths[24:] == lengths[:3]
    assert not kept.exists()


def test_without_hard_links_shards_are_moved_and_an_interrupted_move_is_made_good(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, replace, moved = write_jsonl(tmp_path / "a.jsonl", QA), os.replace, []

    def fail(*_: Any) -> None:
        raise OSError("no links here")

    def replace_one_shard(path: Any, target: Any) -> None:
        if Path(target).name.startswith("data-") and path != target:
            moved.append(path)
            if len(moved) == 2:
                raise KeyboardInterrupt
        replace(path, target)

    monkeypatch.setattr(os, "link", fail)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_one_shard)
        with pytest.raises(KeyboardInterrupt):
            on_ray({"a": source}, tmp_path / "out", model)
    on_ray({"a": source}, tmp_path / "out", model)
    assert len(load_from_disk(str(tmp_path / "out"))) == len(QA)


def test_two_runs_on_one_output_are_refused(tmp_path: Path, model: Path) -> None:
    source, kept = write_jsonl(tmp_path / "a.jsonl", QA), tmp_path / ".out.units"
    kept.mkdir()
    (kept / "run.json").write_text(json.dumps({"host": "node7", "pid": 12}))
    with (
        FileLock(kept / "lock"),
        pytest.raises(DataError, match=r"output_dir must be written by one run at a time; got .*process 12 on node7"),
    ):
        on_ray({"a": source}, tmp_path / "out", model)
    assert kept.exists()


def test_nothing_is_left_of_a_run_that_finished_no_unit(tmp_path: Path, model: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: text is empty"):
        on_ray({"a": source}, tmp_path / "out", model)
    assert list(tmp_path.iterdir()) == [source]


def test_a_source_without_records_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(DataError, match=r"sources\.a must hold at least one record"):
        on_ray({"a": write_jsonl(tmp_path / "a.jsonl", [])}, tmp_path / "out", model)


@pytest.fixture
def killed_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which `ray start` has been killed: the address that it has written down leads nowhere."""
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
    with pytest.raises(UsageError, match=f"RAY_ADDRESS must be host:port of the head of a Ray cluster.* got {address}"):
        ray_cluster(1).__enter__()
