"""Records held out for validation by their words, and repeated ones left out: the same for any run, form and order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk

from tests.lib.errors import refused
from tests.lib.shown import audit_of
from tests.lib.tokenized_text import made
from verl_ext.commands.tokenize import summary
from verl_ext.options import DataError, UsageError
from verl_ext.text.read.readers import ChunkSize
from verl_ext.text.tokens.hashes import repeated, token_hashes

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"the cat {number}"},
            {"role": "assistant", "content": "sat on the mat " * (number % 5 + 1)},
            {"role": "user", "content": "on the mat"},
            {"role": "assistant", "content": f"the {number}"},
        ]
    }
    for number in range(120)
]
TEXTS = [{"text": f"the cat sat {number}"} for number in range(40)]


def rows(folder: Path, part: str) -> list[tuple[int, ...]]:
    """Return the token ids of a part's documents."""
    return [tuple(ids) for ids in load_from_disk(str(folder / "out" / part))["input_ids"]]


def test_a_share_divides_the_records_and_both_parts_have_reports_and_categories(tmp_path: Path, chatml: Path) -> None:
    report = made(tmp_path, chatml, {"chats": CHATS, "texts": TEXTS}, "val_share=0.2")
    whole = made(tmp_path / "whole", chatml, {"chats": CHATS, "texts": TEXTS})
    train, val = rows(tmp_path, "train"), rows(tmp_path, "val")
    assert sorted(train + val) == sorted(rows(tmp_path / "whole", ""))
    assert 0.1 < len(val) / 160 < 0.3
    # The order of the records is kept on both sides, and their counts add up to those of all.
    in_all = rows(tmp_path / "whole", "")
    assert train == [ids for ids in in_all if ids in set(train)]
    assert val == [ids for ids in in_all if ids in set(val)]
    assert report.held_out is not None
    for name, counts in whole.categories.items():
        parts = report.categories[name], report.held_out.categories[name]
        for fact in ("records", "documents", "tokens", "target_tokens", "end_of_turn", "target_kinds", "lengths"):
            first, second = (getattr(part, fact) for part in parts)
            assert first + second == getattr(counts, fact)
    written = [json.loads((tmp_path / "out" / part / "report.json").read_text()) for part in ("train", "val")]
    assert [each["total"]["documents"] for each in written] == [len(train), len(val)]
    assert written[1]["end_of_chat"] == "<|im_end|>"
    division = json.loads((tmp_path / "out/report.json").read_text())["records"]
    assert {name: sum(sides.values()) for name, sides in division.items()} == {"chats": 120, "texts": 40}
    assert division["texts"]["val"] == written[1]["categories"]["texts"]["records"]
    for part in ("train", "val"):
        assert json.loads((tmp_path / "out" / part / "categories.json").read_text()) == {"1": "chats", "2": "texts"}
    assert sorted(load_from_disk(str(tmp_path / "out"))) == ["train", "val"]
    assert f"held out for validation: {division['texts']['val']} of 40 records" in summary(report)
    assert audit_of(tmp_path, tmp_path / "out/train", f"val={tmp_path}/out/val")["findings"]["leaked"]["count"] == 0


def test_more_data_in_another_order_moves_no_record_to_the_other_side(tmp_path: Path, chatml: Path) -> None:
    made(tmp_path / "few", chatml, {"a": CHATS[:60]}, "val_share=0.25")
    made(tmp_path / "many", chatml, {"b": TEXTS, "a": CHATS[::-1]}, "val_share=0.25")
    for part in ("train", "val"):
        assert set(rows(tmp_path / "few", part)) < set(rows(tmp_path / "many", part))


def weighted_and_bad() -> dict[str, list[Any]]:
    """Return records of which a weight, a preference and bad ones must not change those beside them."""
    weighted = [{**chat, "loss_weight": 0.5} if number == 70 else chat for number, chat in enumerate(CHATS)]
    pair = {"prompt": "the dog", "chosen": "sat", "rejected": "ran"}
    return {"a": [*weighted, {"x": 1}, *CHATS[:20], pair], "b": [*TEXTS, {"text": ""}]}


LEFT_OUT = ("deduplicate=true", "on_bad_record=skip")


@pytest.mark.parametrize("share", ["val_share=0.2", "val_share=9"])
@pytest.mark.parametrize(
    ("workers", "size"), [(1, ChunkSize(1, 1)), pytest.param(2, ChunkSize(16, 3000), marks=pytest.mark.slow)]
)
def test_the_size_of_chunks_and_the_number_of_workers_change_nothing(
    tmp_path: Path, chatml: Path, share: str, workers: int, size: ChunkSize
) -> None:
    made(tmp_path / "one", chatml, weighted_and_bad(), share, *LEFT_OUT)
    made(tmp_path / "other", chatml, weighted_and_bad(), share, *LEFT_OUT, f"num_workers={workers}", size=size)
    for part in ("train", "val"):
        one, other = (load_from_disk(str(tmp_path / run / "out" / part)).data.table for run in ("one", "other"))
        assert one.equals(other)
        reports = [json.loads((tmp_path / run / "out" / part / "report.json").read_text()) for run in ("one", "other")]
        assert reports[0]["categories"] == json.loads(
            json.dumps(reports[1]["categories"]).replace(str(tmp_path / "other"), str(tmp_path / "one"))
        )


def test_a_number_holds_out_as_many_different_records_and_their_repetitions(tmp_path: Path, chatml: Path) -> None:
    report = made(tmp_path, chatml, {"a": CHATS, "b": TEXTS}, "val_share=7")
    assert report.held_out is not None
    assert report.held_out.total.records == 7
    made(tmp_path / "twice", chatml, {"a": CHATS + CHATS, "b": TEXTS}, "val_share=7")
    twice = rows(tmp_path / "twice", "val")
    assert set(twice) == set(rows(tmp_path, "val"))
    assert not set(twice) & set(rows(tmp_path / "twice", "train"))
    assert len(twice) > 7


def test_equal_records_are_on_one_side_whatever_their_format_order_of_fields_and_notes_are(
    tmp_path: Path, chatml: Path
) -> None:
    again = [
        {
            "id": number,
            "messages": [{"content": f" {m['content']}", "role": m["role"], "id": 3} for m in chat["messages"]],
        }
        for number, chat in enumerate(CHATS)
    ]
    pq.write_table(pa.Table.from_pylist(again), tmp_path / "again.parquet")
    made(tmp_path, chatml, {"a": CHATS}, "val_share=0.3", f"sources.b={tmp_path}/again.parquet")
    for part in ("train", "val"):
        data = load_from_disk(str(tmp_path / "out" / part))
        of = {
            name: data.filter(lambda row, n=number: row["document_category"] == n)
            for number, name in ((1, "a"), (2, "b"))
        }
        assert len(of["a"]) == len(of["b"]) > 0
        lengths = [np.array(rows_of["length"]) for rows_of in of.values()]
        assert np.ptp(lengths[0] - lengths[1]) == 0  # by the spaces


def test_a_default_system_prompt_moves_no_chat_and_counts_like_that_of_the_chat_itself(
    tmp_path: Path, chatml: Path
) -> None:
    own = [{"messages": [{"role": "system", "content": "the dog"}, *chat["messages"]]} for chat in CHATS]
    report = made(tmp_path, chatml, {"a": CHATS, "b": own}, "val_share=0.3", "system={a: the dog, b: the dog}")
    assert not set(rows(tmp_path, "train")) & set(rows(tmp_path, "val"))
    without = made(tmp_path / "without", chatml, {"a": CHATS, "b": TEXTS}, "val_share=0.3")
    lengths = [np.array(load_from_disk(str(each / "out/val"))["length"]) for each in (tmp_path, tmp_path / "without")]
    held = report.held_out.categories["a"].records  # type: ignore[union-attr]
    assert held == without.held_out.categories["a"].records > 0  # type: ignore[union-attr]
    assert np.ptp(lengths[0][:held] - lengths[1][:held]) == 0  # by the prompt


def test_thoughts_that_a_template_may_leave_out_do_not_part_equal_chats(tmp_path: Path, chatml: Path) -> None:
    def thought(chat: dict[str, Any], text: str) -> dict[str, Any]:
        messages = [dict(message) for message in chat["messages"]]
        messages[1]["content"] = f"<think>{text}</think>\n\n{messages[1]['content']}"
        return {"messages": messages}

    data = {"a": [thought(chat, "cat") for chat in CHATS], "b": [thought(chat, "dog") for chat in CHATS]}
    report = made(tmp_path, chatml, data, "val_share=0.3", "reasoning=drop")
    assert report.held_out is not None
    assert report.held_out.categories["a"].records == report.held_out.categories["b"].records > 0
    assert not set(rows(tmp_path, "train")) & set(rows(tmp_path, "val"))


def test_with_a_document_for_each_turn_chats_that_begin_alike_are_on_one_side(tmp_path: Path, chatml: Path) -> None:
    first = [chat["messages"][:2] for chat in CHATS[:40]]
    ends = [
        [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": f"sat {end}"}] for end in range(3)
    ]
    chats = [{"messages": [*start, *end]} for start in first for end in ends]
    made(tmp_path, chatml, {"a": chats}, "val_share=0.3", "turns=each")
    assert rows(tmp_path, "val")
    assert not set(rows(tmp_path, "train")) & set(rows(tmp_path, "val"))


def test_preferences_are_divided_by_their_prompts_and_stay_whole(tmp_path: Path, chatml: Path) -> None:
    pairs = [{"prompt": f"the cat {number // 2}", "chosen": f"sat {number}", "rejected": "ran"} for number in range(60)]
    made(tmp_path, chatml, {"a": pairs}, "val_share=0.3")
    data = {part: load_from_disk(str(tmp_path / "out" / part)) for part in ("train", "val")}
    for part in data.values():
        assert part["unit"][::2] == [2] * (len(part) // 2)
        assert part["answer"] == [1, -1] * (len(part) // 2)
    prompts = [{tuple(ids[:8]) for ids in part["input_ids"]} for part in data.values()]
    assert prompts[1]
    assert not set(rows(tmp_path, "train")) & set(rows(tmp_path, "val"))


def test_records_that_are_tokenized_already_are_divided_by_their_tokens(tmp_path: Path, chatml: Path) -> None:
    records = [
        {"input_ids": [5, 6, 7, number], "loss_mask": [0, 0, 1, 1], "category_ids": [0, 0, 2, 2]}
        for number in range(30)
    ]
    report = made(tmp_path, chatml, {"a": records + records}, "val_share=0.3", "deduplicate=true", "min_tokens=4")
    train, val = rows(tmp_path, "train"), rows(tmp_path, "val")
    assert sorted(train + val) == sorted(tuple(record["input_ids"]) for record in records)
    assert val
    assert report.total.duplicates + report.held_out.total.duplicates == 30  # type: ignore[union-attr]


def test_categories_of_a_field_have_one_number_in_both_parts(tmp_path: Path, chatml: Path) -> None:
    kinds = [{**chat, "kind": f"k{number % 7}"} for number, chat in enumerate(CHATS)]
    report = made(tmp_path, chatml, {"a": kinds}, "val_share=0.2", "category_field=kind")
    train, val = (json.loads((tmp_path / "out" / part / "categories.json").read_text()) for part in ("train", "val"))
    assert train == val == {str(number + 1): f"k{number}" for number in range(7)}
    held = load_from_disk(str(tmp_path / "out/val"))["document_category"]
    counts = report.held_out.categories  # type: ignore[union-attr]
    assert {int(n): held.count(int(n)) for n, name in val.items() if name in counts} == {
        int(n): counts[name].documents for n, name in val.items() if name in counts
    }


def test_repeated_records_are_left_out_and_counted_wherever_they_are(tmp_path: Path, chatml: Path) -> None:
    copies = [{**CHATS[3], "id": 1}, {"text": "the dog"}, CHATS[5], {"text": "the dog"}]
    report = made(tmp_path, chatml, {"a": CHATS, "b": copies}, "deduplicate=true")
    assert [counts.duplicates for counts in report.categories.values()] == [0, 3]
    assert [counts.documents for counts in report.categories.values()] == [120, 1]
    # What the copies hold is not counted either.
    alone = made(tmp_path / "alone", chatml, {"a": CHATS, "b": [{"text": "the dog"}]})
    assert report.total.target_kinds == alone.total.target_kinds
    assert report.total.end_of_turn == alone.total.end_of_turn
    assert rows(tmp_path, "") == rows(tmp_path / "alone", "")
    assert audit_of(tmp_path, tmp_path / "out")["findings"]["duplicates"]["count"] == 0
    assert "b: left out: 3 records with the tokens of an earlier one" in report.table()


def test_the_same_answers_with_other_sides_are_no_repetition(tmp_path: Path, chatml: Path) -> None:
    pair = {"prompt": "the cat", "chosen": "sat", "rejected": "ran"}
    turned = {"prompt": "the cat", "chosen": "ran", "rejected": "sat"}
    labels = [{"prompt": "the cat", "completion": "sat", "kto_tag": tag} for tag in (True, False)]
    report = made(tmp_path, chatml, {"a": [pair, turned, *labels, pair, labels[1]]}, "deduplicate=true")
    assert (report.total.duplicates, report.total.documents) == (2, 6)


def test_hashes_tell_documents_apart_by_their_tokens_and_order() -> None:
    ids = np.array([5, 6, 5, 6, 6, 5, 5, 6, 0, 5, 6], np.int32)
    lengths = np.array([2, 2, 2, 3, 2])
    hashes = token_hashes(ids, np.cumsum(lengths) - lengths, lengths)
    assert repeated(hashes).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("share", ["0", "0.0", "1.0", "1.5", "-0.1", "-3", "true", "all", "{'a': 0.1}"])
def test_a_share_that_is_none_is_refused_with_its_key(tmp_path: Path, chatml: Path, share: str) -> None:
    with refused("val_share", f"got {share}", error=UsageError):
        made(tmp_path, chatml, {"a": CHATS}, f"val_share={share}")


@pytest.mark.parametrize(
    ("share", "things"),
    [("1e-9", (1e-9, "0 of 120")), ("0.9999999", (0.9999999, "120 of 120")), ("500", (500, "120 of 120"))],
)
def test_a_share_that_leaves_a_side_empty_is_refused_and_writes_nothing(
    tmp_path: Path, chatml: Path, share: str, things: tuple[object, ...]
) -> None:
    with refused("val_share", *things, error=DataError):
        made(tmp_path, chatml, {"a": CHATS}, f"val_share={share}")
    assert not (tmp_path / "out").exists()


def test_both_parts_are_written_in_megatrons_form(tmp_path: Path, chatml: Path) -> None:
    report = made(tmp_path, chatml, {"a": CHATS}, "val_share=0.2", "format=megatron")
    for part, counts in (("train", report.total), ("val", report.held_out.total)):  # type: ignore[union-attr]
        assert (tmp_path / "out" / part / "a.bin").stat().st_size == 4 * counts.tokens
