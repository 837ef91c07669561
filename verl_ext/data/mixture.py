"""MixtureOptions: data.mixture as typed values, checked key by key.

scale: 1.0                    # one factor on every budget
total_tokens: null            # what the sources with a weight share, the budgets in tokens taken off
sources:
  original: {tokens: 4.0e9}
  over_8k:  {tokens: 3.0e9, intervals: [8192, 16384, 32768]}
  papers:   {weight: 2, train_dir: OTHER_DIR}

What a mixture drew, by source and length interval: wanted, given, epochs, and the document where it is far off.

From data.mixture and tokenised folders to the documents of an epoch: which spans each source draws.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from omegaconf import OmegaConf

from verl_ext.packing import Spans
from verl_ext.packing.mixture import KEY, IntervalDraw, MixtureSource, draw_mixture

KEYS = ("scale", "total_tokens", "sources")
SOURCE_KEYS = ("tokens", "weight", "intervals", "train_dir")
MOST = 2**53  # of a number of tokens, and of a weight or scale
MISSING = "???"  # what Hydra has for a value that the command line must give


@dataclass(frozen=True)
class MixtureOptions:
    """sources: budgets and intervals; folders: for each source the absolute folders that it draws from, None where
    those are data.train_dir's; total_tokens: what weighted sources share; scale: a factor on every budget."""

    sources: tuple[MixtureSource, ...]
    folders: tuple[tuple[str, ...] | None, ...]
    scale: float = 1.0
    total_tokens: float | None = None

    @classmethod
    def read(cls, node: Any) -> "MixtureOptions":
        """The node data.mixture of a config, or a mapping like it; ValueError with a line for each mistake."""
        plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        problems = list(_problems(plain))
        if problems:
            raise ValueError("\n".join(problems))
        sources = {str(name): source for name, source in plain["sources"].items()}
        return cls(
            tuple(_source(name, source) for name, source in sources.items()),
            tuple(_own_folders(source.get("train_dir")) for source in sources.values()),
            plain.get("scale") or 1.0,
            plain.get("total_tokens"),
        )

    @property
    def needs_train_dir(self) -> bool:
        """Whether a source draws from data.train_dir."""
        return None in self.folders

    def all_folders(self, train_dir: Iterable[str]) -> tuple[str, ...]:
        """data.train_dir's folders and the sources' own, each once; ValueError when one of these does not exist."""
        for source, own in zip(self.sources, self.folders, strict=True):
            for folder in own or ():
                if not os.path.isdir(folder):
                    raise ValueError(f"{source.key}.train_dir must be an existing folder; got {folder}")
        return tuple(dict.fromkeys([*train_dir, *(folder for own in self.folders for folder in own or ())]))


def _source(name: str, source: Mapping[str, Any]) -> MixtureSource:
    edges = source.get("intervals")
    return MixtureSource(name, source.get("tokens"), source.get("weight"), tuple(edges) if edges else None)


def _own_folders(train_dir: Any) -> tuple[str, ...] | None:
    if train_dir is None:
        return None
    paths = [train_dir] if isinstance(train_dir, (str, os.PathLike)) else train_dir
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths)


def _problems(node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping):
        yield f"{KEY} must be a mapping with sources; got {_show(node)}"
        return
    unknown = list(_unknown(KEY, node, KEYS))
    yield from unknown
    for name in ("scale", "total_tokens"):
        yield from _number(f"{KEY}.{name}", node.get(name))
    sources = node.get("sources")
    if sources is None and unknown:
        return  # a mistyped sources
    if not isinstance(sources, Mapping) or not sources:
        yield f"{KEY}.sources must name at least one source, e.g. {{original: {{tokens: 4.0e9}}}}; got {_show(sources)}"
        return
    for name, source in sources.items():
        yield from _source_problems(f"{KEY}.sources.{name}", source)
    weighted = [name for name, source in sources.items() if isinstance(source, Mapping) and source.get("weight")]
    if node.get("total_tokens") is not None and not weighted:
        yield f"{KEY}.total_tokens must be null where no source has a weight; got {_show(node['total_tokens'])}"


def _source_problems(key: str, source: Any) -> Iterator[str]:
    if not isinstance(source, Mapping):
        yield f"{key} must be a mapping, e.g. {{tokens: 4.0e9}}; got {_show(source)}"
        return
    unknown = list(_unknown(key, source, SOURCE_KEYS))
    yield from unknown
    given = {name: source.get(name) for name in ("tokens", "weight") if source.get(name) is not None}
    if len(given) != 1 and not (unknown and not given):
        got = ", ".join(f"{name}={_show(value)}" for name, value in given.items()) or "none of them"
        yield f"{key} must have either tokens or weight; got {got}"
    for name, value in given.items():
        yield from _number(f"{key}.{name}", value)
    yield from _interval_problems(f"{key}.intervals", source.get("intervals"))
    yield from _folder_problems(f"{key}.train_dir", source.get("train_dir"))


def _interval_problems(key: str, edges: Any) -> Iterator[str]:
    if edges is None:
        return
    whole = isinstance(edges, Sequence) and all(type(edge) is int and edge >= 0 for edge in edges)
    if not whole or len(edges) < 2 or any(low >= high for low, high in pairwise(edges)):
        yield f"{key} must be at least two ascending whole numbers of tokens, e.g. [8192, 16384]; got {_show(edges)}"


def _folder_problems(key: str, train_dir: Any) -> Iterator[str]:
    paths = train_dir if isinstance(train_dir, Sequence) and not isinstance(train_dir, str) else [train_dir]
    named = all(isinstance(path, (str, os.PathLike)) and os.fspath(path) not in ("", MISSING) for path in paths)
    if train_dir is not None and not (named and paths):
        got = "nothing" if train_dir == MISSING else _show(train_dir)
        yield f"{key} must name a tokenised dataset folder; got {got}"


def _number(key: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and value > 0):
        yield f"{key} must be a number above 0; got {_show(value)}"
    elif value > MOST:
        yield f"{key} must be at most 2^53; got {value}"


def _unknown(key: str, node: Mapping[Any, Any], known: Sequence[str]) -> Iterator[str]:
    for name in node:
        if name not in known:
            nearest = get_close_matches(str(name), known, n=1)
            yield f"unknown key {key}.{name}" + (f"; nearest: {key}.{nearest[0]}" if nearest else "")


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


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
    return [
        MixtureRow(
            draw.source,
            draw.low,
            draw.high,
            documents=len(draw.documents),
            distinct=draw.distinct,
            tokens_wanted=draw.wanted,
            tokens_given=draw.given,
            epochs=draw.given / draw.pool,
            off=_off(draw.given, draw.wanted),
            hinders=_hinders(draw, spans, folders, first_rows),
        )
        for draw in draws
    ]


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


def _hinders(draw: IntervalDraw, spans: Spans, folders: Sequence[str], first_rows: NDArray[np.int64]) -> str | None:
    if draw.alternative is None:
        return None
    span, otherwise = draw.alternative.document, draw.alternative.tokens
    row, start, length = int(spans.row[span]), int(spans.start[span]), int(spans.length[span])
    folder = int(np.searchsorted(first_rows, row, side="right")) - 1
    where = f"row {row - int(first_rows[folder])} of {folders[folder]} ({length:,} tokens"
    where += f" from {start:,})" if start else ")"
    times = "once more" if otherwise > draw.given else "once less"
    return f"{where} drawn {times} would make it {_off(otherwise, draw.wanted):+.2%}"


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
    draws = draw_mixture(spans.length, mixture.sources, members, seed, mixture.scale, mixture.total_tokens)
    return np.concatenate([draw.documents for draw in draws]), mixture_report(draws, spans, folders, first_rows)
