"""Tokenizers that `verl-ext init-model` trains: their text, their tokens, and refusals."""

import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.lib.errors import refused
from verl_ext.commands.command_line import read_options
from verl_ext.options import DataError, UsageError
from verl_ext.text.read import text_file
from verl_ext.tools.init_model.command import InitModelOptions, init_model
from verl_ext.tools.init_model.tokenizer import CHATML_TEMPLATE, TokenizerOptions, TrainingText, trained_tokenizer

SENTENCES = ["low lower lowest", "new newer newest", "wide wider widest"] * 30


def read(*paths: Path, text_key: str = "text") -> list[str]:
    return [text for text in TrainingText([str(path) for path in paths], text_key) if text]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_text_files_and_records_and_chats_are_read_in_order(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]}
    (tmp_path / "a.txt").write_text("\ufeffone\r\ntwo\n", encoding="utf-8")
    write_lines(tmp_path / "b.jsonl", {"text": "three"}, chat, {"text": ""})
    assert read(tmp_path / "a.txt", tmp_path / "b.jsonl") == ["one\ntwo\n", "three", "Question", "Answer"]
    write_lines(tmp_path / "c.jsonl", {"content": "four", "text": "not this"})
    assert read(tmp_path / "c.jsonl", text_key="content") == ["four"]


def test_compressed_text_is_read_as_the_plain_text_is(tmp_path):
    content = "".join(f"line {number}\n" for number in range(1000)).encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    (tmp_path / "b.TXT.XZ").write_bytes(lzma.compress(content))
    assert "".join(read(tmp_path / "a.txt.gz")) == "".join(read(tmp_path / "b.TXT.XZ")) == content.decode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content)[:-9])
    with refused(tmp_path / "a.txt.gz", error=DataError):
        read(tmp_path / "a.txt.gz")


@given(text=st.text(st.sampled_from("ab\n é漢🙂"), min_size=1, max_size=60), block=st.integers(1, 9), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_blocks_are_the_text_and_end_with_lines_and_a_byte_that_is_no_utf8_is_named(text, block, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "BLOCK", block)
        path.write_text(text, encoding="utf-8")
        blocks = read(path)
        path.write_bytes(text.encode() + ("漢".encode()[:2] if cut else b"\xff\n tail"))
        with refused(path, f"byte {len(text.encode()) + 1}", error=DataError):
            read(path)
    assert "".join(blocks) == text
    assert all(part.endswith("\n") or len(part.encode()) >= block - 3 for part in blocks[:-1])


@pytest.mark.parametrize(
    ("line", "things"),
    [
        (b'{"text": 3}', ("text", "int")),
        (b'{"txt": "a", "id": 1}', ("text (tokenizer.text_key)", "txt, id")),
        (b'{"text": "a"', ("malformed",)),
        (b'{"text": "\xff"}', ("malformed", "UTF-8 at byte 11")),
        (b"[1]", ("object", "list")),
    ],
)
def test_a_record_without_text_is_named_with_its_line(line, things, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    with refused(f"{tmp_path / 'a.jsonl'}:1", *things, error=DataError):
        read(tmp_path / "a.jsonl")


def trained(texts: Iterable[str], **options: object) -> PreTrainedTokenizerFast:
    return trained_tokenizer(texts, TokenizerOptions(**{"vocab_size": 300, **options}))


def test_the_same_text_trains_the_same_tokenizer_however_it_is_cut():
    joined = ["\n".join(SENTENCES[:45]), *SENTENCES[45:]]
    whole, *others = (trained(texts)._tokenizer.to_str() for texts in (SENTENCES, iter(SENTENCES), joined))
    assert others == [whole, whole]
    assert whole != trained(SENTENCES, vocab_size=270)._tokenizer.to_str()


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(text):
    tokenizer = trained(SENTENCES)._tokenizer
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_are_never_cut():
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "special_tokens": ["<tool>"]}
    tokenizer = trained(SENTENCES, **named, vocab_size=270)
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["<s>", "<|im_start|>", "<|im_end|>", "</s>", "<tool>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", None)
    assert tokenizer("low<tool></s>", add_special_tokens=False).input_ids[-2:] == [4, 3]
    assert len(tokenizer) == 270


def test_chat_templates_are_chatml_a_file_or_none(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    told = [{"role": "user", "content": "low"}]
    named = ("chatml", str(tmp_path / "mine.jinja"), None)
    chatml, mine, none = (trained(SENTENCES, chat_template=template) for template in named)
    assert chatml.chat_template == CHATML_TEMPLATE
    assert chatml.apply_chat_template(told, tokenize=False) == "<|im_start|>user\nlow<|im_end|>\n"
    assert mine.apply_chat_template(told, tokenize=False) == "low!"
    assert none.chat_template is None
    (tmp_path / "broken.jinja").write_text("{{ x")
    with refused("tokenizer.chat_template", f"{tmp_path}/broken.jinja, line 1", error=UsageError):
        trained(SENTENCES, chat_template=str(tmp_path / "broken.jinja"))


def test_a_text_too_small_for_the_vocabulary_is_said_with_the_size_that_came_out(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(SENTENCES))
    options = [f"output_dir={tmp_path / 'out'}", f"tokenizer.train_on={tmp_path}/*.txt", "tokenizer.vocab_size=1000"]
    told = init_model(read_options(InitModelOptions, ["model=tiny", "config.num_hidden_layers=1", *options]))
    size = json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"]
    assert 259 < size < 1000
    assert f"note: the text has pairs to merge for {size} tokens, not for tokenizer.vocab_size=1,000" in told


@pytest.mark.parametrize(
    ("options", "things"),
    [
        (["tokenizer.vocab_size=258"], ("tokenizer.vocab_size", 259, 258)),
        (["tokenizer.chat_template=no.jinja"], ("tokenizer.chat_template", "no.jinja")),
        (["tokenizer.eos_token=''"], ("tokenizer.eos_token", "")),
        (["tokenizer.train_on=[3]"], ("tokenizer.train_on", "[3]")),
        (["tokenizer.train_on=none.txt"], ("tokenizer.train_on", "none.txt")),
        ([], ("tokenizer.train_on", "none")),
    ],
)
def test_a_mistake_in_the_training_is_one_line(options, things, tmp_path):
    (tmp_path / "empty.txt").touch()
    given_options = ["model=tiny", f"output_dir={tmp_path / 'out'}", f"tokenizer.train_on={tmp_path / 'empty.txt'}"]
    with refused(*things):
        init_model(read_options(InitModelOptions, [*given_options, *options]))
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
