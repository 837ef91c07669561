"""data.mixture: the tokens of an epoch by source, and their report.

scale: 1.0                    # one factor on every budget
total_tokens: null            # less the budgets in tokens, shared by the sources with a weight
sources:
  original: {tokens: 4.0e9}
  over_8k:  {tokens: 3.0e9, intervals: [8192, 16384, 32768]}
  papers:   {weight: 2, train_dir: OTHER_DIR}
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.options import MISSING, Options, must, option, options_of, plain, refuse, unknown
from verl_ext.packing import Spans
from verl_ext.packing.mixture import KEY, IntervalDraw, MixtureSource, draw_mixture
from verl_ext.tables import aligned
from verl_ext.text.read.sources import absolute_path

MOST = 2**53  # the maximum of a number of tokens, a weight or a scale


@dataclass(frozen=True)
class MixtureSourceOptions(Options):
    """One source of a mixture."""

    prefix: ClassVar[str] = f"{KEY}.sources.NAME"

    tokens: float | None = option(None, "tokens that an epoch draws from this source", above=0, most=MOST)
    weight: float | None = option(None, "this source's share of total_tokens, in place of tokens", above=0, most=MOST)
    intervals: list | None = option(None, "ascending lengths; the intervals between them give equal numbers of tokens")
    train_dir: Any = option(None, "this source's own folder or folders; null: those of data.train_dir")

    @override
    def problems(self) -> Iterable[str | None]:
        given = [f"{name}={value:g}" for name in ("tokens", "weight") if (value := getattr(self, name)) is not None]
        if len(given) != 1:
            yield must(self.prefix, "have either tokens or weight", ", ".join(given) or "none of them")
        if (edges := self.intervals) is not None:
            whole = all(type(edge) is int and edge >= 0 for edge in edges)
            if len(edges) < 2 or not whole or any(low >= high for low, high in pairwise(edges)):
                wanted = "at least two ascending whole numbers of tokens, e.g. [8192, 16384]"
                yield must(f"{self.prefix}.intervals", f"be {wanted}", edges)
        paths = self.paths
        if self.train_dir is not None and not (paths and all(isinstance(p, (str, os.PathLike)) and p for p in paths)):
            yield must(f"{self.prefix}.train_dir", "name a tokenized dataset folder", self.train_dir)

    @property
    def paths(self) -> Sequence[Any]:
        """The source's own folders as they are given."""
        return self.train_dir if isinstance(self.train_dir, (list, tuple)) else [self.train_dir]


@dataclass(frozen=True)
class MixtureOptions(Options):
    """The sources and budgets that an epoch is drawn from."""

    prefix: ClassVar[str] = KEY

    sources: dict[str, Any] = option({}, "NAME: {tokens or weight, intervals, train_dir}")
    scale: float | None = option(None, "factor on every budget; null: 1", above=0, most=MOST)
    total_tokens: float | None = option(
        None,
        "tokens that the sources with a weight share; null: the tokens that these sources hold",
        above=0,
        most=MOST,
    )

    @classmethod
    def read(cls, node: Any) -> "MixtureOptions":  # type: ignore[override]
        """Read data.mixture; raise ValueError with a line for each mistake."""
        node = plain(node)
        if not isinstance(node, Mapping):
            raise ValueError(must(KEY, "be a mapping with sources", node))
        lines, sources, given = _unknown_keys(cls, KEY, node), {}, node.get("sources")
        if not lines and (not isinstance(given, Mapping) or not given):
            wanted = "at least one source, e.g. {original: {tokens: 4.0e9}}"
            lines.append(must(f"{KEY}.sources", f"name {wanted}", given))
        for name, source in given.items() if isinstance(given, Mapping) else ():
            key = f"{KEY}.sources.{name}"
            if not isinstance(source, Mapping):
                lines.append(must(key, "be a mapping, e.g. {tokens: 4.0e9}", source))
            elif unknown := _unknown_keys(MixtureSourceOptions, key, source):
                lines += unknown
            elif source.get("train_dir") == MISSING:
                lines.append(must(f"{key}.train_dir", "name a tokenized dataset folder", "nothing"))
            else:
                try:
                    sources[str(name)] = MixtureSourceOptions.read(source)
                except ValueError as error:
                    lines += str(error).replace(MixtureSourceOptions.prefix, key).splitlines()
        try:
            options = cls({} if lines else sources, node.get("scale"), node.get("total_tokens"))
        except ValueError as error:
            lines = [*str(error).splitlines(), *lines]
        refuse(lines)
        return options

    @override
    def problems(self) -> Iterable[str | None]:
        weighted = any(source.weight for source in self.sources.values())
        if self.total_tokens is not None and self.sources and not weighted:
            yield must(f"{KEY}.total_tokens", "be null where no source has a weight", self.total_tokens)

    @property
    def budgets(self) -> tuple[MixtureSource, ...]:
        """The budget of each source."""
        return tuple(
            MixtureSource(name, source.tokens, source.weight, tuple(source.intervals) if source.intervals else None)
            for name, source in self.sources.items()
        )

    @property
    def folders(self) -> tuple[tuple[str, ...] | None, ...]:
        """Each source's absolute folders, None for those of data.train_dir."""
        return tuple(
            None if source.train_dir is None else tuple(absolute_path(path) for path in source.paths)
            for source in self.sources.values()
        )

    def all_folders(self, train_dir: Iterable[str]) -> tuple[str, ...]:
        """Return all folders, each once; raise ValueError if one is missing."""
        for name, own in zip(self.sources, self.folders, strict=True):
            for folder in own or ():
                if not os.path.isdir(folder):
                    raise ValueError(must(f"{KEY}.sources.{name}.train_dir", "be an existing folder", folder))
        return tuple(dict.fromkeys([*train_dir, *(folder for own in self.folders for folder in own or ())]))


def _unknown_keys(cls: type[Options], key: str, node: Mapping[Any, Any]) -> list[str]:
    return [unknown(str(name), options_of(cls), node=key) for name in node if name not in options_of(cls)]


@dataclass
class MixtureRow:
    """One interval of a source: its documents, low < length <= high.

    low, high: None for any length. documents counts every draw, and distinct counts each document once. epochs = tokens
    given / tokens of all documents of the interval. off = given / wanted - 1, or 0 if nothing is wanted. blocked_by
    names the document that keeps the interval more than 1 % off.
    """

    source: str
    low: int | None
    high: int | None
    documents: int
    distinct: int
    tokens_wanted: int
    tokens_given: int
    epochs: float
    off: float
    blocked_by: str | None = None


def mixture_report(
    draws: Iterable[IntervalDraw], spans: Spans, folders: Sequence[str], first_rows: NDArray[np.int64]
) -> list[MixtureRow]:
    """Return a row for each interval, in the order of the sources.

    Folder f has the rows first_rows[f]..first_rows[f+1]-1.
    """
    report = []
    for draw in draws:
        counts = len(draw.documents), draw.distinct, draw.budget, draw.drawn, draw.drawn / draw.pool
        reason = None
        if draw.nearest_swap is not None:
            span, otherwise = draw.nearest_swap
            row, start, length = int(spans.row[span]), int(spans.start[span]), int(spans.length[span])
            folder = int(np.searchsorted(first_rows, row, side="right")) - 1
            reason = (
                f"row {row - int(first_rows[folder])} of {folders[folder]} ({length:,} tokens"
                f"{f' from {start:,}' if start else ''}) drawn once {'more' if otherwise > draw.drawn else 'less'} "
                f"would make it {_off(otherwise, draw.budget):+.2%}"
            )
        off = _off(draw.drawn, draw.budget)
        report.append(MixtureRow(draw.source, draw.low, draw.high, *counts, off, reason))
    return report


def mixture_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format MixtureRows as dicts; * marks one more than 1 % off."""
    lines = []
    for row in rows:
        cells = {name: f"{value:,}" for name, value in row.items() if isinstance(value, int)}
        rates = {"epochs": f"{row['epochs']:.2f}", "off": f"{row['off']:+.2%}", "": "*" if row["blocked_by"] else ""}
        lines.append({"source": row["source"], "low": "", "high": "", **cells, **rates})
    return aligned(lines)


def mixture_notices(report: Iterable[MixtureRow]) -> Iterator[str]:
    """Yield a line for each interval more than 1 % off."""
    for row in report:
        if row.blocked_by:
            interval = "" if row.low is None else f", {row.low} < length <= {row.high}"
            yield (
                f"data.mixture: source {row.source}{interval} gives {row.tokens_given:,} of {row.tokens_wanted:,} "
                f"tokens ({row.off:+.2%}); {row.blocked_by}"
            )


def _off(given: int, wanted: int) -> float:
    return given / wanted - 1 if wanted else 0.0


def draw_spans(
    mixture: MixtureOptions,
    spans: Spans,
    folders: Sequence[str],
    first_rows: NDArray[np.int64],
    train_dir: Sequence[str],
    seed: int,
) -> tuple[NDArray[np.int64], list[MixtureRow]]:
    """Draw an epoch: its spans, int64[D], and a report of each interval.

    Folder f of `folders` holds the rows first_rows[f]..first_rows[f+1]-1; `train_dir`: the folders of data.train_dir,
    for sources without folders of their own. The draw is the same in every epoch.

    Raises ValueError if a source or interval has no document, or a budget cannot be met at all.
    """
    span_edges = np.searchsorted(spans.row, first_rows)
    members = [
        np.concatenate([np.arange(*span_edges[f : f + 2]) for f in sorted({folders.index(folder) for folder in own})])
        for own in (train_dir if own is None else own for own in mixture.folders)
    ]
    draws = draw_mixture(spans.length, mixture.budgets, members, seed, mixture.scale or 1.0, mixture.total_tokens)
    return np.concatenate([draw.documents for draw in draws]), mixture_report(draws, spans, folders, first_rows)
