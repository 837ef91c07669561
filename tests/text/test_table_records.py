"""Tables (Arrow folders, Parquet, Hub datasets) give the records of the same JSON lines, in small parts."""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json, List, Value

from tests.lib.errors import names, refused
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.json_records import parse_line
from verl_ext.text.read.readers import CHUNK, Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.records.records import parse_record, read_columns

FEATURES = Features(
    {
        "whole": Json(),
        "messages": List({"role": Value("string"), "content": Json(), "calls": List({"arguments": {"t": Json()}})}),
        "tags": List(Json()),
        "nested": {"deep": {"list": List(List(Json())), "text": Value("string")}},
        "plain": Value("int64"),
    }
)


def chunks_of(source: Path | str, size: ChunkSize = CHUNK, columns: Any = None) -> list[Chunk]:
    return [chunk for file in find_source_files({"a": [str(source)]}) for chunk in read_chunks(file, size, columns)]


def records_of(source: Path | str, **how: Any) -> list[Any]:
    found = []
    records = (record for chunk in chunks_of(source, **how) for record in chunk.records)
    for number, (place, raw) in enumerate(records, start=1):
        assert place.endswith(f":{number}")
        found.append(parse_line(raw) if isinstance(raw, bytes) else raw)
    return found


def json_value(draw: random.Random, depth: int = 3) -> Any:
    """Draw a JSON value; null only below the top, because Arrow and a missing field cannot tell it there."""
    texts = ["", "a", '"quoted"', "{}", "[1]", "null", "1.5", "x\n\\\t", "雪😀", " "]
    leaves = [lambda: draw.choice(texts), lambda: draw.randrange(-(2**60), 2**60), lambda: draw.random() < 0.5]
    if not depth or draw.random() < 0.6:
        return draw.choice([*leaves, lambda: draw.randrange(9) / 4])()
    children = [None if draw.random() < 0.2 else json_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return children if draw.random() < 0.5 else {f"k{number}": child for number, child in enumerate(children)}


def record(draw: random.Random) -> dict[str, Any]:
    """Draw a record of FEATURES in which any field may be missing."""

    def some(**fields: Any) -> dict[str, Any]:
        return {name: make() for name, make in fields.items() if draw.random() < 0.8}

    def several(make: Any) -> list[Any]:
        return [make() for _ in range(draw.randrange(3))]

    def value() -> Any:
        return json_value(draw)

    def message() -> Any:
        return some(role=lambda: "user", content=value, calls=lambda: several(lambda: {"arguments": some(t=value)}))

    deep = {"list": lambda: several(lambda: several(value)), "text": lambda: draw.choice(["a", '"b"'])}
    return {"plain": draw.randrange(9)} | some(
        whole=value,
        messages=lambda: several(message),
        tags=lambda: several(value),
        nested=lambda: some(deep=lambda: some(**deep)),
    )


def as_stored(value: Any, feature: Any) -> Any:
    """Replace values of the type `Json()` by their texts, and the type by that of a text."""
    if isinstance(feature, Json):
        return Value("string") if value is feature else json.dumps(value)
    if isinstance(feature, List):
        if value is feature:
            return List(as_stored(feature.feature, feature.feature))
        return [as_stored(child, feature.feature) for child in value]
    return (
        {name: as_stored(child, feature[name]) for name, child in value.items()} if isinstance(value, dict) else value
    )


@pytest.mark.parametrize("seed", range(4))
def test_tables_with_json_columns_have_the_records_of_the_same_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    rows = [record(draw) for _ in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Not by `Dataset.from_list`, which takes a text such as "{}" for the value that it would be in JSON.
    texts = pa.Table.from_pylist(
        [as_stored(row, FEATURES) for row in rows], Features(as_stored(FEATURES, FEATURES)).arrow_schema
    )
    table = Dataset(texts.cast(FEATURES.arrow_schema))
    table.save_to_disk(tmp_path / "arrow", num_shards=2)
    table.to_parquet(tmp_path / "a.parquet", batch_size=25)
    pq.write_table(pq.read_table(tmp_path / "a.parquet").replace_schema_metadata(None), tmp_path / "b.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "a.parquet").rename(tmp_path / "hub/train.parquet")
    build = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **more: build(str(tmp_path / "hub")))
    expected = records_of(tmp_path / "a.jsonl")
    assert expected == rows
    for source in ("arrow", "hub/train.parquet", "b.parquet", "hf://datasets/owner/name"):
        found = records_of(source if "://" in source else tmp_path / source, size=ChunkSize(7, 1 << 10))
        assert [{name: value for name, value in row.items() if value is not None} for row in found] == rows, source


def test_a_map_is_an_object_and_bad_json_a_value_that_cannot_be_read(tmp_path: Path) -> None:
    pairs = pa.array(
        [[("role", "user"), ("content", "a")], [("b", "1"), ("b", "2")]], pa.map_(pa.string(), pa.string())
    )
    cells = pa.array(['{"a": [1]}', '{"a": NaN}']).cast(pa.string())
    table = pa.table({"pairs": pairs, "cells": pa.ExtensionArray.from_storage(pa.json_(), cells)})
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = records_of(tmp_path / "a.parquet")
    assert first == {"pairs": {"role": "user", "content": "a"}, "cells": {"a": [1]}}
    assert [bad.reason for bad in second.values()] == ["duplicate_key", "malformed_json"]
    assert names(str(second["pairs"]), "column pairs", "'b'")
    assert names(str(second["cells"]), "column cells", "NaN")


def table_of(rows: int, **columns: Any) -> pa.Table:
    return pa.table({"text": [f"{row} " * 50_000 for row in range(rows)], **columns})


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_long_rows_of_a_table_become_as_many_chunks_as_those_of_json_lines(tmp_path: Path, kind: str) -> None:
    table = table_of(40)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    pq.write_table(table, tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "arrow")
    named = tmp_path / ("arrow" if kind == "arrow" else "a.parquet")
    lines, rows = chunks_of(tmp_path / "a.jsonl"), chunks_of(named)
    assert len(rows) >= len(lines) - 1  # the last chunk of lines may be empty
    assert all(chunk.text_bytes <= CHUNK.bytes or len(chunk.records) == 1 for chunk in rows)
    (file,) = find_source_files({"a": [str(named)]})
    assert 0 <= (file.num_bytes or 0) - sum(chunk.num_bytes for chunk in rows) <= len(rows) + 1000


def test_rows_that_the_sizes_in_the_file_do_not_tell_are_cut_as_well(tmp_path: Path) -> None:
    text = "a" * 400_000  # once in the file, as a value of its dictionary
    pq.write_table(pa.table({"text": [text] * 300, "number": list(range(300))}), tmp_path / "a.parquet")
    chunks = chunks_of(tmp_path / "a.parquet")
    assert [record["number"] for chunk in chunks for _, record in chunk.records] == list(range(300))
    assert {len(chunk.records) for chunk in chunks} == {1}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_nothing_reads_is_there_but_not_converted(tmp_path: Path, kind: str) -> None:
    far = pa.array([10**15, None, 10**15], pa.timestamp("s"))  # no year that Python has
    parts = pa.array([[{"data": "x" * 2000}], [], None])
    texts, empty = pa.array(["a", "b", "c"]), pa.nulls(3, pa.string())
    table = pa.table({"text": texts, "far": far, "parts": parts, "parts.of": ["y"] * 3, "empty": empty})
    pq.write_table(table, tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "arrow")
    named = tmp_path / ("arrow" if kind == "arrow" else "a.parquet")
    for how in ({"columns": read_columns({})}, {}):  # read by name, or all: a value is bad only if something reads it
        rows = [parse_record(raw) for raw in records_of(named, **how)]
        assert [row.content.text for row in rows] == ["a", "b", "c"]
        assert [row.unused for row in rows] == [["far", "parts", "parts.of", "empty"]] * 3
    assert len(records_of(named, columns=())) == 3
    with refused("unreadable_row", "column far", error=BadRecord):
        parse_record(records_of(named)[0], {"text": "far"})
