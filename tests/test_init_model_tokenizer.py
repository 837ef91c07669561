"""Tokenizers that `verl-ext init-model` trains: their text, their tokens, and refusals."""

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from verl_ext.commands.command_line import read_options
from verl_ext.text import readers as chunks
from verl_ext.text.tokenizer import check_round_trip, check_tokenizer, read_tokenizer
from verl_ext.tools.init_model.command import InitModelOptions, init_model
from verl_ext.tools.init_model.tokenizer import (
    CHATML_TEMPLATE,
    TokenizerOptions,
    TrainingText,
    train_bpe,
    trained_tokenizer,
)
from verl_ext.values import DataError, UsageError

SENTENCES = ["low lower lowest", "new newer newest", "wide wider widest"] * 30


def read(*paths: Path, text_key: str = "text") -> list[str]:
    return list(TrainingText([str(path) for path in paths], text_key))


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
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read: Compressed file ended"):
        read(tmp_path / "a.txt.gz")


@given(text=st.text(st.sampled_from("ab\n é漢🙂"), max_size=60), block=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_blocks_of_a_text_file_are_its_text_and_end_with_lines(text, block, tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        blocks = read(path)
    assert "".join(blocks) == text
    for part in blocks[:-1]:
        assert part.endswith("\n") or len(part.encode()) >= block - 3


@given(good=st.text(st.sampled_from("ab\né漢🙂"), max_size=20), block=st.integers(1, 9), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_first_byte_that_is_no_utf8_is_named(good, block, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "a.txt"
    path.write_bytes(good.encode() + ("漢".encode()[:2] if cut else b"\xff\n tail"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        with pytest.raises(DataError) as error:
            read(path)
    assert str(error.value) == f"{path}: text must be UTF-8; byte {len(good.encode()) + 1} is not"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"text": 3}', "1: text must be a string; got int"),
        (b'{"txt": "a", "id": 1}', "1: no field text (tokenizer.text_key) and no chat; its fields: txt, id"),
        (b'{"text": "a"', "1: malformed JSON"),
        (b'{"text": "\xff"}', "1: malformed JSON: no UTF-8 at byte 11"),
        (b"[1]", "1: a record must be an object with fields; got list"),
    ],
)
def test_a_record_without_text_is_named_with_its_line(line, told, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError) as error:
        read(tmp_path / "a.jsonl")
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'}:{told}")


def test_the_same_text_trains_the_same_tokenizer_however_it_is_cut():
    whole, pieces = (train_bpe(texts, 300, ["<e>"]) for texts in (SENTENCES, iter(SENTENCES)))
    assert whole.to_str() == pieces.to_str()
    assert whole.to_str() == train_bpe(["\n".join(SENTENCES[:45]), *SENTENCES[45:]], 300, ["<e>"]).to_str()
    assert whole.to_str() != train_bpe(SENTENCES, 270, ["<e>"]).to_str()


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(text):
    tokenizer = train_bpe(SENTENCES, 300, ["<e>"])
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_are_never_cut():
    config = TokenizerOptions(
        bos_token="<s>", eos_token="</s>", pad_token=None, special_tokens=["<tool>"], vocab_size=270
    )
    tokenizer = trained_tokenizer(SENTENCES, config)
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["<s>", "<|im_start|>", "<|im_end|>", "</s>", "<tool>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", None)
    assert tokenizer("low<tool></s>", add_special_tokens=False).input_ids[-2:] == [4, 3]
    assert len(tokenizer) == 270


def test_chat_templates_are_chatml_a_file_or_none(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    told = [{"role": "user", "content": "low"}]
    chatml, mine, none = (
        trained_tokenizer(SENTENCES, TokenizerOptions(chat_template=named, vocab_size=300))
        for named in ("chatml", str(tmp_path / "mine.jinja"), None)
    )
    assert chatml.chat_template == CHATML_TEMPLATE
    assert chatml.apply_chat_template(told, tokenize=False) == "<|im_start|>user\nlow<|im_end|>\n"
    assert mine.apply_chat_template(told, tokenize=False) == "low!"
    assert none.chat_template is None
    (tmp_path / "broken.jinja").write_text("{{ x")
    with pytest.raises(UsageError, match=r"^tokenizer.chat_template must be a Jinja template; got \S+, line 1: "):
        trained_tokenizer(SENTENCES, TokenizerOptions(chat_template=str(tmp_path / "broken.jinja")))


def test_a_text_too_small_for_the_vocabulary_is_said_with_the_size_that_came_out(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(SENTENCES))
    options = [f"output_dir={tmp_path / 'out'}", f"tokenizer.train_on={tmp_path}/*.txt", "tokenizer.vocab_size=1000"]
    told = init_model(read_options(InitModelOptions, ["model=tiny", "config.num_hidden_layers=1", *options]))
    size = json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"]
    assert 259 < size < 1000
    assert f"note: the text has pairs to merge for {size} tokens, not for tokenizer.vocab_size=1,000" in told


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["tokenizer.vocab_size=258"],
            "tokenizer.vocab_size must be at least 259, the 256 bytes and",
        ),
        (["tokenizer.chat_template=no.jinja"], "tokenizer.chat_template must be chatml, a file that exists, or null"),
        (["tokenizer.eos_token=''"], "tokenizer.eos_token must be a text or null; got ''"),
        (["tokenizer.train_on=[3]"], "tokenizer.train_on must be a path, a glob or a list of them; got [3]"),
        (["tokenizer.train_on=none.txt"], "tokenizer.train_on must name files that exist; none.txt does not exist"),
        (["config.vocab_size=300"], "config.vocab_size must be at least the tokenizer's 6,400, or null for as many"),
        ([], "tokenizer.train_on must hold text; got none in"),
    ],
)
def test_a_mistake_in_the_training_is_one_line(options, line, tmp_path):
    (tmp_path / "empty.txt").touch()
    given_options = ["model=tiny", f"output_dir={tmp_path / 'out'}", f"tokenizer.train_on={tmp_path / 'empty.txt'}"]
    with pytest.raises((UsageError, DataError)) as error:
        init_model(read_options(InitModelOptions, [*given_options, *options]))
    assert str(error.value).startswith(line)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def added(text: str, special: bool) -> dict[str, object]:
    return {
        "content": text,
        "special": special,
        **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False),
    }


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gpt_neox", "gemma2", "t5", "bert", "cohere", "llama"])
def test_a_folder_with_only_a_config_has_no_tokenizer(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UsageError, match=rf"^tokenizer\.path must hold a tokenizer; got {tmp_path}[^\n]*$"):
        read_tokenizer(str(tmp_path), "tokenizer.path")


def test_added_tokens_alone_are_no_tokenizer(tmp_path):
    tokens = {"0": added("<|endoftext|>", True), "1": added("begin", True), "2": added("<think>", False)}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": tokens, "eos_token": "<|endoftext|>"}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=re.escape("which has none: only tokens that are no text, <think>, <|end")):
        read_tokenizer(str(tmp_path), "tokenizer.path")


class CharTokenizer(PreTrainedTokenizer):
    """A slow tokenizer of a few characters."""

    def __init__(self, **options: object) -> None:
        self._ids = {"[UNK]": 0, " ": 1, "a": 2}
        super().__init__(unk_token="[UNK]", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: object) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._ids)[index]


class Tiktokens:
    """A vocabulary of bytes, like early tiktoken tokenizers of models, without a list of added tokens."""

    all_special_tokens = ("<|endoftext|>",)

    @property
    def added_tokens_decoder(self) -> dict[int, object]:
        raise NotImplementedError

    def get_vocab(self) -> dict[bytes, int]:
        return {b"<|endoftext|>": 0, b"\xff": 1}


def words_added_to_nothing() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<e>")
    tokenizer.add_tokens(["cat", "漢"])
    return tokenizer


def fast(model: object, **tokens: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **tokens)


@pytest.mark.parametrize(
    "make",
    [
        lambda: trained_tokenizer([], TokenizerOptions(vocab_size=300)),
        lambda: fast(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁a", -2.0)], unk_id=0), unk_token="<unk>"),
        lambda: fast(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"), unk_token="[UNK]"),
        lambda: fast(models.WordLevel({"[UNK]": 0, "[C]": 1, "[=O]": 2}, unk_token="[UNK]"), unk_token="[UNK]"),
        lambda: fast(models.WordLevel({"<note_60>": 0}, unk_token="<note_60>")),
        words_added_to_nothing,
        ByT5Tokenizer,
        CharTokenizer,
        Tiktokens,
    ],
    ids=["bytes", "sentencepiece", "words", "molecules", "notes", "added", "ByT5", "characters", "tiktoken"],
)
def test_no_tokenizer_with_tokens_of_text_is_refused(make):
    check_tokenizer(make(), "folder")


def test_a_tokenizer_that_loses_spaces_or_characters_is_refused(tmp_path: Path) -> None:
    whole = trained_tokenizer([], TokenizerOptions(vocab_size=300))
    check_round_trip(whole, "folder")
    whole.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    named = {**json.loads(settings.read_text()), "tokenizer_class": "LlamaTokenizerFast"}
    settings.write_text(json.dumps(named))
    lost = read_tokenizer(str(tmp_path), "model.path")
    with pytest.raises(UsageError, match="whose LlamaTokenizer makes 'onetwo' of 'one two'"):
        check_round_trip(lost, str(tmp_path))
    no_chinese = fast(models.BPE(vocab={c: i for i, c in enumerate("onetwo ")} | {" ": 6}, merges=[]))
    with pytest.raises(UsageError, match="makes '' of '你好'"):
        check_round_trip(no_chinese, "folder")
