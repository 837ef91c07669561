"""Records that are tokenized already, and every path from text to tokens in two orders and numbers of workers."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.document_texts import random_words
from tests.lib.errors import refused
from verl_ext.commands import index
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.data import SFTDataSet
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.options import DataError, UsageError
from verl_ext.text.read.readers import ChunkSize


def token_record(draw: random.Random, vocabulary: int, weighted: bool) -> dict[str, Any]:
    length = draw.randrange(2, 30)
    mask = [draw.randrange(2) for _ in range(length - 1)] + [1]
    record: dict[str, Any] = {
        "input_ids": [draw.randrange(vocabulary) for _ in range(length)],
        "loss_mask": mask,
        "category_ids": [draw.choice([3, 12, 2**31 - 1]) for _ in range(length)],
        "length": length,
    }
    return record | ({"loss_weight": [draw.randrange(1, 9) / 4 for _ in range(length)]} if weighted else {})


def written(folder: Path, name: str, records: list[dict[str, Any]]) -> Path:
    """Write records as the format that the name ends with; without a suffix, an Arrow folder."""
    path, names = folder / name, dict.fromkeys(field for record in records for field in record)
    rows = [{field: record.get(field) for field in names} for record in records]
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    return path


def made(model: str, output: Path, sources: list[Path], *options: str) -> list[dict[str, Any]]:
    """Return the rows that `verl-ext tokenize` writes of one source."""
    listed = ",".join(map(str, sources))
    given = [f"sources={{a:[{listed}]}}", f"output_dir={output}", f"model.path={model}", *options]
    tokenize(read_options(TokenizeOptions, given), ChunkSize(3, 400))
    return load_from_disk(str(output)).to_list()


def columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("input_ids", "loss_mask", "category_ids", "length", "loss_weight")
    return [{name: row[name] for name in names if name in row} for row in rows]


@pytest.mark.parametrize("weighted", [False, True])
def test_tokenized_records_are_copied_with_the_categories_of_their_tokens(
    tmp_path: Path, chatml: Path, weighted: bool
) -> None:
    draw, vocabulary = random.Random(weighted), len(tiny_tokenizer(CHATML))
    records = [token_record(draw, vocabulary, weighted and number > 20) for number in range(40)]
    expected = []
    for record in records:
        mask = [0, *record["loss_mask"][1:]]
        categories = [category * target for category, target in zip(record["category_ids"], mask, strict=True)]
        weights = {"loss_weight": record.get("loss_weight", [1.0] * len(mask))} if weighted else {}
        expected.append({**record, "loss_mask": mask, "category_ids": categories, **weights})
    for number, name in enumerate(("a.jsonl", "a.parquet", "arrow")):
        rows = made(chatml, tmp_path / f"out{number}", [written(tmp_path, name, records)], "num_workers=1")
        assert columns(rows) == expected
    dataset = SFTDataSet(str(tmp_path / "out0"), 64, category_names={12: "code"})
    assert dataset.categories.names == ("3", "code", str(2**31 - 1))
    assert int(dataset.facts().targets.sum()) == sum(sum(record["loss_mask"]) for record in expected)


@pytest.mark.parametrize(
    ("change", "things"),
    [
        ({"loss_mask": [0, 2, 1]}, ("loss_mask", 3, "0 to 1", "got 2")),
        ({"loss_mask": [0, 1]}, ("loss_mask", 3, "input_ids", "got 2")),
        ({"loss_mask": [1, 0, 0]}, ("no_target", "after the first")),
        ({"input_ids": [1, 10**6, 1]}, ("input_ids", 1000000)),
        ({"input_ids": [1, True, 1]}, ("input_ids", "got list")),
        ({"input_ids": []}, ("input_ids", "[]")),
        ({"category_ids": "abc"}, ("category_ids", 3, 2147483647, "str")),
        ({"category_ids": [0, -1, 1]}, ("category_ids", -1)),
        ({"length": 4}, ("length", "input_ids, 3", 4)),
        ({"loss_weight": [1, -1, 1]}, ("loss_weight", 3, 0)),
        ({"loss_weight": [1, 1e39, 1]}, ("loss_weight", 3, "float32")),
        ({"loss_weight": [1, 1e-50, 1]}, ("loss_weight", 3, "float32")),
    ],
)
def test_a_tokenized_record_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, chatml: Path, change: dict[str, Any], things: tuple[Any, ...]
) -> None:
    good = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "category_ids": [0, 7, 7]}
    file = written(tmp_path, "a.jsonl", [good, {**good, **change}])
    with refused("a.jsonl:2", *things, error=DataError):
        made(chatml, tmp_path / "out", [file], "num_workers=1")
    assert len(made(chatml, tmp_path / "out", [file], "num_workers=1", "on_bad_record=skip")) == 1


def test_tokenized_records_and_others_are_not_mixed(tmp_path: Path, chatml: Path) -> None:
    tokens = written(tmp_path, "a.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 1], "category_ids": [0, 1]}])
    texts = written(tmp_path, "b.jsonl", [{"text": "the cat"}])
    for more, things in (
        ([f"sources={{a:{tokens},b:{texts}}}"], ("sources", texts)),
        ([f"sources={{a:{tokens}}}", "category_field=c"], ("category_field", "tokenized", "c")),
        ([f"sources={{a:{tokens}}}", "format=megatron"], ("format", "arrow", "tokenized", "megatron")),
    ):
        given = [*more, f"output_dir={tmp_path / 'out'}", f"model.path={chatml}", "num_workers=1"]
        with refused(*things, error=UsageError):
            tokenize(read_options(TokenizeOptions, given))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["texts", "tokens", "index"])
def test_documents_depend_on_their_records_alone_in_any_order_by_any_number_of_workers(
    tmp_path: Path, chatml: Path, kind: str
) -> None:
    draw = random.Random(kind)
    texts = [{"text": text, "note": number} for number, text in enumerate(random_words([3, 200, 1, 40] * 15))]
    records = [token_record(draw, 50, False) for _ in range(60)] if kind == "tokens" else texts
    parts = [records[:7], records[7:8], records[8:35], records[35:]]
    names = ("a.jsonl", "b.parquet", "c.jsonl", "d")
    files = [written(tmp_path, name, part) for name, part in zip(names, parts, strict=True)]

    def documents(order: list[Path], workers: int) -> list[Any]:
        output = tmp_path / "-".join([*(file.name for file in order), str(workers)])
        if kind != "index":
            return columns(made(chatml, output, order, f"num_workers={workers}"))
        listed = ",".join(map(str, order))
        given = [f"sources={{a:[{listed}]}}", f"output_dir={output}", f"model.path={chatml}", f"num_workers={workers}"]
        index.index_texts(read_options(index.IndexOptions, given))
        found = TokenIndex(output / "a")
        return [found.tokens(number).tolist() for number in range(found.num_documents)]

    alone = [documents([file], 1) for file in files]
    for order in (range(4), reversed(range(4))):
        numbers = list(order)
        expected = [document for number in numbers for document in alone[number]]
        assert len(expected) == len(records)
        for workers in (1, 3):
            assert documents([files[number] for number in numbers], workers) == expected
