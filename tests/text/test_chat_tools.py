"""Tool calls, tool results, reasoning and tool definitions: their targets, and fields that a template leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.agent_chats import TOKENS, agent_chat
from tests.lib.chat_templates import (
    CHATML,
    FIRST_CALL,
    HEADERS,
    INSTRUCT_CALLS,
    PRINTS_ARGUMENTS,
    PRINTS_TOOLS,
    REASONING,
    RESULTS_INSIDE,
    STRIPS_THINKING,
    chat,
    tiny_tokenizer,
)
from tests.lib.document_texts import write_lines
from tests.lib.errors import names, refused
from tests.lib.tokenized_text import tokenize_files
from verl_ext.commands.report import Report
from verl_ext.options import DataError
from verl_ext.text.chat.parts import RenderedChat
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.records import parse_record

SIT, LOOK = {"name": "sit", "arguments": {"on": "mat"}}, {"name": "look", "arguments": {}}
SIT_TOOL = {"type": "function", "function": {"name": "sit", "description": "Sits down."}}


def rendered(template: str, record: dict[str, Any], eos: str = "<|im_end|>") -> RenderedChat:
    """Render the chat with a template new to it."""
    tokenizer = tiny_tokenizer(template, eos_token=eos, special_tokens=TOKENS)
    return locate(ChatTemplate(tokenizer, None, {}), parse_record(record).content)


def learnt(template: str, record: dict[str, Any], eos: str = "<|im_end|>") -> list[str]:
    """Return the targets' texts."""
    found = rendered(template, record, eos)
    return [found.text[target.start : target.stop] for target in found.targets]


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("special", ["[CALLS]", "<<calls>>"])
def test_the_head_of_a_tool_call_is_learnt_where_no_generation_prompt_tells_its_beginning(
    special: str, space: str
) -> None:
    template = INSTRUCT_CALLS.replace("[CALLS]", space + special).replace(
        "{{ m.content + '", f"{{{{ '{space}' + m.content + '"
    )
    assert f"'{space}' + m.content" in template
    called = special + '[{"name": "sit", "arguments": {"on": "mat"}}]</s>'
    assert [text.lstrip(" ") for text in learnt(template, agent_chat(SIT), "</s>")] == [called, "ok</s>"]
    called = special + '[{"name": "sit", "arguments": {"on": "mat"}}, {"name": "look", "arguments": {}}]</s>'
    assert [text.lstrip(" ") for text in learnt(template, agent_chat(SIT, LOOK), "</s>")] == [called, "ok</s>"]


@pytest.mark.parametrize("template", [HEADERS, HEADERS.replace("add_generation_prompt", "never")])
@pytest.mark.parametrize("content", ["", "Let me see."])
def test_a_turns_content_and_all_its_calls_are_learnt_from_the_header_on(template: str, content: str) -> None:
    called = content + '<call>sit {"on": "mat"}</call><call>look {}</call><|im_end|>'
    assert learnt(template, agent_chat(SIT, LOOK, content=content)) == [called, "ok<|im_end|>"]


def test_a_call_after_a_result_is_learnt_from_its_head() -> None:
    record = agent_chat(SIT)
    record["messages"][3:] = [{"role": "assistant", "content": "", "tool_calls": [{"function": LOOK}]}]
    first = '[CALLS][{"name": "sit", "arguments": {"on": "mat"}}]</s>'
    assert learnt(INSTRUCT_CALLS, record, "</s>") == [first, '[CALLS][{"name": "look", "arguments": {}}]</s>']


def test_results_that_a_template_prints_inside_the_assistants_turn_are_not_learnt() -> None:
    record = agent_chat(SIT, LOOK, content="I sat.")
    found = rendered(RESULTS_INSIDE, record)
    targets = [(found.text[t.start : t.stop], t.message, t.closed_by) for t in found.targets]
    assert targets == [
        ('<call>sit {"on": "mat"}</call><call>look {}</call>', 1, None),
        ("I sat.<|im_end|>", 1, "<|im_end|>"),
        ("ok<|im_end|>", 4, "<|im_end|>"),
    ]
    assert "</call><result>done 0</result><result>done 1</result>I sat." in found.text
    record["messages"][1]["weight"] = 0
    assert learnt(RESULTS_INSIDE, record) == ["ok<|im_end|>"]


def test_a_result_that_says_what_the_assistant_says_is_not_taken_for_it() -> None:
    record = agent_chat(SIT, content="done 0")
    assert learnt(RESULTS_INSIDE, record) == ['<call>sit {"on": "mat"}</call>', "done 0<|im_end|>", "ok<|im_end|>"]


def test_an_empty_result_inside_the_assistants_turn_is_not_learnt() -> None:
    record = agent_chat(SIT, content="I sat.")
    record["messages"][2]["content"] = ""
    assert learnt(RESULTS_INSIDE, record) == ['<call>sit {"on": "mat"}</call>', "I sat.<|im_end|>", "ok<|im_end|>"]


def named_results(number: int) -> dict[str, Any]:
    """Return calls one after the other, of tools with empty answers, whose results have the tools' names."""
    record = agent_chat()
    for i in range(number):
        call = {"name": f"tool{i}", "arguments": {}}
        calling = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        record["messages"][-1:-1] = [calling, {"role": "tool", "name": call["name"], "content": ""}]
    return record


@pytest.mark.parametrize("prompt", ["add_generation_prompt", "never"])
def test_headers_of_empty_results_are_not_learnt_where_each_is_another(prompt: str) -> None:
    template = HEADERS.replace("{{ m.role }}", "{{ m.role }} {{ m.name }}").replace("add_generation_prompt", prompt)
    template = template.replace("assistant\n{% endif", "assistant \n{% endif")
    record = named_results(3)
    del record["messages"][1]
    expected = [f"<call>tool{i} {{}}</call><|im_end|>" for i in range(3)]
    assert learnt(template, record) == [*expected, "ok<|im_end|>"]


def test_users_who_say_nothing_in_two_ways_do_not_move_the_answer() -> None:
    record = chat("", "the cat", "", "sat", " ", "ok")
    template = HEADERS.replace("add_generation_prompt", "never")
    assert learnt(template, record) == ["the cat<|im_end|>", "sat<|im_end|>", "ok<|im_end|>"]


@pytest.mark.parametrize("prompt", ["add_generation_prompt", "never"])
@pytest.mark.parametrize("ids", [("one", "two", "three"), ("a1B2c3D4e", "call00001", "call00002")])
def test_the_ids_of_results_that_follow_their_words_are_not_learnt(ids: tuple[str, ...], prompt: str) -> None:
    template = HEADERS.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}"
    )
    record = agent_chat()
    for i in ids:
        calling = {"role": "assistant", "content": "", "tool_calls": [{"id": i, "function": SIT}]}
        record["messages"] += [calling, {"role": "tool", "content": f"done {i}", "tool_call_id": i}]
        record["messages"] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "again"}]
    del record["messages"][1:3]
    turns = ['<call>sit {"on": "mat"}</call><|im_end|>', "ok<|im_end|>"]
    assert learnt(template.replace("add_generation_prompt", prompt), record) == turns * 3


def test_a_message_that_a_template_prints_as_two_turns_is_learnt_without_the_header_between() -> None:
    template = HEADERS.replace(
        "{% for c in", "{% if m.tool_calls %}<|im_end|>\n<|im_start|>assistant\n{% endif %}{% for c in"
    )
    assert learnt(template, agent_chat(SIT, content="Look:")) == [
        "Look:<|im_end|>",
        '<call>sit {"on": "mat"}</call><|im_end|>',
        "ok<|im_end|>",
    ]


def test_what_a_template_says_at_the_end_of_a_chat_alone_is_not_learnt() -> None:
    said = "{% if not add_generation_prompt %}That was checked.<|endoftext|>{% endif %}"
    for template in (HEADERS, HEADERS.replace("<|im_end|>", "")):
        end = "<|im_end|>" if "<|im_end|>" in template else ""
        record = chat("hello", "the cat", "more", "sat")
        assert learnt(template + said, record) == [f"the cat{end}", f"sat{end}"]
        assert learnt(template + said, chat("hello", "the cat"), eos="<|endoftext|>") == [f"the cat{end}"]
    tools_last = HEADERS.replace("<|im_end|>", "") + "{{ tools | tojson }}"
    assert learnt(tools_last, {**chat("hello", "the cat"), "tools": [SIT_TOOL]}) == ["the cat"]


def with_arguments(arguments: Any) -> dict[str, Any]:
    return agent_chat({"name": "sit", "arguments": arguments})


TEXT = '{"on":  "mät", "n": 1}'  # not in json.dumps' format
OBJECT = {"on": "mät", "n": 1}
AS_JSON = '{"on": "mät", "n": 1}'
NO_STRINGS = "{% if c.function.arguments is string %}{{ raise_exception('no strings') }}{% endif %}</call>"
ONLY_STRINGS = "{{ '' + c.function.arguments }}"


@pytest.mark.parametrize(
    ("template", "arguments", "printed"),
    [
        (PRINTS_ARGUMENTS, TEXT, TEXT),
        (HEADERS, TEXT, AS_JSON),
        (HEADERS, OBJECT, AS_JSON),
        (HEADERS.replace("</call>", NO_STRINGS), TEXT, AS_JSON),
        (HEADERS.replace("</call>", NO_STRINGS), OBJECT, AS_JSON),
        (PRINTS_ARGUMENTS.replace("{{ c.function.arguments }}", ONLY_STRINGS), TEXT, TEXT),
        (PRINTS_ARGUMENTS.replace("{{ c.function.arguments }}", ONLY_STRINGS), OBJECT, AS_JSON),
    ],
)
def test_arguments_are_printed_as_the_record_has_them_or_as_the_template_takes_them(
    template: str, arguments: Any, printed: str
) -> None:
    assert learnt(template, with_arguments(arguments)) == [f"<call>sit {printed}</call><|im_end|>", "ok<|im_end|>"]


def test_what_a_message_says_is_not_taken_for_arguments_that_the_template_prints_as_python_does() -> None:
    record = with_arguments(TEXT)
    record["messages"][0]["content"] = str(OBJECT)
    assert learnt(HEADERS, record)[0] == f"<call>sit {AS_JSON}</call><|im_end|>"
    assert learnt(PRINTS_ARGUMENTS, record)[0] == f"<call>sit {TEXT}</call><|im_end|>"


def test_arguments_that_a_template_refuses_are_not_given_as_text_if_it_takes_others() -> None:
    no_null = "{% if none in c.function.arguments.values() %}{{ raise_exception('no null') }}{% endif %}</call>"
    with refused("template_error", "no null", error=BadRecord):
        learnt(HEADERS.replace(" | tojson }}</call>", " }}" + no_null), with_arguments('{"n": null}'))


def test_a_template_that_needs_tools_is_tried_with_tools() -> None:
    needs_tools = "{% if not tools %}{{ raise_exception('tools must be given') }}{% endif %}{{ tools | tojson }}\n"
    found = rendered(needs_tools + HEADERS, {**agent_chat(SIT), "tools": [SIT_TOOL]})
    assert [found.text[t.start : t.stop] for t in found.targets][1] == "ok<|im_end|>"
    assert not found.unprinted
    with refused("template_error", "tools must be given", error=BadRecord):
        rendered(needs_tools + HEADERS, agent_chat(SIT))


def test_a_template_of_content_in_parts_is_given_parts() -> None:
    parts = HEADERS.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text | trim }}{% endfor %}")
    template = ChatTemplate(tiny_tokenizer(parts, special_tokens=TOKENS), None, {})
    found = locate(template, parse_record(agent_chat(SIT, content="Let me see.")).content)
    called = 'Let me see.<call>sit {"on": "mat"}</call><|im_end|>'
    assert [found.text[t.start : t.stop] for t in found.targets] == [called, "ok<|im_end|>"]
    assert found.text.startswith("<|im_start|>user\nsit<|im_end|>\n")


def test_reasoning_is_learnt_before_what_is_said() -> None:
    record = agent_chat(SIT, content="Let me see.", reasoning_content="The mat?")
    called = '<think>The mat?</think>Let me see.<call>sit {"on": "mat"}</call><|im_end|>'
    assert learnt(REASONING, record) == [called, "ok<|im_end|>"]
    assert rendered(REASONING, record).unprinted == ()


def with_everything() -> dict[str, Any]:
    record = agent_chat(SIT, LOOK, content="Let me see.", reasoning_content="The mat?")
    return {"messages": [{"role": "system", "content": "be kind"}, *record["messages"]], "tools": [SIT_TOOL]}


NO_SYSTEM = "{% for m in messages if m.role != 'system' %}"


@pytest.mark.parametrize(
    ("template", "unprinted"),
    [
        (CHATML, ["reasoning_content", "tool_calls", "tools"]),
        (HEADERS, ["reasoning_content", "tools"]),
        (FIRST_CALL, ["reasoning_content", "tool_calls", "tools"]),
        (REASONING, ["tools"]),
        (PRINTS_TOOLS, []),
        (PRINTS_TOOLS.replace("{% for m in messages %}", NO_SYSTEM), ["system content"]),
        (PRINTS_TOOLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), ["assistant content"]),
        (PRINTS_TOOLS.replace("messages %}", "messages if m.role != 'tool' %}"), ["tool content"]),
    ],
)
def test_what_a_template_leaves_out_is_told_by_kind(template: str, unprinted: list[str]) -> None:
    assert rendered(template, with_everything()).unprinted == tuple(unprinted)


def test_a_second_call_that_repeats_the_first_is_seen_to_be_left_out() -> None:
    assert rendered(FIRST_CALL, agent_chat(SIT, SIT)).unprinted == ("tool_calls",)
    assert rendered(HEADERS, agent_chat(SIT, SIT)).unprinted == ()


def test_reasoning_that_is_taken_out_of_earlier_turns_is_told() -> None:
    record = chat("hello", "<think>\nfirst\n</think>\n\nthe cat", "more", "<think>\nsecond\n</think>\n\nsat")
    assert rendered(STRIPS_THINKING, record).unprinted == ("reasoning in content",)
    del record["messages"][:2]
    assert rendered(STRIPS_THINKING, record).unprinted == ()


def test_words_before_reasoning_that_a_template_takes_out_with_it_are_told() -> None:
    record = chat("hello", "Well. <think>\nhm\n</think>\n\nthe cat", "more", "sat")
    assert rendered(STRIPS_THINKING, record).unprinted == ("assistant content", "reasoning in content")


def tokenized(tmp_path: Path, template: str, records: list[Any], *options: str) -> Report:
    tiny_tokenizer(template, special_tokens=TOKENS).save_pretrained(tmp_path / "model")
    source = write_lines(tmp_path / "in.jsonl", records)
    return tokenize_files({"agent": source}, tmp_path / "out", tmp_path / "model", *options)


def test_chats_of_which_something_is_left_out_are_used_and_counted_by_kind(tmp_path: Path) -> None:
    report = tokenized(tmp_path, HEADERS, [with_everything(), agent_chat(SIT), with_everything()])
    counts = {"reasoning_content": 2, "tools": 2}
    assert json.loads((tmp_path / "out/report.json").read_text())["categories"]["agent"]["unprinted"] == counts
    assert report.sources["agent"].documents == 3
    told = "agent: not printed by the chat template: reasoning_content (2 records), tools (2 records)"
    assert told in report.table().splitlines()


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_on_unprinted_drop_leaves_such_chats_out_and_never_ends_the_run(tmp_path: Path, on_bad_record: str) -> None:
    records = [with_everything(), agent_chat(SIT)]
    options = ("on_unprinted=drop", f"on_bad_record={on_bad_record}")
    tally = tokenized(tmp_path, HEADERS, records, *options).sources["agent"]
    assert (tally.documents, tally.bad, tally.unprinted) == (1, {"unprinted": 1}, {})
    assert names(tally.examples["unprinted"][0], "reasoning_content, tools")


def test_on_unprinted_error_makes_such_chats_bad_records(tmp_path: Path) -> None:
    records = [agent_chat(SIT), with_everything()]
    with refused("in.jsonl:2", "reasoning_content, tools", error=DataError):
        tokenized(tmp_path, HEADERS, records, "on_unprinted=error")
    assert not (tmp_path / "out").exists()
    tally = tokenized(tmp_path, HEADERS, records, "on_unprinted=error", "on_bad_record=skip").sources["agent"]
    assert (tally.documents, tally.bad) == (1, {"unprinted": 1})


@pytest.mark.parametrize("on_unprinted", ["error", "drop", "warn"])
def test_a_chat_of_which_nothing_is_printed_that_could_be_learnt_is_no_document(
    tmp_path: Path, on_unprinted: str
) -> None:
    only_calls = agent_chat(SIT)
    del only_calls["messages"][2:]
    options = (f"on_unprinted={on_unprinted}", "on_bad_record=skip")
    tally = tokenized(tmp_path, CHATML, [only_calls, agent_chat()], *options).sources["agent"]
    assert tally.documents == 1
    assert tally.bad == {"no_target" if on_unprinted == "warn" else "unprinted": 1}


def test_reasoning_of_earlier_turns_is_not_missed_where_each_turn_is_learnt_with_its_own(tmp_path: Path) -> None:
    record = chat("hello", "<think>\nfirst\n</think>\n\nthe cat", "more", "<think>\nsecond\n</think>\n\nsat")
    tally = tokenized(tmp_path, STRIPS_THINKING, [record], "turns=each", "on_unprinted=error").sources["agent"]
    assert (tally.documents, tally.unprinted) == (2, {})


def test_a_record_of_several_documents_is_counted_once_as_not_printed(tmp_path: Path) -> None:
    tally = tokenized(tmp_path, HEADERS, [with_everything()], "turns=each").sources["agent"]
    assert (tally.documents, tally.unprinted) == (2, {"reasoning_content": 1, "tools": 1})


def test_a_turn_that_is_not_printed_is_counted_if_only_later_turns_give_documents(tmp_path: Path) -> None:
    for turns in ("all", "each"):
        tally = tokenized(tmp_path / turns, CHATML, [agent_chat(SIT)], f"turns={turns}").sources["agent"]
        assert (tally.documents, tally.unprinted) == (1, {"tool_calls": 1})
