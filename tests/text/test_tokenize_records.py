"""Record shapes: the chat or text that a record's fields stand for, and refused records."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.content import PlainText
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.records import FIELDS, category_of, parse_record

TOOL = {"name": "sit", "parameters": {"on": {"type": "str"}}}
QUESTION = {"question": "q", "answer": "a"}
SINGLE_TURN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CALL = {"name": "sit", "arguments": {"on": "mat"}}


def with_answer(**fields: Any) -> dict[str, Any]:
    return {"messages": [SINGLE_TURN[0], {**SINGLE_TURN[1], **fields}]}


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
        {"question": "q", "answer": "a", "conversation": None, "id": 7},
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        {"messages": [{**turn, "train": True, "weight": 1} for turn in SINGLE_TURN]},
        {"messages": [{**SINGLE_TURN[0], "train": False}, {**SINGLE_TURN[1], "trainable": 1}]},
        {"conversation": SINGLE_TURN},
        {"question": "q", "response": "a"},
        {"query": "q", "response": "a"},
        {"input": "q", "output": "a"},
        {"inputs": "q", "targets": "a"},
        {"inputs": "q", "targets": "a", "input": "q", "output": "a"},
        {"question": "q", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}},
        {"chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\n"},
        {"data": ["q", "a"], "id": "0"},
        {"data": 7, "question": "q", "answer": "a", "images": [], "context": ""},
    ],
)
def test_every_shape_becomes_the_same_chat(record: dict[str, Any]) -> None:
    content = parse_record(record).content
    assert isinstance(content, Chat)
    assert content.messages == SINGLE_TURN
    assert content.targets == {1: 1.0}


def test_alpaca_input_follows_its_instruction_on_a_line_of_its_own() -> None:
    content = parse_record({"instruction": "add", "input": "1 2", "output": "3"}).content
    assert content.messages[0]["content"] == "add\n1 2"


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "why?", "context": "Because.", "response": "a"},
        {"question": "why?", "context": "Because.", "answers": {"text": ["a"]}},
        {"prompt": "why?", "context": "Because.", "completion": "a"},
    ],
)
def test_context_stands_before_the_question_a_blank_line_between(record: dict[str, Any]) -> None:
    assert parse_record(record).content.messages[0]["content"] == "Because.\n\nwhy?"


def test_calls_of_every_form_become_tool_calls_and_tools_are_found_where_they_stand() -> None:
    call = CALL
    old = {"name": "sit", "arguments": '{"on": "mat"}'}
    asked, answered = {"role": "user", "content": "q"}, {"role": "function", "name": "sit", "content": "done"}
    wrapped = [{"type": "function", "function": TOOL}]
    xlam = {"query": "q", "answers": json.dumps([call]), "tools": json.dumps([TOOL])}
    openai = {"messages": [asked, {"role": "assistant", "content": None, "function_call": old}, answered]}
    in_system = {"role": "system", "content": "s", "tools": json.dumps(wrapped)}
    records = [xlam, {**openai, "functions": [TOOL]}, {"messages": [in_system, *openai["messages"]]}]
    chats = [parse_record(record).content for record in records]
    assert [chat.tools for chat in chats] == [wrapped] * 3
    for chat in chats:
        (turn,) = (chat.messages[i] for i in chat.targets)
        (found,) = turn["tool_calls"]
        assert turn["content"] == ""
        assert found == {"type": "function", "function": call}
        assert chat.with_argument_texts().messages[1 + (chat is chats[2])]["tool_calls"][0]["function"] == old
    assert chats[1].messages[2] == {"role": "tool", "name": "sit", "content": "done"}
    assert chats[2].messages[0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize("names", [("function_call", "observation"), ("tool_call", "tool_response")])
def test_messages_of_calls_continue_the_assistants_turn_with_their_thought(names: tuple[str, str]) -> None:
    call = CALL
    as_text, thought = json.dumps(call), "<think>Press it.</think>"
    said = [("user", "q"), ("assistant", "Look:"), (names[0], as_text), (names[0], as_text), (names[1], "done")]
    said += [(names[0], f"{thought}\n{as_text}"), (names[1], "done"), (names[0], "sit(on='mat')"), (names[0], "{}")]
    record = parse_record({"messages": [{"role": role, "content": text} for role, text in said]})
    made = {"type": "function", "function": call}
    assert record.content.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Look:", "tool_calls": [made, made]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": thought, "tool_calls": [made]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "sit(on='mat')"},
        {"role": "assistant", "content": "{}"},
    ]
    assert list(record.content.targets) == [1, 3, 5, 6]
    assert record.text_calls == 2
    record = parse_record({"messages": [*SINGLE_TURN, {"role": names[0], "content": as_text, "loss": True}]})
    assert record.content.messages[1] == {**SINGLE_TURN[1], "tool_calls": [made]}


@pytest.mark.parametrize("result", [{"w": "süß", "n": [1, None]}, 20, 0.5, True])
def test_a_tools_result_that_is_no_text_becomes_its_json(result: Any) -> None:
    turns = [SINGLE_TURN[0], {**SINGLE_TURN[1], "tool_calls": [CALL]}, {"role": "tool", "content": result}]
    content = parse_record({"messages": [*turns, SINGLE_TURN[1]]}).content
    assert content.messages[2] == {"role": "tool", "content": json.dumps(result, ensure_ascii=False)}


def test_glaive_text_becomes_turns_and_its_system_text_loses_its_head() -> None:
    system = (
        'SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n{"a": 1}'
    )
    answers = ['<functioncall> {"name": "f", "arguments": \'{"x": 1}\'}', "It is 3."]
    chat = f'USER: q\n\n\nASSISTANT: {answers[0]} <|endoftext|>\n\n\nFUNCTION RESPONSE: {{"r": 3}}\n\n\n'
    content = parse_record({"system": system, "chat": f"{chat}ASSISTANT: {answers[1]} <|endoftext|>\n\n\n"}).content
    assert [m["role"] for m in content.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert content.messages[0]["content"] == system.removeprefix("SYSTEM: ")
    assert [content.messages[i]["content"] for i in content.targets] == answers


def test_a_record_nested_too_deep_is_a_bad_record() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with refused("nested", error=BadRecord):
        parse_record({**QUESTION, "images": ["x"], "meta": nested}, drop_media=True)


def test_fields_that_nothing_reads_are_named() -> None:
    messages = [{**turn, "language": "en", "name": "x"} for turn in SINGLE_TURN]
    first = {"role": "system", "content": "s"}
    record = parse_record({"messages": [first, *messages], "system": "t", "title": 1, "history": [["a", "b"]]})
    assert record.unused == ["system", "title", "history"]
    assert record.message_fields == {"language": 2}
    assert parse_record({"messages": [first, *SINGLE_TURN], "system": "s"}).unused == []
    assert parse_record({"question": "q", "answer": "a", "response": "b", "note": None}).unused == ["response", "note"]


def test_columns_give_a_records_own_names() -> None:
    record = {"question": "x", "solution": {"long": "a"}, "problem": "q", "text": "t", "system": "s", "context": 3}
    columns = {"prompt": "problem", "response": "solution.long", "context": None}
    parsed = parse_record(record, columns)
    assert [m["content"] for m in parsed.content.messages] == ["s", "q", "a"]
    assert parsed.unused == ["question", "text", "context"]
    text = {"text": "t", "query": "q", "response": "a"}
    assert parse_record(text, {"text": None}).content.messages == SINGLE_TURN
    assert parse_record(text, {"text": "text"}).content == PlainText("t")
    with refused("columns.response", "solution.long", error=BadRecord):
        parse_record({"problem": "q", "solution": "a"}, columns)


def test_categories_are_strings_integers_or_bools_of_the_record() -> None:
    values = ("web", 7, True, None, " ")
    assert [category_of({"a": {"b": value}}, "a.b") for value in values] == ["web", "7", "true", None, None]
    assert category_of({"c": "x"}, "a") is category_of([1], "a") is None
    for value in (0.5, ["x"], "two\nlines", "x" * 201, "\ud800", 10**5000):
        with refused("a (category_field)", error=BadRecord):
            category_of({"a": value}, "a")


def test_images_and_sound_are_left_out_when_asked() -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}]
    in_parts = parse_record({"messages": [{"role": "user", "content": parts}, SINGLE_TURN[1]]}, drop_media=True)
    turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]
    in_column = parse_record({"conversations": turns, "images": ["x.png", "y.png"], "video": None}, drop_media=True)
    assert in_parts.content.messages == in_column.content.messages == SINGLE_TURN
    assert (in_parts.dropped, in_column.dropped) == ({"image": 1, "audio": 1}, {"image": 2})
    placeholder = {"question": "<image> of html", "answer": "a"}
    assert parse_record(placeholder).content.messages[0]["content"] == "<image> of html"


NUMBERS = (0, 1, 0.5, -1, 2, 1e308, 10**400, float("nan"))
TEXTS = (
    *("", "q", "user", "gpt", "<image>", "\ud800", "[" * 5000, "[]", '{"text": ["a"]}', '[{"name": "f"}]'),
    *("USER: q\n\nASSISTANT: a", '{"name": "f", "arguments": "{}"}', '[["q", "a"]]'),
)
KEYS = ("type", "text", "image", "function", "arguments", "name", "role", "content", "value", "answers")
JSON = st.recursive(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "function_call", "tool"]), "content": st.just("a") | JSON},
    optional=dict.fromkeys(("weight", "train", "loss", "tool_calls", "function_call", "tools", "from", "id"), JSON),
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=4)


@settings(max_examples=400)
@given(
    record=st.dictionaries(st.sampled_from(FIELDS), JSON | MESSAGES, max_size=6)
    | st.fixed_dictionaries({"messages": MESSAGES}, optional={"loss_weight": JSON, "system": JSON, "tools": JSON})
    | JSON,
    columns=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from([None, *FIELDS, "messages.role"]), max_size=2),
    drop_media=st.booleans(),
)
def test_any_json_value_is_a_record_or_a_bad_record(record: Any, columns: dict[str, Any], drop_media: bool) -> None:
    try:
        parsed = parse_record(record, columns, drop_media)
    except BadRecord:
        return
    if isinstance(parsed.content, Chat):
        messages, targets = parsed.content.messages, parsed.content.targets
        assert {messages[i]["role"] for i in targets} == {"assistant"}
        assert all(isinstance(message["content"], str) for message in messages)
        weights = np.float32([weight * (1 if parsed.weight is None else parsed.weight) for weight in targets.values()])
        assert np.isfinite(weights).all()


def test_text_is_plain() -> None:
    assert parse_record({"text": "hello"}).content == PlainText("hello")


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "history", [[["a", "b"]], [{"role": "user", "content": "a"}, {"from": "gpt", "value": "b"}], '[["a", "b"]]']
)
def test_history_and_system_are_taken_along(name: str, history: Any) -> None:
    record = {name: "be kind", "history": history, "instruction": "c", "output": "d"}
    content = parse_record(record).content
    assert [m["content"] for m in content.messages] == ["be kind", "a", "b", "c", "d"]
    assert content.targets == {2: 1.0, 4: 1.0}


def test_assistant_turns_of_a_prompt_are_context() -> None:
    prompt = [*SINGLE_TURN, {"role": "user", "content": "r"}]
    content = parse_record({"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}]}).content
    assert content.targets == {3: 1.0}


def test_sharegpt_tool_roles_become_template_roles() -> None:
    turns = [("system", "s"), ("human", "q"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "o")]
    record = {"conversations": [{"from": role, "value": text} for role, text in [*turns, ("gpt", "a")]]}
    content = parse_record(record).content
    assert [m["role"] for m in content.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert content.messages[2]["tool_calls"][0]["function"]["name"] == "f"
    assert content.targets == {2: 1.0, 4: 1.0}


def test_record_weights_are_numbers_from_zero_up() -> None:
    assert parse_record({"text": "a", "loss_weight": 0.5}).weight == 0.5
    assert parse_record({"text": "a", "weight": 2}).weight == 2.0
    assert parse_record({"text": "a"}).weight is None


def test_message_weights_may_be_fractions_and_zero_is_no_target() -> None:
    messages = [
        {**turn, "weight": w} if turn["role"] == "assistant" else turn for w in (0.25, 0, 3) for turn in SINGLE_TURN
    ]
    assert parse_record({"messages": messages}).content.targets == {1: 0.25, 5: 3.0}


@pytest.mark.parametrize(
    ("record", "reason", "things"),
    [
        ([1], "not_an_object", ("list",)),
        ({"title": "x", "body": "y"}, "unknown_fields", ("title, body", "messages")),
        ({}, "unknown_fields", ("none",)),
        ({"messages": []}, "empty", ("messages",)),
        ({"text": "  "}, "empty", ("text",)),
        ({"question": "q", "answer": " "}, "empty", ("assistant turn",)),
        ({"question": "q", "answer": 3}, "non_string_content", ("answer", 3)),
        ({"messages": [{"role": "user", "content": "q"}]}, "no_target", ("assistant turn",)),
        ({"messages": [{"role": "wizard", "content": "q"}]}, "unknown_role", ("wizard",)),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "non_string_content", ("message 1", "dict")),
        ({"messages": [{"role": "user"}]}, "non_string_content", ("message 1", "content")),
        ({"messages": [{**SINGLE_TURN[1], "weight": 0}]}, "no_target", ("assistant turn",)),
        ({"messages": [{**SINGLE_TURN[1], "weight": "0.3"}]}, "bad_weight", ("message 1", "weight", "'0.3'")),
        ({"text": "a", "loss_weight": 1e308}, "bad_weight", ("float32", "1e+308")),
        ({"text": "a", "loss_weight": 1e-50}, "bad_weight", ("float32", "1e-50")),
        ({"text": "a", "loss_weight": 10**400}, "bad_weight", ("256 bits",)),
        ({"messages": [{**SINGLE_TURN[1], "weight": 1e30}], "weight": 1e30}, "bad_weight", ("the record's",)),
        ({"messages": [{**SINGLE_TURN[1], "train": 2}]}, "bad_weight", ("train", 2)),
        ({"messages": [{**SINGLE_TURN[1], "loss": "no"}]}, "bad_weight", ("loss", "'no'")),
        ({"messages": [{**SINGLE_TURN[1], "weight": 1, "train": False}]}, "bad_weight", ("weight and train",)),
        ({"messages": [{**SINGLE_TURN[0], "train": True}, SINGLE_TURN[1]]}, "bad_weight", ("message 1 (user)",)),
        ({"messages": [{**SINGLE_TURN[0], "weight": 0.5}, SINGLE_TURN[1]]}, "bad_weight", ("message 1 (user)",)),
        ({"context": {"a": "b"}, "question": "q", "answer": "a"}, "non_string_content", ("columns={context: null}",)),
        ({"query": "q", "answers": ["a"]}, "bad_tools", ("answers",)),
        ({"query": "q", "answers": "[]"}, "empty", ("assistant turn",)),
        ({"question": "q", "answers": ["a"]}, "non_string_content", ("answers",)),
        ({"question": "q", "answers": {"text": []}}, "empty", ("assistant turn",)),
        ({"chat": "hello ASSISTANT: a"}, "unknown_shape", ("chat",)),
        ({"chat": "USER: q\nASSISTANT: x\n\n\nASSISTANT: a"}, "unknown_shape", ("chat", "an empty line")),
        ({"text": "t", "query": "q", "response": "a"}, "ambiguous", ("text and query+response", "columns")),
        (
            {"input": "q", "output": "a", "inputs": "q", "targets": "b"},
            "ambiguous",
            ("input+output and inputs+targets",),
        ),
        ({**QUESTION, "system": "a", "system_prompt": "b"}, "ambiguous", ("system and system_prompt",)),
        ({"messages": SINGLE_TURN, "tools": [{}], "functions": [TOOL]}, "bad_tools", ("tools", "once")),
        ({"messages": [{**SINGLE_TURN[1], "function_call": 3}]}, "bad_tools", ("function_call",)),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "vision", ("message 1", "type image")),
        (with_answer(loss_mask=0), "no_target", ("assistant turn",)),
        (with_answer(reasoning_content={"text": "hm"}), "non_string_content", ("reasoning_content", "dict")),
        (with_answer(thinking=True), "non_string_content", ("thinking", "bool")),
        (with_answer(content=["a"]), "non_string_content", ("part 1 of content", "str")),
        (
            with_answer(content=[{"type": "text", "text": "a"}, {"type": "text", "text": None}]),
            "non_string_content",
            ("message 2", "part 2 of content (type 'text')", "`text`"),
        ),
        (
            with_answer(content=[{"type": "tool_use", "name": "f", "input": {}}]),
            "non_string_content",
            ("part 1 of content (type 'tool_use')",),
        ),
        (with_answer(tool_calls=[{"function": "sit"}]), "bad_tools", ("tool_calls", "function")),
        (
            with_answer(tool_calls=[{"name": "sit", "arguments": None, "parameters": {"n": 1}}]),
            "bad_arguments",
            (None, "parameters"),
        ),
        (
            {"messages": [*SINGLE_TURN, {"role": "tool_call", "content": json.dumps(CALL), "loss": False}]},
            "bad_weight",
            ("message 3",),
        ),
        ({"messages": [*SINGLE_TURN, {"role": "critic", "content": "r"}]}, "unknown_role", ("roles={NAME: tool}",)),
        ({"question": "q", "answer": "a", "image": "x.png"}, "vision", ("image",)),
        ({"text": "a", "loss_weight": -1}, "bad_weight", (-1,)),
        ({"text": "a", "loss_weight": float("nan")}, "bad_weight", ("nan",)),
        ({"messages": SINGLE_TURN, "tools": "{"}, "malformed_json", ("tools",)),
        ({"messages": SINGLE_TURN, "tools": [3]}, "bad_tools", ("JSON schemas",)),
    ],
)
def test_unusable_records_say_why(record: Any, reason: str, things: tuple[Any, ...]) -> None:
    with refused(reason, *things, error=BadRecord):
        parse_record(record)
