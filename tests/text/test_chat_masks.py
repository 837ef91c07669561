"""Whole chats as tokens: ids and masks equal each template's reference; a chat is rendered only a few times."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.lib.chat_templates import (
    CHATML,
    GENERATION,
    HEADERS,
    HEADERS_ONLY,
    INSTRUCT_CALLS,
    LEFT_OPEN,
    NO_GENERATION_PROMPT,
    OTHER_LAST_END,
    RESULTS_INSIDE,
    STRIPS_THINKING,
    chat,
    tiny_tokenizer,
)
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import Chunk
from verl_ext.text.records.records import parse_record
from verl_ext.text.tokens.documents import Documents

TOKENS = ("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<call>", "</call>")
Message = dict[str, Any]
Parts = Iterator[tuple[str, bool]]  # a template's printed parts in order, and whether each is a target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(CHATML, special_tokens=TOKENS).save_pretrained(path)
    return path


@functools.cache
def chunk_tokenizer(folder: Path, template: str) -> ChatEncoder:
    options = ["sources={chat:in.jsonl}", "output_dir=out", f"model.path={folder}", "special_tokens_in_text=keep"]
    return ChatEncoder(replace(read_options(TokenizeOptions, options), chat_template=template))


def tokenized(folder: Path, template: str, record: dict[str, Any]) -> Documents:
    return chunk_tokenizer(folder, template).encode(Chunk(1, [("in.jsonl:1", record)]))


def called(message: Message) -> str:
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return "".join(f"<call>{f['name']} {json.dumps(f['arguments'], ensure_ascii=False)}</call>" for f in calls)


def headers(messages: list[Message]) -> Parts:
    for message in messages:
        is_learnt = message["role"] == "assistant"
        yield f"<|im_start|>{message['role']}\n", False
        yield message["content"] + called(message) + "<|im_end|>", is_learnt
        yield "\n", False


def left_open(messages: list[Message]) -> Parts:
    for number, message in enumerate(messages, start=1):
        is_last = number == len(messages)
        yield f"<|im_start|>{message['role']}\n", False
        # The template leaves the last turn open, and an assistant's is ended as those before it are.
        is_open = is_last and message["role"] != "assistant"
        yield message["content"] + ("" if is_open else "<|im_end|>"), message["role"] == "assistant"
        yield "" if is_last else "\n", False


def headers_only(messages: list[Message]) -> Parts:
    for message in messages:
        yield f"<|{message['role']}|>\n", False
        yield message["content"], message["role"] == "assistant"


def other_last_end(messages: list[Message]) -> Parts:
    for number, message in enumerate(messages, start=1):
        yield f"<|im_start|>{message['role']}\n", False
        is_last = number == len(messages) and message["role"] == "assistant"
        yield message["content"] + ("<|endoftext|>" if is_last else "<|im_end|>"), message["role"] == "assistant"
        yield "\n", False


def instruct_calls(messages: list[Message]) -> Parts:
    yield "<s>", False
    for message in messages:
        before, after = {"user": ("[INST] ", " [/INST]"), "tool": ("[RESULT]", "[/RESULT]")}.get(message["role"], "  ")
        if message["role"] != "assistant":
            yield before + message["content"] + after, False
        elif calls := [call["function"] for call in message.get("tool_calls", ())]:
            yield "[CALLS]" + json.dumps(calls, ensure_ascii=False) + "</s>", True
        else:
            yield message["content"] + "</s>", True


def results_inside(messages: list[Message]) -> Parts:
    for message in messages:
        if message["role"] == "tool":
            continue
        is_learnt = message["role"] == "assistant"
        yield f"<|im_start|>{message['role']}\n", False
        if calls := called(message):
            yield calls, True
            yield "".join(f"<result>{m['content']}</result>" for m in messages if m["role"] == "tool"), False
        # After results, an empty turn has no further targets.
        yield message["content"] + "<|im_end|>", is_learnt and bool(message["content"].strip() or not calls)
        yield "\n", False


WORDS = [
    "the",
    "cat",
    " ",
    "  ",
    "\n",
    "\n\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "é",
    "中",
    "😀",
    "0",
    ":",
    "</",
    "assistant\n",
]
WORDS += ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "[/INST]", "[CALLS][", "<call>", "</call>", "<result>", "{{"]
words = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
said = words.filter(str.strip)
empty_or_said = st.just("") | said
calls = st.lists(st.tuples(st.sampled_from(["sit", "look"]), st.dictionaries(st.sampled_from("ab"), words)), max_size=2)


@st.composite
def plain_chats(draw: st.DrawFn) -> list[Message]:
    pairs = draw(st.lists(st.tuples(empty_or_said, said), min_size=1, max_size=3))
    return chat(*(text for pair in pairs for text in pair))["messages"]


@st.composite
def agent_chats(draw: st.DrawFn, results: st.SearchStrategy[str] = empty_or_said) -> list[Message]:
    """Draw plain turns, a turn that makes calls, their results, often an answer to these, and plain turns again."""
    before, after = draw(plain_chats()), draw(plain_chats())
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in draw(calls)]
    if not made:
        return before + after
    calling = {"role": "assistant", "content": draw(words), "tool_calls": made}
    told = [{"role": "tool", "content": draw(results)} for _ in made]
    answers = [{"role": "assistant", "content": draw(said)}] if draw(st.booleans()) else []
    return [*before, {"role": "user", "content": draw(empty_or_said)}, calling, *told, *answers, *after]


def check_against_reference(folder: Path, template: str, messages: list[Message], parts: Parts) -> None:
    tokenizer = chunk_tokenizer(folder, template).tokenizer
    texts, is_learnt = zip(*parts, strict=True)
    text = "".join(texts)
    printed = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert text in (printed, printed + "<|im_end|>" * (template == LEFT_OPEN))
    learnt = [flag for part, flag in zip(texts, is_learnt, strict=True) for _ in part]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A token is a target if any part of it is; a document's first token has nothing before it.
    expected = [int(any(learnt[a:b])) for a, b in encoded["offset_mapping"]]
    expected[0] = 0
    result = tokenized(folder, template, {"messages": messages})
    assert result.input_ids.tolist() == encoded["input_ids"]
    assert result.loss_mask.tolist() == expected


@settings(max_examples=100)
@given(messages=plain_chats(), kind=st.sampled_from([0, 1, 2, 3, 4]))
def test_of_any_words_the_assistants_and_their_end_are_learnt(folder: Path, messages: list[Message], kind: int) -> None:
    template, reference = [
        (CHATML, headers),
        (GENERATION, headers),
        (LEFT_OPEN, left_open),
        (HEADERS_ONLY, headers_only),
        (OTHER_LAST_END, other_last_end),
    ][kind]
    check_against_reference(folder, template, messages, reference(messages))


@settings(max_examples=100)
@given(messages=agent_chats(), kind=st.sampled_from([0, 1, 2]))
def test_of_any_calls_and_results_the_calls_are_learnt_whole(folder: Path, messages: list[Message], kind: int) -> None:
    template, reference = [
        (HEADERS, headers),
        (HEADERS.replace("add_generation_prompt", "never"), headers),
        (INSTRUCT_CALLS, instruct_calls),
    ][kind]
    check_against_reference(folder, template, messages, reference(messages))


@settings(max_examples=60)
@given(messages=agent_chats(results=said))
def test_any_results_inside_the_assistants_turn_are_not_learnt(folder: Path, messages: list[Message]) -> None:
    check_against_reference(folder, RESULTS_INSIDE, messages, results_inside(messages))


def joining_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes, END, and the tokens ":a" and "z\\n", with the newline in its printable form."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, ":a", "zĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(":", "a"), ("z", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="END")


@pytest.fixture(scope="module")
def joining_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("joining")
    joining_tokenizer().save_pretrained(path)
    return path


JOINS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
JOINS_AFTER = "{% for m in messages %}{{ m.role }}={{ m.content }}\n{% endfor %}"
BORDERS = [  # the targets, and how many of their tokens hold template text other than white space
    (JOINS, ("a", "cat", "b", "bat"), "catENDbatEND", 0),
    (JOINS, ("b", "a cat", "b", "cat", "b", "at"), ":a catENDcatEND:atEND", 2),
    (JOINS_AFTER, ("z", "cat", "b", "z"), "catz\n", 0),
]


@pytest.mark.parametrize(("template", "contents", "learnt"), [border[:3] for border in BORDERS])
def test_a_token_of_the_template_and_of_the_content_is_learnt(
    joining_folder: Path, template: str, contents: tuple[str, ...], learnt: str
) -> None:
    record, tokenizer = chat(*contents), chunk_tokenizer(joining_folder, template).tokenizer
    result = tokenized(joining_folder, template, record)
    assert tokenizer.decode(result.input_ids[result.loss_mask == 1].tolist()) == learnt
    whole = tokenizer.apply_chat_template(record["messages"], chat_template=template, return_dict=True)
    assert result.input_ids.tolist() == whole["input_ids"]


@pytest.mark.parametrize(("template", "contents", "border_tokens"), [(t, c, count) for t, c, _, count in BORDERS])
def test_tokens_of_the_template_and_of_the_content_are_counted(
    joining_folder: Path, template: str, contents: tuple[str, ...], border_tokens: int
) -> None:
    assert tokenized(joining_folder, template, chat(*contents)).counts.border_tokens == border_tokens


def turns(number: int) -> dict[str, Any]:
    return chat(*(f"word {i}" for i in range(number)))


def agent_turns(number: int) -> dict[str, Any]:
    """Return a question, calls with their results, and an answer."""
    record = chat("sit", "ok")
    for i in range(number // 2 - 1):
        call = {"name": ("sit", "look")[i % 2], "arguments": {"on": f"mat {i}"}}
        calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        record["messages"][-1:-1] = [calling, {"role": "tool", "content": f"result {i}"}]
    return record


def renders(template: str, record: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of template calls for a chat, and the chat's targets."""
    runs = []
    counted = "{% set counted = count_run() %}" + template
    tokenizer = tiny_tokenizer(counted, special_tokens=TOKENS)
    chat_template = ChatTemplate(tokenizer, None, {"count_run": lambda: runs.append(1)})
    content = parse_record(record).content
    runs.clear()
    found = locate(chat_template, content)
    return len(runs), [found.text[target.start : target.stop] for target in found.targets]


@pytest.mark.parametrize(
    "template", [CHATML, GENERATION, STRIPS_THINKING, NO_GENERATION_PROMPT, LEFT_OPEN, HEADERS_ONLY]
)
def test_a_longer_chat_is_rendered_as_often_as_a_short_one(template: str) -> None:
    few, _ = renders(template, turns(10))
    assert few <= 6
    assert [renders(template, turns(number))[0] for number in (100, 1000)] == [few, few]


@pytest.mark.parametrize("template", [HEADERS, HEADERS.replace("add_generation_prompt", "never"), INSTRUCT_CALLS])
def test_a_longer_chat_of_calls_is_rendered_as_often_as_a_short_one(template: str) -> None:
    few, _ = renders(template, agent_turns(10))
    assert few <= 8
    assert [renders(template, agent_turns(number))[0] for number in (100, 1000)] == [few, few]


REASONS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.FIELD %}<think>{{ m.FIELD }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_printed_as_this_transformers_prints_it(given: str, read: str) -> None:
    """From 5.24 on, a template gets it by other names than the record's too."""
    tokenizer = tiny_tokenizer(REASONS.replace("FIELD", read), special_tokens=TOKENS)
    record = chat("word", "answer")
    record["messages"][1][given] = "why"
    text = ChatTemplate(tokenizer, None, {}).text(parse_record(record).content)
    assert text == tokenizer.apply_chat_template(record["messages"], tokenize=False)
    assert ("why" in text) or given != read


def test_a_template_with_generation_blocks_may_print_the_date() -> None:
    tokenizer = tiny_tokenizer("{{ strftime_now('%Y') }} " + GENERATION, special_tokens=TOKENS)
    found = locate(ChatTemplate(tokenizer, None, {}, today="2031-05-06"), parse_record(chat("word", "answer")).content)
    assert found.text.startswith("2031 ")
    assert found.text[found.targets[0].start :].startswith("answer")


CALL_IDS = HEADERS.replace("</call>", " {{ c.id }}</call>")
RESULT_IDS = HEADERS.replace("{{ m.content }}", "{{ m.content }} {{ m.tool_call_id or '' }}")
COUNTED_IDS = "{% for m in messages if m.tool_call_id and m.tool_call_id | length != 9 %}X{% endfor %}" + RESULT_IDS


@pytest.mark.parametrize("prompt", ["add_generation_prompt", "never"])
@pytest.mark.parametrize("template", [CALL_IDS, RESULT_IDS, COUNTED_IDS])
def test_calls_and_results_whose_ids_follow_their_words_are_rendered_as_often_in_a_longer_chat(
    template: str, prompt: str
) -> None:
    counts = []
    for number in (10, 100, 1000):
        record = agent_turns(number)
        for i, message in enumerate(record["messages"]):
            for call in message.get("tool_calls", ()):
                call["id"] = f"call{i:05}"
            if message["role"] == "tool":
                message["tool_call_id"] = f"call{i - 1:05}"
        counts.append(renders(template.replace("add_generation_prompt", prompt), record)[0])
    assert counts[1:] == counts[:-1]


def test_every_turn_of_five_thousand_is_found() -> None:
    few, found = renders(CHATML, turns(5000))
    assert few <= 6
    assert found == [f"word {i}<|im_end|>" for i in range(1, 5000, 2)]
    few, found = renders(HEADERS, agent_turns(5000))
    assert few <= 8
    assert found[2:-1:97] == [
        f'<call>{("sit", "look")[i % 2]} {{"on": "mat {i}"}}</call><|im_end|>' for i in range(2, 2499, 97)
    ]
    assert len(found) == 2500


def test_words_marked_in_their_middle_do_not_share_what_follows_the_mark() -> None:
    # The template tests how messages begin and end, so that only their middle can be marked.
    asks = (
        "{% for m in messages %}{% set said = m.content %}"
        "{% if said.startswith('<') and said.endswith('>') %}#{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    record = chat("<hello>", "the cat", "<another one>", "sat on the mat", "<x>", "ok")
    rendered = locate(ChatTemplate(tiny_tokenizer(asks), None, {}), parse_record(record).content)
    learnt = [rendered.text[start:stop] for start, stop in rendered.spans]
    assert learnt == ["the cat<|im_end|>", "sat on the mat<|im_end|>", "ok<|im_end|>"]
