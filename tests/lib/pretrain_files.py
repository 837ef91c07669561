"""Text files for pretraining tests, a word tokenizer, and the expected form of a document, built step by step."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_ext.data.stream.megatron.index import IndexWriter

WORDS = 60


def word_tokenizer(bos: bool = True, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """Build a tokenizer: words w0..w59 are ids 4..63, <pad> 0, <bos> 1, <eos> 2. pad is the padding token or None."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(words[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>" if bos else None,
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token=pad,
    )


def text_of(numbers: Iterable[int]) -> str:
    """Return a text of the words with these numbers."""
    return " ".join(f"w{number % WORDS}" for number in numbers)


def texts_of(lengths: Iterable[int]) -> list[str]:
    """Return a text for each length in words; no two begin alike."""
    return [text_of(range(7 * row, 7 * row + length)) for row, length in enumerate(lengths)]


def write_jsonl(path: Path, texts: Sequence[str], key: str = "text") -> str:
    """Write a record for each text to `path`, and make its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def plain_document(tokenizer: PreTrainedTokenizerFast, text: str, max_length: int) -> list[int]:
    """Return BOS, the tokens of the text that fit, and EOS."""
    tokens = tokenizer(
        text, max_length=max_length - 2, truncation=True, add_special_tokens=False, split_special_tokens=True
    )["input_ids"]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return bos + tokens + [tokenizer.eos_token_id]


def plain_row(tokenizer: PreTrainedTokenizerFast, text: str, max_length: int) -> tuple[list[int], list[int]]:
    """Return (input_ids, labels) of one padded row."""
    ids = plain_document(tokenizer, text, max_length)
    padding = max_length - len(ids)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return ids + [pad] * padding, [-100] + ids[1:] + [-100] * padding


def write_index(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    """Write an index of these lists of token ids."""
    prefix.parent.mkdir(exist_ok=True)
    writer = IndexWriter(prefix, np.uint16)
    writer.add(np.concatenate([np.asarray(d, np.uint16) for d in documents]), np.array([len(d) for d in documents]))
    writer.close()
    return str(prefix)
