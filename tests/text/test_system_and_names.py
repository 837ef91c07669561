"""Records read otherwise: a default system prompt, names of roles and message fields, a shortest document."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.chat_templates import CHATML, chat, tiny_tokenizer
from tests.lib.errors import refused
from tests.lib.tokenized_text import made as tokenized
from verl_ext.commands.report import Report
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.options import DataError, UsageError
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.text_file import BLOCK, TextFile
from verl_ext.text.records.message_names import MessageNames
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.preference import Preference
from verl_ext.text.records.records import parse_record

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
OWN = chat("the cat", "sat", system="the mat")


def made(folder: Path, model: Path, sources: dict[str, list[Any]], *options: str) -> tuple[list[str], Report]:
    """Tokenize records by source; return the documents' texts and the report."""
    report = tokenized(folder, model, sources, *options)
    data, tokenizer = TokenizedData([str(folder / "out")], "data"), tiny_tokenizer(CHATML)
    return [tokenizer.decode(data.block(row, row + 1)["input_ids"]) for row in range(len(data))], report


def test_a_default_system_prompt_begins_chats_without_one_and_is_counted(tmp_path: Path, chatml: Path) -> None:
    developer = [{"role": "developer", "content": "the mat"}, *MESSAGES]
    records = [
        {"messages": MESSAGES},
        OWN,
        {"messages": developer},
        {"system": "", "prompt": "the cat", "response": "sat"},
    ]
    records += [{"system": "the mat", "prompt": "the cat", "response": "sat"}, {"text": "the cat"}]
    texts, report = made(tmp_path, chatml, {"a": records}, "system='the dog: [ran]'")
    systems = [text.partition("<|im_start|>user")[0] for text in texts[:5]]
    expected, own = (f"<|im_start|>system\n{text}<|im_end|>\n" for text in ("the dog: [ran]", "the mat"))
    assert systems == [expected, own, own.replace("system", "developer"), expected, own]
    assert "the dog" not in texts[5]
    assert report.total.default_system == 2
    assert "a: the system prompt of `system` begins 2 chats without one of their own" in report.table()
    # What is learnt is what was learnt without it.
    _, without = made(tmp_path / "without", chatml, {"a": records})
    assert report.total.target_tokens == without.total.target_tokens


def test_texts_of_replace_are_filled_in_at_any_depth_before_a_record_is_read_and_counted(
    tmp_path: Path, chatml: Path
) -> None:
    say = {"role": "assistant", "content": "{{NAME}} sat"}
    records = [{"messages": [MESSAGES[0], say]}, {"text": "the {{NAME}} {{name}}"}, {"messages": MESSAGES}]
    texts, report = made(tmp_path, chatml, {"a": records}, "replace={'{{NAME}}':dog}")
    filled, _ = made(tmp_path / "filled", chatml, {"a": json.loads(json.dumps(records).replace("{{NAME}}", "dog"))})
    assert texts == filled
    assert "dog sat" in texts[0]
    assert "dog" in texts[1]
    assert report.total.replaced == 2
    assert "a: texts of `replace` stood in 2 records" in report.table()
    with refused("replace", "{{NAME}}: 3", error=UsageError):
        made(tmp_path / "bad", chatml, {"a": records}, "replace={'{{NAME}}':3}")


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("other", ["C:\\new", 'a "b"', "one\ntwo", "<é>"])
def test_texts_of_replace_are_filled_in_in_messages_that_are_json_text(other: str, is_ascii: bool) -> None:
    messages = [{"role": "user", "content": "the <é>"}, {"role": "assistant", "content": "<é> sat"}]
    texts = {"<é>": other}
    found = parse_record({"messages": json.dumps(messages, ensure_ascii=is_ascii)}, replace=texts)
    assert found.content == parse_record({"messages": messages}, replace=texts).content
    assert found.content.messages[0]["content"] == f"the {other}"
    plain = parse_record({"prompt": "{<é>", "response": '[1,  "<é>"]'}, replace={"<é>": "dog"}).content
    assert [message["content"] for message in plain.messages] == ["{dog", '[1,  "dog"]']


def test_texts_of_replace_are_filled_in_across_the_blocks_of_a_long_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * (2 * BLOCK - 4) + "{{NAME}} ran")
    record = parse_record(TextFile(str(path)), replace={"{{NAME}}": "dog"})
    assert (record.content.text[-8:], record.is_replaced) == ("xdog ran", True)


def test_a_system_prompt_by_category_reaches_its_category_alone(tmp_path: Path, chatml: Path) -> None:
    sources = {"a": [{"messages": MESSAGES}], "b": [{"messages": MESSAGES}], "c": [{"messages": MESSAGES}]}
    texts, report = made(tmp_path, chatml, sources, "system={a: the dog, b: the mat}")
    assert ["the dog" in text for text in texts] == [True, False, False]
    assert ["the mat" in text for text in texts] == [False, True, False]
    assert [counts.default_system for counts in report.categories.values()] == [1, 1, 0]
    kinds = [{"messages": MESSAGES, "kind": kind} for kind in ("x", "y", None)]
    texts, report = made(tmp_path / "kinds", chatml, {"a": kinds}, "category_field=kind", "system={x: the dog, z: no}")
    assert ["the dog" in text for text in texts] == [True, False, False]
    assert "system.z: no record for training has this category" in report.table()


def test_all_answers_of_a_preference_and_prompts_of_evaluations_have_the_default_system_prompt(chatml: Path) -> None:
    content = parse_record({"prompt": "the cat", "chosen": "sat", "rejected": "ran"}, system="the dog").content
    assert isinstance(content, Preference)
    assert [answer.messages[0] for answer in content.answers] == [{"role": "system", "content": "the dog"}] * 2
    assert [answer.targets for answer in content.answers] == [{2: 1.0}] * 2
    options = ChatOptions.read({"model": {"path": str(chatml)}, "system": {"a": "the dog"}})
    encoder = ChatEncoder(options, ["a"])
    _, last, ids = encoder.prompt({"messages": MESSAGES}, "a")
    assert last == 2
    assert "the dog" in encoder.decode(ids)
    assert "the dog" not in encoder.decode(encoder.prompt({"messages": MESSAGES}, "b")[2])
    (shown,) = encoder.shown(json.dumps({"messages": MESSAGES}).encode(), "a")
    assert "the dog" in shown.text


def test_messages_have_other_names_of_fields_and_roles() -> None:
    record = {
        "messages": [
            {"speaker": "CUSTOMER", "says": "the cat", "role": "boss"},
            {"speaker": "Agent", "says": "sat", "learn": 1},
            {"speaker": "ipython", "says": "4"},
            {"speaker": "assistant", "says": "ran"},
        ]
    }
    names = MessageNames(
        {"Customer": "user", "agent": "assistant", "ipython": "tool"},
        {"role": "speaker", "content": "says", "weight": "learn"},
    )
    expected = [("user", "the cat"), ("assistant", "sat"), ("tool", "4"), ("assistant", "ran")]
    for given in (record, {"messages": json.dumps(record["messages"])}):
        content = parse_record(given, names=names).content
        assert isinstance(content, Chat)
        assert [(message["role"], message["content"]) for message in content.messages] == expected
    sharegpt = {"conversations": [{"from": "Customer", "value": "the cat"}, {"from": "Agent", "value": "sat"}]}
    content = parse_record(sharegpt, names=MessageNames(names.roles)).content
    assert isinstance(content, Chat)
    assert [message["role"] for message in content.messages] == ["user", "assistant"]


def test_preferences_of_messages_have_other_names_too() -> None:
    prompt, answers = {"speaker": "Customer", "says": "the cat"}, ("sat", "ran")
    record = {
        "prompt": [prompt],
        **{k: [{"speaker": "Agent", "says": a}] for k, a in zip(("chosen", "rejected"), answers, strict=True)},
    }
    names = MessageNames({"Customer": "user", "Agent": "assistant"}, {"role": "speaker", "content": "says"})
    contents = (
        parse_record(record, names=names),
        parse_record({"prompt": "the cat", "chosen": "sat", "rejected": "ran"}),
    )
    own, plain = ([(chat.messages, chat.targets) for chat in each.content.answers] for each in contents)
    assert own == plain


def test_names_change_no_text_that_is_no_list_of_messages() -> None:
    names = MessageNames({"agent": "assistant"}, {"content": "says"})
    for text in ("[1, 2]", "[the cat]", "agent", '["agent"]'):
        record = {"prompt": text, "response": text}
        assert parse_record(record, names=names) == parse_record(record)


def test_shorter_documents_are_left_out_and_counted_without_ending_the_run(tmp_path: Path, chatml: Path) -> None:
    records = [{"text": "the"}, {"text": "the cat sat on the mat " * 9}, {"messages": MESSAGES}]
    records += [{"prompt": "the cat", "chosen": "sat " * 40, "rejected": "ran"}]
    texts, report = made(tmp_path, chatml, {"a": records}, "min_tokens=30")
    assert len(texts) == 1
    assert report.total.bad == {"too_short": 3}
    assert report.total.end_of_turn == {}  # of what is left out nothing is counted
    assert "tokens, and min_tokens is 30" in report.total.examples["too_short"][0]
    length = report.total.tokens
    assert made(tmp_path / "as_long", chatml, {"a": records}, f"min_tokens={length}")[1].total.documents == 1
    with pytest.raises(DataError, match="no record could be used"):
        made(tmp_path / "longer", chatml, {"a": records}, f"min_tokens={length + 1}")


@pytest.mark.parametrize(
    ("option", "things"),
    [
        ("system=[a]", ("system", "['a']")),
        ("system=' '", ("system", "got  ")),
        ("system={a: 3}", ("system.a", 3)),
        ("system={b: the cat}", ("system.b", "sources (a)", "b")),
        ("roles={agent: asistant}", ("roles.agent", "asistant", "nearest: assistant")),
        ("roles={Agent: user, agent: tool}", ("roles", "Agent, agent")),
        ("message_columns={contents: says}", ("message_columns", "contents", "nearest: content")),
        ("message_columns={content: 3}", ("message_columns.content", 3)),
    ],
)
def test_a_mistake_names_its_key(tmp_path: Path, chatml: Path, option: str, things: tuple[Any, ...]) -> None:
    with refused(*things, error=UsageError):
        made(tmp_path, chatml, {"a": [OWN]}, option)


def test_each_option_changes_the_digest_of_tokenized_folders(chatml: Path) -> None:
    def digest(**options: Any) -> str:
        return ChatEncoder(ChatOptions.read({"model": {"path": str(chatml)}, **options}), ["a"]).fingerprint()

    given = [{"system": "a"}, {"system": {"a": "a"}}, {"min_tokens": 2}, {"roles": {"x": "user"}}]
    given += [{"message_columns": {"role": "x"}}, {}]
    assert len({digest(**options) for options in given}) == len(given)
