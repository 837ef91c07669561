"""The end of an assistant's turn: found from the template and the model's stop tokens, trained on, and reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.chat_templates import (
    CHATML,
    ENDS_DOCUMENT,
    HEADERS_ONLY,
    LEFT_OPEN,
    NAMED_CALLS,
    NEXT_HEAD,
    ONLY_TEXT,
    OTHER_LAST_END,
    TWO_ENDS,
    chat,
    tiny_tokenizer,
)
from tests.lib.document_texts import write_lines
from tests.lib.errors import refused
from tests.lib.tokenized_text import tokenize_files
from verl_ext.commands.report import Report
from verl_ext.options import UsageError
from verl_ext.text.chat.parts import RenderedChat
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.records.records import parse_record

TOKENS = ("</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<call>", "</call>", "<|user|>")
TOKENS += ("<|assistant|>", "<|start|>", "<|say|>", "<|said|>", "<|stop|>")
TWO_TURNS = chat("hello", "the cat", "more", "sat")


def ends_and_turns(
    template: str, record: dict[str, Any], eos: str | None = "</s>", tokens: tuple[str, ...] = TOKENS, **options: Any
) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the detected ends of turns, and every target's text with its end."""
    tokenizer = tiny_tokenizer(template, eos_token=eos, special_tokens=tokens)
    chat_template = ChatTemplate(tokenizer, None, {}, **options)
    content = parse_record(record).content
    rendered: RenderedChat = locate(chat_template, content)
    printed = tokenizer.apply_chat_template(content.messages, tokenize=False)
    assert rendered.text == printed + rendered.appended
    return chat_template.turn_ends, [(rendered.text[t.start : t.stop], t.closed_by) for t in rendered.targets]


@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>", None])
def test_a_last_turn_left_open_ends_as_the_earlier_ones_do(eos: str | None) -> None:
    turns = [("the cat<|im_end|>", "<|im_end|>"), ("sat<|im_end|>", "<|im_end|>")]
    assert ends_and_turns(LEFT_OPEN, TWO_TURNS, eos) == (["<|im_end|>"], turns)


def test_a_last_turn_left_open_ends_with_both_of_two_tokens() -> None:
    template = LEFT_OPEN.replace("<|im_end|>", "<|said|><|stop|>")
    turns = [("the cat<|said|><|stop|>", "<|stop|>"), ("sat<|said|><|stop|>", "<|stop|>")]
    assert ends_and_turns(template, TWO_TURNS, "<|stop|>") == (["<|stop|>"], turns)


@pytest.mark.parametrize("eos", ["<|stop|>", "</s>", None])
def test_of_two_tokens_after_the_content_the_one_that_stops_generation_ends_the_turn(eos: str | None) -> None:
    turns = [("the cat<|said|><|stop|>", "<|stop|>"), ("sat<|said|><|stop|>", "<|stop|>")]
    assert ends_and_turns(TWO_ENDS, TWO_TURNS, eos) == (["<|stop|>"], turns)
    assert ends_and_turns(TWO_ENDS.replace("add_generation_prompt", "never"), TWO_TURNS, eos) == (["<|stop|>"], turns)


def test_nothing_after_the_token_that_stops_generation_is_learnt() -> None:
    turns = [("the cat<|said|>", "<|said|>"), ("sat<|said|>", "<|said|>")]
    assert ends_and_turns(TWO_ENDS, TWO_TURNS, "<|said|>") == (["<|said|>"], turns)
    assert ends_and_turns(TWO_ENDS, TWO_TURNS, None, stop_tokens=["<|said|>"]) == (["<|said|>"], turns)


def test_the_documents_end_after_the_last_turns_end_is_not_learnt() -> None:
    turns = [("the cat<|end|>", "<|end|>"), ("sat<|end|>", "<|end|>")]
    for eos in ("<|endoftext|>", "<|end|>", None):
        assert ends_and_turns(ENDS_DOCUMENT, TWO_TURNS, eos) == (["<|end|>"], turns)


@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>", None])
def test_closers_of_tool_calls_are_learnt_and_do_not_end_the_turn(eos: str | None) -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("sit", "look")]
    record = chat("hello", "the cat", "more", "sat")
    record["messages"][1]["tool_calls"] = calls
    record["messages"][3]["tool_calls"] = calls[:1]
    ends, turns = ends_and_turns(NAMED_CALLS, record, eos)
    assert ends == ["<|im_end|>"]
    assert turns == [
        ("the cat<call>sit</call><call>look</call><|im_end|>", "<|im_end|>"),
        ("sat<call>sit</call><|im_end|>", "<|im_end|>"),
    ]


def test_last_and_earlier_turns_have_each_their_end() -> None:
    turns = [("the cat<|im_end|>", "<|im_end|>"), ("sat<|endoftext|>", "<|endoftext|>")]
    for eos in ("<|endoftext|>", "<|im_end|>", "</s>"):
        assert ends_and_turns(OTHER_LAST_END, TWO_TURNS, eos) == (["<|im_end|>", "<|endoftext|>"], turns)


def test_an_end_that_is_no_token_of_the_tokenizer_is_learnt_as_text() -> None:
    turns = [("the cat<|im_end|>", "<|im_end|>"), ("sat<|im_end|>", "<|im_end|>")]
    assert ends_and_turns(CHATML, TWO_TURNS, tokens=("</s>",)) == (["<|im_end|>"], turns)
    goodbye = CHATML.replace("<|im_end|>", " Over and out.")
    turns = [("the cat Over and out.", "Over and out."), ("sat Over and out.", "Over and out.")]
    assert ends_and_turns(goodbye, TWO_TURNS, tokens=("</s>",)) == (["Over and out."], turns)


def test_a_template_whose_turns_nothing_ends_has_no_ends() -> None:
    turns = [("the cat", ""), ("sat", "")]
    assert ends_and_turns(ONLY_TEXT, TWO_TURNS) == ([], turns)
    assert ends_and_turns(HEADERS_ONLY, TWO_TURNS) == ([], turns)


def test_a_stop_token_that_begins_the_next_turn_ends_the_one_before_it() -> None:
    turns = [("the cat<|user|>", "<|user|>"), ("sat<|user|>", "<|user|>")]
    assert ends_and_turns(HEADERS_ONLY, TWO_TURNS, stop_tokens=["</s>", "<|user|>"]) == (["<|user|>"], turns)


def test_words_that_look_like_the_end_do_not_end_a_turn() -> None:
    record = chat("hello<|im_end|>", "the<|im_end|>\n<|im_start|>user\ncat", "<|im_end|>more", "sat <|im_end|>\n")
    turns = [
        ("the<|im_end|>\n<|im_start|>user\ncat<|im_end|>", "<|im_end|>"),
        ("sat <|im_end|>\n<|im_end|>", "<|im_end|>"),
    ]
    assert ends_and_turns(CHATML, record, "<|im_end|>")[1] == turns


@pytest.mark.parametrize("template", [CHATML, NAMED_CALLS])
def test_a_turn_that_says_nothing_is_its_end(template: str) -> None:
    _, turns = ends_and_turns(template, chat("hello", "", "more", "sat"))
    assert turns == [("<|im_end|>", "<|im_end|>"), ("sat<|im_end|>", "<|im_end|>")]


def test_a_turn_that_says_nothing_is_both_its_ends() -> None:
    _, turns = ends_and_turns(TWO_ENDS, chat("hello", "", "more", "sat"))
    assert turns == [("<|said|><|stop|>", "<|stop|>"), ("sat<|said|><|stop|>", "<|stop|>")]


@pytest.mark.parametrize(
    ("template", "end"),
    [(ONLY_TEXT, "\n\nuser:"), (CHATML, "<|im_end|>\n"), (TWO_ENDS, "<|said|>"), (HEADERS_ONLY, "<|user|>")],
)
def test_end_of_turn_overrides_what_is_found(template: str, end: str) -> None:
    found, turns = ends_and_turns(template, TWO_TURNS, end_of_turn=end, stop_tokens=["<|stop|>"])
    assert found == [end]
    is_open = template == ONLY_TEXT  # its end is no token
    assert turns == [(f"the cat{end}", end), ("sat", "") if is_open else (f"sat{end}", end)]


def test_end_of_turn_overrides_a_stop_token_before_it() -> None:
    ends, turns = ends_and_turns(TWO_ENDS, TWO_TURNS, end_of_turn="<|stop|>", stop_tokens=["<|said|>"])
    assert ends == ["<|stop|>"]
    assert turns == [("the cat<|said|><|stop|>", "<|stop|>"), ("sat<|said|><|stop|>", "<|stop|>")]


def test_a_stop_token_ends_the_turns_that_calls_close_otherwise_than_words() -> None:
    template = NAMED_CALLS.replace("<|im_end|>", "{{ '<|end|><|stop|>' if m.tool_calls else '<|im_end|>' }}")
    record = chat("hello", "the cat", "more", "sat")
    record["messages"][1]["tool_calls"] = [{"function": {"name": "sit", "arguments": {}}}]
    turns = [("the cat<call>sit</call><|end|>", "<|end|>"), ("sat<|im_end|>", "<|im_end|>")]
    assert ends_and_turns(template, record, stop_tokens=["<|end|>"]) == (["<|im_end|>"], turns)


def tokenized(tmp_path: Path, template: str, records: list[Any], *options: str, **generation: Any) -> Report:
    """Return the report of a run whose tokenizer folder has a generation_config.json with these fields."""
    tiny_tokenizer(template, eos_token="</s>", special_tokens=TOKENS).save_pretrained(tmp_path / "model")
    if generation:
        (tmp_path / "model/generation_config.json").write_text(json.dumps(generation))
    source = write_lines(tmp_path / "in.jsonl", records)
    return tokenize_files({"chat": source}, tmp_path / "out", tmp_path / "model", *options)


def learnt(tmp_path: Path) -> list[list[str]]:
    """Return the targets that report.json shows for each document."""
    previews = json.loads((tmp_path / "out/report.json").read_text())["sources"]["chat"]["preview"]
    return [[text for is_target, text in runs if is_target] for runs in previews]


@pytest.mark.parametrize("as_list", [False, True])
def test_the_stop_tokens_of_generation_config_end_turns(tmp_path: Path, as_list: bool) -> None:
    user = tiny_tokenizer(HEADERS_ONLY, eos_token="</s>", special_tokens=TOKENS).convert_tokens_to_ids("<|user|>")
    report = tokenized(tmp_path, HEADERS_ONLY, [TWO_TURNS], eos_token_id=[0, user] if as_list else user)
    assert learnt(tmp_path) == [["the cat<|user|>", "sat<|user|>"]]
    assert report.sources["chat"].end_of_turn == {"<|user|>": 2}


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}, {"eos_token_id": 0}, {"eos_token_id": [0, 10**6]}])
def test_a_generation_config_without_another_stop_token_changes_nothing(
    tmp_path: Path, generation: dict[str, Any]
) -> None:
    tokenized(tmp_path, HEADERS_ONLY, [TWO_TURNS], **generation, max_length=20)
    assert learnt(tmp_path) == [["the cat", "sat"]]


def test_the_header_of_a_second_assistants_turn_in_a_row_is_not_learnt() -> None:
    prompt = "add_generation_prompt and messages[-1].role != 'assistant'"
    for template in (NAMED_CALLS, LEFT_OPEN):
        template = template.replace("{% if add_generation_prompt %}<|im_start|>", f"{{% if {prompt} %}}<|im_start|>")
        record = chat("hello", "the cat", "more", "sat")
        record["messages"].insert(2, {"role": "assistant", "content": "and"})
        texts = [text.removesuffix("<|im_end|>") for text, _ in ends_and_turns(template, record)[1]]
        assert texts == ["the cat", "and", "sat"]


@pytest.mark.parametrize("trim", [True, False])
def test_white_space_after_words_is_learnt_where_the_template_prints_it(trim: bool) -> None:
    template = ONLY_TEXT.replace("m.content", "m.content.strip()" if trim else "m.content")
    turns = ends_and_turns(template, chat("hello", "the cat\n", "more", "sat"))[1]
    assert turns == [("the cat" if trim else "the cat\n", ""), ("sat", "")]


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/generation_config.json").write_text("{")
    with refused(f"{tmp_path}/model/generation_config.json", "JSON", error=UsageError):
        tokenized(tmp_path, CHATML, [TWO_TURNS])


def test_an_end_of_turn_that_the_template_never_writes_is_refused(tmp_path: Path) -> None:
    with refused("end_of_turn", "'<|eot|>'", error=UsageError):
        tokenized(tmp_path, CHATML, [TWO_TURNS], "end_of_turn='<|eot|>'")


def test_report_and_table_say_what_ends_the_turns(tmp_path: Path) -> None:
    report = tokenized(tmp_path, OTHER_LAST_END, [TWO_TURNS, chat("hello", "the cat")])
    counts = {"<|endoftext|>": 2, "<|im_end|>": 1}
    assert json.loads((tmp_path / "out/report.json").read_text())["categories"]["chat"]["end_of_turn"] == counts
    assert report.table().splitlines()[-1] == "chat: end of turn: <|endoftext|> (2 turns), <|im_end|> (1 turns)"
    assert learnt(tmp_path) == [["the cat<|im_end|>", "sat<|endoftext|>"], ["the cat<|endoftext|>"]]


def test_turns_that_nothing_ends_are_warned_of_unless_end_of_turn_is_given(tmp_path: Path) -> None:
    report = tokenized(tmp_path, ONLY_TEXT, [TWO_TURNS])
    assert report.as_dict()["categories"]["chat"]["end_of_turn"] == {"": 2}
    assert report.table().splitlines()[-1].startswith("chat: warning: 2 turns have no end-of-turn token")
    assert learnt(tmp_path) == [["the cat", "sat"]]
    report = tokenized(tmp_path, ONLY_TEXT.replace("\n\n", " ~\n\n"), [TWO_TURNS], "end_of_turn=' ~'", "overwrite=true")
    assert report.as_dict()["categories"]["chat"]["end_of_turn"] == {" ~": 2}
    assert "warning" not in report.table()
    told = "chat: no token of the tokenizer, but learnt as text, is the end of turn  ~ (2 turns): "
    assert report.table().splitlines()[-1].startswith(told)
    assert learnt(tmp_path) == [["the cat ~", "sat ~"]]


GLM_TOKENS = (*TOKENS, "<|observation|>")
STOPS = ["</s>", "<|user|>", "<|observation|>"]
SIT = {"type": "function", "function": {"name": "sit", "arguments": {}}}
CALLING = {"messages": [TWO_TURNS["messages"][0], {"role": "assistant", "content": "", "tool_calls": [SIT]}]}
ANSWERED = {"messages": [*CALLING["messages"], {"role": "tool", "content": "sat"}, TWO_TURNS["messages"][1]]}


@pytest.mark.parametrize(
    ("record", "end_of_chat", "stops", "ends"),
    [
        (TWO_TURNS, "auto", STOPS, ["<|user|>", "<|user|>"]),
        (CALLING, "auto", STOPS, ["<|observation|>"]),
        (ANSWERED, "auto", STOPS, ["<|observation|>", "<|user|>"]),
        (ANSWERED, "none", STOPS, ["<|observation|>", ""]),
        (ANSWERED, "auto", ["</s>"], ["", ""]),
        (TWO_TURNS, "<|user|>", ["</s>"], ["<|user|>", "<|user|>"]),
        (ANSWERED, "<|user|>", ["</s>"], ["", "<|user|>"]),
        (CALLING, "<|user|>", ["</s>"], ["<|user|>"]),
        (TWO_TURNS, "</s>", ["</s>"], ["", "</s>"]),
        ({"messages": TWO_TURNS["messages"][:3]}, "auto", STOPS, ["<|user|>"]),
    ],
)
def test_a_chats_last_turn_ends_with_the_token_that_the_next_one_would_begin_with(
    record: dict[str, Any], end_of_chat: str, stops: list[str], ends: list[str]
) -> None:
    options = {"tokens": GLM_TOKENS, "stop_tokens": stops, "end_of_chat": end_of_chat}
    found, turns = ends_and_turns(NEXT_HEAD, record, **options)
    assert [end for _, end in turns] == ends
    words = ["<call>sit {}</call>" if "tool_calls" in m else m["content"] for m in record["messages"]]
    spoken = [text for text, m in zip(words, record["messages"], strict=True) if m["role"] == "assistant"]
    assert [text for text, _ in turns] == [text + end for text, end in zip(spoken, ends, strict=True)]
    assert end_of_chat in ("auto", "none", *found)


def test_an_end_of_chat_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with refused("end_of_chat", "'<stop>'", error=UsageError):
        tokenized(tmp_path, NEXT_HEAD, [TWO_TURNS], "end_of_chat='<stop>'")
    with refused("end_of_chat", "", error=UsageError):
        tokenized(tmp_path, NEXT_HEAD, [TWO_TURNS], "end_of_chat=''")


def test_all_documents_of_a_record_learn_to_stop_and_the_report_names_the_token(tmp_path: Path) -> None:
    last = {"chosen": [TWO_TURNS["messages"][1]], "rejected": [{"role": "assistant", "content": "sat"}]}
    pair = {"prompt": TWO_TURNS["messages"][:1], **last}
    report = tokenized(tmp_path, HEADERS_ONLY, [pair], "end_of_chat='<|user|>'")
    assert learnt(tmp_path) == [["the cat<|user|>"], ["sat<|user|>"]]
    assert (report.end_of_chat, "warning" in report.table()) == ("<|user|>", False)
    each = tokenized(tmp_path, HEADERS_ONLY, [TWO_TURNS], "turns=each", "end_of_chat='<|user|>'", "overwrite=true")
    assert learnt(tmp_path) == [["the cat<|user|>"], ["sat<|user|>"]]
    assert each.as_dict()["categories"]["chat"]["end_of_turn"] == {"<|user|>": 2}
    none = tokenized(tmp_path, HEADERS_ONLY, [TWO_TURNS], "end_of_chat=none", "overwrite=true")
    assert "end_of_chat=TOKEN" in none.table()
