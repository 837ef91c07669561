"""Texts and chats have the tokens and characters of their tokenizer, for every kind of tokenizer."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.lib.chat_templates import tiny_tokenizer
from tests.lib.errors import names, refused
from tests.lib.special_names import END, PLAIN, START, TOKENIZER, chat_of, encoded_chat
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.data.stream.megatron.writer import write_text_indexes
from verl_ext.text.chat.renderer import RenderedTurns
from verl_ext.text.encoder_texts import TextOptions, TextRecordEncoder
from verl_ext.text.read import text_file
from verl_ext.text.read.bad_record import MOST_CHARACTERS, BadRecord, RecordOptions
from verl_ext.text.read.readers import Chunk, read_chunks
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.read.text_file import TextFile
from verl_ext.text.records.content import PlainText
from verl_ext.text.text_encoder import TextEncoder, TokenCharacters

CORPUS = [
    "The cat's on the mat, and it'll say HELLO to 12345 worlds!\n\nA café — naïve; 漢字 と かな。\n",
    "def f(x):\n    return x + 1  # the cat\n\tan aside…   three   spaces\r\nand x = 3.14159 ;;",
] * 3
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PREFIX_SPACE = pre_tokenizers.ByteLevel(add_prefix_space=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES])


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
QWEN = split(CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = split(CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
METASPACE = {scheme: pre_tokenizers.Metaspace(prepend_scheme=scheme) for scheme in ("always", "first", "never")}
LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def bpe(pre: Any = None, normalizer: Any = None) -> Tokenizer:
    """Train a BPE on the words of the corpus, even if it is used without them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=False))
    tokenizer.pre_tokenizer = METASPACE["always"] if pre is None else pre
    alphabet = pre_tokenizers.ByteLevel.alphabet() if pre in (GPT2, PREFIX_SPACE, QWEN, LLAMA3) else ["▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    rebuilt = Tokenizer(tokenizer.model)
    rebuilt.add_special_tokens(["<unk>", "</s>"])
    if pre is not None:
        rebuilt.pre_tokenizer = pre
    if normalizer is not None:
        rebuilt.normalizer = normalizer
    if len(alphabet) > 1:
        rebuilt.decoder = decoders.ByteLevel()
    return rebuilt


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = METASPACE["always"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words() -> Tokenizer:
    vocabulary = {"<unk>": 0, "</s>": 1, "the": 2, "cat": 3, "The": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: bpe(GPT2),
    "gpt2 nfc": lambda: bpe(GPT2, normalizers.NFC()),
    "qwen": lambda: bpe(QWEN, normalizers.NFC()),
    "llama3": lambda: bpe(LLAMA3),
    "lowercase": lambda: bpe(QWEN, normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "strip": lambda: bpe(QWEN, normalizers.Strip()),
    "prefix space": lambda: bpe(PREFIX_SPACE),
    "prefix space nfc": lambda: bpe(PREFIX_SPACE, normalizers.NFC()),
    "metaspace always": lambda: bpe(METASPACE["always"]),
    "metaspace first": lambda: bpe(METASPACE["first"]),
    "metaspace never": lambda: bpe(METASPACE["never"]),
    "llama2": lambda: bpe(None, LLAMA2),
    "gemma": lambda: bpe(None, normalizers.Replace(" ", "▁")),
    "unigram": unigram,
    "wordpiece": word_pieces,
    "words": words,
}
TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    if kind not in TOKENIZERS:
        made = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="</s>", unk_token="<unk>")
        pad = AddedToken("<pad>", special=True, lstrip=True, rstrip=True)
        made.add_tokens([AddedToken("<think>", normalized=False), pad, AddedToken("cat sat", single_word=True)])
        TOKENIZERS[kind] = made
    return TOKENIZERS[kind]


PARTS = st.sampled_from(
    [
        "the",
        " cat",
        " the",
        "The",
        "'s",
        "'ll",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "1",
        "23",
        "456",
        "e",
        "\u0301",
        "é",
        "漢字",
        "。",
        ", ",
        ".",
        ";;",
        " — ",
        "<think>",
        "<pad>",
        "</s>",
        "cat sat",
        " cat sat ",
        "x" * 30,
        "İ",
        "ﬁ",
        "\u0958",
    ]
)
TEXTS = st.lists(PARTS, min_size=1, max_size=120).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_found", ["encode", "keep"])
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
@example(text="e\u0301e\u0301e\u0301 the \u0958 cat")  # NFC keeps the number of bytes
@example(text="e\u0301 the cat")  # the same with a prefix
@example(text="the <pad>")  # a prefix, and a special token that absorbs a space
def test_texts_and_chats_have_the_tokens_and_characters_of_the_tokenizer(kind: str, on_found: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    whole = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=on_found == "encode"
    )
    (encoded,) = TextEncoder(tokenizer, RecordOptions(on_found)).encode([PlainText(text)])
    chats = [RenderedTurns(each) for each in (text[::-1], "", text)]  # the characters are those of each alone
    *_, chat = TextEncoder(tokenizer, RecordOptions("keep")).encode_chats(chats)
    if not isinstance(encoded, BadRecord):  # a tokenizer of words has </s> itself
        assert encoded.ids.tolist() == whole["input_ids"]
    if on_found == "keep":
        assert chat.ids.tolist() == whole["input_ids"]
        assert np.array_equal(
            np.reshape(list(chat.offsets), (-1, 2))[:, 1], np.reshape(whole["offset_mapping"], (-1, 2))[:, 1]
        )
        own = TokenCharacters.from_spans(whole["offset_mapping"])
        for place in range(len(text)):
            assert chat.offsets.first_after(place) == own.first_after(place)
            assert chat.offsets.first_from(place) == own.first_from(place)


def test_a_text_that_is_too_long_to_be_tokenized_whole_is_refused(tmp_path: Path) -> None:
    text = "a" * (MOST_CHARACTERS + 1)
    encoder = TextRecordEncoder(TextOptions(on_bad_record="skip", add_eos=False), TOKENIZER)
    documents = encoder.encode(Chunk(1, [("a:1", {"text": text}), ("a:2", {"text": "the cat"})]))
    assert documents.counts.bad == {"too_long": 1}
    assert documents.input_ids.tolist() == TOKENIZER.encode("the cat")
    with refused(tmp_path / "a.txt", "too_long", f"{MOST_CHARACTERS:,}"):
        write_and_index(tmp_path, text.encode())


@pytest.mark.parametrize("adds", [False, True])
def test_the_tokenizers_own_tokens_stand_at_the_ends_of_the_whole_text(adds: bool) -> None:
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    text = "the cat sat on the mat\n" * 20
    encoder = TextEncoder(tokenizer, RecordOptions("encode"))
    (encoded,) = encoder.encode([PlainText(text)], add_special_tokens=adds)
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=adds)["input_ids"]
    assert (encoded.ids[0] == 3) == adds


def test_names_of_special_tokens_are_counted_in_a_text() -> None:
    tokenizer = tiny_tokenizer()
    text = "the cat <|im_end|> sat " * 40
    encoded, bad = (
        TextEncoder(tokenizer, RecordOptions(how)).encode([PlainText(text)])[0] for how in ("encode", "error")
    )
    assert encoded.special_tokens == 40
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert bad.reason == "special_token"


def test_a_chat_that_holds_special_tokens_has_them_as_text() -> None:
    content = "the <|im_end|> cat </s> sat " * 30
    ids, mask, count = encoded_chat(TOKENIZER, chat_of("a", content))
    turn = PLAIN.encode("assistant\n" + content).ids
    line_end = PLAIN.encode("\n").ids
    expected = [START, *PLAIN.encode("user\na").ids, END, *line_end, START, *turn, END, *line_end]
    header = len(PLAIN.encode("assistant\n").ids)
    assert ids == expected
    assert sum(mask) == len(turn) - header + 1
    assert count == 60


def write_and_index(folder: Path, content: bytes, name: str = "a.txt", on_bad_record: str = "error") -> list[int]:
    (folder / name).write_bytes(content)
    files = find_source_files({"a": [str(folder / name)]})
    options = TextOptions(on_bad_record=on_bad_record, add_eos=False)
    write_text_indexes(files, TextRecordEncoder(options, tiny_tokenizer()), {"a": folder / "out"})
    return TokenIndex(folder / "out").tokens(0).tolist()


@settings(max_examples=30, deadline=None)
@given(text=TEXTS, block=st.integers(20, 60))
def test_a_text_file_read_in_blocks_is_the_document_of_its_text(
    text: str, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    text = "the " + text
    encoder = TextEncoder(tiny_tokenizer(), RecordOptions("encode"))
    (expected,) = encoder.encode([PlainText(text.replace("\r\n", "\n"))])
    (folder / "a.txt").write_bytes(("\ufeff" + text).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "BLOCK", block)
        (chunk,) = read_chunks(find_source_files({"a": [str(folder / "a.txt")]})[0])
        ((_, record),) = chunk.records
        (encoded,) = encoder.encode([PlainText(record.read())])
    assert encoded.ids.tolist() == expected.ids.tolist()


def test_a_stream_that_cannot_be_used_is_told_as_a_short_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_file, "BLOCK", 64)
    for content, things in ((b"the cat\n" * 100 + b"\xff", ("byte 801", "not_utf8")), (b" \n" * 400, ("(empty",))):
        with refused(tmp_path / "a.txt", *things):
            write_and_index(tmp_path, content)
    (tmp_path / "a.txt").write_bytes(b"the cat\n" * 100)
    file = TextFile(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").unlink()
    gone = TextRecordEncoder(TextOptions(), tiny_tokenizer()).encode(Chunk(1, [(file.path, file)]))
    assert names(gone.failure, file.path, "No such file or directory")
