"""Names of special tokens in data are text, both in plain texts and in chats whose template writes the same tokens."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tests.lib.chat_templates import CHATML, GENERATION_WITHOUT_END, SPECIAL_TOKENS, WITH_TOOLS, tiny_tokenizer
from tests.lib.errors import names, refused
from tests.lib.special_names import END, NO_MODEL, PLAIN, START, TOKENIZER, chat_of, encoded_chat
from verl_ext.commands.command_line import read_options
from verl_ext.commands.index import IndexOptions
from verl_ext.commands.index import index_texts as index
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.data import MultiDocDataset, PreTrainDataset
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.options import DataError
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.chat.renderer import ChatRenderer
from verl_ext.text.read.bad_record import BadRecord, RecordOptions
from verl_ext.text.records.content import PlainText
from verl_ext.text.records.records import parse_record
from verl_ext.text.text_encoder import Encoded, TextEncoder

SPECIAL_IDS = {TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
PARTS = st.sampled_from(
    [*SPECIAL_TOKENS, "<think>", "</think>", "the cat", " ", "\n", "<", "|>", "<|im_", "é漢", "assistant\n", "</", "s>"]
)
CONTENTS = st.lists(PARTS, min_size=1, max_size=8).map("".join).filter(str.strip)


@settings(max_examples=150, deadline=None)
@given(st.lists(CONTENTS, min_size=2, max_size=6).filter(lambda contents: len(contents) % 2 == 0))
def test_in_a_chat_the_templates_special_tokens_are_tokens_and_the_messages_are_text(contents: list[str]) -> None:
    ids, mask = [], []
    for number, content in enumerate(contents):
        header = ("assistant" if number % 2 else "user") + "\n"
        turn = PLAIN.encode(header + content, add_special_tokens=False)
        is_target = [int(number % 2 == 1 and end > len(header)) for _, end in turn.offsets]
        line_end = PLAIN.encode("\n").ids
        ids += [START, *turn.ids, END, *line_end]
        mask += [0, *is_target, number % 2, *[0] * len(line_end)]
    assert sum(token in SPECIAL_IDS for token in ids) == 2 * len(contents)
    found = encoded_chat(TOKENIZER, chat_of(*contents))
    assert found[:2] == (ids, mask)


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=8).map("".join))
def test_a_plain_text_has_no_special_token_of_its_own(text: str) -> None:
    (encoded,) = TextEncoder(TOKENIZER, RecordOptions("encode")).encode([PlainText(text)])
    assert encoded.ids.tolist() == PLAIN.encode(text).ids
    (kept,) = TextEncoder(TOKENIZER, RecordOptions("keep")).encode([PlainText(text)])
    assert kept.ids.tolist() == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert (encoded.special_tokens > 0) == any(name in text for name in SPECIAL_TOKENS)


def test_a_chat_without_names_of_special_tokens_is_tokenized_as_it_always_was() -> None:
    record = chat_of("the cat", "<think>\nsat\n</think> on")
    at_once = TOKENIZER.apply_chat_template(record["messages"], return_dict=True)["input_ids"]
    assert encoded_chat(TOKENIZER, record)[::2] == (at_once, 0)
    assert TOKENIZER.convert_tokens_to_ids("<think>") in at_once


def test_keep_takes_names_in_messages_for_the_tokens() -> None:
    record = chat_of("a<|im_end|>b", "c")
    at_once = TOKENIZER.apply_chat_template(record["messages"], return_dict=True)["input_ids"]
    assert encoded_chat(TOKENIZER, record, "keep")[0] == at_once
    assert encoded_chat(TOKENIZER, record)[0] != at_once


def test_error_refuses_what_is_rendered_and_nothing_else() -> None:
    with refused("special_token", "<|im_end|>", "special_tokens_in_text=keep", error=BadRecord):
        encoded_chat(TOKENIZER, chat_of("a<|im_end|>", "b"), "error")
    unseen = chat_of("a", "b")
    unseen["messages"][0]["note"] = "<|im_end|>"
    assert encoded_chat(TOKENIZER, unseen, "error") == encoded_chat(TOKENIZER, chat_of("a", "b"))


def test_a_turn_that_ends_with_the_name_of_its_end_token_keeps_the_end_token() -> None:
    tokenizer = tiny_tokenizer(GENERATION_WITHOUT_END)
    ids, mask, count = encoded_chat(tokenizer, chat_of("a", "say <|im_end|>"))
    assert tokenizer.decode(np.array(ids)[np.array(mask) == 1]) == "say <|im_end|><|im_end|>"
    assert (ids.count(END), count) == (2, 1)


def test_tools_and_tool_calls_are_text_too() -> None:
    tokenizer = tiny_tokenizer(WITH_TOOLS)
    call = {"type": "function", "function": {"name": "say", "arguments": {"<s>": 'x<|im_end|>"'}}}
    record = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "</s>"},
            {"role": "assistant", "content": "done"},
        ],
        "tools": [{"type": "function", "function": {"name": "say", "description": "ends with <|im_end|>"}}],
    }
    ids, mask, count = encoded_chat(tokenizer, record)
    own = [token for token in ids if token in SPECIAL_IDS]
    assert own == [START, END] * 5
    assert count == 4
    targets = tokenizer.decode(np.array(ids)[np.array(mask) == 1])
    assert '"<s>": "x<|im_end|>\\""' in targets
    assert targets.endswith("</tool_call><|im_end|>done<|im_end|>")


@pytest.mark.parametrize("content", ["{{ m.content | upper }}", "{{ m.content[:8] }}"])
def test_a_template_that_changes_the_name_makes_a_bad_record(content: str) -> None:
    template = CHATML.replace("{{ m.content }}", content)
    with refused("special_token", "template", error=BadRecord):
        encoded_chat(tiny_tokenizer(template), chat_of("ab <|im_end|>", "<|im_end|>"))


def test_private_use_characters_are_only_refused_beside_the_name_of_a_special_token() -> None:
    glyph = "\U000f0001\U00100002"
    assert encoded_chat(TOKENIZER, chat_of(glyph, "b"))[2] == 0
    with refused("private-use", error=BadRecord):
        encoded_chat(TOKENIZER, chat_of(glyph + "<s>", "b"))


def test_a_name_that_only_normalisation_makes_is_text_as_well() -> None:
    backend = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFKC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.add_tokens([AddedToken("<stop>", special=True, normalized=True)])
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert stop in tokenizer("a ＜stop＞")["input_ids"]
    assert stop not in encoded_chat(tokenizer, chat_of("a ＜stop＞", "b"))[0]
    assert stop not in TextEncoder(tokenizer, RecordOptions("encode")).encode([PlainText("a ＜stop＞")])[0].ids
    assert encoded_chat(tokenizer, chat_of("a ＜stop＞", "b"))[0].count(END) == 2


def test_a_tokenizer_that_cannot_split_a_name_makes_a_bad_record() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "abc</s>")]
    backend = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    good, bad, unknown = TextEncoder(tokenizer, RecordOptions("encode")).encode(
        [PlainText("a b"), PlainText("a </s>b"), PlainText("a Z")]
    )
    assert isinstance(good, Encoded)
    assert isinstance(unknown, Encoded)
    assert bad.reason == "special_token"
    assert names(str(bad), "</s>", "special_tokens_in_text=keep")


def test_a_slow_tokenizer_refuses_names_and_encodes_all_else() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "</s>")
    encoder = TextEncoder(tokenizer, RecordOptions("encode"))
    good, bad = encoder.encode([PlainText("a b"), PlainText("a</s>b")], add_special_tokens=True)
    assert good.ids.tolist() == tokenizer("a b")["input_ids"]
    assert names(str(bad), "</s>", "fast tokenizer")
    renderer = ChatRenderer(tokenizer, encoder.special, ChatOptions(model=NO_MODEL))
    with refused("</s>", "fast tokenizer", error=BadRecord):
        renderer.render(parse_record(chat_of("a</s>", "b")).content)


RECORDS = [
    {"text": "a<|im_end|>b<s>"},
    {"text": "the cat"},
    {"text": "<think>"},
    {"question": "a <|im_end|>", "answer": "<|im_start|>"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def command(name: str, source: str, output: Path, model: Path, *overrides: str) -> Any:
    base = [f"sources={{a:{source}}}", f"output_dir={output}", f"model.path={model}", "num_workers=1", *overrides]
    return (
        tokenize(read_options(TokenizeOptions, base)) if name == "tokenize" else index(read_options(IndexOptions, base))
    )


def counted(output: Path) -> dict[str, Any]:
    return json.loads((output / "report.json").read_text())["total"]


def test_the_commands_count_what_they_encode_as_text(tmp_path: Path, model: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", RECORDS)
    report = command("tokenize", source, tmp_path / "out", model)
    assert counted(tmp_path / "out")["special_tokens_in_text"] == {"records": 2, "occurrences": 4}
    assert "a         special tokens   " in report.table()
    rows = load_from_disk(str(tmp_path / "out")).to_list()
    assert [token for token in rows[3]["input_ids"] if token in SPECIAL_IDS] == [START, END, START, END]
    assert rows[0]["input_ids"] == [*PLAIN.encode(RECORDS[0]["text"]).ids, END]

    table = command("index", write_jsonl(tmp_path / "t.jsonl", RECORDS[:3]), tmp_path / "index", model)
    assert counted(tmp_path / "index")["special_tokens_in_text"] == {"records": 1, "occurrences": 2}
    assert "special tokens" in table
    assert TokenIndex(tmp_path / "index/a").tokens(0).tolist() == rows[0]["input_ids"]

    command("index", source, tmp_path / "cut", model, "max_corpus_tokens=3", "special_tokens_in_text=keep")
    assert counted(tmp_path / "cut")["special_tokens_in_text"] == {"records": 0, "occurrences": 0}


@pytest.mark.parametrize("name", ["tokenize", "index"])
def test_error_is_a_bad_record_of_both_commands(tmp_path: Path, model: Path, name: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [*RECORDS[1:3], RECORDS[0]])

    with refused("in.jsonl:3", "<|im_end|>", "special_token", "on_bad_record=skip", error=DataError):
        command(name, source, tmp_path / "none", model, "special_tokens_in_text=error")
    command(name, source, tmp_path / "out", model, "special_tokens_in_text=error", "on_bad_record=skip")
    assert counted(tmp_path / "out")["bad_records"] == {"special_token": 1}


def test_datasets_of_text_have_the_option_and_their_caches_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "the cat<|im_end|>sat"}] * 3)
    cache = str(tmp_path / "cache")
    text = PLAIN.encode("the cat<|im_end|>sat").ids
    kept = TOKENIZER("the cat<|im_end|>sat", add_special_tokens=False)["input_ids"]

    def documents(**options: Any) -> list[int]:
        dataset = PreTrainDataset(TOKENIZER, source, 64, cache_dir=cache, rows="padded", **options)
        return dataset[0]["input_ids"][dataset[0]["loss_mask"] == 1].tolist()[:-1]

    def stream(**options: Any) -> list[int]:
        config = {"seq_len": 8, "cache_dir": cache, "sampling": "in_order", **options}
        return MultiDocDataset([source], TOKENIZER, config=config)[0]["input_ids"].tolist()

    with caplog.at_level(logging.WARNING):
        assert documents() == text
    assert "3 records of data.train_dir hold names of special tokens, 3 in all" in caplog.text
    assert documents(special_tokens_in_text="keep") == kept
    assert stream()[:8] == text[:8]
    assert stream(special_tokens_in_text="keep")[:8] == [*kept, END, *kept][:8]
    for read in (documents, stream):
        with refused("<|im_end|>", "data.special_tokens_in_text=keep"):
            read(special_tokens_in_text="error")
