"""The answers of an evaluation as a table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from verl_ext.checkpoint.layout import ANSWERS
from verl_ext.options import DataError, UsageError, choice_problem, must, one_line
from verl_ext.tables import plain_table
from verl_ext.tools.show.runs import run_folder

OPENING, ENDING = 30, 50  # characters of a prompt that its line shows
WORDS = 200  # characters of an answer that its line shows


def answers_view(path: str, step: int | None, category: str | None) -> Iterator[RenderableType]:
    """Yield a step's answers, by default those of the last step.

    Raises:
        UsageError: there are no answers, or none of the step or category.
        DataError: a line is not an answer; the last line is exempt because a run may still be writing it.
    """
    file = run_folder(path) / ANSWERS
    rows = _read(file)
    steps = sorted({row["step"] for row in rows})
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise UsageError(must("step", f"be one of those with answers, {_listed(steps)}", step))
    rows = [row for row in rows if row["step"] == step]
    if category is not None:
        if problem := choice_problem("category", category, sorted({row["category"] for row in rows})):
            raise UsageError(problem)
        rows = [row for row in rows if row["category"] == category]
    scores = [row["score"] for row in rows if row["score"] is not None]
    mean = f": mean score {sum(scores) / len(scores):.3g}" if scores else ""
    yield Text(f"{len(rows):,} answers of step {step:,} in {one_line(str(file))}{mean}", "bold")
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
