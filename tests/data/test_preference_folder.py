"""Preferences in tokenized folders: columns, units that are not whole, SFT on preferred answers, views."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, Value, load_from_disk
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.lib.chat_templates import CHATML, STRIPS_THINKING, tiny_tokenizer
from tests.lib.document_texts import write_lines
from tests.lib.errors import names, refused
from tests.lib.shown import audit_of, document, show
from tests.lib.tokenized_data import FEATURES
from tests.lib.tokenized_text import tokenize_files
from verl_ext.answers.options import AnswerOptions
from verl_ext.answers.prompts import Prompts
from verl_ext.commands.command_line import read_options
from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.data import ChosenDataSet, SFTDataSet
from verl_ext.data.families.preference import PreferenceDataSet
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.data.tokenized.facts import check_answers
from verl_ext.data.tokenized.ranks import ONE_RANK, Ranks
from verl_ext.data.tokenized.units import UnitRows
from verl_ext.options import DataError
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import ChunkSize
from verl_ext.trainer.report import data_facts
from verl_ext.trainer.report_lines import report_lines


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def made(tmp_path: Path, model: str, sources: dict[str, list[Any]], *options: str, **more: Any) -> tuple[str, Report]:
    """Tokenize records by source; return the folder and the report."""
    paths = {name: write_lines(tmp_path / f"{name}.jsonl", records) for name, records in sources.items()}
    given, out = {"chunk_size": ChunkSize(2, 200), **more}, tmp_path / "out"
    return str(out), tokenize_files(paths, out, Path(model), "overwrite=true", *options, **given)


CHAT = {"messages": [user("the cat"), said("sat")]}
PAIR = {"prompt": "the cat", "chosen": "sat on the mat", "rejected": "ran", "weight": 2}
RANKED = {
    "prompt": "the dog",
    "answers": [{"answer": text, "rank": rank} for text, rank in (("a b", 2), ("c", 1), ("d", 3))],
}
LABEL = {"prompt": "the cow", "completion": "lay", "kto_tag": False}


def facts(rows: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    return [(row["unit"], row["answer"], row["pair_weight"]) for row in rows]


@pytest.mark.parametrize("shard_bytes", [1, 10**6])
def test_answers_are_documents_that_say_their_unit_side_and_weight(
    tmp_path: Path, chatml: Path, shard_bytes: int
) -> None:
    sources = {"chats": [CHAT, {"text": "the cat"}], "pairs": [PAIR, CHAT, RANKED, LABEL]}
    folder, report = made(tmp_path, chatml, sources, shard_bytes=shard_bytes)
    rows = load_from_disk(folder).to_list()
    alone = [(1, 0, 1)] * 2
    assert facts(rows) == [*alone, (2, 1, 2), (0, -1, 2), alone[0], (3, 1, 1), (0, -1, 1), (0, -1, 1), (1, -1, 1)]
    tokenizer = tiny_tokenizer(CHATML)
    texts = [tokenizer.decode(row["input_ids"]) for row in rows]
    learnt = [
        tokenizer.decode([token for token, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit])
        for row in rows
    ]
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    assert texts[2:4] == [asked.format("the cat", "sat on the mat"), asked.format("the cat", "ran")]
    assert learnt[2:4] == ["sat on the mat<|im_end|>", "ran<|im_end|>"]
    assert texts[5:8] == [asked.format("the dog", answer) for answer in ("c", "a b", "d")]
    assert "loss_weight" not in rows[0]
    assert report.sources["pairs"].preferences == {
        **{"units": 3, "pairs": 3, "labels": 1, "chosen_longer": 1, "rejected_longer": 1}
    }
    assert "3 units" not in report.table()
    assert "2 units of 3 pairs; the chosen answer has more targets in 33%; 1 answers with a label" in report.table()
    # The same record as a chat has the same tokens and targets.
    (chosen,) = load_from_disk(
        made(tmp_path, chatml, {"one": [{"messages": [user("the cat"), said("sat on the mat")]}]})[0]
    )
    assert (chosen["input_ids"], chosen["loss_mask"]) == (rows[2]["input_ids"], rows[2]["loss_mask"])
    assert "unit" not in chosen


def test_weights_of_messages_are_those_of_tokens_and_a_records_that_of_its_pairs(tmp_path: Path, chatml: Path) -> None:
    record = {"prompt": "the cat", "chosen": {**said("sat"), "weight": 0.5}, "rejected": "ran", "loss_weight": 3}
    rows = load_from_disk(made(tmp_path, chatml, {"a": [CHAT, record]})[0]).to_list()
    assert [row["pair_weight"] for row in rows] == [1, 3, 3]
    found = [{w for w, bit in zip(row["loss_weight"], row["loss_mask"], strict=True) if bit} for row in rows]
    assert found == [{1}, {0.5}, {1}]


def test_a_pair_is_bad_as_a_whole_and_small_gaps_are_left_out_and_counted(tmp_path: Path, chatml: Path) -> None:
    scored = [{**PAIR, "score_chosen": gap, "score_rejected": 0} for gap in (0.5, 2)]
    folder, report = made(tmp_path, chatml, {"a": scored}, "min_score_gap=1")
    assert report.total.bad == {"small_gap": 1}
    assert len(load_from_disk(folder)) == 2
    for bad, reason in (
        ({**PAIR, "rejected": "sat on the mat"}, "same_answers"),
        ({**PAIR, "rejected": ""}, "empty"),
        ({**PAIR, "rejected": [said("a"), user("b"), said("c")]}, "several_turns"),
        ({**PAIR, "chosen": "\ud800"}, "invalid_text"),
    ):
        _, report = made(tmp_path, chatml, {"a": [bad, PAIR]}, "on_bad_record=skip", "turns=each")
        assert report.total.bad == {reason: 1}, bad
        assert (report.total.documents, report.total.preferences["units"]) == (2, 1)
        assert report.total.end_of_turn == {"<|im_end|>": 2}  # of the usable pair alone
        with refused("a.jsonl:1", reason, "on_bad_record=skip", error=DataError):
            made(tmp_path, chatml, {"a": [bad, PAIR]}, "turns=each")


def test_answers_that_have_the_same_tokens_only_when_they_are_rendered_are_no_preference(
    tmp_path: Path, chatml: Path
) -> None:
    record = {"prompt": "q", "chosen": "<think>a</think>x", "rejected": ["y", "<think>b</think>x"]}
    with refused("a.jsonl:1", "tokens", "same_answers", error=DataError):
        made(tmp_path, chatml, {"a": [record]}, "reasoning=drop")
    assert made(tmp_path, chatml, {"a": [record]})[1].total.documents == 3


def test_unequal_reasoning_and_ends_of_pairs_are_counted(tmp_path: Path, chatml: Path) -> None:
    thought = {**PAIR, "rejected": "<think>\n\n</think>\n\nran"}
    _, report = made(tmp_path, chatml, {"a": [PAIR, thought, {**PAIR, "chosen": "<think>\n\n</think>\n\nsat"}]})
    assert report.total.preferences["unequal_parts"] == 2
    assert "2 pairs of which only one answer has reasoning" in report.table()
    assert report.total.preferences["unequal_ends"] == 0


def test_pairs_of_which_one_answer_has_an_end_of_turn_are_counted_and_not_those_of_two_kinds_of_ends(
    tmp_path: Path,
) -> None:
    ends = "{% if m.tool_calls %}<|end|>{% elif 'open' not in m.content %}<|im_end|>{% endif %}\n"
    template = CHATML.replace("{{ m.content }}<|im_end|>\n", "{{ m.content }}{{ m.tool_calls }}" + ends, 1)
    tiny_tokenizer(template).save_pretrained(tmp_path / "own")
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    for name, rejected, end, count in (("a", "open", "", 1), ("b", call, "<|end|>", 0)):
        _, report = made(tmp_path, str(tmp_path / "own"), {name: [{**PAIR, "rejected": rejected}]})
        assert report.total.end_of_turn == {"<|im_end|>": 1, end: 1}
        assert report.total.preferences["unequal_ends"] == count
        found = audit_of(tmp_path, str(tmp_path / "out"))["findings"]
        assert (found["unequal_ends"]["count"], found["unequal_ends"]["of"]) == (count, 1)


def test_prompts_that_the_template_prints_in_two_forms_and_scores_the_wrong_way_round_are_counted(
    tmp_path: Path,
) -> None:
    tiny_tokenizer(STRIPS_THINKING).save_pretrained(tmp_path / "own")
    shared = [user("the cat?"), {**said("<think>hello</think>sat"), "train": False}]
    records = [
        # Only the chosen answer's last user message stands before the shared turn, which keeps its thought there.
        {"chosen": [*shared, said("mat")], "rejected": [*shared, said("ran"), user("and?"), said("the cat")]},
        {"chosen": [*shared, said("mat")], "rejected": [*shared, said("ran")]},
        {**PAIR, "score_chosen": 1, "score_rejected": 2.5},
        {**PAIR, "score_chosen": 2, "score_rejected": 2},
    ]
    folder, report = made(tmp_path, str(tmp_path / "own"), {"a": records})
    counts = report.total.preferences
    assert (counts["unequal_prompts"], counts["scores_reversed"], counts["pairs"]) == (1, 1, 4)
    found = audit_of(tmp_path, folder)["findings"]
    assert [found[name]["count"] for name in ("unequal_prompts", "scores_reversed")] == [1, 1]
    for words in ("1 pairs whose prompt the template prints in another form", "1 pairs whose preferred answer has the"):
        assert words in report.table()


def test_a_blank_prompt_is_none_and_a_run_says_how_many_documents_stand_beside_answers(
    tmp_path: Path, chatml: Path
) -> None:
    blank = [{**PAIR, "prompt": ""}, {**LABEL, "prompt": " "}, {"chosen": [user(""), said("a")], "rejected": "b"}]
    blank[2]["rejected"] = [user(""), said("b")]
    records = [*blank, PAIR, RANKED, LABEL, CHAT, {"text": "the cat"}]
    folder, report = made(tmp_path, chatml, {"a": records}, "on_bad_record=skip")
    assert report.total.bad == {"no_prompt": 3}
    facts = data_facts(PreferenceDataSet(train_dir=folder, max_tokens=64))
    names = ("units", "pairs", "labels", "documents_alone")
    assert [facts[name] for name in names] == [5, 3, 1, 2]
    (line,) = (line for line in report_lines({"train": facts}) if "units" in line)
    assert line == (
        "train: 5 units: 3 pairs, 1 answers with a label, 2 documents that are not answers, "
        "which are learnt like those of SFT (loss.sft_weight)"
    )


def test_the_weights_of_records_are_named_with_their_field_and_range(tmp_path: Path, chatml: Path) -> None:
    records = [{"text": "the cat", "weight": weight} for weight in (70.5, None, 0.5)] + [{**PAIR, "heavy": 3}]
    _, report = made(tmp_path, chatml, {"a": records})
    assert "a: weights of targets from the field weight: from 0.5 to 70.5, in 3 records" in report.table()
    assert report.as_dict()["total"]["loss_weights"] == {"weight": {"records": 3, "least": 0.5, "most": 70.5}}
    _, report = made(tmp_path, chatml, {"a": records[3:]}, "columns={loss_weight: heavy}")
    assert report.as_dict()["total"]["loss_weights"] == {"heavy": {"records": 1, "least": 3, "most": 3}}
    assert "fields not used: weight (1)" in report.table()


def test_empty_thinking_blocks_are_dropped_in_both_answers_or_in_none(tmp_path: Path, chatml: Path) -> None:
    block = "<think>\n\n</think>\n\n"
    records = [{"prompt": f"q {n}", "chosen": f"{block}a {n}", "rejected": f"{block}b"} for n in range(40)]
    rows = load_from_disk(made(tmp_path, chatml, {"a": records}, "drop_empty_reasoning=0.5")[0]).to_list()
    tokenizer = tiny_tokenizer(CHATML)
    has_block = ["<think>" in tokenizer.decode(row["input_ids"]) for row in rows]
    assert has_block[::2] == has_block[1::2]
    assert 0 < sum(has_block) < 80


def test_a_prompt_of_an_evaluation_ends_before_the_preferred_answer(chatml: Path) -> None:
    encoder = ChatEncoder(ChatOptions.read({"model": {"path": str(chatml)}}), ["a"])
    chat, last, ids = encoder.prompt(PAIR)
    assert chat is not None
    assert chat.messages[last]["content"] == PAIR["chosen"]
    assert tiny_tokenizer(CHATML).decode(ids) == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    desirable, _, _ = encoder.prompt({**LABEL, "kto_tag": True})
    assert desirable is not None
    assert desirable.messages[-1]["content"] == LABEL["completion"]


def test_an_undesirable_answer_is_never_the_expected_one_of_an_evaluation(tmp_path: Path, chatml: Path) -> None:
    (tmp_path / "labels.jsonl").write_text(json.dumps(LABEL) + "\n")
    options = AnswerOptions.read({"prompts": [str(tmp_path / "labels.jsonl")]})
    with refused("eval.prompts", "labels.jsonl:1", "undesirable", error=DataError):
        Prompts.read(options, AutoTokenizer.from_pretrained(chatml))


def test_a_folder_of_preferences_is_not_tokenized_again_as_documents(tmp_path: Path, chatml: Path) -> None:
    folder, _ = made(tmp_path, chatml, {"a": [CHAT, PAIR, RANKED, LABEL]})
    again = [f"sources={{p:{folder}}}", f"output_dir={tmp_path}/again", f"model.path={chatml}"]
    with refused("answer", 1, "preference", "on_bad_record=skip", error=DataError):
        tokenize(read_options(TokenizeOptions, again))
    report = tokenize(read_options(TokenizeOptions, [*again, "on_bad_record=skip"]))
    assert report.total.bad == {"preference": 6}
    assert report.total.documents == 1


def test_megatrons_format_refuses_preferences_in_one_line(tmp_path: Path, chatml: Path) -> None:
    with refused("sources.a", "format=megatron", error=DataError):
        made(tmp_path, chatml, {"a": [PAIR]}, "format=megatron")


def test_plain_training_refuses_preferences_and_chosen_trains_on_the_preferred(tmp_path: Path, chatml: Path) -> None:
    folder, _ = made(tmp_path, chatml, {"chats": [CHAT], "pairs": [PAIR, RANKED, LABEL, {**LABEL, "kto_tag": 1}]})
    with refused("data.train_dir", "preferences", folder, "data=chosen"):
        SFTDataSet(folder, 100)
    with refused("eval.prompts", "preferences", folder):
        Prompts.read(AnswerOptions.read({"prompts": [folder]}), AutoTokenizer.from_pretrained(chatml))
    dataset = ChosenDataSet(folder, 400)
    rows = load_from_disk(folder).to_list()
    kept = [row for row in rows if row["answer"] >= 0]
    assert len(kept) == 4
    found = sorted(np.concatenate([dataset[pack]["input_ids"].numpy() for pack in range(len(dataset))]).tolist())
    assert found == sorted(token for row in kept for token in row["input_ids"])
    rejected = [row for row in rows if row["answer"] < 0]
    (left_out,) = dataset.omitted_documents()
    assert (left_out.reason, left_out.documents) == ("rejected answer", len(rejected))
    assert left_out.tokens_removed == sum(row["length"] for row in rejected)
    assert left_out.share == left_out.tokens_removed / sum(row["length"] for row in rows)
    (tmp_path / "plain").mkdir()
    plain, _ = made(tmp_path / "plain", chatml, {"chats": [CHAT]})
    with refused("data.train_dir", "preferences", "documents alone"):
        ChosenDataSet(plain, 100)
    assert len(ChosenDataSet([plain, folder], 400).folders) == 2
    with refused("data.mixture", "data=chosen"):
        ChosenDataSet(folder, 100, mixture={"sources": {"a": {"tokens": 10}}})


def test_labels_that_nothing_read_are_named_where_answers_are_asked_for(chatml: str, tmp_path: Path) -> None:
    answers = [{"prompt": "the cat", "completion": "sat", "correct": n > 0, "label": n > 0} for n in range(2)]
    unread = made(tmp_path, chatml, {"kto": answers}, "columns={kto_tag: null}")[0]
    with refused("data.train_dir", "columns={kto_tag: label}"):
        PreferenceDataSet(unread, max_tokens=100)
    assert len(PreferenceDataSet(made(tmp_path, chatml, {"kto": answers}, "columns={kto_tag: label}")[0], 100))


@pytest.mark.parametrize("options", [{}, {"pad_mode": "right"}, {"share_prefixes": True}])
def test_a_pairs_weight_weights_the_tokens_of_its_chosen_answer_as_a_records_weight_those_of_a_chat(
    tmp_path: Path, chatml: Path, options: dict[str, Any]
) -> None:
    half = {**said("sat down"), "weight": 0.5}
    records = [CHAT, PAIR, {"prompt": "the dog", "chosen": half, "rejected": "ran", "weight": 3}, {**PAIR, "weight": 0}]
    chats = [
        CHAT,
        {"messages": [user("the cat"), said("sat on the mat")], "weight": 2},
        {"messages": [user("the dog"), half], "weight": 3},
        {"messages": [user("the cat"), said("sat on the mat")], "weight": 0},
    ]
    (tmp_path / "chats").mkdir()
    datasets = (
        ChosenDataSet(made(tmp_path, chatml, {"a": records})[0], 400, **options),
        SFTDataSet(made(tmp_path / "chats", chatml, {"a": chats})[0], 400, **options),
    )
    ((chosen,), (plain,)) = ([dataset[pack] for pack in range(len(dataset))] for dataset in datasets)
    assert chosen.keys() == plain.keys()
    targets = chosen["loss_mask"] == 1
    assert chosen["loss_weight"][targets].tolist() == plain["loss_weight"][targets].tolist()
    assert {0.0, 1.0, 1.5, 2.0} == {*chosen["loss_weight"][targets].tolist()}
    assert all(chosen[name].equal(plain[name]) for name in chosen if name != "loss_weight")


def write_answers(path: Path, columns: dict[str, list[Any]], rows: list[list[int]] | None = None) -> str:
    """Write a folder of another program, with columns of units."""
    count = len(columns["unit"])
    documents = [document(ids, range(1, len(ids))) for ids in rows or [[1, 2, 3 + row] for row in range(count)]]
    given = {name: [each[name] for each in documents] for name in ("input_ids", "loss_mask", "category_ids")}
    kinds = {"unit": Value("int64"), "answer": Value("int8"), "pair_weight": Value("float64")}
    features = Features({**FEATURES, **{name: kinds[name] for name in columns}})
    Dataset.from_dict(
        {**given, "length": [len(each["input_ids"]) for each in documents], **columns}, features=features
    ).save_to_disk(str(path))
    return str(path)


def test_units_of_another_programs_folder_and_of_plain_ones_beside_it_are_read(tmp_path: Path) -> None:
    first = write_answers(tmp_path / "a", {"unit": [3, 0, 0, 1], "answer": [1, -1, -1, -1]})
    second = write_answers(tmp_path / "b", {"unit": [2, 0], "answer": [1, -1], "pair_weight": [2.0, 2.0]})
    plain = write_answers(tmp_path / "c", {"unit": [7, 7]})  # a column of that name that means something else
    units = TokenizedData([first, plain, second], with_answers=True).units
    assert units is not None
    assert units.starts.tolist() == [0, 3, 4, 5, 6, 8]
    assert units.weight.tolist() == [1, 1, 1, 1, 2]
    assert units.answer.tolist() == [1, -1, -1, -1, 0, 0, 1, -1]
    assert [pairs.tolist() for pairs in units.pairs] == [[0, 0, 6], [1, 2, 7]]
    assert (units.unit_of(2), units.unit_of(7)) == (range(0, 3), range(6, 8))
    assert TokenizedData([plain]).units is None


@pytest.mark.parametrize(
    ("columns", "things"),
    [
        ({"unit": [0, 2], "answer": [1, -1]}, ("the first row of a unit", "0 in row 0")),
        ({"unit": [2, 1], "answer": [1, -1]}, ("unit 2 and 0 rows", "row 0")),
        ({"unit": [3, 0], "answer": [1, -1]}, ("unit 3 and 1 rows", "row 0")),
        ({"unit": [-1, 1], "answer": [1, -1]}, ("unit", "got -1 in row 0")),
        ({"unit": [2, 0], "answer": [-1, 1]}, ("answer 1", "answer -1 in row 0")),
        ({"unit": [2, 0], "answer": [1, 0]}, ("answer 1", "answer 0 in row 1")),
        ({"unit": [1, 1], "answer": [1, 2]}, ("answer 1, -1 or 0", "2 in row 1")),
        ({"unit": [2, 0], "answer": [1, -1], "pair_weight": [-1.0, 1.0]}, ("pair_weight", "-1.0 in row 0")),
    ],
)
def test_units_that_are_not_whole_are_refused_with_their_row(
    tmp_path: Path, columns: dict[str, list[Any]], things: tuple[str, ...]
) -> None:
    folder = write_answers(tmp_path / "a", columns)
    with refused("data.train_dir", *things, folder):
        ChosenDataSet(folder, 100)


def rewritten(folder: str, out: Path, change: Callable[[list[dict[str, Any]]], None]) -> str:
    """Write a folder's rows again, changed."""
    dataset = load_from_disk(folder)
    change(rows := dataset.to_list())
    Dataset.from_list(rows, features=dataset.features).save_to_disk(str(out))
    return str(out)


def test_answers_without_a_target_and_equal_ones_of_another_program_are_refused(tmp_path: Path) -> None:
    columns = {"unit": [2, 0], "answer": [1, -1]}
    equal = write_answers(tmp_path / "a", columns, [[1, 2, 3], [1, 2, 3]])
    right = write_answers(tmp_path / "b", columns)
    lacking = rewritten(right, tmp_path / "c", lambda rows: rows[1].update(loss_mask=[1, 0, 0]))
    nothing = {"input_ids": [], "loss_mask": [], "category_ids": [], "length": 0}
    empty = rewritten(right, tmp_path / "d", lambda rows: rows[1].update(nothing))
    for folder, things in (
        (equal, ("data.train_dir", "answers", "row 0", "row 1")),
        (lacking, ("data.train_dir", "target", "row 1")),
        (empty, ("data.train_dir", "target", "row 1")),
    ):
        with refused(*things):
            _ = ChosenDataSet(folder, 100).scan()
        with refused(*things):
            ChosenDataSet(folder, 100).read_together(ONE_RANK)
        code, _, errors = show(folder)
        assert code == 1
        assert names(errors, *things[1:])


@given(
    st.lists(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=3), min_size=2, max_size=4), max_size=6),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_the_answers_of_a_unit_are_compared_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, units: list[list[list[int]]], block_tokens: int, untold: int
) -> None:
    rows = [[9, *ids] for unit in units for ids in unit] or [[9, 1]]
    sizes = [size for unit in units for size in (len(unit), *[0] * (len(unit) - 1))] or [1]
    places = [place for unit in units for place in range(len(unit))] or [0]
    columns = {"unit": sizes, "answer": [-1 if place else 1 for place in places]}
    folder = write_answers(tmp_path_factory.mktemp("units"), columns, rows)
    data = TokenizedData([folder], with_answers=True)
    first = [row - place for row, place in enumerate(places)]
    equal = [row for row, place in enumerate(places) if place and rows[row] == rows[first[row]]]
    has_target = np.arange(len(rows)) >= untold
    if not equal:
        check_answers(data, has_target, block_tokens=block_tokens)
        return
    with refused(f"row {first[equal[0]]}", f"row {equal[0]}"):
        check_answers(data, has_target, block_tokens=block_tokens)


def test_answers_are_checked_once_by_one_rank_and_of_unequal_lengths_no_tokens_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"unit": [2, 0, 2, 0], "answer": [1, -1, 1, -1]}
    data, equal, unequal = (
        TokenizedData([write_answers(tmp_path / name, columns, rows)], with_answers=True)
        for name, rows in (
            ("a", [[1, 2], [1, 3], [2, 2], [2, 3]]),
            ("b", [[1, 2], [1, 2], [2, 2], [2, 3]]),
            ("c", [[1, 2], [1, 2, 3], [2, 2], [2]]),
        )
    )
    known = np.ones(4, bool)
    check_answers(data, known, keep=True)

    def refuse(*_: Any) -> None:
        raise AssertionError("tokens are read")

    class SecondRank(Ranks):
        rank, size = 1, 2

    monkeypatch.setattr(TokenizedData, "gather", refuse)
    monkeypatch.setattr(TokenizedData, "block", refuse)
    check_answers(data, known, keep=True)
    check_answers(equal, np.zeros(4, bool), SecondRank())
    check_answers(unequal, known)
    with pytest.raises(AssertionError, match="tokens are read"):
        check_answers(data, known)


def test_units_longer_than_a_pack_are_an_error_or_left_out_whole_and_never_cut() -> None:
    unit, answer = np.array([2, 0, 2, 0, 1]), np.array([1, -1, 1, -1, 1])
    units = UnitRows.of_columns(unit, answer, np.ones(5), "data.train_dir", "DIR")
    tokens = np.array([10, 30, 5])
    assert units.fitting(tokens, 10, "drop", "DIR").tolist() == [0, 2]
    assert units.fitting(tokens, 30, "error", "DIR").tolist() == [0, 1, 2]
    with refused("data.max_tokens", 10, "1 of 3", "rows 2..3", "30 tokens"):
        units.fitting(tokens, 10, "error", "DIR")


def test_show_draws_the_prompt_once_and_every_answer_below_it(tmp_path: Path, chatml: Path) -> None:
    folder, _ = made(tmp_path, chatml, {"chats": [CHAT], "pairs": [PAIR, RANKED, LABEL]})
    code, shown, _ = show(folder, "row=2")
    assert code == 0
    lines = shown.splitlines()
    assert lines[0].endswith("pairs, weight 2")
    heads = [line.partition(":")[0] for line in lines[1:] if line[:1].isalpha()]
    assert heads == ["prompt", "chosen", "rejected"]
    assert shown.count("the cat") == 1
    assert "[[sat on the mat]]" in shown
    assert "[[ran]]" in shown
    # Both rows of a unit are one view, and a document beside them is drawn as ever.
    _, shown, _ = show(folder, "matches=the", "documents=9")
    assert (shown.count("\nprompt\n"), shown.count("rejected: "), shown.count("undesirable: ")) == (3, 3, 1)
    assert "row 0 of" in shown
    _, shown, _ = show(folder, "row=1", "tokens=true")
    assert shown.count("*<|im_end|>") == 2
    _, shown, _ = show(folder, "row=2", "record=true")
    assert '"chosen": "sat on the mat"' in shown


def test_the_audit_finds_length_bias_and_unequal_parts(tmp_path: Path, chatml: Path) -> None:
    thought = {**PAIR, "chosen": "<think>\n\n</think>\n\nsat on the mat"}
    folder, _ = made(tmp_path, chatml, {"pairs": [PAIR, PAIR, thought, {**PAIR, "rejected": "sat on the mat now"}]})
    found = audit_of(tmp_path, folder)["findings"]
    assert (found["length_bias"]["count"], found["length_bias"]["of"]) == (3, 4)
    assert [row for _, row in found["length_bias"]["rows"]] == [1, 3, 5]
    assert (found["unequal_parts"]["count"], found["unequal_ends"]["count"]) == (1, 0)
    code, _, errors = show(folder, "require=length_bias<60%")
    assert code == 1
    assert names(errors, "length_bias<60%", "3 of 4")
    plain, _ = made(tmp_path, chatml, {"chats": [CHAT]})
    assert not {"length_bias", "unequal_parts", "unequal_ends"} & audit_of(tmp_path, plain)["findings"].keys()
