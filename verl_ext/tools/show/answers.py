"""The answers of a run's evaluation as a table, and BABILong's scores by task and length."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from verl_ext.checkpoint.layout import ANSWERS
from verl_ext.tables import plain_table
from verl_ext.tools.show.runs import ShownRun
from verl_ext.values import DataError, UsageError, choice_problem, one_line

OPENING, ENDING = 30, 50  # characters of a prompt that its line shows
WORDS = 200  # characters of an answer that its line shows
_CELL = re.compile(r"val/(?:answer/)?(qa\d+)_(\d+[km]?)(?:_(accuracy|exact_match))?", re.IGNORECASE)
SHADES = " ░▒▓█"


def answers_view(path: str, step: int | None, category: str | None) -> Iterator[RenderableType]:
    """Yield the answers of a step, by default of the last step that has answers.

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
        raise UsageError(f"step must be one of those with answers, {_listed(steps)}; got {step}")
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
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            (row["score"] or 0) + row["step"]  # numbers, and null for a text that is gone on with
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


class HeatCell(NamedTuple):
    """The last score of a task at a length."""

    task: str
    length: str
    metric: str
    step: int
    value: float


def heat_map(run: ShownRun) -> list[HeatCell]:
    """Return BABILong's last scores by task and length: generated answers if there are any, else exact matches."""
    cells: dict[tuple[str, str], HeatCell] = {}
    for metric in ("exact_match", "accuracy", None):  # later ones replace earlier ones
        for name, curve in run.curves.items():
            found = _CELL.fullmatch(name)
            if found and found[3] == metric and (values := [v for v in curve.values if v is not None]):
                step = curve.steps[len(curve.values) - 1 - curve.values[::-1].index(values[-1])]
                task, length = found[1].lower(), found[2].lower()
                cells[task, length] = HeatCell(task, length, metric or "answer", step, values[-1])
    return sorted(cells.values(), key=lambda cell: (int(cell.task[2:]), length_of(cell.length)))


def length_of(name: str) -> int:
    """Return the number of tokens of a length such as 32k."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(name[-1], 1)
    return int(name.rstrip("km")) * factor


def heat_table(run: ShownRun) -> RenderableType | None:
    """Return the heat map as a table of tasks by lengths; None with fewer than two scores."""
    cells = {(cell.task, cell.length): cell for cell in heat_map(run)}
    lengths = sorted({length for _, length in cells}, key=length_of)
    if not cells or len(cells) < 2:
        return None
    table = plain_table(f"{run.name}: right answers", *lengths)
    for task in dict.fromkeys(task for task, _ in cells):
        row = (cells.get((task, length)) for length in lengths)
        table.add_row(task, *("" if cell is None else f"{_shade(cell.value)} {cell.value:.0%}" for cell in row))
    return table


def _shade(value: float) -> str:
    return SHADES[min(int(max(value, 0) * len(SHADES)), len(SHADES) - 1)]


def heat_chart(run: ShownRun) -> dict[str, Any] | None:
    """Return the heat map as a figure of a page, with its values; None with fewer than two scores."""
    cells = heat_map(run)
    if len(cells) < 2:
        return None
    lengths = sorted({cell.length for cell in cells}, key=length_of)
    base = {"x": {"field": "length", "type": "ordinal", "sort": lengths, "title": None, "axis": {"labelAngle": 0}}}
    base |= {"y": {"field": "task", "type": "ordinal", "sort": None, "title": None}}
    share = {"field": "value", "type": "quantitative"}
    scale = {"domain": [0, 1], "scheme": "blues"}
    ink = {"condition": {"test": "datum.value > 0.55", "value": "white"}, "value": "black"}
    spec = {
        "title": f"{run.name}: right answers by task and length",
        "width": "container",
        "height": {"step": 28},
        "encoding": base,
        "layer": [
            {"mark": "rect", "encoding": {"color": {**share, "scale": scale, "legend": None}}},
            {"mark": "text", "encoding": {"text": {**share, "format": ".0%"}, "color": ink}},
        ],
    }
    return {"title": spec["title"], "spec": spec, "values": [cell._asdict() for cell in cells]}
