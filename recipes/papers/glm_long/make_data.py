"""Write tokenized documents of every length that the two stages ask for, so that their mixtures can be planned.

    python recipes/papers/glm_long/make_data.py --output DIR

writes DIR/original, whose lengths fall off from a few hundred tokens to 900,000, and DIR/artificial, from 8K
to 600,000, about 11M tokens (95 MB) in all. A document repeats one passage of 97 random tokens. The same seed writes
the same data.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from datasets.table import InMemoryTable

VOCABULARY = 1000
PASSAGE = 97

# (shortest, longest, tokens): the lengths are log-uniform over each range
ORIGINAL = (
    (100, 8_192, 1_000_000),
    (8_193, 16_384, 500_000),
    (16_385, 32_768, 500_000),
    (32_769, 65_536, 500_000),
    (65_537, 131_072, 500_000),
    (131_073, 262_144, 600_000),
    (262_145, 524_288, 1_100_000),
    (524_289, 1_048_576, 1_500_000),
)
ARTIFICIAL = tuple((2**power + 1, 2 ** (power + 1), max(500_000, 3 * 2**power)) for power in range(13, 20))


def draw_lengths(ranges: tuple[tuple[int, int, int], ...], rng: np.random.Generator) -> np.ndarray:
    """Return lengths int64[D] in random order: each range has at least one document, and about its number of tokens."""
    lengths = []
    for shortest, longest, tokens in ranges:
        mean = (longest - shortest) / np.log(longest / shortest)
        count = max(round(tokens / mean), 1)
        lengths.append(np.exp(rng.uniform(np.log(shortest), np.log(longest), count)).astype(np.int64))
    return rng.permutation(np.concatenate(lengths))


def write(folder: Path, lengths: np.ndarray, rng: np.random.Generator) -> None:
    """Write a tokenized folder with one category, `text`; every token except a document's first is a target."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    passages = rng.integers(1, VOCABULARY, (len(lengths), PASSAGE), dtype=np.int32)
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(offsets[-1]) - offsets[document]
    is_target = (position > 0).astype(np.int8)
    columns = {
        "input_ids": passages[document, position % PASSAGE],
        "loss_mask": is_target,
        "category_ids": is_target.astype(np.int32),
    }
    rows = pa.array(offsets, pa.int32())
    lists = {column: pa.ListArray.from_arrays(rows, pa.array(values)) for column, values in columns.items()}
    table = pa.table({**lists, "length": pa.array(lengths, pa.int32())})
    Dataset(InMemoryTable(table)).save_to_disk(folder)
    (folder / "categories.json").write_text(json.dumps({"1": "text"}), encoding="utf-8")
    print(f"{folder}: {len(lengths):,} documents of {lengths.min():,} to {lengths.max():,}, {offsets[-1]:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    disable_progress_bars()
    rng = np.random.default_rng(arguments.seed)
    for name, ranges in (("original", ORIGINAL), ("artificial", ARTIFICIAL)):
        write(arguments.output / name, draw_lengths(ranges, rng), rng)


if __name__ == "__main__":
    main()
