"""Texts of words from a tiny model's tokenizer, and the stream of their tokens."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

EOS = 2


def random_words(lengths: Iterable[int], seed: int = 0) -> list[str]:
    """Return a text for each number of words, from the words w0..w99."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in rng.integers(0, 100, length)) for length in lengths]


def write_texts(folder: Path, texts: Sequence[str]) -> str:
    """Write a .txt file for each text; the names keep the order."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def write_jsonl(path: Path, texts: Sequence[str]) -> str:
    """Write one {"text": …} a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write a record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def tokens_of(text: str, eos: bool = True) -> list[int]:
    """Return the tiny model's tokens of a text; its word wN is token N + 4."""
    return [int(word[1:]) + 4 for word in text.split()] + [EOS] * eos


def stream_of(texts: Iterable[str], eos: bool = True) -> list[int]:
    """Return the documents one after the other."""
    return [token for text in texts for token in tokens_of(text, eos)]
