"""The lowest and the highest token id of indices, read in shares and kept in the cache."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_ext.data.cached_folder import cached_folder, damage
from verl_ext.data.fingerprint import digest, file_facts
from verl_ext.data.megatron import TokenIndex

_FILE = "token_range.json"


def range_part(indices: Sequence[TokenIndex], part: int, parts: int) -> tuple[int, int] | None:
    """(lowest, highest) token id of one of `parts` shares of about as many tokens each; None where it has no token."""
    found = []
    for index in indices:
        ends = np.cumsum(index.lengths, dtype=np.int64)
        edges = np.arange(part, part + 2) * index.num_tokens // parts
        first, last = np.searchsorted(ends, edges, side="right").tolist()
        if part == parts - 1:
            last = index.num_documents
        lowest, highest = index.token_range(first, last)
        if lowest <= highest:
            found.append((lowest, highest))
    if not found:
        return None
    lows, highs = zip(*found, strict=True)
    return min(lows), max(highs)


def cached_range(root: Path, indices: Sequence[TokenIndex]) -> tuple[int, int] | None:
    """What `keep_range` kept of exactly these files; None for nothing."""
    folder = root / _name(indices)
    if damage(folder) is not None:
        return None
    try:
        lowest, highest = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return int(lowest), int(highest)
    except (OSError, ValueError, TypeError):
        return None


def keep_range(root: Path, indices: Sequence[TokenIndex], token_range: tuple[int, int]) -> None:
    """Keep it for the next start, where the cache can be written."""
    with contextlib.suppress(ValueError):
        cached_folder(root, _name(indices), lambda to: _write(to / _FILE, token_range))


def _write(path: Path, token_range: tuple[int, int]) -> None:
    path.write_text(json.dumps(token_range), encoding="utf-8")


def _name(indices: Sequence[TokenIndex]) -> str:
    return f"range-{digest(file_facts(file for index in indices for file in index.files))}"
