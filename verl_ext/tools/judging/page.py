"""The page of a judgement: figures with intervals, models side by side, and every case with the judge's texts."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from verl_ext.tables import plain_table
from verl_ext.tools.judging.figures import Figure
from verl_ext.tools.judging.run import Judged, shown, table
from verl_ext.tools.judging.task import Task
from verl_ext.tools.page import FIT, Chart, score_scale, write_page
from verl_ext.values import one_line

PROMPT_ENDS = 600  # characters that a case shows of each end of its prompt

Found = Mapping[str, Mapping[str, Mapping[str, Figure]]]
JudgedModels = Mapping[str, Sequence[Judged]]


def write_judged(path: Path, title: str, task: Task, judged: JudgedModels, found: Found) -> None:
    """Write the page; without vl-convert, a note replaces the figures."""
    has_figures = find_spec("vl_convert") is not None
    parts: list[RenderableType] = [Text(table(judged, found)), *_group_tables(task, judged, found)]
    if not has_figures:
        parts.insert(0, Text("Figures need vl-convert-python: pip install 'verl-ext[show]'", "yellow"))
    charts = list(charts_of(task, judged, found)) if has_figures else []
    write_page(path, title, parts, charts=charts, closing=[_case_table(judged)], folded=_case_texts(judged))


def charts_of(task: Task, judged: JudgedModels, found: Found) -> Iterator[Chart]:
    """Yield the figures: each headline over all cases and by group, then the benchmark's own plot."""
    for score in task.headlines:
        if values := [_point("", model, of["all"][score]) for model, of in found.items() if score in of["all"]]:
            yield _intervals(score, values, "model")
        for kind in _kinds(task, judged):
            values = [
                _point(group.removeprefix(f"{kind} "), model, of_scores[score])
                for model, of in found.items()
                for group, of_scores in of.items()
                if group.startswith(f"{kind} ") and score in of_scores
            ]
            several = len({value["group"] for value in values}) > 1  # one alone has the figures of all cases
            if several and not (task.heat_map and kind == "cell"):
                yield _intervals(f"{score} by {kind}", values, "group")
    if task.against:
        yield _against(*task.against, judged)
    if task.heat_map:
        for model, rows in judged.items():
            yield _heat_map(task, *task.heat_map, model, rows)


def _kinds(task: Task, judged: JudgedModels) -> list[str]:
    """Return the kinds of groups in the order of the cases."""
    return list(dict.fromkeys(kind for rows in judged.values() for row in rows for kind in task.groups(row.case)))


def _point(group: str, model: str, figure: Figure) -> dict[str, Any]:
    return {"group": group, "model": model, **vars(figure)}


def _intervals(title: str, values: Sequence[Mapping[str, Any]], across: str) -> Chart:
    """Return a chart of means with their intervals; in a chart by group, the models stand side by side."""
    ends = (value[name] for value in values for name in ("mean", "low", "high"))
    scale = score_scale(end for end in ends if end is not None)
    y = {"type": "quantitative", "axis": {"title": None}, "scale": scale}
    offset: dict[str, Any] = {} if across == "model" else {"xOffset": {"field": "model", "sort": None}}
    tooltip = [{"field": name} for name in ("model", "group", "mean", "low", "high", "cases")]
    spec = {
        "title": title,
        **FIT,
        "encoding": {
            "x": {"field": across, "type": "nominal", "sort": None, "axis": {"title": None, "labelAngle": -30}},
            **offset,
            "color": {"field": "model", "type": "nominal", "sort": None, "legend": {"orient": "bottom", "title": None}},
        },
        "layer": [
            {"mark": "rule", "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {"y": {"field": "mean", **y}, "tooltip": tooltip},
            },
        ],
    }
    return {"title": title, "spec": spec, "values": list(values)}


def _against(fact: str, score: str, judged: JudgedModels) -> Chart:
    """Return a chart of the cases' scores over the requested values, with a line on which both are equal."""
    values = [
        {"asked": row.case.facts[fact], "is": row.scores[score], "model": model, "case": row.case.name}
        for model, rows in judged.items()
        for row in rows
        if row.scores.get(score)
    ]
    title = f"{score} written over {score} asked for"
    scale = {"type": "log", "nice": False}  # has no place for a text without words, which only the table shows
    x = {"field": "asked", "type": "quantitative", "scale": scale, "axis": {"title": "asked for", "format": "~s"}}
    y = {"type": "quantitative", "scale": scale, "axis": {"title": "written", "format": "~s"}}
    color = {"field": "model", "type": "nominal", "sort": None, "legend": {"orient": "bottom", "title": None}}
    tooltip = [{"field": name} for name in ("model", "case", "asked", "is")]
    median = {"field": "is", "aggregate": "median", **y}
    layers = [
        {
            "mark": {"type": "line", "strokeDash": [4, 4], "color": "#888888"},
            "encoding": {"x": x, "y": {"field": "asked", **y}},
        },
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": {"x": x, "y": median, "color": color}},
        {
            "mark": {"type": "point", "filled": True, "opacity": 0.6},
            "encoding": {"x": x, "y": {"field": "is", **y}, "color": color, "tooltip": tooltip},
        },
    ]
    return {"title": title, "spec": {"title": f"{title}; lines: medians", **FIT, "layer": layers}, "values": values}


def _heat_map(task: Task, across: str, down: str, score: str, model: str, rows: Sequence[Judged]) -> Chart:
    """Return a heat map of a model's mean scores over two kinds of groups; a cell without a score stays empty."""
    values = [
        {"across": groups.get(across, ""), "down": groups[down], "score": row.scores[score]}
        for row in rows
        if row.scores.get(score) is not None and (groups := task.groups(row.case))
    ]
    axes = {name: {"field": name, "type": "ordinal", "sort": None} for name in ("across", "down")}
    colour = {"field": "score", "aggregate": "mean", "type": "quantitative"}
    scale = {"scale": {"domain": [0, 1], "scheme": "redyellowgreen"}, "legend": {"title": None}}
    tooltip = [*({"field": name, "type": "ordinal"} for name in axes), colour, {"aggregate": "count"}]
    encoding = {
        "x": {**axes["across"], "axis": {"title": across, "labelAngle": 0}},
        "y": {**axes["down"], "axis": {"title": down}},
    }
    layers = [
        {"mark": "rect", "encoding": {"color": {**colour, **scale}, "tooltip": tooltip}},
        {"mark": "text", "encoding": {"text": {**colour, "format": ".2f"}, "color": {"value": "black"}}},
    ]
    title = f"{model}: {score}"
    return {"title": title, "spec": {"title": title, **FIT, "encoding": encoding, "layer": layers}, "values": values}


def _group_tables(task: Task, judged: JudgedModels, found: Found) -> Iterator[RenderableType]:
    """Yield a table for each headline, with a row per group, those of a kind together, and a column per model."""
    kinds, named = ["all", *_kinds(task, judged)], dict.fromkeys(group for of in found.values() for group in of)
    groups = [group for kind in kinds for group in named if group == kind or group.startswith(f"{kind} ")]
    for score in task.headlines:
        if len(groups) > 1 and any(score in of["all"] for of in found.values()):
            rows = plain_table(score, *map(one_line, found))
            for group in groups:
                figures = (of.get(group, {}).get(score) for of in found.values())
                rows.add_row(Text(one_line(group)), *(shown(figure) for figure in figures))
            yield rows


def _case_table(judged: JudgedModels) -> RenderableType:
    """Return a table of the cases with the outcome and the scores of each model."""
    rows = plain_table("case", *map(one_line, judged), left=1 + len(judged))
    for of_models in zip(*judged.values(), strict=True):
        rows.add_row(Text(one_line(of_models[0].case.name)), *(Text(_outcome(row)) for row in of_models))
    return rows


def _outcome(row: Judged) -> str:
    scores = (f"{name} {'–' if score is None else _digits(score)}" for name, score in row.scores.items())
    return "  ".join([row.outcome, *scores])


def _digits(score: float) -> str:
    """Return four digits of a score, and all of a number of words: 0.7312, 10,160."""
    return f"{score:,.0f}" if abs(score) >= 1000 else f"{score:.4g}"


def _case_texts(judged: JudgedModels) -> dict[str, str]:
    """Return the folded text of each case: the ends of its prompt, the answers, and the judge's raw texts."""
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
