"""Texts and conversations of made-up words, by Zipf's law, with trained tokenizers."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from verl_ext.tools.init_model.tokenizer import TokenizerOptions, trained_tokenizer

# ChatML without the newline after a turn's end, which verl trains on and we do not: all readers must agree.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRAINED_ON = 2000  # texts

Conversation = list[dict[str, str]]


class Kind(NamedTuple):
    """The words of each turn, and the max_tokens of a pack."""

    name: str
    words: tuple[tuple[int, int], ...]
    max_tokens: int


CHATS = Kind("chats", ((8, 60),) * 4, 8192)
LONG = Kind("long documents", ((6_600, 24_000), (200, 600)), 32_768)


class Words:
    def __init__(self, count: int, letters: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
        self._rng = rng
        self._words = np.array(["".join(rng.choice(list(letters), rng.integers(*sizes))) for _ in range(count)])
        share = 1 / np.arange(1, count + 1)
        self._share = share / share.sum()

    def text(self, words: int) -> str:
        return " ".join(self._rng.choice(self._words, words, p=self._share))


def make_conversations(kind: Kind, count: int, rng: np.random.Generator) -> list[Conversation]:
    words = Words(3000, "abcdefghijklmnopqrstuvwxyz", (3, 9), rng)
    roles = [("assistant" if turn % 2 else "user", length) for turn, length in enumerate(kind.words)]
    return [
        [{"role": role, "content": words.text(rng.integers(*length))} for role, length in roles] for _ in range(count)
    ]


def write_conversations(conversations: list[Conversation], folder: Path) -> tuple[Path, PreTrainedTokenizerFast]:
    """Write conversations as JSONL, with a trained `tokenizer` beside it."""
    lines = folder / "conversations.jsonl"
    lines.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    texts = [message["content"] for messages in conversations for message in messages]
    tokenizer = trained_tokenizer(texts, TokenizerOptions(vocab_size=4096, bos_token=None))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    return lines, tokenizer


def write_texts(megabytes: float, vocabulary: int, folder: Path, rng: np.random.Generator) -> tuple[Path, list[str]]:
    """Write documents of about 200 words as JSONL, with a trained `tokenizer`."""
    words = Words(20_000, "eeettaaoinshrdlucmfwypvbgkjqxz", (1, 11), rng)
    texts, size = [], 0
    while size < megabytes * 1e6:
        texts.append(words.text(int(rng.lognormal(np.log(170), 0.6)) + 1) + ".\n")
        size += len(texts[-1])
    trained_tokenizer(texts[:TRAINED_ON], TokenizerOptions(vocab_size=vocabulary)).save_pretrained(folder / "tokenizer")
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return lines, texts
