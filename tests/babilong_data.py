"""Files in BABILong's layout, with samples of words from a tiny model's tokenizer."""

import json
from pathlib import Path

import numpy as np


def write_babilong(path: Path, samples: int, words: int, seed: int = 0) -> Path:
    """Write a JSON list of records of about ``words`` words with one-word answers; all lengths differ."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(samples):
        text = " ".join(f"w{word}" for word in rng.integers(20, 100, words + number % 5))
        records.append({"input": text, "question": "w1 w2", "target": f"w{rng.integers(3, 6)}"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records))
    return path
