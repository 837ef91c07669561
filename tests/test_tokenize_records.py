"""Record shapes: which chat or text a record's fields stand for, and which records are refused."""

from typing import Any

import pytest

from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.records import Chat, PlainText, parse_record

SINGLE_TURN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": SINGLE_TURN, "text": "ignored"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, SINGLE_TURN[1]]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": SINGLE_TURN},
        {"instruction": "q", "input": "", "output": "a", "response": "other"},
        {"instruction": "q", "response": "a"},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"prompt": [SINGLE_TURN[0]], "completion": [SINGLE_TURN[1]]},
        {"prompt": [SINGLE_TURN[0]], "response": "a"},
        {"question": "q", "answer": "a", "messages": None, "id": 7},
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
    ],
)
def test_every_shape_becomes_the_same_chat(record: dict[str, Any]) -> None:
    content = parse_record(record).content
    assert isinstance(content, Chat)
    assert content.messages == SINGLE_TURN
    assert content.targets == [1]


def test_alpaca_input_follows_its_instruction_on_a_line_of_its_own() -> None:
    content = parse_record({"instruction": "add", "input": "1 2", "output": "3"}).content
    assert content.messages[0]["content"] == "add\n1 2"


def test_text_is_plain() -> None:
    assert parse_record({"text": "hello"}).content == PlainText("hello")


def test_history_and_system_are_taken_along() -> None:
    record = {"system": "be kind", "history": [["a", "b"]], "instruction": "c", "output": "d"}
    content = parse_record(record).content
    assert [m["content"] for m in content.messages] == ["be kind", "a", "b", "c", "d"]
    assert content.targets == [2, 4]


def test_assistant_turns_of_a_prompt_are_context() -> None:
    prompt = [*SINGLE_TURN, {"role": "user", "content": "r"}]
    content = parse_record({"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}]}).content
    assert content.targets == [3]


def test_sharegpt_tool_roles_become_template_roles() -> None:
    turns = [("system", "s"), ("human", "q"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "o")]
    record = {"conversations": [{"from": role, "value": text} for role, text in [*turns, ("gpt", "a")]]}
    content = parse_record(record).content
    assert [m["role"] for m in content.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert content.messages[2]["tool_calls"][0]["function"]["name"] == "f"
    assert content.targets == [2, 4]


def test_record_weights_are_numbers_from_zero_up() -> None:
    assert parse_record({"text": "a", "loss_weight": 0.5}).weight == 0.5
    assert parse_record({"text": "a", "weight": 2}).weight == 2.0
    assert parse_record({"text": "a"}).weight is None


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        ([1], "not_an_object", "list"),
        ({"title": "x", "body": "y"}, "unknown_fields", "title, body; known shapes: messages"),
        ({}, "unknown_fields", "none"),
        ({"messages": []}, "empty", "messages is empty"),
        ({"text": "  "}, "empty", "text is empty"),
        ({"question": "q", "answer": " "}, "empty", "every assistant turn is empty"),
        ({"question": "q", "answer": 3}, "non_string_content", "answer must be a string; got int"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no_target", "no assistant turn"),
        ({"messages": [{"role": "wizard", "content": "q"}]}, "unknown_role", "wizard"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "non_string_content", "got dict"),
        ({"messages": [{"role": "user"}]}, "non_string_content", "no content"),
        ({"messages": [{**SINGLE_TURN[1], "weight": 0}]}, "no_target", "no assistant turn"),
        ({"messages": [{**SINGLE_TURN[1], "weight": 0.3}]}, "bad_weight", "0 or 1"),
        ({"text": "a", "loss_weight": -1}, "bad_weight", "-1"),
        ({"text": "a", "loss_weight": float("nan")}, "bad_weight", "nan"),
        ({"messages": SINGLE_TURN, "tools": "{"}, "malformed_json", "tools"),
        ({"messages": SINGLE_TURN, "tools": [3]}, "bad_tools", "JSON schemas"),
    ],
)
def test_unusable_records_say_why(record: Any, reason: str, message: str) -> None:
    with pytest.raises(BadRecord) as error:
        parse_record(record)
    assert error.value.reason == reason
    assert message in str(error.value)
