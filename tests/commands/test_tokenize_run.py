"""From sources to a dataset in this process: formats, columns, policies, reports, and leftovers of failed runs."""

import csv
import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from tests.lib.chat_templates import CHATML, GENERATION, tiny_tokenizer
from tests.lib.document_texts import write_lines
from tests.lib.errors import refused
from tests.lib.tokenized_text import QA, rows, tokenize_files
from verl_ext.commands.command_line import read_options
from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.options import DataError, UsageError
from verl_ext.text.arrow_folder import DOCUMENT_COLUMNS
from verl_ext.text.read.json_records import JsonList
from verl_ext.text.read.readers import ChunkSize
from verl_ext.text.tokens.counts import Counts


def test_columns_categories_and_report_are_those_of_the_data_contract(tmp_path: Path, chatml: Path) -> None:
    qa, text = write_lines(tmp_path / "qa.jsonl", QA), write_lines(tmp_path / "t.jsonl", [{"text": "the cat sat"}])
    report = tokenize_files({"qa": qa, "prose": text}, tmp_path / "out", chatml)
    dataset = load_from_disk(str(tmp_path / "out"))
    schema = dataset.data.schema
    assert {name: schema.field(name).type for name in schema.names} == {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "category_ids": pa.list_(pa.int32()),
        "length": pa.int32(),
        **dict.fromkeys(DOCUMENT_COLUMNS, pa.int32()),
        "first_block": pa.int64(),
    }
    assert json.loads((tmp_path / "out/categories.json").read_text()) == {"1": "qa", "2": "prose"}
    data = dataset.to_list()
    assert all(row["length"] == len(row["input_ids"]) == len(row["loss_mask"]) for row in data)
    assert all(row["category_ids"] == row["loss_mask"] for row in data[:20])
    for row in data:
        assert [row[name] for name in DOCUMENT_COLUMNS] == [
            *(sum(row["loss_mask"][1:]), min(row["input_ids"]), max(row["input_ids"])),
            *(row["length"], max(row["category_ids"])),
        ]
    eos = tiny_tokenizer(CHATML).eos_token_id
    assert data[20]["input_ids"][-1] == eos
    assert data[20]["input_ids"].count(eos) == 1
    assert data[20]["loss_mask"] == [0] + [1] * (data[20]["length"] - 1)
    assert data[20]["category_ids"] == [0] + [2] * (data[20]["length"] - 1)
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert written["categories"]["qa"]["target_tokens"] == sum(sum(row["loss_mask"]) for row in data[:20])
    assert written["total"]["tokens"] == sum(row["length"] for row in data) == report.total.tokens
    assert report.table().splitlines()[1].split()[:3] == ["qa", "20", "0"]
    assert written["chat_template"] == CHATML
    assert written["end_of_chat"] == "<|im_end|>"
    assert written["total"]["end_of_turn"] == {"<|im_end|>": 20}


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "json", "json of lines", "parquet", "csv", "arrow", "folder", "glob"]
)
def test_every_format_gives_the_same_documents(tmp_path: Path, chatml: Path, kind: str) -> None:
    tokenize_files({"qa": write_lines(tmp_path / "plain.jsonl", QA)}, tmp_path / "expected", chatml)
    source = tmp_path / f"in.{kind.split()[0]}"
    if kind == "jsonl":
        source.write_text("\ufeff\n" + "\n\n".join(json.dumps(record) for record in QA))
    elif kind == "jsonl.gz":
        source.write_bytes(gzip.compress("\n".join(map(json.dumps, QA)).encode()))
    elif kind == "json":
        source.write_text(json.dumps(QA, indent=2))
    elif kind == "json of lines":
        write_lines(source, QA)
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
        write_lines(source / "a.jsonl", QA[:7])
        (source / "b.json").write_text(json.dumps(QA[7:]))
        source = source / "*" if kind == "glob" else source
    tokenize_files({"qa": source}, tmp_path / "out", chatml)
    assert rows(tmp_path / "out") == rows(tmp_path / "expected")


def test_json_list_is_read_in_blocks_smaller_than_its_records() -> None:
    stream = io.BytesIO(json.dumps(QA, indent=1).encode())
    assert [record for (_, record), _ in JsonList("in.json", stream, block=5)] == QA


@pytest.mark.parametrize(
    "content", ['[{"text": "a"},\n {"text": }]', '[{"text": "a"}\n {"text": "b"}]', '[{"text": "a"},\n']
)
def test_a_broken_json_list_is_named_with_the_record(tmp_path: Path, chatml: Path, content: str) -> None:
    source = tmp_path / "in.json"
    source.write_text(content)
    with refused(f"{tmp_path}/in.json", "malformed", "record", error=DataError):
        tokenize_files({"qa": source}, tmp_path / "out", chatml, "on_bad_record=skip")


def test_nulls_that_arrow_fills_in_are_not_seen(tmp_path: Path, chatml: Path) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with_calls = [messages[0], {"role": "assistant", "content": "a", "tool_calls": calls}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}, {"messages": with_calls}]), tmp_path / "in.parquet")
    write_lines(tmp_path / "in.jsonl", [{"messages": messages}, {"messages": with_calls}])
    tokenize_files({"a": tmp_path / "in.parquet"}, tmp_path / "out", chatml)
    tokenize_files({"a": tmp_path / "in.jsonl"}, tmp_path / "same", chatml)
    assert rows(tmp_path / "out") == rows(tmp_path / "same")


def test_malformed_line_is_named_and_nothing_is_left(tmp_path: Path, chatml: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the cat"}\n\n{"text": \n')
    before = sorted(tmp_path.iterdir())
    with refused(f"{tmp_path}/in.jsonl:3", "malformed", error=DataError):
        tokenize_files({"a": source}, tmp_path / "out", chatml)
    assert sorted(tmp_path.iterdir()) == before


def test_skipped_records_are_counted_by_reason_and_category(tmp_path: Path, chatml: Path) -> None:
    bad = [3, {"title": "x"}, {"text": ""}, {"text": "\ud800"}, {"messages": [{"role": "user", "content": "q"}]}]
    first = write_lines(tmp_path / "a.jsonl", [*bad, {"text": "the cat"}])
    second = write_lines(tmp_path / "b.jsonl", [{"text": ""}, *QA])
    report = tokenize_files({"a": first, "b": second}, tmp_path / "out", chatml, "on_bad_record=skip")
    counts = json.loads((tmp_path / "out/report.json").read_text())["categories"]
    reasons = ("not_an_object", "unknown_fields", "empty", "invalid_text", "no_target")
    assert counts["a"]["bad_records"] == dict.fromkeys(reasons, 1)
    assert counts["b"]["bad_records"] == {"empty": 1}
    assert counts["a"]["documents"] == 1
    assert f"{first}:2: no known shape" in report.table()


def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path: Path, chatml: Path, files_end_at: Any) -> None:
    source = write_lines(tmp_path / "t.jsonl", [{"text": "the cat " * 20_000}])

    with files_end_at(1 << 16), refused("output_dir", tmp_path / "out", "File too large", error=DataError):
        tokenize_files({"a": source}, tmp_path / "out", chatml)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_nothing_usable_is_an_error(tmp_path: Path, chatml: Path) -> None:
    with pytest.raises(DataError, match="no record could be used"):
        tokenize_files({"a": write_lines(tmp_path / "a.jsonl", [{}])}, tmp_path / "out", chatml, "on_bad_record=skip")
    with refused("sources.a", tmp_path / "b.jsonl", error=DataError):
        tokenize_files({"a": write_lines(tmp_path / "b.jsonl", [])}, tmp_path / "out", chatml)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_weights_are_a_column_only_when_some_record_has_one(tmp_path: Path, chatml: Path, shard_bytes: int) -> None:
    sizes = {"chunk_size": ChunkSize(records=4), "shard_bytes": shard_bytes}
    records = [*QA, {"text": "the cat", "loss_weight": 0.5}, {"text": "sat"}]
    tokenize_files({"a": write_lines(tmp_path / "a.jsonl", records)}, tmp_path / "out", chatml, **sizes)
    data = rows(tmp_path / "out")
    assert load_from_disk(str(tmp_path / "out")).data.schema.field("loss_weight").type == pa.list_(pa.float32())
    weights = [set(row["loss_weight"]) for row in data]
    assert weights == [{1.0}] * 20 + [{0.5}, {1.0}]
    assert all(len(row["loss_weight"]) == row["length"] for row in data)


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_each_turn_weighs_what_its_record_and_message_say(tmp_path: Path, template: str) -> None:
    tiny_tokenizer(template).save_pretrained(tmp_path / "model")
    turns = [("the cat", 0.5), ("sat", 0), ("on the mat", 1)]
    messages = [
        message
        for text, weight in turns
        for message in ({"role": "user", "content": "q"}, {"role": "assistant", "content": text, "weight": weight})
    ]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": messages, "loss_weight": 4}, *QA[:1]])
    tokenize_files({"a": source}, tmp_path / "out", tmp_path / "model")
    weighted, plain = rows(tmp_path / "out")
    found = {weight: [] for weight in (2.0, 4.0)}
    for token, target, weight in zip(*(weighted[k] for k in ("input_ids", "loss_mask", "loss_weight")), strict=True):
        if target:
            found[weight].append(token)
    decode = tiny_tokenizer(template).decode
    assert [decode(tokens) for tokens in found.values()] == ["the cat<|im_end|>", "on the mat<|im_end|>"]
    assert set(plain["loss_weight"]) == {1.0}


def test_the_last_turn_alone_is_learnt_if_asked(tmp_path: Path, chatml: Path) -> None:
    turns = [("user", "a"), ("assistant", "the cat"), ("user", "b"), ("assistant", "sat")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    tokenize_files({"a": write_lines(tmp_path / "a.jsonl", [record])}, tmp_path / "out", chatml, "turns=last")
    (row,) = rows(tmp_path / "out")
    targets = [token for token, target in zip(row["input_ids"], row["loss_mask"], strict=True) if target]
    assert tiny_tokenizer(CHATML).decode(targets) == "sat<|im_end|>"


def test_records_give_their_category_numbered_as_they_appear_in_the_output(tmp_path: Path, chatml: Path) -> None:
    values = ["code", "web", None, 7, "code", "a", 0.5, "never"]
    records = [{**qa, "meta": {"source": value}} for qa, value in zip(QA, values, strict=False)]
    records[-1] = {"text": "", "meta": {"source": "never"}}
    source, other = write_lines(tmp_path / "a.jsonl", records), write_lines(tmp_path / "b.jsonl", QA[:1])
    sources, options = {"a": source, "b": other}, ("category_field=meta.source", "on_bad_record=skip")
    report = tokenize_files(sources, tmp_path / "out", chatml, *options, chunk_size=ChunkSize(records=2))
    names = json.loads((tmp_path / "out/categories.json").read_text())
    assert names == {"1": "code", "2": "web", "3": "a", "4": "7", "5": "b"}
    data = rows(tmp_path / "out")
    assert [max(row["category_ids"]) for row in data] == [1, 2, 3, 4, 1, 3, 5]
    assert all([c > 0 for c in row["category_ids"]] == [m > 0 for m in row["loss_mask"]] for row in data)
    written = json.loads((tmp_path / "out/report.json").read_text())
    counts = {name: (c["records"], c["documents"]) for name, c in written["categories"].items()}
    assert counts == {"code": (2, 2), "web": (1, 1), "a": (3, 2), "7": (1, 1), "never": (1, 0), "b": (1, 1)}
    assert written["categories"]["a"]["bad_records"] == {"bad_category": 1}
    assert written["sources"]["a"]["records_without_category"] == 1
    assert written["sources"]["a"]["documents"] == 6
    assert written["sources"]["a"]["unused_fields"] == {}
    assert "a: no meta.source: 1 records, which have the source's name as their category" in report.table()
    many = write_lines(tmp_path / "many.jsonl", [{"text": "cat", "id": number} for number in range(1001)])
    with refused("category_field=id", "1,000", error=DataError):
        tokenize_files({"a": many}, tmp_path / "many", chatml, "category_field=id")


def test_columns_of_every_format_may_be_null_in_a_record(tmp_path: Path, chatml: Path) -> None:
    records = [
        {"problem": "the cat", "hint": None, "solution": "sat"},
        {"problem": "q", "hint": "mat", "solution": "a"},
    ]
    options = ("columns={instruction:problem,input:hint,output:solution}",)
    tokenize_files({"a": write_lines(tmp_path / "a.jsonl", records)}, tmp_path / "jsonl", chatml, *options)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    tokenize_files({"a": tmp_path / "a.parquet"}, tmp_path / "parquet", chatml, *options)
    (tmp_path / "a.csv").write_text("problem,hint,solution\nthe cat,,sat\nq,mat,a\n")
    tokenize_files({"a": tmp_path / "a.csv"}, tmp_path / "csv", chatml, *options)
    assert rows(tmp_path / "jsonl") == rows(tmp_path / "parquet") == rows(tmp_path / "csv")
    with refused(f"{tmp_path}/a.csv:2", "columns.input", "hints", error=DataError):
        tokenize_files({"a": tmp_path / "a.csv"}, tmp_path / "out", chatml, "columns={instruction:problem,input:hints}")


def sampled(output: Path) -> list[int]:
    return [row["length"] for row in rows(output)]


def test_a_sample_depends_on_seed_source_and_place_alone(tmp_path: Path, chatml: Path) -> None:
    records = [{"text": "cat " * (number + 1)} for number in range(200)]
    sources = {"a": write_lines(tmp_path / "a.jsonl", records), "b": write_lines(tmp_path / "b.jsonl", QA)}
    report = tokenize_files(sources, tmp_path / "fraction", chatml, "sample={a:0.25}")
    read = json.loads((tmp_path / "fraction/report.json").read_text())["sources"]
    drawn = sampled(tmp_path / "fraction")[:-20]
    assert read["a"]["records_read"] == 200
    assert 25 < read["a"]["records_sampled"] == len(drawn) < 75
    assert (read["b"]["records_read"], read["b"]["records_sampled"]) == (20, 20)
    assert f"a: sampled: {len(drawn)} of 200 records" in report.table()
    options, small = (f"sample={len(drawn)}", "num_workers=2"), ChunkSize(records=7)
    tokenize_files({"a": sources["a"]}, tmp_path / "count", chatml, *options, chunk_size=small)
    assert sampled(tmp_path / "count") == drawn  # the lowest numbers, which are also below the fraction
    tokenize_files({"a": sources["a"]}, tmp_path / "more", chatml, "sample=100")
    assert set(drawn) < set(sampled(tmp_path / "more"))
    assert len(rows(tmp_path / "more")) == 100
    tokenize_files({"a": sources["a"]}, tmp_path / "seed", chatml, "sample=0.25", "seed=1", chunk_size=small)
    assert sampled(tmp_path / "seed") != drawn
    tokenize_files({"a": sources["a"]}, tmp_path / "all", chatml, "sample=1.0")
    assert len(rows(tmp_path / "all")) == 200
    with refused("sample", "sources.b", 20, error=DataError):
        tokenize_files(sources, tmp_path / "none", chatml, "sample={b:1e-9}")


def test_fields_that_nothing_reads_and_media_are_counted_and_told(tmp_path: Path, chatml: Path) -> None:
    named = [{"role": "user", "content": "q", "lang": "en"}, {"role": "assistant", "content": "a", "lang": "en"}]
    records = [{"messages": named, "title": "t", "\x1b[1m\ud800": 1}, {**QA[0], "title": "u", "images": ["x", "y"]}]
    source = write_lines(tmp_path / "a.jsonl", records)
    with refused(f"{tmp_path}/a.jsonl:2", "images", "media=drop", error=DataError):
        tokenize_files({"a": source}, tmp_path / "out", chatml)
    report = tokenize_files({"a": source}, tmp_path / "out", chatml, "media=drop")
    counts = json.loads((tmp_path / "out/report.json").read_text())["categories"]["a"]
    assert counts["unused_fields"] == {"\\x1b[1m\\ud800": 1, "messages.lang": 2, "title": 2}
    assert counts["dropped_media"] == {"image": 2}
    assert "a: fields not used: messages.lang (2), title (2), \\x1b[1m\\ud800 (1)\n" in report.table() + "\n"
    assert "a: left out: image (2)\n" in report.table()
    prints_lang = CHATML.replace("{{ m.role }}", "{{ m.role }} {{ m.lang }}")
    (tmp_path / "lang.jinja").write_text(prints_lang)
    options = ("media=drop", f"chat_template={tmp_path / 'lang.jinja'}")
    assert "messages.lang" not in tokenize_files({"a": source}, tmp_path / "lang", chatml, *options).table()


def test_a_run_shows_the_first_documents_of_every_source_as_they_were_written(tmp_path: Path, chatml: Path) -> None:
    qa = write_lines(tmp_path / "qa.jsonl", [{"text": " "}, *QA])
    prose = write_lines(tmp_path / "t.jsonl", [{"text": "the cat"}])
    report = tokenize_files({"qa": qa, "prose": prose}, tmp_path / "out", chatml, "on_bad_record=skip")
    written = json.loads((tmp_path / "out/report.json").read_text())["sources"]
    first = [[False, "<|im_start|>user\nthe cat 0<|im_end|>\n<|im_start|>assistant\n"]]
    first += [[True, "sat on the mat <|im_end|>"], [False, "\n"]]
    assert written["qa"]["preview"][0] == first
    assert len(written["qa"]["preview"]) == 2
    assert ["".join(text for _, text in runs) for runs in written["prose"]["preview"]] == ["the cat<|im_end|>"]
    assert [len(documents) for documents in report.previews.values()] == [2, 1]
    assert tokenize_files({"prose": prose}, tmp_path / "none", chatml, "preview=0").previews == {"prose": []}


def test_the_table_says_how_turns_end_and_what_the_template_does_not_print(tmp_path: Path, chatml: Path) -> None:
    options = ["sources={a:a.jsonl,b:b.jsonl}", f"output_dir={tmp_path / 'out'}", f"model.path={chatml}"]
    report = Report(read_options(TokenizeOptions, options), ["a", "b"])
    counts = Counts(end_of_turn=Counter({"<|im_end|>": 1200, "</s>\n": 3}), unprinted=Counter(tools=2))
    report.sources["a"].add(counts)
    report.sources["a"].add(counts)
    report.sources["b"].add(Counts(end_of_turn=Counter({"": 5})))
    assert report.table().split("\n\n")[-1].splitlines() == [
        "a: end of turn: <|im_end|> (2,400 turns), </s>\\n (6 turns)",
        "a: not printed by the chat template: tools (4 records)",
        "b: warning: 5 turns have no end-of-turn token to stop at; end_of_chat=TOKEN adds one",
    ]
    assert report.as_dict()["categories"]["a"]["end_of_turn"] == {"</s>\n": 6, "<|im_end|>": 2400}


def test_workers_do_not_change_a_byte(tmp_path: Path, chatml: Path) -> None:
    records = [{**qa, "kind": f"k{number % 4}"} for number, qa in enumerate(QA)]
    bad = [{"text": "cat"}, 3]
    sources = {"a": write_lines(tmp_path / "a.jsonl", records), "b": write_lines(tmp_path / "b.jsonl", bad)}
    for workers in (1, 2):
        options = (f"num_workers={workers}", "on_bad_record=skip", "category_field=kind", "sample={a:11}")
        tokenize_files(sources, tmp_path / "out", chatml, *options, chunk_size=ChunkSize(3, 100))
        (tmp_path / "out").rename(tmp_path / str(workers))
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir())
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in names)
    with refused(f"{tmp_path}/b.jsonl:2", "object", error=DataError):
        tokenize_files(sources, tmp_path / "out", chatml, "num_workers=2")


def test_output_with_files_is_only_replaced_when_asked(tmp_path: Path, chatml: Path) -> None:
    source, output = write_lines(tmp_path / "a.jsonl", [{"text": "the cat"}]), tmp_path / "out"
    output.mkdir()
    tokenize_files({"a": source}, output, chatml)
    before = rows(output)
    with refused("output_dir", "overwrite=true", output, error=UsageError):
        tokenize_files({"a": source}, output, chatml)
    bad = write_lines(tmp_path / "bad.jsonl", [{}])
    with pytest.raises(DataError):
        tokenize_files({"a": bad}, output, chatml, "overwrite=true")
    assert rows(output) == before
    tokenize_files({"b": write_lines(source, [{"text": "sat"}])}, output, chatml, "overwrite=true")
    assert rows(output) != before
    assert json.loads((output / "categories.json").read_text()) == {"1": "b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl", "out"]
    with refused("output_dir", "source", tmp_path, error=UsageError):
        tokenize_files({"a": source}, tmp_path, chatml, "overwrite=true")
    (output / "categories.json").unlink()  # now it looks like an index, whose report has the same name
    with refused("output_dir", output, error=UsageError):
        tokenize_files({"a": source}, output, chatml, "overwrite=true")


@pytest.mark.parametrize(
    ("overrides", "things"),
    [
        (["previw=3"], ("previw", "nearest: preview")),
        (["max_tokens=8"], ("max_tokens", "data.max_tokens")),
        (["max_document_tokens=8"], ("max_document_tokens", "format=arrow")),
        (["over_length=drop"], ("over_length", "format=arrow")),
        (["model.pat=x"], ("model.pat", "nearest: model.path")),
        (["+zzzzzz=1"], ("zzzzzz",)),
        (["model.path=/no/such/folder"], ("model.path", "/no/such/folder")),
        (["apply_chat_template_kwargs={tokenize:true}"], ("apply_chat_template_kwargs", "tokenize")),
        (["sources={b:x.jsonl,b:y.jsonl}"], ("sources", "once", "got b")),
        (["sources={b:'x{c:1,c:2}.jsonl',c:[{d:1,d:2}]}"], ("sources", "once", "got d")),
        (["sources.a=3"], ("sources.a", 3)),
        (["sources=ok.jsonl"], ("sources", "'sources={ok:ok.jsonl}'", "got ok.jsonl")),
        (["columns=question"], ("columns", "'columns={question:question}'", "got question")),
        (["columns={promt:question}"], ("columns", "promt", "nearest: prompt")),
        (["columns={prompt:question,answer:solution}"], ("columns", "one shape", "got prompt, answer")),
        (["columns.prompt=3"], ("columns.prompt", 3)),
        (["category_field=''"], ("category_field", "")),
        (["sample=0"], ("sample", 0)),
        (["sample={b:0.5}"], ("sample.b", "sources (a)", "b")),
        (["nonsense"], ("key=value", "nonsense")),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(
    tmp_path: Path, chatml: Path, overrides: list[str], things: tuple[Any, ...]
) -> None:
    good = [f"output_dir={tmp_path / 'out'}", f"model.path={chatml}"]
    good += [] if overrides == ["sources={}"] else ["sources.a=x.jsonl"]
    with refused(*things, error=UsageError):
        read_options(TokenizeOptions, [*good, *overrides])


def test_missing_sources_and_unknown_formats_are_refused(tmp_path: Path, chatml: Path) -> None:
    for name, thing in (("no.jsonl", "exist"), ("no*.jsonl", "matches"), (".", "none")):
        with refused("sources.a", tmp_path / name, thing, error=UsageError):
            tokenize_files({"a": tmp_path / name}, tmp_path / "x/out", chatml)
    (tmp_path / "a.md").write_text("x")
    with refused("sources.a", ".jsonl", tmp_path / "a.md", error=UsageError):
        tokenize_files({"a": tmp_path / "a.md"}, tmp_path / "out", chatml)


def test_chat_without_a_template_is_refused_and_an_override_is_used(tmp_path: Path, chatml: Path) -> None:
    tiny_tokenizer(None).save_pretrained(tmp_path / "bare")
    source = write_lines(tmp_path / "a.jsonl", QA)
    with refused("chat_template", error=UsageError):
        tokenize_files({"a": source}, tmp_path / "out", tmp_path / "bare")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    tokenize_files({"a": source}, tmp_path / "out", tmp_path / "bare", f"chat_template={tmp_path / 'chatml.jinja'}")
    tokenize_files({"a": source}, tmp_path / "same", chatml)
    assert rows(tmp_path / "out") == rows(tmp_path / "same")
