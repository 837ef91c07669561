"""data.mixture: how many tokens an epoch draws from which source, of which lengths; and what was drawn.

scale: 1.0                    # one factor on every budget
total_tokens: null            # what the sources with a weight share, the budgets in tokens taken off
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
import pandas as pd
from numpy.typing import NDArray

from verl_ext.packing import Spans
from verl_ext.packing.mixture import KEY, IntervalDraw, MixtureSource, draw_mixture
from verl_ext.text.sources import absolute_path
from verl_ext.values import MISSING, Options, nearest_name, option, options_of, plain, refuse, show

MOST = 2**53  # of a number of tokens, and of a weight or scale


@dataclass(frozen=True)
class SourceOptions(Options):
    """One source of a mixture."""

    prefix: ClassVar[str] = f"{KEY}.sources.NAME"

    tokens: float | None = option(None, "tokens that an epoch draws of it", above=0, most=MOST)
    weight: float | None = option(None, "its share of total_tokens, in place of tokens", above=0, most=MOST)
    intervals: list | None = option(None, "ascending lengths; each interval between two gives as many tokens")
    train_dir: Any = option(None, "its own folder or folders; null: those of data.train_dir")


@dataclass(frozen=True)
class MixtureOptions(Options):
    """What an epoch is drawn from."""

    prefix: ClassVar[str] = KEY

    sources: dict[str, Any] = option({}, "NAME: {tokens or weight, intervals, train_dir}")
    scale: float | None = option(None, "one factor on every budget; null: 1", above=0, most=MOST)
    total_tokens: float | None = option(
        None,
        "what the sources with a weight share; null: the tokens that these sources hold",
        above=0,
        most=MOST,
    )

    @classmethod
    def read(cls, node: Any) -> "MixtureOptions":  # type: ignore[override]
        """The node data.mixture of a config, or a mapping like it; ValueError with a line for each mistake."""
        node = plain(node)
        refuse(list(_problems(node)))
        sources = {str(name): SourceOptions.read(source) for name, source in node["sources"].items()}
        return cls(sources, node.get("scale"), node.get("total_tokens"))

    @property
    def budgets(self) -> tuple[MixtureSource, ...]:
        return tuple(
            MixtureSource(name, source.tokens, source.weight, tuple(source.intervals) if source.intervals else None)
            for name, source in self.sources.items()
        )

    @property
    def folders(self) -> tuple[tuple[str, ...] | None, ...]:
        """For each source the absolute folders that it draws from, None where those are data.train_dir's."""
        return tuple(
            None if source.train_dir is None else tuple(absolute_path(path) for path in _as_list(source.train_dir))
            for source in self.sources.values()
        )

    @property
    def needs_train_dir(self) -> bool:
        return None in self.folders

    def all_folders(self, train_dir: Iterable[str]) -> tuple[str, ...]:
        """data.train_dir's folders and the sources' own, each once; ValueError when one of these does not exist."""
        for name, own in zip(self.sources, self.folders, strict=True):
            for folder in own or ():
                if not os.path.isdir(folder):
                    raise ValueError(f"{KEY}.sources.{name}.train_dir must be an existing folder; got {folder}")
        return tuple(dict.fromkeys([*train_dir, *(folder for own in self.folders for folder in own or ())]))


def _as_list(paths: Any) -> Sequence[Any]:
    return paths if isinstance(paths, (list, tuple)) else [paths]


def _problems(node: Any) -> Iterator[str | None]:
    if not isinstance(node, Mapping):
        yield f"{KEY} must be a mapping with sources; got {show(node)}"
        return
    problems = _node_problems(MixtureOptions, KEY, {**node, "sources": {}})
    yield from problems
    sources = node.get("sources")
    if sources is None and any(line.startswith("unknown key") for line in problems):
        return  # a mistyped sources
    if not isinstance(sources, Mapping) or not sources:
        yield f"{KEY}.sources must name at least one source, e.g. {{original: {{tokens: 4.0e9}}}}; got {show(sources)}"
        return
    for name, source in sources.items():
        yield from _source_problems(f"{KEY}.sources.{name}", source)
    weighted = any(isinstance(source, Mapping) and source.get("weight") for source in sources.values())
    if node.get("total_tokens") is not None and not weighted:
        yield f"{KEY}.total_tokens must be null where no source has a weight; got {show(node['total_tokens'])}"


def _source_problems(key: str, source: Any) -> Iterator[str]:
    if not isinstance(source, Mapping):
        yield f"{key} must be a mapping, e.g. {{tokens: 4.0e9}}; got {show(source)}"
        return
    problems = _node_problems(SourceOptions, key, source)
    given = [f"{name}={show(source[name])}" for name in ("tokens", "weight") if source.get(name) is not None]
    if len(given) == 2 or not (given or problems):
        yield f"{key} must have either tokens or weight; got {', '.join(given) or 'none of them'}"
    yield from problems
    edges, train_dir = source.get("intervals"), source.get("train_dir")
    if isinstance(edges, (list, tuple)):
        whole = all(type(edge) is int and edge >= 0 for edge in edges)
        if len(edges) < 2 or not whole or any(low >= high for low, high in pairwise(edges)):
            wanted = "at least two ascending whole numbers of tokens, e.g. [8192, 16384]"
            yield f"{key}.intervals must be {wanted}; got {show(edges)}"
    paths = _as_list(train_dir)
    named = all(isinstance(path, (str, os.PathLike)) and os.fspath(path) not in ("", MISSING) for path in paths)
    if train_dir is not None and not (named and paths):
        got = "nothing" if train_dir == MISSING else show(train_dir)
        yield f"{key}.train_dir must name a tokenized dataset folder; got {got}"


def _node_problems(cls: type[Options], key: str, node: Mapping[Any, Any]) -> list[str]:
    """A line for each unknown key of a node and each value that its options do not allow."""
    known, found = options_of(cls), []
    for name, value in node.items():
        if name in known:
            found.append(known[name].problem(f"{key}.{name}", value))
        else:
            nearest = nearest_name(str(name), known)
            found.append(f"unknown key {key}.{name}" + (f"; nearest: {key}.{nearest}" if nearest else ""))
    return list(filter(None, found))


@dataclass
class MixtureRow:
    """One interval of a source: documents of low < length <= high tokens (None: of any length).

    documents counts every time that one is drawn, distinct each once. epochs = tokens given / tokens of all documents
    of the interval. off = given / wanted - 1, 0 where nothing is wanted. hinders names the document that keeps it more
    than 1 % off.
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
    hinders: str | None = None


def mixture_report(
    draws: Iterable[IntervalDraw], spans: Spans, folders: Sequence[str], first_rows: NDArray[np.int64]
) -> list[MixtureRow]:
    """A row for each interval, in the order of the sources; folder f has the rows first_rows[f]..first_rows[f+1]-1."""
    report = []
    for draw in draws:
        counts = len(draw.documents), draw.distinct, draw.wanted, draw.given, draw.given / draw.pool
        reason = None
        if draw.alternative is not None:
            span, otherwise = draw.alternative.document, draw.alternative.tokens
            row, start, length = int(spans.row[span]), int(spans.start[span]), int(spans.length[span])
            folder = int(np.searchsorted(first_rows, row, side="right")) - 1
            reason = (
                f"row {row - int(first_rows[folder])} of {folders[folder]} ({length:,} tokens"
                f"{f' from {start:,}' if start else ''}) drawn once {'more' if otherwise > draw.given else 'less'} "
                f"would make it {_off(otherwise, draw.wanted):+.2%}"
            )
        off = _off(draw.given, draw.wanted)
        report.append(MixtureRow(draw.source, draw.low, draw.high, *counts, off, reason))
    return report


def mixture_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """MixtureRows as dicts, a line for each; * where the budget is missed by more than 1 %."""
    lines = []
    for row in rows:
        cells = {name: f"{value:,}" for name, value in row.items() if isinstance(value, int)}
        rates = {"epochs": f"{row['epochs']:.2f}", "off": f"{row['off']:+.2%}", "": "*" if row["hinders"] else ""}
        lines.append({"source": row["source"], "low": "", "high": "", **cells, **rates})
    return pd.DataFrame(lines).to_string(index=False)


def mixture_notices(report: Iterable[MixtureRow]) -> Iterator[str]:
    """A line for each interval that is more than 1 % off its budget."""
    for row in report:
        if row.hinders:
            interval = "" if row.low is None else f", {row.low} < length <= {row.high}"
            yield (
                f"data.mixture: source {row.source}{interval} gives {row.tokens_given:,} of {row.tokens_wanted:,} "
                f"tokens ({row.off:+.2%}); {row.hinders}"
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
    """(int64[D]: the spans of an epoch, one as often as it is drawn; a row of the report for each interval).

    Folder f of `folders` holds the rows first_rows[f]..first_rows[f+1]-1; `train_dir`: those of data.train_dir, which
    a source without folders of its own draws from. The draw is the same in every epoch.

    Raises:
        ValueError: a source or interval without a document, or a budget that cannot be met at all.
    """
    span_edges = np.searchsorted(spans.row, first_rows)
    members = [
        np.concatenate([np.arange(*span_edges[f : f + 2]) for f in sorted({folders.index(folder) for folder in own})])
        for own in (train_dir if own is None else own for own in mixture.folders)
    ]
    draws = draw_mixture(spans.length, mixture.budgets, members, seed, mixture.scale or 1.0, mixture.total_tokens)
    return np.concatenate([draw.documents for draw in draws]), mixture_report(draws, spans, folders, first_rows)
