"""The two length distributions that packers are compared on."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Distribution(NamedTuple):
    """A distribution of lengths: draw(count, rng) -> int64[count], each within 1..max_tokens."""

    text: str
    max_tokens: int
    draw: Callable[[int, np.random.Generator], NDArray[np.int64]]


def _chat_and_long(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    long = rng.random(count) < 0.1
    lengths = np.where(long, rng.uniform(8192, 65_536, count), rng.lognormal(np.log(1024), 0.8, count))
    return lengths.astype(np.int64).clip(1, 65_536)


def _uniform(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return rng.integers(1024, 32_768, count, endpoint=True)


DISTRIBUTIONS = {
    "A": Distribution("90 % lognormal (median 1,024, σ 0.8), 10 % uniform 8k–64k", 65_536, _chat_and_long),
    "B": Distribution("uniform 1k–32k", 32_768, _uniform),
}
