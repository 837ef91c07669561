"""The target tokens of a chat, for the existing kinds of chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.chat_templates import (
    CHATML,
    ENDS_DOCUMENT,
    GENERATION,
    GENERATION_WITHOUT_END,
    INSTRUCT,
    NO_GENERATION_PROMPT,
    OTHER_LAST_END,
    PREFILLED_THINKING,
    STRIPS_THINKING,
    WITH_BOS,
    WITH_TOOLS,
    chat,
    tiny_tokenizer,
)
from tests.lib.errors import refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.options import DataError
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.prefixes import mask_from_prefixes
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.records import parse_record
from verl_ext.text.text_encoder import TokenCharacters, mask_from_offsets


def target_texts(
    template: str, record: dict[str, Any], last_turn_only: bool = False, **template_kwargs: Any
) -> list[str]:
    """Return the decoded runs of target tokens of a record."""
    tokenizer = tiny_tokenizer(template)
    chat = parse_record(record).content
    if last_turn_only:
        chat = chat.with_last_target()
    rendered = locate(ChatTemplate(tokenizer, None, template_kwargs), chat)
    text, spans = rendered.text, rendered.spans
    at_once = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, return_dict=True, **template_kwargs)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["input_ids"] == at_once["input_ids"]
    mask, _ = mask_from_offsets(text, TokenCharacters.from_spans(encoded["offset_mapping"]), spans)
    without_offsets = mask_from_prefixes(
        encoded["input_ids"], text, spans, lambda part: tokenizer(part, add_special_tokens=False)["input_ids"]
    )
    assert mask.tolist() == without_offsets.tolist()
    runs: list[list[int]] = []
    previous = 0
    for token, target in zip(encoded["input_ids"], mask, strict=True):
        if target and not previous:
            runs.append([])
        if target:
            runs[-1].append(token)
        previous = target
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (GENERATION, "<|im_end|>"),
        (GENERATION_WITHOUT_END, "<|im_end|>"),
        (PREFILLED_THINKING, "<|im_end|>"),
        (WITH_BOS, "<|im_end|>"),
        (NO_GENERATION_PROMPT, "<|im_end|>"),
        (ENDS_DOCUMENT, "<|end|>"),
        (WITH_TOOLS, "<|im_end|>"),
    ],
)
def test_every_assistant_turn_with_its_end_token_and_nothing_else_is_a_target(template: str, end: str) -> None:
    record = chat("hello", "the cat", "and then", "sat on the mat", system="be kind")
    assert target_texts(template, record) == [f"the cat{end}", f"sat on the mat{end}"]
    assert target_texts(template, record, last_turn_only=True) == [f"sat on the mat{end}"]


def test_thinking_removed_from_earlier_turns_is_no_target_and_the_last_turn_keeps_it() -> None:
    record = chat("hello", "<think>\nfirst\n</think>\n\nthe cat", "more", "<think>\nsecond\n</think>\n\nsat")
    last = "<think>\nsecond\n</think>\n\nsat<|im_end|>"
    assert target_texts(STRIPS_THINKING, record) == ["the cat<|im_end|>", last]


def test_the_block_that_the_template_writes_for_the_model_belongs_to_the_turn() -> None:
    turns = target_texts(STRIPS_THINKING, chat("hello", "the cat", "more", "sat"))
    assert turns == ["the cat<|im_end|>", "<think>\n\n</think>\n\nsat<|im_end|>"]


def test_what_the_generation_prompt_holds_is_no_target() -> None:
    turns = target_texts(STRIPS_THINKING, chat("hello", "the cat", "more", "sat"), enable_thinking=False)
    assert turns == ["the cat<|im_end|>", "sat<|im_end|>"]
    thinking = chat("hello", "<think>\nfirst\n</think>\n\nthe cat")
    assert target_texts(PREFILLED_THINKING, thinking) == ["first\n</think>\n\nthe cat<|im_end|>"]


def test_last_and_earlier_turns_may_end_with_different_tokens() -> None:
    turns = target_texts(OTHER_LAST_END, chat("hello", "the cat", "more", "sat"))
    assert turns == ["the cat<|im_end|>", "sat<|endoftext|>"]


def test_template_without_header_or_generation_prompt_starts_at_the_content() -> None:
    turns = target_texts(INSTRUCT, chat("hello", "the cat", "more", "sat"))
    assert [turn.strip() for turn in turns] == ["the cat </s>", "sat </s>"]


@pytest.mark.parametrize("template", [CHATML, STRIPS_THINKING, NO_GENERATION_PROMPT, ENDS_DOCUMENT])
def test_user_text_that_looks_like_the_template_does_not_move_a_target(template: str) -> None:
    record = chat("say <|im_start|>assistant\nhello<|im_end|>\nthe cat", "the cat", "the cat", "the cat")
    turns = target_texts(template, record, enable_thinking=False)
    assert len(turns) == 2
    assert all(turn.startswith("the cat<|") for turn in turns)


def test_turns_in_a_row_are_targets_without_the_header_between_them() -> None:
    record = {
        "messages": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("assistant", "c"))]
    }
    for template in (CHATML, STRIPS_THINKING, NO_GENERATION_PROMPT):
        found = target_texts(template, record, enable_thinking=False)
        assert [turn[-11:] for turn in found] == ["b<|im_end|>", "c<|im_end|>"]


def test_assistant_that_speaks_first_is_a_target() -> None:
    record = {"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "the cat"}]}
    assert target_texts(CHATML, record) == ["hello<|im_end|>"]


def test_tool_calls_are_targets_and_tool_answers_are_not() -> None:
    call = {"type": "function", "function": {"name": "sit", "arguments": {"on": "mat"}}}
    messages = [
        {"role": "user", "content": "sit"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "sat"},
    ]
    turns = target_texts(WITH_TOOLS, {"messages": messages, "tools": '[{"name": "sit"}]'})
    called = '<tool_call>\n{"name": "sit", "arguments": {"on": "mat"}}\n</tool_call><|im_end|>'
    assert turns == [called, "sat<|im_end|>"]
    assert target_texts(WITH_TOOLS.replace("add_generation_prompt", "never"), {"messages": messages}) == turns


def test_weight_zero_makes_a_turn_no_target() -> None:
    record = chat("hello", "the cat", "more", "sat")
    record["messages"][1]["weight"] = 0
    for template in (CHATML, GENERATION, STRIPS_THINKING):
        turns = target_texts(template, record, enable_thinking=False)
        assert turns == ["sat<|im_end|>"]


def documents(tmp_path: Path, template: str, record: dict[str, Any], *options: str) -> list[dict[str, Any]]:
    """Return the rows that the command writes for one record."""
    tiny_tokenizer(template).save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text(json.dumps(record))
    base = [f"sources={{chat:{tmp_path / 'in.jsonl'}}}", f"output_dir={tmp_path / 'out'}", "num_workers=1"]
    tokenize(read_options(TokenizeOptions, [*base, f"model.path={tmp_path / 'model'}", *options]))
    return load_from_disk(str(tmp_path / "out")).to_list()


def learnt(row: dict[str, Any]) -> str:
    """Return a row's targets, decoded."""
    tokens = zip(row["input_ids"], row["loss_mask"], strict=True)
    return tiny_tokenizer().decode([token for token, target in tokens if target])


THINKING = (
    "hello",
    "<think>\nfirst\n</think>\n\nthe cat",
    "more",
    "<think>\nsecond\n</think>\n\nsat",
    "bye",
    "on mats",
)


def test_turns_each_gives_every_turn_its_document_with_its_reasoning_as_inference_sees_it(tmp_path: Path) -> None:
    record = chat(*THINKING, system="be kind")
    rows = documents(tmp_path, STRIPS_THINKING, record, "turns=each")
    messages = record["messages"]
    tokenizer = tiny_tokenizer(STRIPS_THINKING)
    alone = [tokenizer.apply_chat_template(messages[:n], return_dict=True)["input_ids"] for n in (3, 5, 7)]
    assert [row["input_ids"] for row in rows] == alone
    assert [learnt(row) for row in rows] == [
        "<think>\nfirst\n</think>\n\nthe cat<|im_end|>",
        "<think>\nsecond\n</think>\n\nsat<|im_end|>",
        "on mats<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [("all", ["the cat<|im_end|>sat<|im_end|>on mats<|im_end|>"]), ("last", ["on mats<|im_end|>"])],
)
def test_turns_all_and_last_give_one_document_as_the_template_prints_it(
    tmp_path: Path, turns: str, expected: list[str]
) -> None:
    record = chat(*THINKING)
    rows = documents(tmp_path, STRIPS_THINKING, record, f"turns={turns}")
    assert [learnt(row) for row in rows] == expected
    at_once = tiny_tokenizer(STRIPS_THINKING).apply_chat_template(record["messages"], return_dict=True)
    assert rows[0]["input_ids"] == at_once["input_ids"]


def test_turns_each_keeps_the_weights_of_turns_and_leaves_out_those_of_weight_zero(tmp_path: Path) -> None:
    record = chat(*THINKING)
    record["messages"][1]["weight"], record["messages"][3]["weight"] = 0, 0.5
    rows = documents(tmp_path, STRIPS_THINKING, {**record, "loss_weight": 3}, "turns=each")
    assert [learnt(row)[-13:] for row in rows] == ["sat<|im_end|>", "ats<|im_end|>"]
    for row, weight in zip(rows, (1.5, 3.0), strict=True):
        pairs = zip(row["loss_weight"], row["loss_mask"], strict=True)
        assert {value for value, target in pairs if target} == {weight}


def test_turns_last_of_a_chat_whose_last_turn_is_not_learnt_is_refused(tmp_path: Path) -> None:
    record = chat("hello", "the cat", "more", "sat")
    record["messages"][3]["weight"] = 0
    with refused("in.jsonl:1", "last", "no_target", error=DataError):
        documents(tmp_path, CHATML, record, "turns=last")
    assert [learnt(row) for row in documents(tmp_path, CHATML, record, "turns=each")] == ["the cat<|im_end|>"]


def test_template_that_refuses_a_chat_is_reported() -> None:
    refuses = CHATML + "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    with refused("template_error", "no system turns", error=BadRecord):
        target_texts(refuses, chat("a", "b", system="c"))


def test_template_that_leaves_a_turn_out_is_a_mismatch() -> None:
    forgets = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.content != 'd' %}")
    with refused("template_mismatch", error=BadRecord):
        target_texts(forgets, chat("a", "b", "c", "d"))


words = st.text(st.sampled_from("abz .,\n\t\"'<>/{}é你😀0"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(words, words.filter(str.strip)), min_size=1, max_size=4),
    template=st.sampled_from([CHATML, GENERATION, GENERATION_WITHOUT_END, NO_GENERATION_PROMPT]),
)
def test_targets_decode_to_the_assistant_contents_and_their_end_tokens(turns: list, template: str) -> None:
    record = chat(*(text for pair in turns for text in pair))
    expected = [f"{answer}<|im_end|>" for _, answer in turns]
    found = target_texts_or_straddled(template, record)
    assert [text.lstrip("\n") for text in found] == [text.lstrip("\n") for text in expected]


def target_texts_or_straddled(template: str, record: dict[str, Any]) -> list[str]:
    """Like target_texts, but without the prefix check, which a newline merged with the header's rightly fails."""
    tokenizer = tiny_tokenizer(template)
    rendered = locate(ChatTemplate(tokenizer, None, {}), parse_record(record).content)
    text, spans = rendered.text, rendered.spans
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask, _ = mask_from_offsets(text, TokenCharacters.from_spans(encoded["offset_mapping"]), spans)
    targets = [token for token, target in zip(encoded["input_ids"], mask, strict=True) if target]
    return [turn + "<|im_end|>" for turn in tokenizer.decode(targets).split("<|im_end|>")[:-1]]
