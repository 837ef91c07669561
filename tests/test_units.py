"""Files as units of work: any split gives the records of the whole file, under their own numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_ext.text.readers import read_chunks
from verl_ext.text.sources import SourceFile, find_source_files
from verl_ext.text.units import LEAST_UNIT, MOST_UNIT, Unit, count, numbered, unit_bytes, units_of

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
lines = st.lists(st.sampled_from(["{}", '{"text": "é"}', '{"text": "' + "cat " * 20 + '"}', "", "  ", "\r", "no json"]))


def records(files: list[SourceFile]) -> list[tuple[str, Any]]:
    """(place, record) of every record of files or parts of them."""
    return [
        (chunk.place(number), record)
        for file in files
        for chunk in read_chunks(file)
        for number, record in chunk.records
    ]


def parts(units: list[Unit]) -> list[SourceFile]:
    counts = {file: count(file) for unit in units for file in unit.files}
    return [file for unit in numbered(units, counts) for file in unit.files]


@in_one_folder
@given(lines, st.sampled_from(["", "\ufeff"]), st.booleans(), st.integers(1, 60))
def test_lines_are_those_of_the_whole_file(tmp_path: Path, lines: list[str], mark: str, ends: bool, size: int) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes((mark + "\n".join(lines) + "\n" * ends).encode())
    files = find_source_files({"a": [str(source)]})
    split = parts(units_of(files, size))
    assert records(split) == records(files)
    assert sum(file.num_bytes or 0 for file in split) == files[0].num_bytes
    read = 0
    for file in split:
        assert file.part is None or file.part.records == read
        read += count(file)[0]


@in_one_folder
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 300, 1000]), st.booleans())
def test_rows_are_those_of_the_whole_file(
    tmp_path: Path, number: int, group: int, shards: int, size: int, as_parquet: bool
) -> None:
    rows = [{"text": f"the cat {row}"} for row in range(number)] or [{"text": "sat"}]
    if as_parquet:
        source = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=group)
    else:
        source = tmp_path / f"{number} {group} {shards}"
        source.mkdir(exist_ok=True)
        names = [f"{shard}.arrow" for shard in range(shards)]
        for shard, name in enumerate(names):
            table = pa.Table.from_pylist(rows).slice(shard * len(rows) // shards)
            table = table.slice(0, (shard + 1) * len(rows) // shards - shard * len(rows) // shards)
            with pa.ipc.new_stream(str(source / name), table.schema) as writer:
                writer.write_table(table, max_chunksize=group)
        (source / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (source / "dataset_info.json").write_text("{}")
    files = find_source_files({"a": [str(source)]})
    split = parts(units_of(files, size))
    assert records(split) == records(files)
    if size == 1 and (as_parquet or shards == 1):
        assert len(split) == math.ceil(len(rows) / group)
    assert 0 <= (files[0].num_bytes or 0) - sum(file.num_bytes or 0 for file in split) < len(split)


def test_units_share_small_files_of_a_source_alone_and_keep_the_order(tmp_path: Path) -> None:
    sizes = {"a": [10, 10, 10, 25, 90, 10], "b": [10], "c": [300, 1]}
    for name, own in sizes.items():
        (tmp_path / name).mkdir()
        for place, size in enumerate(own):
            (tmp_path / name / f"{place}.csv").write_text("x" * size)
    files = find_source_files({name: [str(tmp_path / name)] for name in sizes})
    units = units_of(files, 30)
    assert [[file.num_bytes for file in unit.files] for unit in units] == [[10] * 3, [25], [90], [10], [10], [300], [1]]
    assert [file for unit in units for file in unit.files] == files
    assert [unit.places for unit in units] == [(0, 1, 2), (3,), (4,), (5,), (0,), (0,), (1,)]


@pytest.mark.parametrize("content", [b"no parquet", b""])
def test_what_cannot_be_split_is_one_part_for_its_reader_to_refuse(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    (unit,) = units_of(files := find_source_files({"a": [str(tmp_path / "a.parquet")]}), 1)
    assert list(unit.files) == files


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "cat"}) + "\n" * 100)
    units = units_of(find_source_files({"a": [str(source)]}), 60)
    source.write_text("\n" * 30)
    with pytest.raises(ValueError, match=r"a\.jsonl: must not change while it is read; 30 of 60 bytes came"):
        records(list(units[0].files))


def test_the_size_of_units_follows_from_the_corpus_in_steps() -> None:
    def of(num_bytes: int | None) -> int:
        return unit_bytes([SourceFile(1, "a.jsonl", "jsonl", num_bytes)])

    assert of(None) == of(1) == of(1 << 30) == LEAST_UNIT
    assert of((1 << 30) + 1) == of(1 << 31) == 2 * LEAST_UNIT
    assert of(1 << 50) == MOST_UNIT
