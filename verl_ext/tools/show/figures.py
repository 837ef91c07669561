"""The figures of runs: on a page with their tables, or one picture of the loss of every category, as SVG.

In the picture, lines are training, smoothed; points are validation. With several runs each run has a dash of its own.
The colours follow the reader's light or dark mode, and the ground is part of the picture, so that it can be read on any
page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from verl_ext.files import atomic_write
from verl_ext.options import DataError, must
from verl_ext.tools.page import COLUMNS, FIT, Chart, curve_chart, interval_chart, score_scale, vl_convert, write_page
from verl_ext.tools.show.heat_maps import heat_maps
from verl_ext.tools.show.run_tables import ANSWERS, EVALUATIONS, OF_LENGTHS, by_length, run_tables, shown_metrics
from verl_ext.tools.show.runs import ShownRun

_SCORES = ("answer", "exact match", "accuracy", "token accuracy")
_UNDRAWN = ("tokens", "target tokens", "packs", "epoch", "answers", "total target tokens")  # counts, in the table alone
_COUNTERS = ("skipped steps", "spikes")  # drawn if anything was counted
_SMOOTHED = 0.05  # the share of a run's steps over which a line is a mean
_SIZE = {"width": 560, "height": 260}
# The colour of each part in light mode, and what takes its place in dark mode.
_TEXT, _LINE, _GROUND = ("#1f2328", "#e6edf3"), ("#d8dee4", "#30363d"), ("#ffffff", "#0d1117")
_COLOURS = (_TEXT, _LINE, _GROUND)
_SERIES = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#57606a", "#0a7ea4"]


def write_run_page(path: Path, title: str, runs: Sequence[ShownRun], closing: Iterable[RenderableType] = ()) -> None:
    """Write the page of runs, with `closing` below the figures.

    Raises DataError if there are figures to draw, but vl-convert is not installed.
    """
    files = {
        f"{run.name}: {name}": json.dumps(facts, indent=2, ensure_ascii=False)
        for run in runs
        for name, facts in {"run.json": run.facts, "data_report.json": run.data}.items()
        if facts
    }
    curves = [{"name": run.name, "curves": {n: vars(curve) for n, curve in run.curves.items()}} for run in runs]
    tables, charts, first = run_tables(runs, COLUMNS), run_charts(runs), category_chart(runs)
    write_page(path, title, tables, charts=charts, runs=curves, closing=closing, folded=files, first=first)


def category_chart(runs: Sequence[ShownRun]) -> Chart | None:
    """Return one figure of every category's loss; None without any. Training is smoothed."""
    if not (values := picture_values(runs, "loss")):
        return None
    spec = category_spec(values, [run.name for run in runs], "loss")
    return {"title": spec["title"], "spec": {**FIT, "height": 300, **spec}, "values": values}


def run_charts(runs: Sequence[ShownRun]) -> list[Chart]:
    """Return the figures: losses, categories, other metrics, heat maps of scores."""
    groups: dict[str, list[tuple[str, str]]] = {"loss": [("train/loss", "train"), ("val/loss", "validation")]}
    for name in dict.fromkeys(category for run in runs for category in run.categories()):
        groups[f"loss of {name}"] = [(f"train/{name}_loss", "train"), (f"val/{name}_loss", "validation")]
    losses = {name for metrics in groups.values() for name, _ in metrics}
    for name in dict.fromkeys(key for run in runs for key in shown_metrics(run) if key not in losses):
        if (title := _figure_of(name)) not in _UNDRAWN:
            groups.setdefault(title, []).append((name, name))
    charts: list[Chart] = []
    for title, metrics in groups.items():
        curves: list[dict[str, Any]] = []
        for number, run in enumerate(runs):
            for metric, kind in metrics:
                if metric in run.curves:
                    series = _series(runs, run, kind, len(metrics))
                    curves.append({"run": number, "metric": metric, "series": series, "kind": metric.split("/")[0]})
        values = [value for one in curves for _, value in runs[one["run"]].curves[one["metric"]].points]
        if values and (title not in _COUNTERS or any(values)):
            charts.append(_curve_chart(title, curves, values))
    for metric, points in by_length(runs).items():
        charts.append(interval_chart(f"{metric} by document length, first and last", points, "group"))
    return [*charts, *(heat_map.chart() for heat_map in heat_maps(runs))]


def _figure_of(name: str) -> str:
    """Return a metric's figure title, which all categories' scores share."""
    plain = name.partition("/")[2]
    if (of_length := OF_LENGTHS.fullmatch(name)) and of_length[1] == "loss":
        return "loss by length"
    kinds = ("token_accuracy", *EVALUATIONS)
    kind = "answer" if name.startswith(ANSWERS) else next((kind for kind in kinds if plain.endswith(kind)), plain)
    return kind.replace("_", " ")


def _series(runs: Sequence[ShownRun], run: ShownRun, kind: str, metrics: int) -> str:
    """Return a legend's name: the run, the kind, or both."""
    return " ".join(([run.name] if len(runs) > 1 else []) + ([kind] if metrics > 1 or len(runs) == 1 else []))


def _curve_chart(title: str, curves: Sequence[Mapping[str, Any]], values: Sequence[float]) -> Chart:
    forms = {"lr": ".1e", "tokens per second": "~s", "total tokens": "~s", "perplexity": "~s"}
    # The digits of a form without a precision are those between two ticks, so that 10 to 50 would be 1e+1 to 5e+1.
    axis: Chart = {"format": forms.get(title, ".4~g")}
    scale: Chart = score_scale(values) if title in _SCORES else {"zero": False}
    if title == "perplexity":  # before training it is thousands of times that of its end
        scale, axis = {"type": "log", "nice": False}, {**axis, "tickCount": 6}
    return curve_chart(title, curves, axis, scale)


def write_picture(path: Path, runs: Sequence[ShownRun], metric: str) -> None:
    """Draw <category>_<metric> of all categories into an SVG file.

    Raises DataError if no run has such curves, or vl-convert is not installed.
    """
    values = picture_values(runs, metric)
    if not values:
        names = {key.partition("/")[2] for run in runs for key in run.curves}
        got = f"{metric}, runs have {sorted(names)}"
        raise DataError(must("metric", "be one that categories have, such as loss", got))
    text = vl_convert("svg").vegalite_to_svg(_spec(values, [run.name for run in runs], metric))
    dark = "".join(f'[fill="{light}"]{{fill:{night}}}[stroke="{light}"]{{stroke:{night}}}' for light, night in _COLOURS)
    style = f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>"
    head, _, rest = text.partition(">")
    with atomic_write(path) as partial:
        partial.write_text(f"{head}>{style}{rest}\n", encoding="utf-8")


def picture_values(runs: Sequence[ShownRun], metric: str) -> list[dict[str, Any]]:
    """Return the points of all curves: {run, category, kind, step, value}."""
    values = []
    categories = sorted({name for run in runs for name in run.categories()})  # one may be validated and not trained
    for run in runs:
        for category in categories:
            for kind in ("train", "val"):
                if curve := run.curves.get(f"{kind}/{category}_{metric}"):
                    points: Sequence[tuple[float, float]] = curve.points
                    if kind == "train":
                        points = _smoothed(points, max(1, round(run.step * _SMOOTHED)))
                    facts = {"run": run.name, "category": category, "kind": kind}
                    values += [{**facts, "step": float(step), "value": round(value, 4)} for step, value in points]
    return values


def _smoothed(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Return the means of steps and values in each part of `width` steps."""
    parts: dict[int, list[tuple[float, float]]] = {}
    for step, value in points:
        parts.setdefault(int(step) // width, []).append((step, value))
    return [
        (sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part))
        for part in parts.values()
    ]


def category_spec(values: Sequence[dict[str, Any]], runs: Sequence[str], metric: str) -> dict[str, Any]:
    """Return the figure of all curves, without their values, size and colours of the page around it."""
    axis = {"title": None, "format": ".3~g", "domain": False, "ticks": False}
    is_positive = all(value["value"] > 0 for value in values)
    scale: dict[str, Any] = {"type": "log", "nice": False} if metric == "loss" and is_positive else {"zero": False}
    legend = {"title": None, "symbolOpacity": 1}
    dashes = {**legend, "symbolType": "stroke", "symbolSize": 400, "symbolFillColor": "transparent"}
    encoding: dict[str, Any] = {
        "x": {"field": "step", "type": "quantitative", "axis": {**axis, "title": "step", "grid": False}},
        "y": {"field": "value", "type": "quantitative", "axis": {**axis, "tickCount": 6}, "scale": scale},
        "color": {"field": "category", "type": "nominal", "scale": {"range": _SERIES}, "legend": legend},
    }
    if len(runs) > 1:
        encoding["strokeDash"] = {"field": "run", "type": "nominal", "sort": [*runs], "legend": dashes}
    line: dict[str, Any]
    point: dict[str, Any]
    if len(runs) == 1:
        line, point = {"strokeWidth": 2}, {"type": "point", "filled": True, "opacity": 1, "size": 45}
    else:  # a line through the points of a run tells which run they are of
        line, point = {"strokeWidth": 1, "opacity": 0.35}, {"type": "line", "strokeWidth": 2, "point": {"size": 45}}
    marks = {"train": {"type": "line", **line}, "val": point}
    drawn = {value["kind"] for value in values}  # vega warns of a layer without values
    layers = [
        {"mark": mark, "transform": [{"filter": f"datum.kind == '{kind}'"}]}
        for kind, mark in marks.items()
        if kind in drawn
    ]
    heading = f"{metric.replace('_', ' ')} by category: lines are training (smoothed), points are validation"
    return {"title": heading, "encoding": encoding, "layer": layers}


def _spec(values: Sequence[dict[str, Any]], runs: Sequence[str], metric: str) -> dict[str, Any]:
    axis = {"labelColor": _TEXT[0], "titleColor": _TEXT[0], "gridColor": _LINE[0]}
    legend = {"labelColor": _TEXT[0], "labelFontSize": 12, "symbolStrokeWidth": 2, "symbolStrokeColor": _TEXT[0]}
    config = {
        "background": _GROUND[0],
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**axis, "titleFontWeight": "normal", "labelFontSize": 12},
        "legend": legend,
        "title": {"color": _TEXT[0], "fontSize": 13, "anchor": "start", "fontWeight": "normal"},
    }
    data = {"values": [*values]}
    return {**_SIZE, "padding": 12, "data": data, "config": config, **category_spec(values, runs, metric)}
