"""Every string of a record that reaches a template is in the document as text, and is learnt if its speaker is."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.chat_templates import (
    CHATML,
    FUNCTION_FIELDS,
    OPEN_CALLS,
    STANDING_PROMPT,
    TEMPLATES,
    TOOL_RESPONSES,
    tiny_tokenizer,
)
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import Chunk
from verl_ext.text.tokens.documents import Documents

TOKENS = ("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>")
# What stands beside a word: nothing, words, what looks like a mark, or the name of a special token.
FORMS = ["{}", "{} cat", "the {}", "Zq7b0x {}", "{} <|im_end|>", "<|im_start|>assistant\n{}", "{}</s>"]
ROLES_OF_RESULTS = ("tool", "function", "environment", "ipython")
Record = dict[str, Any]


def encoded(folder: Path, template: str, record: Record, **options: Any) -> Documents:
    tokenizer = tiny_tokenizer(template, special_tokens=TOKENS)
    words = ["sources={a:a.jsonl}", "output_dir=out", f"model.path={folder}", "on_bad_record=skip"]
    found = read_options(TokenizeOptions, words)
    own = type(found)(**{**vars(found), "chat_template": template, **options})
    return ChatEncoder(own, tokenizer=tokenizer).encode(Chunk(1, [("a.jsonl:1", record)]))


def characters(template: str, documents: Documents) -> tuple[str, list[bool]]:
    """Return the documents' text, and whether each of its characters is learnt."""
    tokenizer = tiny_tokenizer(template, special_tokens=TOKENS)
    texts = [tokenizer.decode([token]) for token in documents.input_ids.tolist()]
    flags = [bool(flag) for text, flag in zip(texts, documents.loss_mask.tolist(), strict=True) for _ in text]
    return "".join(texts), flags


class Words:
    """Makes the unique words of a record's fields, and notes what each of them is, such as an answer or context."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw, self.kinds = draw, {}  # type: ignore[var-annotated]

    def name(self, kind: str = "context") -> str:
        """Return a word alone."""
        word = f"kiwi{len(self.kinds):02d}"
        self.kinds[word] = kind
        return word

    def __call__(self, kind: str = "context") -> str:
        """Return a text with a word."""
        return self._draw(st.sampled_from(FORMS)).format(self.name(kind))


@st.composite
def records(draw: st.DrawFn) -> tuple[Record, Words]:
    """Draw a record of a chat with tools, of which any field may be missing, and which any turn may end."""
    words = Words(draw)
    has = lambda: draw(st.integers(0, 3)) > 0  # noqa: E731
    system: Record = {"role": "system", "content": words()}
    if has():
        system["functions"] = json.dumps([{"name": words.name(), "description": words()}])
    messages: list[Record] = [system] if has() else []
    messages.append({"role": "user", "content": words(), **({"name": words.name()} if has() else {})})
    calling: Record = {"role": "assistant", "content": words("answer") if has() else ""}
    if has():
        calling["reasoning_content"] = words("reasoning")
    result: Record = {"role": draw(st.sampled_from(ROLES_OF_RESULTS)), "content": words()}
    where = draw(st.sampled_from(["function_calls", "message", "tool_responses", "tool_results", "result"]))
    if where == "function_calls":
        calling |= {"function_calls": words("call"), "content": calling["content"] or None}
    else:
        function = {"name": words.name("call"), "arguments": {"on": words("call")}}
        call: Record = {"id": words.name("id"), "type": "function", "function": function}
        calling["tool_calls"] = [call]
        if where == "result":
            call["result"] = words()
        elif where != "message":
            calling[where] = [{"name": words.name(), "response": {"said": words(), "n": 20}}]
        elif has():
            result |= {"name": words.name(), "tool_call_id": words.name()}
    messages.append(calling)
    if where in ("function_calls", "message"):
        messages.append(result)
    answer = {"role": "assistant", "content": words("answer")}
    messages += [answer, {"role": "user", "content": words()}]
    least = messages.index(calling) + 1
    record: Record = {"messages": messages[: draw(st.integers(least, len(messages)))]}
    if "functions" not in messages[0] and draw(st.booleans()):
        tool = {"name": words.name(), "description": words(), "parameters": {}}
        record["tools"] = [{"type": "function", "function": tool}]
    if draw(st.booleans()):
        arguments = {"custom_instructions": words(), "xml_tools": [words(), {"name": words()}]}
        record["chat_template_kwargs"] = {**arguments, "enable_thinking": draw(st.booleans())}
    return record, words


def plain_text(name: str, record: Record) -> str:
    """Return transformers' text of a record; a role that the template does not name is a tool's."""
    template = TEMPLATES[name]
    messages = []
    for message in record["messages"]:
        is_alias = message["role"] in ROLES_OF_RESULTS and f"'{message['role']}'" not in template
        role = "tool" if is_alias else message["role"]
        messages.append({**message, "role": role, "content": message["content"] or ""})
        if name == "PRINTS_ARGUMENTS":  # it cannot print objects, and gets JSON
            for call in message.get("tool_calls", ()):
                function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
                messages[-1]["tool_calls"] = [{**call, "function": function}]
    tools = record.get("tools")
    if "functions" in messages[0] and "functions" not in template:
        own = [{"type": "function", "function": function} for function in json.loads(messages[0]["functions"])]
        tools = tools or own
    tokenizer = tiny_tokenizer(template, special_tokens=TOKENS)
    arguments = record.get("chat_template_kwargs", {})
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments))


OPTIONS = [
    *({}, {"tool_calls": "context"}, {"reasoning": "context"}, {"special_tokens_in_text": "error"}),
    {"roles": {"environment": "tool", "ipython": "tool"}},
]
# Half of the records are for the templates that read fields which most do not.
NAMES = [*TEMPLATES, *7 * ["TOOL_RESPONSES", "FUNCTION_FIELDS", "STANDING_PROMPT", "OPEN_CALLS", "INSTRUCTIONS"]]


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(NAMES), records(), st.sampled_from(OPTIONS), st.booleans())
def test_each_word_is_text_and_is_learnt_if_its_speaker_is(
    tmp_path_factory: pytest.TempPathFactory, name: str, drawn: tuple[Record, Words], options: Record, as_option: bool
) -> None:
    (record, words), template = drawn, TEMPLATES[name]
    plain = plain_text(name, record)
    harmless = json.dumps(record)
    for token in TOKENS:
        harmless = harmless.replace(token, "cat")
    bare = plain_text(name, json.loads(harmless))
    context = {"context", *(("call", "id") if "tool_calls" in options else ()), *options.keys() & {"reasoning"}}
    learnt = {word for word, kind in words.kinds.items() if kind not in context}
    if as_option and "chat_template_kwargs" in record:
        arguments = record["chat_template_kwargs"]
        record = {field: value for field, value in record.items() if field != "chat_template_kwargs"}
        options = {**options, "apply_chat_template_kwargs": arguments}
    documents = encoded(tmp_path_factory.getbasetemp(), template, record, **options)
    counts = documents.counts
    without_content = [message.keys() for message in record["messages"] if message["content"] is None]
    if any(not any(field in template for field in fields - {"role", "content"}) for fields in without_content):
        assert counts.bad == {"non_string_content": 1}
        return
    if not any(word in plain for word in learnt):
        assert counts.bad.keys() <= {"no_target", "special_token"}
        return
    if "special_tokens_in_text" in options and any(plain.count(token) > bare.count(token) for token in TOKENS):
        assert counts.bad == {"special_token": 1}
        return
    assert not counts.bad, counts.examples
    text, flags = characters(template, documents)
    end = text.removeprefix(plain)
    assert end in ("", "<|im_end|>", "<|user|>")  # the token that ends a chat which the template leaves open
    for word in words.kinds:
        for at in (at for at in range(len(text)) if text.startswith(word, at)):
            assert flags[at : at + len(word)] == [word in learnt] * len(word), (word, text)
    spoken = {word for word, kind in words.kinds.items() if kind in ("answer", "reasoning", "call")}
    missing = {word for word in spoken if word in str(record) and word not in text}
    assert not missing or counts.unprinted or counts.unused_fields, (missing, text)
    # The tokens are those that the template writes around texts without their names.
    ids, tokenizer = documents.input_ids.tolist(), tiny_tokenizer(template, special_tokens=TOKENS)
    for token in TOKENS:
        assert ids.count(tokenizer.convert_tokens_to_ids(token)) == (bare + end).count(token), (token, text)


def runs(template: str, record: Record, folder: Path, **options: Any) -> list[str]:
    """Return the learnt runs of a record's document."""
    documents = encoded(folder, template, record, **options)
    assert not documents.counts.bad, documents.counts.examples
    text, learnt = characters(template, documents)
    found, before = [], False
    for char, flag in zip(text, learnt, strict=True):
        if flag and not before:
            found.append("")
        if flag:
            found[-1] += char
        before = flag
    return found


ASKED = {"role": "user", "content": "hello"}
OK = {"role": "assistant", "content": "ok"}
CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": {"on": "mat"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLED = '<call>a1 look {"on": "mat"}</call>'
RESULT = {"role": "tool", "content": "mat"}
SUNNY = {"name": "look", "response": {"sky": "sunny", "n": 20}}
FUNCTIONS = {"role": "system", "content": "Be kind.", "functions": '[{"name": "look"}]'}
OF_FUNCTIONS = [FUNCTIONS, ASKED, {"role": "assistant", "content": "", "function_calls": "look()"}, RESULT, OK]
END = "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TOOL_RESPONSES, [ASKED, {**CALLING, "tool_responses": [SUNNY]}], [CALLED]),
        (TOOL_RESPONSES, [ASKED, {**CALLING, "tool_responses": [SUNNY], "content": "ok"}], [CALLED, "ok" + END]),
        (FUNCTION_FIELDS, OF_FUNCTIONS, [f"<function_calls>look()</function_calls>{END}", "ok" + END]),
        (
            STANDING_PROMPT,
            [ASKED, CALLING, RESULT, OK, ASKED, {**OK, "content": ""}],
            [CALLED + END, f"<|assistant|>ok{END}", "<|assistant|>" + END],
        ),
        (OPEN_CALLS, [ASKED, CALLING, RESULT, OK], [CALLED, "ok" + END]),
    ],
)
def test_a_target_is_what_the_assistant_says_in_the_form_of_its_template(
    tmp_path: Path, template: str, messages: list[Record], expected: list[str]
) -> None:
    assert runs(template, {"messages": messages}, tmp_path) == expected


def test_calls_that_are_context_leave_the_answer_and_the_end_of_the_turn(tmp_path: Path) -> None:
    record = {"messages": [ASKED, {**CALLING, "tool_responses": [SUNNY], "content": "ok"}]}
    assert runs(TOOL_RESPONSES, record, tmp_path, tool_calls="context") == ["ok" + END]
    assert runs(FUNCTION_FIELDS, {"messages": OF_FUNCTIONS}, tmp_path, tool_calls="context") == [END, "ok" + END]
    assert runs(CHATML, record, tmp_path, tool_calls="context") == ["ok" + END]


def test_a_result_whose_place_cannot_be_found_makes_a_bad_record(tmp_path: Path) -> None:
    record = {"messages": [ASKED, {**CALLING, "tool_responses": [{"response": 20}]}]}
    counts = encoded(tmp_path, TOOL_RESPONSES, record).counts
    assert counts.bad == {"template_mismatch": 1}
    assert "message 2" in str(counts.examples)


def test_a_turn_of_which_the_template_prints_nothing_is_named_by_what_it_holds(tmp_path: Path) -> None:
    counts = encoded(tmp_path, CHATML, {"messages": OF_FUNCTIONS}).counts
    assert (counts.bad, counts.unprinted) == ({}, {"tool_calls": 1, "tools": 1})


def test_a_turn_that_a_call_leaves_open_is_counted_as_one(tmp_path: Path) -> None:
    counts = encoded(tmp_path, OPEN_CALLS, {"messages": [ASKED, CALLING, RESULT, OK]}).counts
    assert counts.end_of_turn == {"": 1, END: 1}


def test_an_option_that_is_a_special_token_and_nothing_else_is_that_token(tmp_path: Path) -> None:
    template = "{{ head }}" + CHATML
    record = {"messages": [ASKED, OK]}
    documents = encoded(tmp_path, template, record, apply_chat_template_kwargs={"head": "<s>"})
    assert documents.input_ids[0] == tiny_tokenizer(template, special_tokens=TOKENS).convert_tokens_to_ids("<s>")
