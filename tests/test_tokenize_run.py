"""Sources to dataset, in this process: formats, columns, policies, reports, and what a failed run leaves."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from tests.test_tokenize_templates import CHATML, tiny_tokenizer
from verl_ext.commands.errors import DataError, UsageError
from verl_ext.tokenize import dataset_writer, run
from verl_ext.tokenize.config import load_config
from verl_ext.tokenize.report import Report

QA = [{"question": f"the cat {i}", "answer": "sat on the mat " * (i % 5 + 1)} for i in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(CHATML).save_pretrained(folder)
    return folder


def tokenise(sources: dict[str, Any], output: Path, model: Path, *overrides: str) -> Report:
    items = ",".join(f"{name}:'{path}'" for name, path in sources.items())
    base = [f"sources={{{items}}}", f"output_dir={output}", f"model.path={model}", "num_workers=1"]
    return run.tokenize(load_config([*base, *overrides]))


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows(output: Path) -> list[dict[str, Any]]:
    return load_from_disk(str(output)).to_list()


def test_columns_categories_and_report_are_those_of_the_data_contract(tmp_path: Path, model: Path) -> None:
    qa, text = write_jsonl(tmp_path / "qa.jsonl", QA), write_jsonl(tmp_path / "t.jsonl", [{"text": "the cat sat"}])
    report = tokenise({"qa": qa, "prose": text}, tmp_path / "out", model)
    dataset = load_from_disk(str(tmp_path / "out"))
    schema = dataset.data.schema
    assert {name: schema.field(name).type for name in schema.names} == {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "category_ids": pa.list_(pa.int32()),
        "length": pa.int32(),
    }
    assert json.loads((tmp_path / "out/categories.json").read_text()) == {"1": "qa", "2": "prose"}
    data = dataset.to_list()
    assert all(row["length"] == len(row["input_ids"]) == len(row["loss_mask"]) for row in data)
    assert all(row["category_ids"] == row["loss_mask"] for row in data[:20])
    eos = tiny_tokenizer(CHATML).eos_token_id
    assert data[20]["input_ids"][-1] == eos
    assert data[20]["input_ids"].count(eos) == 1
    assert data[20]["loss_mask"] == [0] + [1] * (data[20]["length"] - 1)
    assert data[20]["category_ids"] == [0] + [2] * (data[20]["length"] - 1)
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert written["categories"]["qa"]["target_tokens"] == sum(sum(row["loss_mask"]) for row in data[:20])
    assert written["total"]["tokens"] == sum(row["length"] for row in data) == report.total.tokens
    assert report.table().splitlines()[1].split()[:3] == ["qa", "20", "0"]


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "json", "json of lines", "parquet", "csv", "arrow", "folder", "glob"]
)
def test_every_format_gives_the_same_documents(tmp_path: Path, model: Path, kind: str) -> None:
    tokenise({"qa": write_jsonl(tmp_path / "plain.jsonl", QA)}, tmp_path / "expected", model)
    source = tmp_path / f"in.{kind.split()[0]}"
    if kind == "jsonl":
        source.write_text("\ufeff\n" + "\n\n".join(json.dumps(record) for record in QA))
    elif kind == "jsonl.gz":
        source.write_bytes(gzip.compress("\n".join(map(json.dumps, QA)).encode()))
    elif kind == "json":
        source.write_text(json.dumps(QA, indent=2))
    elif kind == "json of lines":
        write_jsonl(source, QA)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(QA), source, row_group_size=7)
    elif kind == "csv":
        with open(source, "w", newline="") as stream:
            writer = csv.DictWriter(stream, ["question", "answer"])
            writer.writeheader()
            writer.writerows(QA)
    elif kind == "arrow":
        Dataset.from_list(QA).save_to_disk(source)
    else:
        source = tmp_path / "parts"
        source.mkdir()
        write_jsonl(source / "a.jsonl", QA[:7])
        (source / "b.json").write_text(json.dumps(QA[7:]))
        source = source / "*" if kind == "glob" else source
    tokenise({"qa": source}, tmp_path / "out", model)
    assert rows(tmp_path / "out") == rows(tmp_path / "expected")


def test_json_list_is_read_in_blocks_smaller_than_its_records(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_ext.tokenize.chunks.BLOCK", 5)
    monkeypatch.setattr("verl_ext.tokenize.chunks.CHUNK_RECORDS", 3)
    (tmp_path / "in.json").write_text(json.dumps(QA, indent=1))
    assert tokenise({"qa": tmp_path / "in.json"}, tmp_path / "out", model).total.records == 20


@pytest.mark.parametrize(
    "content", ['[{"text": "a"},\n {"text": }]', '[{"text": "a"}\n {"text": "b"}]', '[{"text": "a"},\n']
)
def test_broken_json_list_names_its_line(tmp_path: Path, model: Path, content: str) -> None:
    source = tmp_path / "in.json"
    source.write_text(content)
    with pytest.raises(DataError, match=r"in\.json:2: malformed JSON"):
        tokenise({"qa": source}, tmp_path / "out", model, "on_bad_record=skip")


def test_nulls_that_arrow_fills_in_are_not_seen(tmp_path: Path, model: Path) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with_calls = [messages[0], {"role": "assistant", "content": "a", "tool_calls": calls}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}, {"messages": with_calls}]), tmp_path / "in.parquet")
    write_jsonl(tmp_path / "in.jsonl", [{"messages": messages}, {"messages": with_calls}])
    tokenise({"a": tmp_path / "in.parquet"}, tmp_path / "out", model)
    tokenise({"a": tmp_path / "in.jsonl"}, tmp_path / "same", model)
    assert rows(tmp_path / "out") == rows(tmp_path / "same")


def test_malformed_line_is_named_and_nothing_is_left(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the cat"}\n\n{"text": \n')
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"in\.jsonl:3: malformed JSON"):
        tokenise({"a": source}, tmp_path / "out", model)
    assert sorted(tmp_path.iterdir()) == before


def test_skipped_records_are_counted_by_reason_and_category(tmp_path: Path, model: Path) -> None:
    bad = [3, {"title": "x"}, {"text": ""}, {"text": "\ud800"}, {"messages": [{"role": "user", "content": "q"}]}]
    first = write_jsonl(tmp_path / "a.jsonl", [*bad, {"text": "the cat"}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"text": ""}, *QA])
    report = tokenise({"a": first, "b": second}, tmp_path / "out", model, "on_bad_record=skip")
    counts = json.loads((tmp_path / "out/report.json").read_text())["categories"]
    reasons = ("not_an_object", "unknown_fields", "empty", "invalid_text", "no_target")
    assert counts["a"]["bad_records"] == dict.fromkeys(reasons, 1)
    assert counts["b"]["bad_records"] == {"empty": 1}
    assert counts["a"]["documents"] == 1
    assert f"{first}:2: no known shape" in report.table()


def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path: Path, model: Path, files_end_at: Any) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "the cat " * 20_000}])
    told = f"^output_dir must be a folder that can be written; got {tmp_path}/out: .*File too large$"
    with files_end_at(1 << 16), pytest.raises(DataError, match=told):
        tokenise({"a": source}, tmp_path / "out", model)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_nothing_usable_is_an_error(tmp_path: Path, model: Path) -> None:
    with pytest.raises(DataError, match="no record could be used"):
        tokenise({"a": write_jsonl(tmp_path / "a.jsonl", [{}])}, tmp_path / "out", model, "on_bad_record=skip")
    with pytest.raises(DataError, match=r"sources\.a must hold at least one record"):
        tokenise({"a": write_jsonl(tmp_path / "b.jsonl", [])}, tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_weights_are_a_column_only_when_some_record_has_one(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr("verl_ext.tokenize.chunks.CHUNK_RECORDS", 4)
    original = dataset_writer.DatasetWriter
    monkeypatch.setattr(run, "DatasetWriter", lambda folder: original(folder, shard_bytes))
    records = [*QA, {"text": "the cat", "loss_weight": 0.5}, {"text": "sat"}]
    tokenise({"a": write_jsonl(tmp_path / "a.jsonl", records)}, tmp_path / "out", model)
    data = rows(tmp_path / "out")
    assert load_from_disk(str(tmp_path / "out")).data.schema.field("loss_weight").type == pa.list_(pa.float32())
    weights = [set(row["loss_weight"]) for row in data]
    assert weights == [{1.0}] * 20 + [{0.5}, {1.0}]
    assert all(len(row["loss_weight"]) == row["length"] for row in data)


def test_last_turn_only_leaves_one_target_turn(tmp_path: Path, model: Path) -> None:
    turns = [("user", "a"), ("assistant", "the cat"), ("user", "b"), ("assistant", "sat")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    tokenise({"a": write_jsonl(tmp_path / "a.jsonl", [record])}, tmp_path / "out", model, "last_turn_only=true")
    (row,) = rows(tmp_path / "out")
    targets = [token for token, target in zip(row["input_ids"], row["loss_mask"], strict=True) if target]
    assert tiny_tokenizer(CHATML).decode(targets) == "sat<|im_end|>"


def test_over_length_documents_are_refused_with_their_place(tmp_path: Path, model: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "the"}, {"text": "the cat sat on the mat " * 9}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: a document must have at most max_tokens=8"):
        tokenise({"a": source}, tmp_path / "out", model, "max_tokens=8")


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_over_length_policies_count_what_they_do(tmp_path: Path, model: Path, policy: str) -> None:
    records = [{"text": "the"}, {"text": "the cat sat on the mat " * 4}, {"question": "cat " * 30, "answer": "a"}]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    tokenise({"a": source}, tmp_path / "whole", model)
    whole = rows(tmp_path / "whole")
    tokenise({"a": source}, tmp_path / "out", model, "max_tokens=8", f"over_length={policy}")
    data = rows(tmp_path / "out")
    assert all(row["length"] <= 8 and row["loss_mask"][0] == row["category_ids"][0] == 0 for row in data)
    report = json.loads((tmp_path / "out/report.json").read_text())["categories"]["a"]
    counts, lengths = report["over_length"], [row["length"] for row in whole]
    if policy == "drop":
        assert data == whole[:1]
        assert counts == {"dropped_documents": 2, "dropped_tokens": sum(lengths[1:])}
    elif policy == "truncate":
        assert data == [whole[0], {**{k: v[:8] for k, v in whole[1].items() if k != "length"}, "length": 8}]
        lost = sum(whole[1]["loss_mask"][8:])
        assert counts == {
            "truncated_documents": 1,
            "truncated_tokens": lengths[1] - 8,
            "truncated_targets_lost": lost,
            "truncated_last_target_lost": 1,
        }
        assert report["bad_records"] == {"no_target_after_truncation": 1}
    else:
        assert [t for row in data for t in row["input_ids"]] == [t for row in whole for t in row["input_ids"]]
        assert counts["split_documents"] == 2
        assert counts["split_pieces"] == len(data) - 1
        lost = sum(sum(row["loss_mask"]) for row in whole) - sum(sum(row["loss_mask"]) for row in data)
        assert counts["split_targets_lost"] == lost > 0
        assert counts["split_pieces_without_target"] == sum(not any(row["loss_mask"]) for row in data)


def test_the_table_says_what_was_cut_and_whether_a_last_target_was_lost(tmp_path: Path, model: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "the"}, {"text": "the cat sat on the mat " * 4}])
    report = tokenise({"a": source}, tmp_path / "out", model, "max_tokens=8", "over_length=truncate")
    header, row = report.table().split("\n\n")[1].splitlines()
    tally = report.total
    removed = tally.over_length["truncated_tokens"]
    assert header.split()[:3] == ["category", "over", "max_tokens"]
    share = f"{removed / (tally.tokens + removed):.2%}"
    lost = str(tally.over_length["truncated_targets_lost"])
    assert row.split() == ["a", "truncated", "1", str(removed), share, lost, "1"]


def test_workers_do_not_change_a_byte(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.tokenize.chunks.CHUNK_RECORDS", 3)
    monkeypatch.setattr(run, "CHUNK_BYTES", 100)
    sources = {"a": write_jsonl(tmp_path / "a.jsonl", QA), "b": write_jsonl(tmp_path / "b.jsonl", [{"text": "cat"}, 3])}
    for workers in (1, 2):
        options = (f"num_workers={workers}", "on_bad_record=skip")
        tokenise(sources, tmp_path / "out", model, *options)
        (tmp_path / "out").rename(tmp_path / str(workers))
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir())
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in names)
    with pytest.raises(DataError, match=r"b\.jsonl:2: a record must be an object"):
        tokenise(sources, tmp_path / "out", model, "num_workers=2")


def test_output_with_files_is_only_replaced_when_asked(tmp_path: Path, model: Path) -> None:
    source, output = write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat"}]), tmp_path / "out"
    output.mkdir()
    tokenise({"a": source}, output, model)
    before = rows(output)
    with pytest.raises(UsageError, match="output_dir must be empty or new, or overwrite=true"):
        tokenise({"a": source}, output, model)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{}])
    with pytest.raises(DataError):
        tokenise({"a": bad}, output, model, "overwrite=true")
    assert rows(output) == before
    tokenise({"b": write_jsonl(source, [{"text": "sat"}])}, output, model, "overwrite=true")
    assert rows(output) != before
    assert json.loads((output / "categories.json").read_text()) == {"1": "b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl", "out"]
    with pytest.raises(UsageError, match="must not hold a source"):
        tokenise({"a": source}, tmp_path, model, "overwrite=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["max_tokns=3"], "unknown key max_tokns; nearest: max_tokens"),
        (["model.pat=x"], "nearest: model.path"),
        (["+zzzzzz=1"], "known keys: sources"),
        (["max_tokens=1"], "max_tokens must be at least 2; got 1"),
        (["max_tokens=many"], "max_tokens"),
        (["over_length=cut"], "over_length must be one of error, drop, truncate, split; got cut"),
        (["on_bad_record=x"], "on_bad_record must be one of error, skip; got x"),
        (["num_workers=0"], "num_workers must be at least 1; got 0"),
        (["model.path=/no/such/folder"], "model.path must be a folder that exists; got /no/such/folder"),
        (["apply_chat_template_kwargs={tokenize:true}"], "must not set tokenize"),
        (
            ["sources={b:x.jsonl,b:y.jsonl}"],
            "sources must have each name once, several values",
        ),
        (["sources={b:'x{c:1,c:2}.jsonl',c:[{d:1,d:2}]}"], "got d more than once"),
        (["sources.a=3"], "sources.a must be a path"),
        (["sources={}"], "sources must name at least one category"),
        (["nonsense"], "an override must be key=value"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(
    tmp_path: Path, model: Path, overrides: list[str], message: str
) -> None:
    good = [f"output_dir={tmp_path / 'out'}", f"model.path={model}"]
    good += [] if overrides == ["sources={}"] else ["sources.a=x.jsonl"]
    with pytest.raises(UsageError) as error:
        load_config([*good, *overrides])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_sources_and_unknown_formats_are_refused(tmp_path: Path, model: Path) -> None:
    for name, message in (("no.jsonl", "does not exist"), ("no*.jsonl", "matches no file"), (".", "has none")):
        with pytest.raises(UsageError, match=rf"sources\.a must .*{message}"):
            tokenise({"a": tmp_path / name}, tmp_path / "x/out", model)
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(UsageError, match=r"sources\.a must be jsonl"):
        tokenise({"a": tmp_path / "a.md"}, tmp_path / "out", model)


def test_chat_without_a_template_is_refused_and_an_override_is_used(tmp_path: Path, model: Path) -> None:
    tiny_tokenizer(None).save_pretrained(tmp_path / "bare")
    source = write_jsonl(tmp_path / "a.jsonl", QA)
    with pytest.raises(UsageError, match="chat_template must be given for chat records"):
        tokenise({"a": source}, tmp_path / "out", tmp_path / "bare")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    tokenise({"a": source}, tmp_path / "out", tmp_path / "bare", f"chat_template={tmp_path / 'chatml.jinja'}")
    tokenise({"a": source}, tmp_path / "same", model)
    assert rows(tmp_path / "out") == rows(tmp_path / "same")
