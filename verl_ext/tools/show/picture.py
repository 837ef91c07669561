"""One picture of runs for a page of text: the loss of every category, as SVG.

Lines are training, smoothed; points are validation. With several runs each run has a dash of its own. The colours
follow the reader's light or dark mode, and the ground is part of the picture, so that it can be read on any page.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.files import atomic_write
from verl_ext.options import DataError, must
from verl_ext.tools.show.runs import ShownRun

_SMOOTHED = 0.05  # the share of a run's steps over which a line is a mean
_SIZE = {"width": 560, "height": 260}
# The colour of each part in light mode, and what takes its place in dark mode.
_TEXT, _LINE, _GROUND = ("#1f2328", "#e6edf3"), ("#d8dee4", "#30363d"), ("#ffffff", "#0d1117")
_COLOURS = (_TEXT, _LINE, _GROUND)
_SERIES = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#57606a", "#0a7ea4"]


def write_picture(path: Path, runs: Sequence[ShownRun], metric: str) -> None:
    """Draw <category>_<metric> of all categories into an SVG file.

    Raises DataError if no run has such curves, or vl-convert is not installed.
    """
    values = picture_values(runs, metric)
    if not values:
        names = {key.partition("/")[2] for run in runs for key in run.curves}
        got = f"{metric}, runs have {sorted(names)}"
        raise DataError(must("metric", "be one that categories have, such as loss", got))
    try:
        from vl_convert import vegalite_to_svg  # imported here because other views do not need it
    except ImportError as error:
        raise DataError(
            "svg needs the package vl-convert-python, which verl-ext[show] names; it is not installed"
        ) from error
    text = vegalite_to_svg(_spec(values, [run.name for run in runs], metric))
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
                    pairs = zip(curve.steps, curve.values, strict=True)
                    points = [(float(step), value) for step, value in pairs if value is not None]
                    points = _smoothed(points, max(1, round(run.step * _SMOOTHED))) if kind == "train" else points
                    facts = {"run": run.name, "category": category, "kind": kind}
                    values += [{**facts, "step": step, "value": round(value, 4)} for step, value in points]
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
