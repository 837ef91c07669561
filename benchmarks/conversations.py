"""Conversations of made-up words for the readers of loading.py, as JSONL, parquet and tokenized data."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerFast

from verl_ext.tools.init_model.tokenizer import TokenizerOptions, trained_tokenizer

WORDS = 3000
TOKENIZER = 4096  # vocabulary size
# ChatML without the newline after a turn's end, which verl trains on and we do not: all readers must agree.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Kind:
    """Conversations of one shape: the words of each turn (user, assistant, …) and the max_tokens of a pack."""

    name: str
    words: tuple[tuple[int, int], ...]
    max_tokens: int


CHATS = Kind("chats", ((8, 60),) * 4, 8192)
LONG = Kind("long documents", ((6_600, 24_000), (200, 600)), 32_768)


def make_conversations(kind: Kind, count: int, rng: np.random.Generator) -> list[Conversation]:
    """Make ``count`` conversations of words whose frequencies follow Zipf's law, as in a language."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = ["".join(rng.choice(letters, rng.integers(3, 9))) for _ in range(WORDS)]
    share = 1 / np.arange(1, WORDS + 1)
    share /= share.sum()

    def turn(index: int) -> dict[str, str]:
        words = rng.choice(vocabulary, rng.integers(*kind.words[index]), p=share)
        return {"role": "assistant" if index % 2 else "user", "content": " ".join(words)}

    return [[turn(index) for index in range(len(kind.words))] for _ in range(count)]


@dataclass(frozen=True)
class Corpus:
    """One kind's conversations in every contestant's form."""

    kind: Kind
    parquet: Path
    tokenized: Path
    tokenizer: PreTrainedTokenizerFast


def write_conversations(conversations: list[Conversation], folder: Path) -> tuple[Path, PreTrainedTokenizerFast]:
    """Write the conversations as a JSONL file, and a tokenizer trained on them beside it as `tokenizer`."""
    lines = folder / "conversations.jsonl"
    lines.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    texts = (message["content"] for messages in conversations for message in messages)
    tokenizer = trained_tokenizer(texts, TokenizerOptions(vocab_size=TOKENIZER, bos_token=None))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    return lines, tokenizer


def write_corpus(kind: Kind, count: int, folder: Path, seed: int) -> Corpus:
    """Write conversations below ``folder`` with a tokenizer trained on them, and run `verl-ext tokenize` on them."""
    from verl_ext.commands.command_line import read_options
    from verl_ext.commands.tokenize import TokenizeOptions, tokenize

    folder.mkdir(parents=True)
    conversations = make_conversations(kind, count, np.random.default_rng(seed))
    lines, tokenizer = write_conversations(conversations, folder)
    pd.DataFrame({"messages": conversations}).to_parquet(folder / "conversations.parquet")
    command = [f"sources={{made_up:{lines}}}", f"output_dir={folder / 'tokenized'}", "num_workers=1"]
    tokenize(read_options(TokenizeOptions, [*command, f"model.path={folder / 'tokenizer'}"]))
    return Corpus(kind, folder / "conversations.parquet", folder / "tokenized", tokenizer)
