"""A run's items: of right length, unrepeated, drawn evenly over intervals."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from verl_ext.options import DataError, must
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.overlap import NearDuplicates, Passages

ALL = "all"  # the one group of items whose lengths are not counted


@dataclass(frozen=True)
class Intervals:
    """Intervals of tokens: edges[i] up to edges[i + 1], the last included."""

    edges: tuple[int, ...]

    def of(self, tokens: int) -> str | None:
        """Return the interval of a length; None if it is in none."""
        if not self.edges[0] <= tokens <= self.edges[-1]:
            return None
        place = min(bisect_right(self.edges, tokens), len(self.edges) - 1)
        return f"{self.edges[place - 1]:,}–{self.edges[place]:,}"

    @property
    def names(self) -> list[str]:
        """The names of all intervals, the shortest first."""
        return [str(self.of(edge)) for edge in self.edges[:-1]]


@dataclass(frozen=True)
class Lengths:
    """How the lengths of items are counted, and over which intervals they are spread.

    Attributes:
        count: counts the tokens of a text, or the words that it asks for; 0: unknown.
        shorten: cuts a text that is too long to so many tokens; None: it is left out.
    """

    intervals: Intervals
    count: Callable[[str], int]
    shorten: Callable[[str, int], str] | None = None


class Corpus:
    """Items of files by length, read to choose and to ask.

    The seed and the name of an item give a number, and the items of an interval with the lowest numbers are chosen. So
    the choice does not depend on the order of reading, and a larger choice contains a smaller one.

    Args:
        read: yields all items, and counts the records that it leaves out.
        lengths: their lengths; None: all items are one group.
    """

    def __init__(self, read: Callable[[Counter[str]], Iterator[SourceItem]], lengths: Lengths | None) -> None:
        self._read, self._lengths = read, lengths
        self.left_out: Counter[str] = Counter()
        self.available: dict[str, int] = {}
        self.chosen: dict[str, set[str]] = {}

    def choose(self, records: int | None, seed: int, near: NearDuplicates | None, passages: Passages) -> int:
        """Draw `records` items (None: all) evenly over intervals; return their number.

        An interval with too few gives all of its items, and the others make up for it. Raises DataError if all of them
        together have too few.
        """
        names = self._lengths.intervals.names if self._lengths else [ALL]
        groups: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
        for item, group in self._items(self.left_out):
            if passages.found_in(item.text):
                self.left_out["contaminated"] += 1
            elif near and near.repeats(item.name, item.text):
                self.left_out["near_duplicate"] += 1
            else:
                groups[group].append((drawn(seed, item.name), item.name))
        self.available = {group: len(found) for group, found in groups.items()}
        for group, share in _shares(list(self.available.values()), records, list(groups)).items():
            self.chosen[group] = {name for _, name in sorted(groups[group])[:share]}
        return self.total

    @property
    def total(self) -> int:
        """The number of chosen items."""
        return sum(map(len, self.chosen.values()))

    def items(self) -> Iterator[SourceItem]:
        """Yield the chosen items in the order of the files."""
        for item, group in self._items(Counter()):
            if item.name in self.chosen[group]:
                yield item

    def _items(self, left_out: Counter[str]) -> Iterator[tuple[SourceItem, str]]:
        """Yield items of right length with their interval; count the others.

        `left_out` counts those that are shortened too.
        """
        for item in self._read(left_out):
            if self._lengths is None:
                yield item, ALL
                continue
            intervals, count, shorten = self._lengths.intervals, self._lengths.count, self._lengths.shorten
            tokens, most = count(item.text), intervals.edges[-1]
            if tokens > most and shorten is not None:
                left_out["truncated"] += 1
                text = shorten(item.text, most)
                within = [(first, min(end, len(text))) for first, end in item.documents if first < len(text)]
                item = replace(item, text=text, documents=within)
                tokens = count(item.text)
            if group := intervals.of(tokens):
                yield replace(item, tokens=tokens), group
            else:
                reason = "too_short" if tokens < intervals.edges[0] else "too_long"
                left_out[reason if tokens else "no_length"] += 1


def _shares(available: Sequence[int], records: int | None, names: Sequence[str]) -> dict[str, int]:
    """Return how many items each group gives, one in turn."""
    total = sum(available)
    if records is None or not total:
        return dict(zip(names, available, strict=True))
    if records > total:
        of_each = (
            ""
            if names == [ALL]
            else f" ({', '.join(f'{n:,} of {name}' for n, name in zip(available, names, strict=True))})"
        )
        needed = f"be at most {total:,}, what the sources have to draw from{of_each}"
        raise DataError(must("records", needed, f"{records:,}"))
    shares, left = [0] * len(available), records
    while left:
        for place, most in enumerate(available):
            if left and shares[place] < most:
                shares[place] += 1
                left -= 1
    return dict(zip(names, shares, strict=True))
