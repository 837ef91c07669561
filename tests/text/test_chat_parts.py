"""Parts of an assistant's turn (reasoning, tool calls, empty thinking blocks, weighted characters) and their counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.chat_templates import (
    CHANNELS,
    CHATML,
    GLM,
    HEAD,
    LLAMA,
    OPENED,
    QWEN3,
    STRIPS_THINKING,
    TAIL,
    WITH_TOOLS,
    tiny_tokenizer,
)
from tests.lib.chat_turns import CALLS, CALLS_2, END, EVERYTHING, FIELD, Tokenized, call, turn
from tests.lib.errors import refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.options import DataError

INSIDE = turn("<think>\nsat there\n</think>\n\nthe cat")
NO_ANSWER = turn("", reasoning_content="sat there", tool_calls=[call(on="mat")])


@pytest.mark.parametrize(
    ("template", "record", "options", "learnt"),
    [
        (QWEN3, FIELD, {}, ["<think>\nsat there\n</think>\n\nthe cat" + END]),
        (QWEN3, FIELD, {"reasoning": "context"}, ["the cat" + END]),
        (QWEN3, INSIDE, {"reasoning": "context"}, ["the cat" + END]),
        (CHATML, INSIDE, {"reasoning": "context"}, ["the cat" + END]),
        (QWEN3, EVERYTHING, {"reasoning": "context"}, [f"the cat\n{CALLS_2}{END}"]),
        (QWEN3, EVERYTHING, {"tool_calls": "context"}, ["<think>\nsat there\n</think>\n\nthe cat", END]),
        (QWEN3, EVERYTHING, {"reasoning": "context", "tool_calls": "context"}, ["the cat", END]),
        (QWEN3, NO_ANSWER, {"reasoning": "context"}, [CALLS + END]),
        (QWEN3, NO_ANSWER, {"tool_calls": "context"}, ["<think>\nsat there\n</think>\n\n", END]),
        (GLM, EVERYTHING, {"tool_calls": "context"}, ["<think>sat there</think>\nthe cat", "<|end|>"]),
        (GLM, FIELD, {"reasoning": "context"}, ["the cat<|end|>"]),
        (OPENED, turn("sat there\n</think>\n\nthe cat"), {}, ["sat there\n</think>\n\nthe cat<|end|>"]),
        (OPENED, turn("sat there\n</think>\n\nthe cat"), {"reasoning": "context"}, ["the cat<|end|>"]),
        (OPENED, turn("<think>\nsat there\n</think>\n\nthe cat"), {"reasoning": "context"}, ["the cat<|end|>"]),
        (LLAMA, turn("", tool_calls=[call(on="mat")]), {"tool_calls": "context"}, [END]),
        (WITH_TOOLS, turn("the cat", tool_calls=[call(on="mat")]), {"tool_calls": "context"}, ["the cat", END]),
        (CHATML, turn(f"the cat\n{CALLS_2}"), {"tool_calls": "context"}, ["the cat\n", END]),
        (CHANNELS, turn("the cat", thinking="sat there"), {"reasoning": "context"}, ["the cat" + END]),
        (
            CHANNELS,
            turn("", thinking="sat there", tool_calls=[call(on="mat")]),
            {"reasoning": "context"},
            ['<|assistant|>to=sit json<s>{"on": "mat"}</s>'],
        ),
    ],
)
def test_reasoning_and_calls_are_context_where_asked_and_the_answer_and_its_end_are_learnt(
    chatml: Path, template: str, record: dict[str, Any], options: dict[str, str], learnt: list[str]
) -> None:
    found = Tokenized(chatml, template, record, **options)
    assert found.learnt == learnt
    messages = [{k: v for k, v in m.items() if v} | {"content": m["content"]} for m in record["messages"]]
    assert found.text == found.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


@pytest.mark.parametrize(("template", "record"), [(QWEN3, FIELD), (QWEN3, INSIDE), (CHATML, INSIDE), (GLM, FIELD)])
def test_dropped_reasoning_gives_the_text_of_a_record_without_it(
    chatml: Path, template: str, record: dict[str, Any]
) -> None:
    found = Tokenized(chatml, template, record, reasoning="drop")
    plain = Tokenized(chatml, template, turn("the cat"))
    assert (found.text, found.learnt) == (plain.text, plain.learnt)
    assert "sat" not in found.text
    assert (found.counts.dropped_reasoning, plain.counts.dropped_reasoning) == (1, 0)


@pytest.mark.parametrize("template", [QWEN3, GLM, STRIPS_THINKING])
def test_an_empty_thinking_block_is_context_unless_asked_for(chatml: Path, template: str) -> None:
    # ms-swift's ignore_empty_think excludes this pattern at a response's start from the loss.
    found = Tokenized(chatml, template, turn("the cat"))
    learnt = Tokenized(chatml, template, turn("the cat"), empty_reasoning="learn")
    block = "<think></think>\n" if template == GLM else "<think>\n\n</think>\n\n"
    assert learnt.learnt[0] == block + found.learnt[0]
    assert found.text == learnt.text
    assert found.counts.context_parts == {"empty_reasoning": 1}
    assert learnt.counts.target_kinds["reasoning"] > 0


@pytest.mark.parametrize("content", ["<think>\n\n</think>\n\nthe cat", "<think></think>the cat", "</think>\n\nthe cat"])
def test_an_empty_block_that_the_record_writes_is_context_too(chatml: Path, content: str) -> None:
    assert Tokenized(chatml, CHATML, turn(content)).learnt == ["the cat" + END]
    assert Tokenized(chatml, CHATML, turn(content), empty_reasoning="learn").learnt == [content + END]


def test_a_message_says_for_itself_what_is_learnt(chatml: Path) -> None:
    flags: list[dict[str, bool]] = [{}, {"train_on_reasoning": True}, {"train_on_tool_calls": False}]
    records = [turn("the cat", reasoning_content="sat", tool_calls=[call(on="mat")], **flag) for flag in flags]
    found = Tokenized(chatml, QWEN3, *records, reasoning="context")
    think = "<think>\nsat\n</think>\n\n"
    assert found.learnt == [f"the cat\n{CALLS}{END}", f"{think}the cat\n{CALLS}{END}", "the cat", END]
    kept = Tokenized(chatml, QWEN3, records[1], reasoning="drop")
    assert kept.learnt == [f"{think}the cat\n{CALLS}{END}"]


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (turn("a </think> b"), {"reasoning": "context"}),
        (turn("a </think> b"), {"reasoning": "drop"}),
        (turn("<think>a <think>b</think> c</think> d"), {"reasoning": "context"}),
        (turn("<think>never closed"), {"reasoning": "context"}),
        (turn("<tool_call>never closed"), {"tool_calls": "context"}),
    ],
)
def test_parts_that_cannot_be_told_apart_are_refused_only_where_they_differ(
    chatml: Path, record: dict[str, Any], options: dict[str, str]
) -> None:
    assert Tokenized(chatml, CHATML, record).learnt == [record["messages"][1]["content"] + END]
    with refused("message 2", error=DataError):
        Tokenized(chatml, CHATML, record, **options)


def test_calls_of_which_no_word_is_marked_are_not_learnt_by_mistake(chatml: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ 'SIT' if c.function.name == 'sit' }}{% endfor %}"
    asks = HEAD + "{{ m.content }}" + calls + TAIL
    record = turn("the cat", tool_calls=[call()])
    assert Tokenized(chatml, asks, record).learnt == ["the catSIT" + END]
    with refused("tool call", error=DataError):
        Tokenized(chatml, asks, record, tool_calls="context")


def test_tools_and_calls_as_json_text_are_read_as_minimind_writes_them(chatml: Path) -> None:
    # dataset/lm_dataset.py of MiniMind-3: `tools` on the system message and `tool_calls` on a turn are JSON text.
    made = json.dumps([{"name": "sit", "arguments": {"on": "mat"}}])
    tools = json.dumps([{"type": "function", "function": {"name": "sit", "parameters": {}}}])
    system = {"role": "system", "content": "be kind", "reasoning_content": "", "tools": tools, "tool_calls": ""}
    asked = {"role": "user", "content": "sit", "reasoning_content": "", "tools": "", "tool_calls": ""}
    calling = {"role": "assistant", "content": "", "reasoning_content": "", "tools": "", "tool_calls": made}
    found = Tokenized(chatml, QWEN3, {"conversations": [system, asked, calling]})
    assert found.learnt == [CALLS + END]


def test_parts_of_the_content_are_masked_as_axolotl_does(chatml: Path) -> None:
    parts = [{"type": "text", "text": "the cat", "train": False}, {"type": "text", "text": " sat on"}]
    parts.append({"type": "text", "text": " the mat", "weight": 0})
    record = turn("")
    record["messages"][1]["content"] = parts
    assert Tokenized(chatml, CHATML, record).learnt == [" sat on", END]
    thinking = turn("the cat", reasoning_content=[{"type": "text", "text": "sat", "train": False}])
    assert Tokenized(chatml, QWEN3, thinking).learnt == ["the cat" + END]


def test_the_end_of_a_range_is_its_last_character_and_the_rest_is_context(chatml: Path) -> None:
    # The record of axolotl's docs/dataset-formats/conversation.qmd; `learnt` by its get_offsets_for_train_detail.
    said = "I'm doing very well, thank you!"
    detail = [(0, 8, False), (9, 18, True), (19, 30, False)]
    ranges = [{"begin_offset": a, "end_offset": b, "train": train} for a, b, train in detail]
    assert Tokenized(chatml, CHATML, turn(said, train_detail=ranges)).learnt == [said[9:19], END]
    assert Tokenized(chatml, CHATML, turn(said, train_detail=ranges[1:2])).learnt == [said[9:19], END]


def test_weights_of_parts_multiply_those_of_their_turn_and_record(chatml: Path) -> None:
    record = turn("", weight=0.5)
    record["messages"][1]["content"] = [{"text": "the cat", "weight": 3.0}, {"text": " sat"}]
    result = Tokenized(chatml, CHATML, {**record, "loss_weight": 2}).result
    weights = result.weights[result.loss_mask == 1].tolist()
    tokens = [len(tiny_tokenizer()(text)["input_ids"]) for text in ("the cat", " sat<|im_end|>")]
    assert weights == [3.0] * tokens[0] + [1.0] * tokens[1]


@pytest.mark.parametrize(
    ("fields", "things"),
    [
        ({"train_on_reasoning": 2}, ("train_on_reasoning", 2)),
        ({"train_detail": 3}, ("train_detail", "list")),
        ({"train_detail": [{"begin_offset": 3, "end_offset": 2, "train": True}]}, ("train_detail", "3 and 2")),
        (
            {"train_detail": [{"begin_offset": 9, "end_offset": 9, "train": True}]},
            ("train_detail", "7 characters", "9 and 9"),
        ),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 2}]}, ("train_detail", "train or weight")),
        ({"content": [{"text": "a", "weight": -1}]}, ("weight", -1)),
    ],
)
def test_a_wrong_mask_is_a_bad_record(chatml: Path, fields: dict[str, Any], things: tuple[Any, ...]) -> None:
    record = turn("the cat")
    record["messages"][1] |= fields
    with refused("in.jsonl:1", *things, error=DataError):
        Tokenized(chatml, CHATML, record)


def test_weighted_characters_that_the_template_changes_are_refused(chatml: Path) -> None:
    detail = [{"begin_offset": 0, "end_offset": 2, "train": True}]
    changes = CHATML.replace("m.content }}", "m.content | replace('a', 'o') }}")
    with refused("content", "weights", error=DataError):
        Tokenized(chatml, changes, turn("the cat", train_detail=detail))


WORDS = ["the", " cat", "\n", " ", "sat", "\n\n", '"', "é", "中", "{", "0"]
words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join).filter(str.strip)
turns = st.tuples(words, words | st.just(""), words | st.just(""), st.lists(words, max_size=2))


@settings(max_examples=150)
@given(
    st.lists(turns, min_size=1, max_size=4),
    st.sampled_from(["learn", "context"]),
    st.sampled_from(["learn", "context"]),
    st.sampled_from(["learn", "context"]),
)
def test_of_any_chat_the_learnt_parts_are_those_of_the_template(
    chatml: Path, said: list[tuple[str, str, str, list[str]]], reasoning: str, empty: str, calls: str
) -> None:
    """The reference writes the chat itself, with the kind of each piece."""
    messages: list[dict[str, Any]] = []
    pieces: list[tuple[str, str]] = []
    for question, thought, answer, arguments in said:
        message = {"role": "assistant", "content": answer, "reasoning_content": thought}
        if not answer and not arguments:
            message["content"] = answer = "ok"
        if arguments:
            message["tool_calls"] = [call(on=argument) for argument in arguments]
        messages += [{"role": "user", "content": question}, message]
        pieces += [(f"<|user|>\n{question}<|end|><|assistant|>\n", "prompt")]
        pieces += [(f"<think>{thought.strip()}</think>\n", "reasoning" if thought.strip() else "empty")]
        # White space between the block and the first word belongs to the block; at a turn's end, to the part before it.
        lead = len(answer) - len(answer.lstrip())
        kind = "reasoning" if thought.strip() else "empty"
        if not answer.strip():
            pieces += [(answer, "tool_call" if not thought.strip() else kind)]
        else:
            pieces += [(answer[:lead], kind), (answer[lead:], "answer")]
        for argument in arguments:
            body = f"<arg_key>on</arg_key>\n<arg_value>{argument}</arg_value>\n"
            pieces += [(f"\n<tool_call>sit\n{body}</tool_call>", "tool_call")]
        pieces += [("<|end|>", "end")]
    text = "".join(piece for piece, _ in pieces)
    found = Tokenized(chatml, GLM, {"messages": messages}, reasoning=reasoning, empty_reasoning=empty, tool_calls=calls)
    assert text == found.tokenizer.apply_chat_template(messages, chat_template=GLM, tokenize=False)
    asked = {"prompt": "context", "reasoning": reasoning, "empty": empty, "tool_call": calls}
    context = {kind for kind, option in asked.items() if option == "context"}
    is_learnt = [kind not in context for piece, kind in pieces for _ in piece]
    offsets = found.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    blank = [char.isspace() for char in text]
    for (a, b), target in zip(offsets, found.result.loss_mask.tolist(), strict=True):
        if not all(blank[a:b]):  # white space between parts may belong to either
            assert target == any(flag and not space for flag, space in zip(is_learnt[a:b], blank[a:b], strict=True))


def test_the_report_counts_targets_by_kind_over_workers(tmp_path: Path, chatml: Path) -> None:
    lines = [json.dumps(record) for record in (EVERYTHING, FIELD, INSIDE, turn("the cat"))] * 5
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    tiny_tokenizer(QWEN3).save_pretrained(tmp_path / "model")
    base = [f"sources={{chat:{tmp_path / 'in.jsonl'}}}", f"output_dir={tmp_path / 'out'}", "num_workers=2"]
    report = tokenize(read_options(TokenizeOptions, [*base, f"model.path={tmp_path / 'model'}", "reasoning=context"]))
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    kinds = written["target_kinds"]["chat"]
    count = {text: len(tiny_tokenizer()(text)["input_ids"]) for text in ("the cat", "\n" + CALLS_2, END)}
    calls = 5 * count["\n" + CALLS_2]
    assert kinds == {"answer": 20 * count["the cat"], "reasoning": 0, "tool_call": calls, "end_of_turn": 20}
    assert sum(kinds.values()) == written["categories"]["chat"]["target_tokens"]
    assert written["categories"]["chat"]["context_parts"] == {"empty_reasoning": 5, "reasoning": 15}
    assert "no target: reasoning (15 parts of turns), empty reasoning (5 parts of turns)" in report.table()


def test_answers_that_close_a_block_which_is_closed_already_are_counted(chatml: Path) -> None:
    empty = "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    closes = HEAD + empty + "{{ m.content }}" + TAIL
    counted = [Tokenized(chatml, closes, turn(text)).counts.closed_again for text in ("a", "hm</think>a", "</think>a")]
    assert counted == [0, 1, 1]
    assert Tokenized(chatml, CHATML, turn("hm</think>a")).counts.closed_again == 0
    assert Tokenized(chatml, closes, turn("<think>b</think>a")).counts.closed_again == 0
