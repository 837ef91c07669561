"""Tokenizers of text are taken; folders without one, and tokenizers that lose text, are refused."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from tests.lib.errors import refused
from verl_ext.options import UsageError
from verl_ext.text.tokens.tokenizer import check_round_trip, check_tokenizer, read_tokenizer
from verl_ext.tools.init_model.tokenizer import TokenizerOptions, trained_tokenizer


def added(text: str, special: bool) -> dict[str, object]:
    return {
        "content": text,
        "special": special,
        **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False),
    }


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gpt_neox", "gemma2", "t5", "bert", "cohere", "llama"])
def test_a_folder_with_only_a_config_has_no_tokenizer(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with refused("tokenizer.path", tmp_path, error=UsageError):
        read_tokenizer(str(tmp_path), "tokenizer.path")


def test_added_tokens_alone_are_no_tokenizer(tmp_path):
    tokens = {"0": added("<|endoftext|>", True), "1": added("begin", True), "2": added("<think>", False)}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": tokens, "eos_token": "<|endoftext|>"}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused("tokenizer.path", tmp_path, "<think>, <|endoftext|>", error=UsageError):
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
    if type(lost).__name__ == "LlamaTokenizer":
        with refused("LlamaTokenizer", "'onetwo' of 'one two'", error=UsageError):
            check_round_trip(lost, str(tmp_path))
    else:  # newer versions of transformers load the class that suits the file
        check_round_trip(lost, str(tmp_path))
    no_chinese = fast(models.BPE(vocab={c: i for i, c in enumerate("onetwo ")} | {" ": 6}, merges=[]))
    with refused("'' of '你好'", error=UsageError):
        check_round_trip(no_chinese, "folder")
