"""Order the samples of a blend, which are drawn from its sources.

`blend_order` keeps |c_i - w_i·k| <= 1 - 1/(2D-2) < 1 for the count c_i of every source after every k samples, for D
sources of weights w_i that sum to 1: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
With s = 1/(2D-2), draw j = 0, 1, … of source i has

    a release    the first step k with  w_i·k >= j + s
    a deadline   the first step k with  w_i·k >  j + 1 - s      later, its count would lag by more than the bound

Each step takes the released draw with the earliest deadline (of the first source, if deadlines are equal). Weights are
taken as the decimals that they print as, in integer arithmetic; the order repeats with their common denominator.

`megatron_blend_order` is megatron-core's rule, the largest w_i·k - c_i, which keeps no such bound. Rounding decides
ties. The rule is therefore computed in floats, as megatron-core does, by its compiled loop if that is installed.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from itertools import count, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import must

BLOCK = 1 << 16  # samples that are numbered at a time
MAX_SOURCES = np.iinfo(np.int16).max
MEGATRON_SURPLUS = 0.005  # megatron-core's mid_level_dataset_surplus

Order = tuple[NDArray[np.int16], NDArray[np.int64]]


def blend_order(weights: Sequence[float], n: int) -> Order:
    """Return (int16[n]: source of each sample, int64[n]: its number in that source).

    Sources of weight 0 are not drawn.

    Raises ValueError if weights are negative, all zero or not finite, or there are more than 32,767 of them.
    """
    check_blend_weights(weights)
    drawn = np.flatnonzero(weights).astype(np.int16)
    exact = [Fraction(repr(float(weight))) for weight in weights if weight > 0]
    scale = math.lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]  # whole numbers in the proportion of the weights
    divisor = math.gcd(*parts)
    parts = [part // divisor for part in parts]
    period = min(n, sum(parts))
    number = np.fromiter(_scheduled(parts) if len(parts) > 1 else repeat(0), np.int16, period)
    source = np.tile(drawn[number], -(-n // max(period, 1)))[:n]
    return source, _sample_numbers(source, len(weights))


def megatron_blend_order(weights: Sequence[float], n: int, *, compiled: bool = True) -> Order:
    """Return megatron-core's order, a BlendedDataset's arrays for weights and n samples.

    BlendedMegatronDatasetBuilder gives it weights that are already `normalised`, and it normalises them again.
    `compiled`: use megatron-core's loop if it is installed. Raises ValueError like `blend_order`.
    """
    check_blend_weights(weights)
    drawn = np.flatnonzero(weights).astype(np.int16)
    shares = normalised([weight for weight in weights if weight > 0])
    number, sample = np.empty(n, np.int16), np.empty(n, np.int64)
    helpers = megatron_helpers() if compiled else None
    if helpers is None:
        _fill_most_behind(shares, number)
        sample = _sample_numbers(number, len(drawn))
    else:
        helpers.build_blending_indices(number, sample, shares, len(shares), n, False)
    return (number if len(drawn) == len(weights) else drawn[number]), sample


# Values of data.blend_rule.
BLEND_RULES: dict[str, Callable[[Sequence[float], int], Order]] = {
    "tijdeman": blend_order,
    "megatron": megatron_blend_order,
}


def megatron_source_samples(shares: Sequence[float], n: int) -> list[int]:
    """Return how many samples of each source megatron-core requests for n blended.

    This number decides which epochs are shuffled together. `shares`: the blend's weights, `normalised`.
    """
    return [math.ceil(math.ceil(n * share) * (1 + MEGATRON_SURPLUS)) for share in shares]


def normalised(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return weights as shares of their sum, bitwise megatron-core's `normalize`."""
    array = np.array(weights, np.float64)
    return array / np.sum(array)


def check_blend_weights(weights: Sequence[float], key: str = "data.blend") -> None:
    """Raise ValueError if a blend's weights cannot be used."""
    shown = str(list(weights)) if len(weights) <= 8 else f"{list(weights[:8])} and {len(weights) - 8} more"
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(must(key, "have weights that are finite and at least 0", shown))
    if not any(weights):
        raise ValueError(must(key, "have a weight above 0", shown))
    if len(weights) > MAX_SOURCES:
        raise ValueError(must(key, f"have at most {MAX_SOURCES} sources", len(weights)))


def _sample_numbers(source: NDArray[np.int16], num_sources: int) -> NDArray[np.int64]:
    """Return each sample's number of earlier samples of its source, int64[n]."""
    numbers = np.empty(len(source), np.int64)
    counts = np.zeros(num_sources, np.int64)
    for first in range(0, len(source), BLOCK):
        part = source[first : first + BLOCK]
        order = np.argsort(part, kind="stable")
        here = np.bincount(part, minlength=num_sources)
        begins = np.cumsum(here) - here
        numbers[first + order] = np.arange(len(part)) + np.repeat(counts - begins, here)
        counts += here
    return numbers


def _scheduled(parts: list[int]) -> Iterator[int]:
    """Yield Tijdeman's endless order of two or more sources, weighted parts/sum(parts)."""
    sources, total = len(parts), sum(parts)
    whole = total * (2 * sources - 2)  # the number 1, in units in which s = total
    weights = [part * (2 * sources - 2) for part in parts]
    lag = [total] * sources  # j + s of the next draw
    released: list[int] = []  # deadline · sources + source
    waiting: dict[int, list[int]] = {}  # release -> the same
    for source, weight in enumerate(weights):
        draw = ((whole - total) // weight + 1) * sources + source
        waiting.setdefault(-(-total // weight), []).append(draw)
    for step in count(1):
        for draw in waiting.pop(step, ()):
            heappush(released, draw)
        source = heappop(released) % sources
        yield source
        lag[source] += whole
        weight, least = weights[source], lag[source]
        draw = ((least + whole - 2 * total) // weight + 1) * sources + source
        release = -(-least // weight)
        if release <= step:
            heappush(released, draw)
        else:
            waiting.setdefault(release, []).append(draw)


def _fill_most_behind(shares: NDArray[np.float64], out: NDArray[np.int16]) -> None:
    """Fill `out` with Megatron's sources, each the first with the largest w·k-c."""
    counts, lags = np.zeros(len(shares)), np.empty(len(shares))
    for step in range(len(out)):
        np.multiply(shares, max(step, 1), out=lags)  # k is 1 for the first sample as well
        np.subtract(lags, counts, out=lags)
        source = lags.argmax()
        counts[source] += 1
        out[step] = source


@functools.cache
def megatron_helpers() -> Any:
    """Return megatron-core's module of compiled loops; None if it is missing.

    Only that file is loaded, because importing the package takes seconds and prints warnings on machines without a GPU.
    """
    try:
        core = find_spec("megatron.core")
        folders = [f"{folder}/datasets" for folder in core.submodule_search_locations or ()] if core else []
        spec = PathFinder.find_spec("megatron.core.datasets.helpers_cpp", folders)
        if spec is None or spec.loader is None:
            return None
        helpers = module_from_spec(spec)
        spec.loader.exec_module(helpers)
    except ImportError:  # not installed, or built for another Python
        return None
    return helpers
