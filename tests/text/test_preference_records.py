"""Records of preferences: every shape of other programs is a prompt with its answers, or a bad record with a reason."""

import json
import math
from typing import Any

import pytest

from tests.lib.errors import refused
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.preference import Preference
from verl_ext.text.records.records import column_problems, parse_record

ASKED = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}
WITH_TOOL = {**SYSTEM, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


GOOD, BAD = [ASKED, said("good")], [ASKED, said("bad")]
PAIR = {"chosen": "good", "rejected": "bad"}
HH = [f"\n\nHuman: q\n\nAssistant: {text}" for text in ("good", "bad")]  # Anthropic's texts of whole chats
FUNCTIONS = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
CALLS = [{"role": "assistant", "content": "", "tool_calls": [each]} for each in FUNCTIONS]


def preference(record: Any, **columns: str) -> Preference:
    content = parse_record(record, columns).content
    assert isinstance(content, Preference)
    return content


def texts(found: Preference) -> list[list[str]]:
    return [[message["content"] for message in answer.messages] for answer in found.answers]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", **PAIR},  # TRL's explicit prompt, as texts
        {"prompt": [ASKED], "chosen": [said("good")], "rejected": [said("bad")]},  # and as messages
        {"prompt": "q", "chosen": GOOD, "rejected": BAD, "messages": GOOD, "score_chosen": 8.0},  # UltraFeedback
        {"prompt": [ASKED], "chosen": GOOD, "rejected": BAD},
        {"chosen": GOOD, "rejected": BAD},  # TRL's implicit prompt
        {"chosen": HH[0], "rejected": HH[1]},
        {"prompt": "\n\nHuman: q\n\nAssistant:", **PAIR},
        {"prompt": "Human: q\n\nAssistant:", "chosen": HH[0], "rejected": HH[1]},  # a prompt that the chats repeat
        {"prompt": "q", "chosen": HH[0], "rejected": HH[1]},
        {"prompt": [ASKED], "chosen": HH[0], "rejected": HH[1]},
        {"prompt": "Human: q\n\nAssistant:", "chosen": GOOD, "rejected": BAD},
        # Cells of a table
        {"prompt": json.dumps([ASKED]), "chosen": json.dumps([said("good")]), "rejected": json.dumps(said("bad"))},
        {"prompt": json.dumps([ASKED]), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)},
        {"messages": json.dumps(GOOD), "rejected_messages": json.dumps(BAD)},
        {"messages": [ASKED], "chosen": said("good"), "rejected": said("bad")},  # axolotl
        {"messages": GOOD, **PAIR},
        {
            "conversations": [{"from": "human", "value": "q"}],  # LLaMA-Factory
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {"messages": GOOD, "rejected_response": "bad"},  # ms-swift
        {"messages": GOOD, "rejected_response": [said("bad")]},
        {"messages": GOOD, "rejected_messages": BAD},
        {"instruction": "q", "input": "", **PAIR},  # alpaca
        {"question": "q", **PAIR},  # axolotl's chatml.intel, .icr, .argilla
        {"input": "q", **PAIR},
        {"instruction": "q", "chosen_response": "good", "rejected_response": "bad"},
        {
            "context": [ASKED],
            "completions": [{"rank": 1, "completion": "bad"}, {"rank": 0, "completion": [said("good")]}],
        },
        {
            "context": "\n\nHuman: q\n\nAssistant:",
            "completions": [{"rank": 1, "completion": "bad"}, {"rank": 0, "completion": "good"}],
        },
        {"prompt": "q", "answers": [{"answer": "bad", "rank": 2.5}, {"answer": "good", "rank": 1}]},  # Nectar
        {"prompt": "q", "answers": [{"answer": "bad", "score": -1}, {"answer": "good", "score": 2}]},
    ],
)
def test_every_shape_of_a_pair_is_the_same_preference(record: dict[str, Any]) -> None:
    parsed = parse_record(record)
    found = parsed.content
    assert isinstance(found, Preference)
    assert [answer.messages for answer in found.answers] == [GOOD, BAD]
    assert [answer.targets for answer in found.answers] == [{1: 1.0}, {1: 1.0}]
    assert [answer.shared for answer in found.answers] == [1, 1]
    assert found.sides == (1, -1)
    assert set(parsed.unused) <= {"score_chosen"}


def test_texts_that_look_like_turns_are_answers_if_they_do_not_repeat_the_prompt_beside_them() -> None:
    for prompt in ("Write a dialogue", [{"role": "user", "content": "Write a dialogue"}]):
        found = preference({"prompt": prompt, "chosen": HH[0], "rejected": HH[1]})
        assert texts(found) == [["Write a dialogue", text] for text in HH]
    blank = preference({"prompt": "", "input": " ", "chosen": HH[0], "rejected": HH[1]})
    assert [answer.messages for answer in blank.answers] == [GOOD, BAD]
    found = preference({"prompt": "q", "chosen": "Assistant: a", "rejected": "Assistant: b"})
    assert texts(found) == [["q", "Assistant: a"], ["q", "Assistant: b"]]
    assert texts(preference({"messages": GOOD, "rejected_response": HH[1]}))[1] == ["q", HH[1]]
    for text in ('{"name": "Bob", "role": "admin"}', '{"role": "user", "name": "Bob"}', "[1]", "[", "{x}"):
        assert texts(preference({"prompt": "q", **PAIR, "chosen": text}))[0] == ["q", text]


def test_a_prompt_of_several_turns_in_a_text_is_read_turn_by_turn_after_history_and_context() -> None:
    record = {"prompt": "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q2\n\nAssistant:", **PAIR}
    (chosen, _) = preference(record).answers
    assert [message["role"] for message in chosen.messages] == ["user", "assistant", "user", "assistant"]
    assert texts(preference(record))[0] == ["q1", "a1", "q2", "good"]
    assert texts(preference({**record, "history": [["a", "b"]], "context": "c"}))[0][:3] == ["a", "b", "c\n\nq1"]


def test_a_copy_of_the_chosen_answer_after_the_prompt_is_the_same_message_in_any_form() -> None:
    copy = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    found = preference({"conversations": [ASKED, copy], "chosen": CALLS[0], "rejected": CALLS[1]})
    assert [answer.messages for answer in found.answers] == [[ASKED, CALLS[0]], [ASKED, CALLS[1]]]
    shared_gpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]
    assert [answer.messages for answer in preference({"conversations": shared_gpt, **PAIR}).answers] == [GOOD, BAD]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "completion": "good", "kto_tag": True},  # TRL, its label renamed
        {"prompt": [ASKED], "completion": [said("good")], "kto_tag": 1},
        {"messages": GOOD, "kto_tag": "true"},
        {"instruction": "q", "output": "good", "kto_tag": 1.0},
    ],
)
def test_a_label_makes_an_answer_alone_desirable_or_not(record: dict[str, Any]) -> None:
    for label, side in ((record["kto_tag"], 1), (False, -1), (0, -1), ("False", -1)):
        found = preference({**record, "kto_tag": label})
        assert ([answer.messages for answer in found.answers], found.sides) == ([GOOD], (side,))
    renamed = {**record, "label": False}
    del renamed["kto_tag"]
    assert preference(renamed, kto_tag="label").sides == (-1,)
    assert not isinstance(parse_record(renamed).content, Preference)


def test_a_label_is_that_of_the_turns_after_the_last_user_message() -> None:
    turns = [*GOOD, {"role": "user", "content": "r"}, said("look"), {"role": "tool", "content": "x"}, said("done")]
    (answer,) = preference({"messages": turns, "kto_tag": True}).answers
    assert (answer.shared, answer.targets) == (3, {3: 1.0, 5: 1.0})


def test_system_history_context_and_tools_stand_before_every_answer() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    record = {"system": "s", "history": [["a", "b"]], "context": "c", "prompt": "q", "tools": [tool], **PAIR}
    found = preference(record)
    assert texts(found) == [["s", "a", "b", "c\n\nq", "good"], ["s", "a", "b", "c\n\nq", "bad"]]
    assert [answer.targets for answer in found.answers] == [{4: 1.0}, {4: 1.0}]
    assert [answer.tools for answer in found.answers] == [[tool], [tool]]
    assert texts(preference({"instruction": "add", "input": "1 2", **PAIR}))[0][0] == "add\n1 2"


def test_the_common_beginning_is_taken_over_messages_and_holds_equal_turns_of_the_assistant() -> None:
    look, more = [ASKED, said("look"), {"role": "tool", "content": "x"}], {"role": "user", "content": "and?"}
    found = preference(
        {"chosen": [SYSTEM, *look, said("good")], "rejected": [SYSTEM, *look, said("goo"), more, said("b")]}
    )
    assert [answer.shared for answer in found.answers] == [4, 4]
    assert [answer.targets for answer in found.answers] == [{4: 1.0}, {4: 1.0, 6: 1.0}]
    # ms-swift's answer is what follows the last user message, calls and their results included.
    swift = preference({"messages": [*look, said("good")], "rejected_response": "no"})
    assert texts(swift) == [["q", "look", "x", "good"], ["q", "no"]]
    assert [answer.targets for answer in swift.answers] == [{1: 1.0, 3: 1.0}, {1: 1.0}]


def test_several_answers_are_ordered_the_best_first_without_those_tied_with_it() -> None:
    found = preference({"prompt": "q", "chosen": "a", "rejected": ["b", "c"]})
    assert (texts(found), found.sides) == ([["q", "a"], ["q", "b"], ["q", "c"]], (1, -1, -1))
    equal = preference({"prompt": "q", "chosen": "a", "rejected": ["b", "b"]})
    assert (texts(equal), equal.sides) == ([["q", "a"], ["q", "b"], ["q", "b"]], (1, -1, -1))
    ranks = [("a", 3), ("b", 1), ("c", 1), ("d", 2), ("e", 3)]
    for key, sign in (("rank", 1), ("score", -1)):
        answers = [{"answer": text, key: sign * rank} for text, rank in ranks]
        found = preference({"prompt": "q", "answers": answers})
        assert texts(found) == [["q", "b"], ["q", "d"], ["q", "a"], ["q", "e"]]
        assert found.tied == 1
        assert found.scores == (None if key == "rank" else (-1, -2, -3, -3))


def test_answers_within_the_least_gap_of_scores_are_left_out() -> None:
    answers = [{"answer": text, "score": score} for text, score in (("a", 5), ("b", 4), ("c", 1))]
    found = preference({"prompt": "q", "answers": answers})
    assert texts(found.with_least_gap(2)) == [["q", "a"], ["q", "c"]]
    assert texts(found.with_least_gap(1)) == texts(found)
    for gap, record in ((5, {"score_chosen": 3, "score_rejected": -1}), (0, {"score_chosen": 1, "score_rejected": 2})):
        with refused("small_gap", error=BadRecord):
            preference({"prompt": "q", **PAIR, **record}).with_least_gap(gap)
    assert preference({"prompt": "q", **PAIR, "score_chosen": "7.5", "score_rejected": "2"}).scores == (7.5, 2)  # CSV
    # Answers in the order of their ranks have scores too, if each of those that are kept has one.
    ranked = [{**each, "rank": rank} for rank, each in enumerate(answers)]
    assert texts(preference({"prompt": "q", "answers": ranked}).with_least_gap(2)) == [["q", "a"], ["q", "c"]]
    tied = [*ranked, {"answer": "d", "rank": 0}]
    assert preference({"prompt": "q", "answers": tied}).scores == (5, 4, 1)
    assert preference({"prompt": "q", "answers": [*ranked, {"answer": "d", "rank": 4}]}).scores is None
    for record in ({}, {"score_chosen": "high"}, {"score_chosen": "nan"}, {"score_chosen": True}):
        with refused("no_score", error=BadRecord):
            preference({"prompt": "q", **PAIR, "score_rejected": 0, **record}).with_least_gap(0)


@pytest.mark.parametrize(
    ("record", "reason", "thing"),
    [
        ({"chosen": "good", "rejected": "bad"}, "no_prompt", "characters"),
        ({"prompt": "q", "chosen": "good", "rejected": "good"}, "same_answers", "equal"),
        ({"chosen": [*GOOD, ASKED, said("x")], "rejected": GOOD}, "same_answers", "beginning"),
        ({"prompt": "q", "chosen": "a", "rejected": ["b", "a"]}, "same_answers", "answer 2 of rejected"),
        ({"chosen": GOOD, "rejected": [{**ASKED, "content": "p"}, said("bad")]}, "different_prompts", "message 1"),
        ({"prompt": "q", "chosen": GOOD, "rejected": "bad"}, "different_prompts", "whole chat"),
        ({"prompt": [SYSTEM], "chosen": GOOD, "rejected": BAD}, "different_prompts", "prompt"),
        ({"chosen": [WITH_TOOL, *GOOD], "rejected": [SYSTEM, *BAD]}, "different_prompts", "tools"),
        ({"messages": GOOD, "chosen": "x", "rejected": "bad"}, "ambiguous", "messages"),
        ({"prompt": "q", "chosen": "good", "rejected": ""}, "empty", "rejected"),
        ({"prompt": "q", "chosen": [], "rejected": "bad"}, "empty", "chosen"),
        ({"prompt": "q", "chosen": ["a", 1], "rejected": "bad"}, "non_string_content", "chosen"),
        ({"prompt": "q", "chosen": "good", "rejected": {**said("bad"), "train": False}}, "no_target", "rejected"),
        ({"messages": GOOD, "rejected_messages": [ASKED]}, "no_target", "rejected_messages"),
        ({"prompt": "q", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 1}]}, "same_rank", "answers"),
        ({"prompt": "q", "answers": [{"answer": "a", "rank": 1}, {"text": "b", "rank": 2}]}, "no_target", "answer 2"),
        *(
            ({"prompt": "q", "answers": [{"answer": a, key: n} for a, n in given]}, "bad_rank", thing)
            for given in ((("a", 1), ("b", math.nan), ("c", 2)), (("a", math.nan), ("b", 1), ("c", 2)))
            for key, thing in (("rank", "the rank"), ("score", "nan"))
        ),
        ({"prompt": "p", "chosen": GOOD, "rejected": BAD}, "different_prompts", "columns={prompt: null}"),
        ({"prompt": "Human: p", "chosen": HH[0], "rejected": HH[1]}, "different_prompts", "prompt"),
        ({"prompt": "Human: p\n\nAssistant: Sure,", **PAIR}, "ambiguous", "prompt"),
        ({"messages": [ASKED, CALLS[0]], "chosen": CALLS[1], "rejected": "bad"}, "ambiguous", "messages"),
        ({"messages": [said("good")], **PAIR}, "no_prompt", "chosen"),
        ({"messages": [said("good")], "rejected_response": "bad"}, "no_prompt", "messages"),
        ({"messages": [said("good")], "kto_tag": True}, "no_prompt", "the record"),
        ({"messages": GOOD, "kto_tag": "maybe"}, "bad_label", "'maybe'"),
        ({"text": "a", "kto_tag": True}, "unknown_shape", "a text"),
        ({"prompt": "q", **PAIR, "kto_tag": True}, "unknown_shape", "several answers"),
    ],
)
def test_a_record_without_a_preference_says_why(record: dict[str, Any], reason: str, thing: str) -> None:
    with refused(reason, thing, error=BadRecord):
        parse_record(record)


def test_columns_rename_the_fields_of_preferences_and_null_reads_the_chat_beside_them() -> None:
    record = {"ask": "q", "win": "good", "lose": "bad"}
    assert texts(preference(record, prompt="ask", chosen="win", rejected="lose")) == [["q", "good"], ["q", "bad"]]
    beside = parse_record({"messages": GOOD, "chosen": GOOD, "rejected": BAD}, {"chosen": None, "rejected": None})
    assert not isinstance(beside.content, Preference)
    other = {"prompt": "another", "chosen": GOOD, "rejected": BAD}
    found = parse_record(other, {"prompt": None}).content
    assert isinstance(found, Preference)
    assert texts(found) == [["q", "good"], ["q", "bad"]]
    assert column_problems({"chosen": "win", "answer": "x"})
    assert not column_problems({"chosen": "win", "rejected": "lose", "kto_tag": "label"})


def test_other_fields_named_like_answers_leave_a_chat_as_it_was() -> None:
    record = {"prompt": "q", "response": "good", "chosen": True, "rejected": False, "answers": json.dumps(["x"])}
    assert not isinstance(parse_record(record).content, Preference)
