"""Equal chats give equal rows and counts, whatever came before them and whichever worker encodes them."""

import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from tests.lib import chat_templates
from tests.lib.agent_chats import TOKENS, agent_chat
from tests.lib.chat_templates import CHATML, HEADERS, chat, tiny_tokenizer
from tests.lib.errors import names, refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.text import encoder
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.prefixes import mask_from_prefixes
from verl_ext.text.read.bad_record import RecordOptions
from verl_ext.text.read.readers import Chunk
from verl_ext.text.records.records import parse_record
from verl_ext.text.text_encoder import TextEncoder
from verl_ext.text.tokens.counts import Counts

# Like Gemma 4's: an object in the template's own syntax, and a string as it is.
OWN_SYNTAX = HEADERS.replace(
    "{{ c.function.arguments | tojson }}",
    "{% if c.function.arguments is mapping %}{{ '{' }}{% for k, v in c.function.arguments | dictsort %}"
    "{{ k }}:{{ v | tojson }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% else %}{{ c.function.arguments }}"
    "{% endif %}",
)
TEMPLATES = chat_templates.TEMPLATES | {"OWN_SYNTAX": OWN_SYNTAX, "DATED": "{{ strftime_now('%d %b %Y') }}" + CHATML}

Message = dict[str, Any]
WORDS = ["", " ", "\n", "\n ", "a", "the cat", " cat\n", "b", "<think>\nhm\n</think>\n\nb", "</think>", "{'n': True}"]
words = st.sampled_from(WORDS)
content = words | st.lists(words, min_size=1, max_size=2).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
arguments = st.sampled_from([{}, "{}", "", " ", None, {"n": True}, '{"n":  true}', {"on": "mat"}, '{"on": ', "[]", []])


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a record: one to three questions and answers, some with reasoning, with calls and results, or a weight."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(words)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(content)})
        if draw(st.integers(0, 3)) == 0:
            call = {"type": "function", "function": {"name": "sit", "arguments": draw(arguments)}}
            messages.append({"role": "assistant", "content": draw(words), "tool_calls": [call]})
            messages.append({"role": "tool", "name": "sit", "content": draw(words)})
        answer: Message = {"role": "assistant", "content": draw(content)}
        if draw(st.booleans()):
            answer[draw(st.sampled_from(["reasoning_content", "thinking"]))] = draw(content)
        if draw(st.integers(0, 4)) == 0:
            answer["weight"] = draw(st.sampled_from([0, 0.5]))
        messages.append(answer)
    return {"messages": messages}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(CHATML, special_tokens=(*TOKENS, "<|end|>", "<call>", "</call>", "<|user|>")).save_pretrained(path)
    load, loaded = encoder.load_tokenizer, {}

    def load_once(model: Any) -> Any:
        if repr(model) not in loaded:
            loaded[repr(model)] = load(model)
        return loaded[repr(model)]

    with pytest.MonkeyPatch.context() as patch:  # a worker loads the same tokenizer each time
        patch.setattr(encoder, "load_tokenizer", load_once)
        yield path


def worker(folder: Path, template: str, **given_options: Any) -> ChatEncoder:
    words = ["sources={a:a.jsonl}", "output_dir=out", f"model.path={folder}", "on_bad_record=skip"]
    options = read_options(TokenizeOptions, words)
    return ChatEncoder(type(options)(**{**vars(options), "chat_template": template, **given_options}))


Row = tuple[list[int], list[int], list[float] | None]


def encoded(encoder: ChatEncoder, record: dict[str, Any]) -> tuple[Row, Counts]:
    found = encoder.encode(Chunk(1, [("a.jsonl:1", record)]))
    weights = None if found.weights is None else found.weights.tolist()
    return (found.input_ids.tolist(), found.loss_mask.tolist(), weights), found.counts


def rows_of(folder: Path, template: str, records: Sequence[dict[str, Any]], workers: int) -> list[tuple[Row, Counts]]:
    encoders = [worker(folder, template) for _ in range(workers)]
    return [encoded(encoders[number % workers], record) for number, record in enumerate(records)]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*TEMPLATES]), st.lists(chats(), min_size=1, max_size=4), st.integers(1, 4), st.randoms())
def test_a_chat_gives_the_same_row_and_counts_in_any_order_and_any_worker(
    folder: Path, name: str, records: list[dict[str, Any]], workers: int, random: Any
) -> None:
    alone = [encoded(worker(folder, TEMPLATES[name]), record) for record in records]
    order = [number for number in range(len(records)) for _ in range(4 * workers)]
    random.shuffle(order)
    found = rows_of(folder, TEMPLATES[name], [records[number] for number in order], workers)
    for number, each in zip(order, found, strict=True):
        assert each == alone[number], records[number]


FORMS = [({"on": "mät", "n": True}, ['{"on": "mät", "n": true}']), ({}, ["{}", "", " \n", None, "null", " {} "])]
NO_OBJECTS = ['{"on": ', "[]", '"x"', "x", "1", '{"a": 1, "a": 2}', [], 1, True]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_arguments_of_a_call_mean_the_same_however_they_are_written(folder: Path, name: str) -> None:
    encoder = worker(folder, TEMPLATES[name])
    for own, others in FORMS:
        record = agent_chat({"name": "sit", "arguments": own})
        row, counts = encoded(encoder, record)
        printed = encoder.tokenizer.decode(row[0])
        messages = record["messages"]
        text = encoder.tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False)
        text += "<|im_end|>" * name.endswith("LEFT_OPEN")  # end_of_chat=auto
        assert name.endswith("PRINTS_ARGUMENTS") or printed == text
        for other in others:
            assert encoded(encoder, agent_chat({"name": "sit", "arguments": other})) == (row, counts), other
            calling = {"role": "assistant", "content": "", "function_call": {"name": "sit", "arguments": other}}
            as_field = {"messages": [messages[0], calling, *messages[2:]]}
            assert encoded(encoder, as_field)[0] == encoded(encoder, {"messages": messages})[0], other
    for wrong in NO_OBJECTS:
        row, counts = encoded(encoder, agent_chat({"name": "sit", "arguments": wrong}))
        assert counts.bad == {"bad_arguments": 1}, wrong
        assert names(str(counts.examples), "arguments of tool call 1"), wrong


CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
# Like Qwen's: the thought of a content and that of a field are printed alike. Like gpt-oss': tags stay in the content.
THOUGHTS = {
    "splits": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
    "{% set t = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set t = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{% if t.strip() %}<think>\n{{ t.strip() }}\n</think>\n\n{% endif %}{{ c.strip() }}" + CALLS + "<|im_end|>\n"
    "{% endfor %}",
    "field": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking %}<|analysis|>{{ m.thinking }}"
    "<|end|>{% endif %}{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}",
    "content": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}",
}
CALL = {"name": "sit", "arguments": {"on": "mat"}}


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_thought_before_a_call_is_a_thought_and_a_call_in_any_form(folder: Path, name: str) -> None:
    def chat(thought: str, calling: Message) -> dict[str, Any]:
        answer = {"role": "assistant", "content": f"<think>{thought}</think>done"}
        asked = {"role": "user", "content": "q"}
        return {"messages": [asked, calling, {"role": "tool", "content": "ok"}, answer]}

    def sharegpt(text: str) -> dict[str, Any]:
        return chat("ok then", {"from": "function_call", "value": text + json.dumps(CALL)})

    def openai(**said: str) -> dict[str, Any]:
        call = {"type": "function", "function": CALL}
        return chat("ok then", {"role": "assistant", "content": "", **said, "tool_calls": [call]})

    encoder = worker(folder, THOUGHTS[name])
    own = {
        "splits": {"reasoning_content": "a b"},
        "field": {"thinking": "a b"},
        "content": {"content": "<think>a b</think>"},
    }
    row, counts = encoded(encoder, openai(**own[name]))
    assert counts.bad == {}
    assert encoder.tokenizer.decode(row[0]) == encoder.tokenizer.apply_chat_template(
        openai(**own[name])["messages"], chat_template=THOUGHTS[name], tokenize=False
    )
    assert encoded(encoder, sharegpt("<think>a b</think>"))[0] == row
    if name == "splits":
        assert encoded(encoder, openai(content="<think>a b</think>"))[0] == row
    without = encoded(encoder, openai())[0]
    assert [encoded(encoder, sharegpt(text))[0] for text in ("", "<think>\n\n</think>\n\n")] == [without] * 2


# Two templates print a prompt that no document begins with: an answer stands in place of its end.
WITH_PROMPTS = sorted(TEMPLATES.keys() - {"STANDING_PROMPT", "OPEN_CALLS"})


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(WITH_PROMPTS), chats(), st.sampled_from(["learn", "drop"]), st.sampled_from([0.0, 1.0]))
def test_the_prompt_of_an_evaluation_begins_the_document_of_training(
    folder: Path, name: str, record: dict[str, Any], reasoning: str, dropped: float
) -> None:
    *before, _ = record["messages"]
    answer = {"role": "assistant", "content": "a <|im_end|> b"}
    record = {"chat": [*before, {"role": "user", "content": "<|im_end|> or </s>?"}, answer]}
    encoder = worker(
        folder, TEMPLATES[name], columns={"messages": "chat"}, reasoning=reasoning, drop_empty_reasoning=dropped
    )
    (ids, mask, _), _ = encoded(encoder, record)
    if not ids:
        return  # a record that training refuses
    chat_read, number, prompt = encoder.prompt(record)
    assert ids[: len(prompt)] == prompt
    assert (chat_read.messages[number], sum(mask[len(prompt) :]) > 0) == (answer, True)


def test_a_folders_date_is_that_of_all_its_workers_prompts_and_its_fingerprint(folder: Path) -> None:
    record = chat("hello", "the cat")
    first, second = (worker(folder, TEMPLATES["DATED"], chat_date=f"2026-01-0{day}") for day in (1, 2))
    assert first.tokenizer.decode(encoded(first, record)[0][0]).startswith("01 Jan 2026<|im_start|>")
    assert first.tokenizer.decode(first.prompt(record)[2]).startswith("01 Jan 2026<|im_start|>")
    assert first.fingerprint() != second.fingerprint()
    undated = [worker(folder, CHATML, chat_date=f"2026-01-0{day}").fingerprint() for day in (1, 2)]
    assert undated[0] == undated[1]
    assert worker(folder, CHATML).options.chat_date is not None
    assert pickle.loads(pickle.dumps(first.options)).chat_date == "2026-01-01"


@pytest.mark.parametrize("wrong", ["2026-13-01", "20260101", "today"])
def test_a_date_that_is_no_day_is_refused(folder: Path, wrong: str) -> None:
    with refused("chat_date", wrong):
        worker(folder, CHATML, chat_date=wrong)


SAYS_NO_THINK = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking }}"
)


def test_a_records_own_template_arguments_hold_for_it_alone(folder: Path) -> None:
    encoder, told = worker(folder, SAYS_NO_THINK), chat("hello", "the cat")
    texts = []
    for own in (
        *({}, {"enable_thinking": False}, {"enable_thinking": True}, {"chat_template_kwargs": {}}),
        *({"chat_template_kwargs": '{"enable_thinking": false}'}, {"enable_thinking": None}),
    ):
        (ids, _, _), counts = encoded(encoder, {**told, **own})
        texts.append("/nothink" in encoder.tokenizer.decode(ids))
        assert not counts.unused_fields
        assert encoder.prompt({**told, **own})[2] == ids[: len(encoder.prompt({**told, **own})[2])]
    assert texts == [False, True, False, False, True, False]
    assert encoded(worker(folder, CHATML), {**told, "enable_thinking": True})[1].unused_fields == {"enable_thinking": 1}
    for text, value in (("False", False), ("true", True)):  # of a CSV file
        assert (
            encoded(encoder, {**told, "enable_thinking": text})[0]
            == encoded(encoder, {**told, "enable_thinking": value})[0]
        )
    renamed = worker(folder, SAYS_NO_THINK, columns={"enable_thinking": "think"})
    assert encoded(renamed, {**told, "think": False})[0] == encoded(encoder, {**told, "enable_thinking": False})[0]


@pytest.mark.parametrize(
    "own",
    [
        {"enable_thinking": "no"},
        {"enable_thinking": 0, "chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": [1]},
    ],
)
def test_template_arguments_of_a_record_that_cannot_be_used_make_it_bad(folder: Path, own: dict[str, Any]) -> None:
    found = encoded(worker(folder, SAYS_NO_THINK), {**chat("hello", "the cat"), **own})[1]
    assert found.bad == {"bad_template_kwargs": 1}


def test_what_is_encoded_of_a_chat_grows_with_its_length_for_a_tokenizer_without_offsets() -> None:
    encoder, fast = TextEncoder(ByT5Tokenizer(), RecordOptions()), tiny_tokenizer()
    shares = []
    for turns in (50, 400):
        content = parse_record(chat(*(f"word {i} of some" for i in range(turns)))).content
        rendered = locate(ChatTemplate(fast, CHATML, {}), content)
        read: list[int] = []
        ids = encoder.ids(rendered.text)
        count = lambda text, read=read: (read.append(len(text)), encoder.ids(text))[1]  # noqa: E731
        mask = mask_from_prefixes(ids, rendered.text, rendered.spans, count)
        learnt = "".join(rendered.text[a:b] for a, b in rendered.spans)
        assert mask.sum() == len(encoder.ids(learnt))
        shares.append(sum(read) / len(rendered.text))
    assert shares[1] == pytest.approx(shares[0], rel=0.1)
    assert shares[1] < 6
