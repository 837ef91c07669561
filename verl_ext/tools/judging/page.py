"""The page of a judgement: figures, tables, and every case's texts."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from verl_ext.options import one_line
from verl_ext.tables import pivot
from verl_ext.tools.judging.figures import Figure
from verl_ext.tools.judging.run import FiguresOfModels, Judged, JudgedModels, difference_table, shown, table
from verl_ext.tools.judging.task import Task
from verl_ext.tools.page import Chart, heat_map, interval_chart, scatter_chart, write_page

PROMPT_ENDS = 600  # characters that a case shows of each end of its prompt


def write_judged(
    path: Path,
    title: str,
    task: Task,
    judged: JudgedModels,
    figures: FiguresOfModels,
    differences: FiguresOfModels,
) -> None:
    """Write the page; without vl-convert, a note replaces the figures."""
    has_figures = find_spec("vl_convert") is not None
    parts: list[RenderableType] = [Text(table(judged, figures)), *_group_tables(task, judged, figures)]
    if of_pairs := difference_table(differences):
        parts.insert(1, Text(of_pairs))
    if not has_figures:
        parts.insert(0, Text("Figures need vl-convert-python: pip install 'verl-ext[show]'", "yellow"))
    charts = list(judged_charts(task, judged, figures)) if has_figures else []
    write_page(path, title, parts, charts=charts, closing=[_case_table(judged)], folded=_case_texts(judged))


def judged_charts(task: Task, judged: JudgedModels, figures: FiguresOfModels) -> Iterator[Chart]:
    """Yield the figures of headlines, then the benchmark's own plot."""
    for score in task.headlines:
        if values := [_point("", model, of["all"][score]) for model, of in figures.items() if score in of["all"]]:
            yield interval_chart(score, values, "model")
        for kind in _kinds(task, judged):
            values = [
                _point(group.removeprefix(f"{kind} "), model, of_scores[score])
                for model, of in figures.items()
                for group, of_scores in of.items()
                if group.startswith(f"{kind} ") and score in of_scores
            ]
            several = len({value["group"] for value in values}) > 1  # one alone has the figures of all cases
            if several and not (task.heat_map and kind == "cell"):
                yield interval_chart(f"{score} by {kind}", values, "group")
    if task.against:
        yield _scatter(*task.against, judged)
    if task.heat_map:
        for model, rows in judged.items():
            yield _heat_map(task, *task.heat_map, model, rows)


def _kinds(task: Task, judged: JudgedModels) -> list[str]:
    """Return the kinds of groups in the order of the cases."""
    return list(dict.fromkeys(kind for rows in judged.values() for row in rows for kind in task.groups(row.case)))


def _point(group: str, model: str, figure: Figure) -> dict[str, Any]:
    return {"group": group, "model": model, **vars(figure)}


def _scatter(fact: str, score: str, judged: JudgedModels) -> Chart:
    """Return the cases' scores over requested values, without scores of 0."""
    values = [
        {"asked": row.case.facts[fact], "is": row.scores[score], "model": model, "case": row.case.name}
        for model, rows in judged.items()
        for row in rows
        if row.scores.get(score)
    ]
    return scatter_chart(f"{score} written over {score} asked for", values, "asked for", "written")


def _heat_map(task: Task, across: str, down: str, score: str, model: str, rows: Sequence[Judged]) -> Chart:
    """Return a model's mean scores over two kinds of groups."""
    values = [
        {"across": groups.get(across, ""), "down": groups[down], "score": row.scores[score]}
        for row in rows
        if row.scores.get(score) is not None and (groups := task.groups(row.case))
    ]
    return heat_map(
        f"{model}: {score}",
        values,
        {"field": "across", "sort": None, "axis": {"title": across, "labelAngle": 0}},
        {"field": "down", "axis": {"title": down}},
        {"field": "score", "aggregate": "mean"},
        form=".2f",
        colour={"scale": {"domain": [0, 1], "scheme": "redyellowgreen"}, "legend": {"title": None}},
        ink={"value": "black"},
    )


def _group_tables(task: Task, judged: JudgedModels, figures: FiguresOfModels) -> Iterator[RenderableType]:
    """Yield a table for each headline, by group and model."""
    kinds, named = ["all", *_kinds(task, judged)], dict.fromkeys(group for of in figures.values() for group in of)
    groups = [group for kind in kinds for group in named if group == kind or group.startswith(f"{kind} ")]
    for score in task.headlines:
        if len(groups) > 1 and any(score in of["all"] for of in figures.values()):
            cells: dict[tuple[str, str], RenderableType] = {
                (one_line(group), one_line(model)): shown(of.get(group, {}).get(score))
                for group in groups
                for model, of in figures.items()
            }
            yield pivot(score, cells)


def _case_table(judged: JudgedModels) -> RenderableType:
    """Return a table of cases with each model's outcome and scores."""
    cells = {
        (one_line(row.case.name), one_line(model)): Text(_outcome(row))
        for of_models in zip(*judged.values(), strict=True)
        for model, row in zip(judged, of_models, strict=True)
    }
    return pivot("case", cells, left=1 + len(judged))


def _outcome(row: Judged) -> str:
    scores = (f"{name} {'–' if score is None else _digits(score)}" for name, score in row.scores.items())
    return "  ".join([row.outcome, *scores])


def _digits(score: float) -> str:
    """Return four digits of a score, or all from 1,000 up."""
    return f"{score:,.0f}" if abs(score) >= 1000 else f"{score:.4g}"


def _case_texts(judged: JudgedModels) -> dict[str, str]:
    """Return each case's prompt ends, answers and judge's texts, folded."""
    texts = {}
    for of_models in zip(*judged.values(), strict=True):
        case = of_models[0].case
        prompt = case.prompt
        if len(prompt) > 2 * PROMPT_ENDS:
            left_out = f"[… {len(prompt) - 2 * PROMPT_ENDS:,} characters …]"
            prompt = f"{prompt[:PROMPT_ENDS]}\n{left_out}\n{prompt[-PROMPT_ENDS:]}"
        parts = [prompt]
        for model, row in zip(judged, of_models, strict=True):
            parts += [f"──── {model}: {_outcome(row)}", row.answer.raw or row.answer.reason]
            for number, verdict in enumerate(row.verdicts, start=1):
                parts += [f"──── {model}: verdict {number}, {verdict.outcome}", verdict.raw or verdict.reason]
        texts[f"case {case.name}"] = "\n\n".join(parts)
    return texts
