"""`verl-ext tokenize format=megatron` writes the Arrow folder's documents, by our reader and megatron-core's."""

from pathlib import Path

import numpy as np
import pytest

from tests.lib.document_texts import write_lines
from tests.lib.errors import refused
from tests.lib.megatron_peer import indexed_dataset
from tests.lib.tokenized_text import QA, rows, tokenize_files
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.options import DataError, UsageError


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    texts = [{"text": "the cat sat on the mat " * count} for count in (1, 4, 2)]
    return {"qa": write_lines(tmp_path / "qa.jsonl", QA), "prose": write_lines(tmp_path / "prose.jsonl", texts)}


def test_tokens_and_masks_are_those_of_the_arrow_folder_row_by_row(tmp_path: Path, chatml: Path, sources) -> None:
    tokenize_files(sources, tmp_path / "arrow", chatml)
    report = tokenize_files(sources, tmp_path / "megatron", chatml, "format=megatron")
    expected = rows(tmp_path / "arrow")
    assert len(expected) == report.total.documents == 23
    found = {"ours": [], "theirs": []}
    for name, documents in (("qa", 20), ("prose", 3)):
        prefix = str(tmp_path / "megatron" / name)
        tokens, masks = TokenIndex(prefix), TokenIndex(f"{prefix}_mask")
        assert (tokens.num_documents, masks.num_documents) == (documents, documents)
        assert (tokens.dtype, masks.dtype) == (np.int32, np.uint8)
        found["ours"] += [(tokens.tokens(i).tolist(), masks.tokens(i).tolist()) for i in range(documents)]
        theirs = [indexed_dataset.IndexedDataset(path) for path in (prefix, f"{prefix}_mask")]
        found["theirs"] += [tuple(index[i].tolist() for index in theirs) for i in range(documents)]
    wanted = [(row["input_ids"], row["loss_mask"]) for row in expected]
    assert found == {"ours": wanted, "theirs": wanted}
    assert 0 < sum(map(sum, (mask for _, mask in wanted))) < sum(len(ids) for ids, _ in wanted)


def test_what_the_form_has_no_place_for_is_refused(tmp_path: Path, chatml: Path, sources) -> None:
    weighted = write_lines(tmp_path / "weighted.jsonl", [{**QA[0], "weight": 0.5}])
    with refused("sources.qa", "weights", "format=megatron", error=DataError):
        tokenize_files({"qa": weighted}, tmp_path / "out", chatml, "format=megatron")
    with refused("category_field", "format=megatron", "answer", error=UsageError):
        tokenize_files(sources, tmp_path / "out", chatml, "format=megatron", "category_field=answer")
    with refused("sources.qa_mask", "name", error=UsageError):
        tokenize_files({"qa": weighted, "qa_mask": weighted}, tmp_path / "out", chatml, "format=megatron")
    with refused("format", "arrow, megatron", "megatrn", "nearest: megatron", error=UsageError):
        tokenize_files(sources, tmp_path / "out", chatml, "format=megatrn")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_documents_above_max_document_tokens_are_cut_and_counted(tmp_path: Path, chatml: Path, policy: str) -> None:
    records = [{"text": "the"}, {"text": "the cat sat on the mat " * 4}, {"question": "cat " * 30, "answer": "a"}]
    source = {"a": write_lines(tmp_path / "a.jsonl", records)}
    tokenize_files(source, tmp_path / "whole", chatml)
    limit = ("format=megatron", "max_document_tokens=8")
    report = tokenize_files(source, tmp_path / "out", chatml, *limit, f"over_length={policy}")
    tokens, masks = (TokenIndex(str(tmp_path / "out" / name)) for name in ("a", "a_mask"))
    found = [(tokens.tokens(i).tolist(), masks.tokens(i).tolist()) for i in range(tokens.num_documents)]
    whole = rows(tmp_path / "whole")
    wanted = []
    for number, row in enumerate(whole):
        stop = {"drop": 0 if number else 8, "truncate": 8, "split": row["length"]}[policy]
        spans = [slice(at, min(at + 8, stop, row["length"])) for at in range(0, stop, 8)]
        pieces = [(row["input_ids"][span], [0, *row["loss_mask"][span][1:]]) for span in spans]
        wanted += pieces if any(any(mask) for _, mask in pieces) else []
    assert found == wanted
    over, total = report.total.over_length, report.total
    assert over["documents"] == 2
    assert total.tokens + over["tokens"] == sum(row["length"] for row in whole)
    assert total.target_tokens + over["targets"] == sum(sum(row["loss_mask"]) for row in whole)
    header, row = report.table().split("\n\n")[1].splitlines()
    assert header.split()[:3] == ["category", "over", "max_document_tokens"]
    assert row.split()[:3] == ["a", "2", f"{over['tokens']}"]
    with refused("max_document_tokens", "sources.a", 8, error=DataError):
        tokenize_files(source, tmp_path / "none", chatml, *limit)
    assert not (tmp_path / "none").exists()
