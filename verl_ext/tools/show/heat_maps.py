"""What a run measured over two fields: a table for a terminal, and a heat map for a page.

scores      category by category, of names such as qa1_4k: the last measurement
experts     how evenly tokens choose a mixture's experts, layer by layer: the last line of experts.jsonl
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from verl_ext.checkpoint.layout import EXPERTS
from verl_ext.data.families.babilong_answers import category_fields
from verl_ext.options import DataError, one_line
from verl_ext.progress import four_digits
from verl_ext.tables import pivot, plain_table
from verl_ext.tools.page import Chart, heat_map
from verl_ext.tools.show.runs import ShownRun

SHADES = " ░▒▓█"  # of scores from 0 to 1; of experts, none and up to twice an even share or more
_SCORES = (("val/", "_exact_match"), ("val/", "_accuracy"), ("val/answer/", ""))  # a later one counts
_NUMBERED = re.compile(r"(.*?)(\d*)([km]?)")
_LOAD = "times an even share"


def heat_maps(runs: Sequence[ShownRun]) -> "Iterator[ScoreTable | ExpertLoads]":
    """Yield the heat maps of runs, one kind after the other."""
    for kind in (ScoreTable, ExpertLoads):
        yield from filter(None, map(kind.of_run, runs))


@dataclass(frozen=True)
class ScoreTable:
    """The last scores of categories whose names have two fields.

    records: [{DOWN, ACROSS, metric, step, value}] in the order of the rows; columns: the values of `across` in order.
    """

    name: str
    down: str
    across: str
    records: list[dict[str, Any]]
    columns: list[str]

    @classmethod
    def of_run(cls, run: ShownRun) -> "ScoreTable | None":
        """Return the scores by two category fields; None below two categories."""
        cells: dict[tuple[str, ...], dict[str, Any]] = {}
        for prefix, suffix in _SCORES:
            for name, curve in run.curves.items():
                if not name.startswith(prefix) or not name.endswith(suffix) or not curve.points:
                    continue
                fields = category_fields(name.removeprefix(prefix).removesuffix(suffix).lower())
                if len(fields) == 2:
                    step, value = curve.points[-1]
                    kind = suffix.removeprefix("_") or "answer"
                    cells[tuple(fields.values())] = {**fields, "metric": kind, "step": step, "value": value}
        if len(cells) < 2:
            return None
        records = [cells[key] for key in sorted(cells, key=lambda key: [*map(_size, key)])]
        down, across, *_ = records[0]
        return cls(run.name, down, across, records, sorted({record[across] for record in records}, key=_size))

    def tables(self, width: int) -> Iterator[RenderableType]:
        """Yield a table, whose width is that of its columns."""
        cells = {
            (record[self.down], record[self.across]): f"{_shade(record['value'])} {record['value']:.0%}"
            for record in self.records
        }
        yield pivot(f"{self.name}: right answers", cells, columns=self.columns)

    def chart(self) -> Chart:
        """Return a heat map with the share of right answers in each cell."""
        return heat_map(
            f"{self.name}: right answers by {self.down} and {self.across}",
            self.records,
            {"field": self.across, "sort": self.columns, "title": None, "axis": {"labelAngle": 0}},
            {"field": self.down, "title": None},
            {"field": "value"},
            form=".0%",
            colour={"scale": {"domain": [0, 1], "scheme": "blues"}, "legend": None},
            ink={"condition": {"test": "datum.value > 0.55", "value": "white"}, "value": "black"},
            size={"width": "container", "height": {"step": 28}},
        )


def _size(name: str) -> tuple[str, int]:
    """Return a sort key that orders qa2 before qa10, 32k before 1m."""
    word, number, unit = _NUMBERED.fullmatch(name).groups()  # type: ignore[union-attr]
    return word, int(number or 0) << {"k": 10, "m": 20}.get(unit, 0)


def _shade(value: float) -> str:
    return SHADES[min(int(max(value, 0) * len(SHADES)), len(SHADES) - 1)]


@dataclass(frozen=True)
class ExpertLoads:
    """The share of each expert in the choices of a layer over an even one; loads are by layer."""

    run: str
    step: int
    layers: Sequence[int]
    loads: Sequence[Sequence[float]]

    @classmethod
    def of_run(cls, run: ShownRun) -> "ExpertLoads | None":
        """Return a run's last shares; None without trainer.log_experts. Raises DataError for another file."""
        path = run.folder / EXPERTS
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        for line in reversed(lines[:-1]):  # the last one is empty, or is still being written
            try:
                row: dict[str, Any] = json.loads(line)
                loads = [[len(shares) * float(share) for share in shares] for shares in row["shares"]]
                return cls(run.name, int(row["step"]), [*map(int, row["layers"])], loads)
            except (ValueError, TypeError, LookupError) as error:
                raise DataError(f"{path} must hold lines with step, layers and shares; {error!r}") from error
        return None

    @property
    def title(self) -> str:
        """What the table and the chart show."""
        return one_line(f"{self.run}: experts of each layer at step {self.step:,}, over an even share")

    def tables(self, width: int) -> Iterator[RenderableType]:
        """Yield the title, and a table with a line of shades for each layer."""
        yield Text(self.title)
        table = plain_table("layer", "least", "most", left=0)
        table.add_column("experts", no_wrap=True)
        for layer, loads in zip(self.layers, self.loads, strict=True):
            parts = np.array_split(np.array(loads), min(len(loads), max(width - 30, 10)))
            shades = "".join(SHADES[min(round(2 * float(part.mean())), len(SHADES) - 1)] for part in parts)
            table.add_row(str(layer), four_digits(min(loads)), four_digits(max(loads)), Text(f"│{shades}│"))
        yield table

    def chart(self) -> Chart:
        """Return a heat map of layers and experts, without numbers."""
        records = [
            {"layer": layer, "expert": expert, _LOAD: load}
            for layer, loads in zip(self.layers, self.loads, strict=True)
            for expert, load in enumerate(loads)
        ]
        return heat_map(
            self.title,
            records,
            {"field": "expert", "axis": {"labelOverlap": True}},
            {"field": "layer"},
            {"field": _LOAD},
            form=".2f",
            colour={"scale": {"domain": [0, 1, 3], "range": ["white", "#9ecae1", "#08306b"], "clamp": True}},
            ink={"value": "transparent"},
            size={"width": "container", "height": {"step": 10}},
        )
