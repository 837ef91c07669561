"""The answers of an evaluation as a table, and scores by category."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from verl_ext.checkpoint.layout import ANSWERS
from verl_ext.data.families.babilong_answers import category_fields
from verl_ext.options import DataError, UsageError, choice_problem, must, one_line
from verl_ext.tables import pivot, plain_table
from verl_ext.tools.page import Chart, heat_map
from verl_ext.tools.show.runs import ShownRun

OPENING, ENDING = 30, 50  # characters of a prompt that its line shows
WORDS = 200  # characters of an answer that its line shows
_SCORES = (("val/", "_exact_match"), ("val/", "_accuracy"), ("val/answer/", ""))  # a later one counts
_NUMBERED = re.compile(r"(.*?)(\d*)([km]?)")
SHADES = " ░▒▓█"


def answers_view(path: str, step: int | None, category: str | None) -> Iterator[RenderableType]:
    """Yield a step's answers, by default those of the last step.

    Raises:
        UsageError: there are no answers, or none of the step or category.
        DataError: a line is not an answer; the last line is exempt because a run may still be writing it.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    rows = _read(folder / ANSWERS)
    steps = sorted({row["step"] for row in rows})
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise UsageError(must("step", f"be one of those with answers, {_listed(steps)}", step))
    rows = [row for row in rows if row["step"] == step]
    if category is not None:
        if problem := choice_problem("category", category, {row["category"] for row in rows}):
            raise UsageError(problem)
        rows = [row for row in rows if row["category"] == category]
    scores = [row["score"] for row in rows if row["score"] is not None]
    mean = f": mean score {sum(scores) / len(scores):.3g}" if scores else ""
    yield Text(f"{len(rows):,} answers of step {step:,} in {one_line(str(folder / ANSWERS))}{mean}", "bold")
    table = plain_table("category", "score", "prompt", "expected", "answer", left=5)
    for row in rows:
        prompt = one_line(str(row["prompt"] if row["question"] is None else row["question"]))
        if len(prompt) > OPENING + ENDING:
            prompt = f"{prompt[:OPENING]} … {prompt[-ENDING:]}"
        words = ("" if row[name] is None else one_line(str(row[name]))[:WORDS] for name in ("expected", "answer"))
        table.add_row(one_line(str(row["category"])), _score(row["score"]), Text(prompt), *map(Text, words))
    yield table


def _score(score: float | None) -> Text:
    if score is None:
        return Text("")
    return Text(f"{score:.3g}", "green" if score >= 1 else "red" if score <= 0 else "yellow")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(f"{path.parent} must hold {path.name}, which a run with eval.prompts writes; it does not")
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            (row["score"] or 0) + row["step"]  # numbers, and null for a text that is continued
            names = ("step", "category", "prompt", "answer", "expected", "score")
            rows.append({"question": row.get("question"), **{name: row[name] for name in names}})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise DataError(f"{path}:{number} must be an answer with step and score; {error!r}") from error
    if not rows:
        raise UsageError(f"{path} must hold an answer; it holds none")
    return rows


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) < 9 else f"{', '.join(map(str, steps[:4]))} … {steps[-1]}"


class ScoreTable(NamedTuple):
    """The last scores of categories whose names have two fields.

    records: [{DOWN, ACROSS, metric, step, value}] in the order of the rows; columns: the values of `across` in order.
    """

    name: str
    down: str
    across: str
    records: list[dict[str, Any]]
    columns: list[str]

    def table(self) -> RenderableType:
        """Return the scores as a table for a terminal."""
        cells = {
            (record[self.down], record[self.across]): f"{_shade(record['value'])} {record['value']:.0%}"
            for record in self.records
        }
        return pivot(f"{self.name}: right answers", cells, columns=self.columns)

    def chart(self) -> Chart:
        """Return the scores as a heat map for a page."""
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


def score_table(run: ShownRun) -> ScoreTable | None:
    """Return the scores by two category fields; None below two categories."""
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    for prefix, suffix in _SCORES:
        for name, curve in run.curves.items():
            if not name.startswith(prefix) or not name.endswith(suffix) or not curve.finite:
                continue
            fields = category_fields(name.removeprefix(prefix).removesuffix(suffix).lower())
            if len(fields) == 2:
                step, value = [pair for pair in zip(curve.steps, curve.values, strict=True) if pair[1] is not None][-1]
                kind = suffix.removeprefix("_") or "answer"
                cells[tuple(fields.values())] = {**fields, "metric": kind, "step": step, "value": value}
    if len(cells) < 2:
        return None
    records = [cells[key] for key in sorted(cells, key=lambda key: [*map(_size, key)])]
    down, across, *_ = records[0]
    return ScoreTable(run.name, down, across, records, sorted({record[across] for record in records}, key=_size))


def _size(name: str) -> tuple[str, int]:
    """Return a sort key that orders qa2 before qa10, 32k before 1m."""
    word, number, unit = _NUMBERED.fullmatch(name).groups()  # type: ignore[union-attr]
    return word, int(number or 0) << {"k": 10, "m": 20}.get(unit, 0)


def _shade(value: float) -> str:
    return SHADES[min(int(max(value, 0) * len(SHADES)), len(SHADES) - 1)]
