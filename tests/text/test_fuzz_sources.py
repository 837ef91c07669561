"""Random records and randomly damaged files never give a traceback, and never lose written records in silence.

VERL_EXT_FUZZ=50 makes fifty times as many inputs.
"""

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.options import DataError, UsageError
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.json_records import parse_line
from verl_ext.text.read.readers import Chunk, read_chunks
from verl_ext.text.read.sources import find_source_files

TIMES = float(os.environ.get("VERL_EXT_FUZZ", "1"))
FIELDS = [
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "response",
    "completion",
    "prompt",
    "question",
    "answer",
    "text",
    "system",
    "tools",
    "history",
    "loss_weight",
    "weight",
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "type",
    "id",
    "key",
    "train",
    "loss",
]
ROLES = ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "narrator"]
ODD = [
    "",
    " ",
    "\0",
    "\ud800",
    "<|im_end|>",
    "[[",
    '[{"role": "user"}]',
    "nan",
    "\U0001f600",
    "a\u0301\r\n",
    "[" * 2000,
]
ODD_NUMBERS = [0, -1, 1, 0.5, 2**64, 10**300, -0.0, 1e308, True]


def value(draw: random.Random, depth: int = 0) -> Any:
    """Draw any JSON value, most often one that records have."""
    kind = draw.random()
    if kind < 0.45 or depth > 4:
        return draw.choice(["the cat sat", "on the mat", *ROLES, *ODD])
    if kind < 0.6:
        return draw.choice([None, *ODD_NUMBERS])
    if kind < 0.8:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind < 0.9:
        return message(draw, depth + 1)
    return {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def message(draw: random.Random, depth: int) -> dict[str, Any]:
    turn = {"role": draw.choice(ROLES), "content": draw.choice(["the cat", "sat on", value(draw, depth)])}
    extra = {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(draw.choice([0, 0, 0, 1, 2]))}
    return {**turn, **extra}


def record(draw: random.Random) -> Any:
    if draw.random() < 0.05:
        return value(draw)
    made = {draw.choice(FIELDS): value(draw) for _ in range(draw.randrange(1, 5))}
    if draw.random() < 0.5:
        made[draw.choice(["messages", "conversations", "prompt"])] = [
            message(draw, 1) for _ in range(draw.randrange(6))
        ]
    return made


def test_a_random_record_is_tokenized_or_counted_as_bad(tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    base = ["sources.a=a.jsonl", f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model", "on_bad_record=skip"]
    tokenizer = ChatEncoder(read_options(TokenizeOptions, base))
    draw, told = random.Random(0), Counter[str]()
    for _ in range(round(12 * TIMES)):
        lines = [json.dumps(record(draw)).encode() for _ in range(50)]
        result = tokenizer.encode(Chunk(1, [(f"a.jsonl:{number}", line) for number, line in enumerate(lines, start=1)]))
        told.update({"used": len(result.lengths)}, **result.counts.bad)
        assert len(result.lengths) + sum(result.counts.bad.values()) == result.counts.records == len(lines)
        json.dumps(result.counts.as_dict(), ensure_ascii=False).encode()
    assert told["used"]
    assert len(told) > 6


NUMBER = 40
ROWS = [{"id": f"{number}", "text": f"the cat {number} caf\u00e9, " * 3} for number in range(NUMBER)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def separated(delimiter: str) -> bytes:
    rows = [["id", "text"], *(row.values() for row in ROWS)]
    return "".join(delimiter.join(f'"{cell}"' for cell in row) + "\r\n" for row in rows).encode()


def parquet(**options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=15, **options)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PLAIN = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ROWS, indent=0).encode(),
    "b.json": LINES,
    "a.csv": separated(","),
    "a.tsv": separated("\t"),
    "a.txt": LINES,
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
TABLES = {"a.parquet": parquet(), "b.parquet": parquet(compression="zstd", use_dictionary=False)}
FILES = {
    **PLAIN,
    **{name + ending: pack(PLAIN[name]) for name in PLAIN for ending, pack in PACK.items()},
    **{
        f"two.{name}{ending}": pack(PLAIN[name][:900]) + pack(PLAIN[name][900:])
        for name in ("a.jsonl", "a.csv")
        for ending, pack in PACK.items()
    },
    **TABLES,
}


def damaged(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change, insert or remove some bytes, or cut the end off; return the bytes and the kind of damage."""
    at = draw.randrange(len(content))
    how = draw.choice(["changed", "changed", "put in", "taken out", "cut"])
    if how == "cut":
        return content[:at], how
    if how == "taken out":
        return content[:at] + content[at + 1 :], how
    if how == "put in":
        return content[:at] + draw.randbytes(draw.randrange(1, 5)) + content[at:], how
    changed = bytearray(content)
    for place in [at, *(draw.randrange(len(content)) for _ in range(draw.randrange(2)))]:
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed), how


def read(path: Path) -> tuple[int, int]:
    """Return the numbers of records and of bad records."""
    total = bad = 0
    for file in find_source_files({"a": [str(path)]}):
        for chunk in read_chunks(file):
            for place, raw in chunk.records:
                assert place.startswith(str(path))
                total += 1
                try:
                    bad += isinstance(parse_line(raw) if isinstance(raw, bytes) else raw, BadRecord)
                except BadRecord:
                    bad += 1
    return total, bad


def outcomes(
    draw: random.Random, path: Path, whole: bytes, times: int, read_at: Path
) -> Iterator[tuple[str, int, int]]:
    """Yield (damage, records or -1 if the file is refused, bad records) of a number of damaged copies of a file."""
    for _ in range(times):
        content, how = damaged(whole, draw)
        path.write_bytes(content)
        try:
            total, bad = read(read_at)
        except (DataError, UsageError) as error:
            told, total, bad = str(error), -1, 0
        else:
            told = str(read_at)
        assert str(read_at) in told
        assert "\n" not in told
        yield how, total, bad


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_or_has_its_records(tmp_path: Path, name: str) -> None:
    draw, whole, refused = random.Random(name), FILES[name], 0
    path = tmp_path / name
    path.write_bytes(whole)
    written, _ = read(path)
    assert written == (1 if ".txt" in name else NUMBER)
    # Lines that end early, and changed bytes in zstd without a checksum, cannot be detected.
    without_sums = name in PLAIN or name.endswith(".zst")
    for how, total, bad in outcomes(draw, path, whole, round(25 * TIMES), path):
        refused += total < 0
        may_be_fewer = (how == "cut" and name in PLAIN) or (how != "cut" and name.endswith(".zst"))
        assert total < 0 or bad or total == written or may_be_fewer, f"{name}, {how}: {total} of {written}"
    assert refused or without_sums


def test_a_damaged_arrow_folder_is_refused_or_has_its_records(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "whole", num_shards=2)
    draw, refused = random.Random(0), 0
    for file in sorted((tmp_path / "whole").iterdir()):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "a")
        for how, total, bad in outcomes(
            draw, tmp_path / "a" / file.name, file.read_bytes(), round(50 * TIMES), tmp_path / "a"
        ):
            refused += total < 0
            assert total < 0 or bad or total == NUMBER, f"{file.name}, {how}: {total} of {NUMBER}"
    assert refused
