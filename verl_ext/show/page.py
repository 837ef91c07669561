"""One HTML file that opens offline, with the tables of the terminal and the curves of runs as figures.

vega-lite draws the figures, because its library adds 0.9 MB to the file (plotly's adds 4.5 MB) and vl-convert can also
draw without a browser. The page holds each number of the figures once, as JSON; all text is escaped.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from rich.console import Console, RenderableType
from rich.text import Text

from verl_ext.files import atomic_write
from verl_ext.show.answers import heat_chart
from verl_ext.show.run_tables import ANSWERS, EVALUATIONS, shown_metrics
from verl_ext.show.runs import ShownRun
from verl_ext.values import DataError

COLUMNS = 140  # width of the tables in characters; they scroll on a narrower screen
POINTS = 2000  # points of a curve that are drawn, about as many as a screen shows
_SCORES = ("answer", "exact match", "accuracy", "token accuracy")
_UNDRAWN = ("tokens", "target tokens", "packs", "epoch", "answers", "total target tokens")  # counts, in the table alone
_COUNTERS = ("skipped steps", "spikes")  # drawn if anything was counted
# A document's line goes on below its text, and not below the numbers before it.
_HANGING = re.compile(r"(?:<[^>]*>)*(?: {32}|[ \d,]{17}  )")
_LIBRARY = "window.vegaEmbed = vegaEmbed;"
# A figure is as wide as its frame. A long legend adds to its height.
FIT: dict[str, Any] = {"width": "container", "height": 220, "autosize": {"type": "fit-x", "contains": "padding"}}

Chart = dict[str, Any]


def write_page(
    path: Path,
    title: str,
    parts: Iterable[RenderableType],
    documents: Iterable[Text] = (),
    runs: Sequence[ShownRun] = (),
    charts: Sequence[Chart] = (),
    closing: Iterable[RenderableType] = (),
    folded: Mapping[str, str] | None = None,
) -> None:
    """Write a page of tables, documents (with their lines wrapped), and runs with their figures.

    charts: further figures, {title, spec, values}. closing: tables below the figures. folded: {heading: text that a
    click opens}.

    Raises:
        DataError: there are figures to draw, but vl-convert is not installed.
    """
    charts = [*charts_of(runs), *charts]
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, highlight=False)
    tables = "".join(f'<pre class="part">{_html(console, part)}</pre>' for part in parts)
    written = "".join(f'<pre class="document">{_lines(_html(console, text, wrap=False))}</pre>' for text in documents)
    data = {
        "charts": charts,
        "runs": [{"name": run.name, "curves": {n: vars(c) for n, c in run.curves.items()}} for run in runs],
    }
    details: dict[str, str] = dict(folded or {})
    for run in runs:
        for name, facts in {"run.json": run.facts, "data_report.json": run.data}.items():
            if facts:
                details[f"{run.name}: {name}"] = json.dumps(facts, indent=2, ensure_ascii=False)
    environment = Environment(loader=PackageLoader("verl_ext.show", "."), autoescape=select_autoescape())
    text = environment.get_template("page.html").render(
        title=title,
        parts=[tables],
        closing="".join(f'<pre class="part">{_html(console, part)}</pre>' for part in closing),
        documents=written,
        charts=charts,
        points=POINTS,
        thinned=any(len(curve.steps) > POINTS for run in runs for curve in run.curves.values()),
        details=details,
        data=json.dumps(data).replace("<", "\\u003c"),
        vega=_vega().replace("</script", "<\\/script") if charts else "",
    )
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def charts_of(runs: Sequence[ShownRun]) -> list[Chart]:
    """Return the figures: loss, loss of each category, answers, evaluation, other metrics, BABILong's heat maps."""
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
        values = [value for one in curves for value in runs[one["run"]].curves[one["metric"]].finite]
        if values and (title not in _COUNTERS or any(values)):
            charts.append({"title": title, "curves": curves, "spec": _spec(title, curves, values)})
    return [*charts, *filter(None, map(heat_chart, runs))]


def _figure_of(name: str) -> str:
    """Return the title of the figure that shows a metric; scores of all categories share one."""
    plain = name.partition("/")[2]
    kinds = ("token_accuracy", *EVALUATIONS)
    kind = "answer" if name.startswith(ANSWERS) else next((kind for kind in kinds if plain.endswith(kind)), plain)
    return kind.replace("_", " ")


def _series(runs: Sequence[ShownRun], run: ShownRun, kind: str, metrics: int) -> str:
    """Return the name in the legend: the run if there are several, the kind if there are several or only one run."""
    return " ".join(([run.name] if len(runs) > 1 else []) + ([kind] if metrics > 1 or len(runs) == 1 else []))


def score_scale(values: Iterable[float]) -> dict[str, Any]:
    """Return the axis of scores: from 0 to 1 or to 100, whichever holds them all; else as the values are."""
    values = list(values)
    tops = (top for top in (1, 100) if all(0 <= value <= top for value in values))
    return {"domain": [0, top]} if (top := next(tops, None)) else {"zero": False}


def _spec(title: str, curves: Sequence[Mapping[str, Any]], values: Sequence[float]) -> dict[str, Any]:
    """Return a vega-lite figure without its data: lines, and points for validation, which is measured rarely."""
    shown = (("series", "nominal"), ("step", "quantitative"), ("value", "quantitative"))
    layers: list[dict[str, Any]] = [{"mark": {"type": "line", "strokeWidth": 1.5}}]
    if any(curve["kind"] == "val" for curve in curves):
        points = {
            "mark": {"type": "point", "filled": True, "size": 40},
            "transform": [{"filter": "datum.kind == 'val'"}],
            "encoding": {"tooltip": [{"field": name, "type": kind} for name, kind in shown]},
        }
        layers.append(points)
    forms = {"lr": ".1e", "tokens per second": "~s", "total tokens": "~s", "perplexity": "~s"}
    # The digits of a form without a precision are those between two ticks, so that 10 to 50 would be 1e+1 to 5e+1.
    axis: dict[str, Any] = {"format": forms.get(title, ".4~g"), "title": None}
    scale: dict[str, Any] = score_scale(values) if title in _SCORES else {"zero": False}
    if title == "perplexity":  # before training it is thousands of times that of its end
        scale, axis = {"type": "log", "nice": False}, {**axis, "tickCount": 6}
    legend: dict[str, Any] | None = {"orient": "bottom", "columns": 3, "title": None} if len(curves) > 1 else None
    return {
        "title": title,
        **FIT,
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "axis": {"format": "~s"}, "scale": {"nice": False}},
            "y": {"field": "value", "type": "quantitative", "axis": axis, "scale": scale},
            "color": {"field": "series", "type": "nominal", "legend": legend},
        },
        "layer": layers,
    }


def _html(console: Console, part: RenderableType, wrap: bool = True) -> str:
    """Return the terminal's rendering as escaped HTML with inline styles."""
    console.print(part, soft_wrap=not wrap)
    return console.export_html(inline_styles=True, code_format="{code}")


def _lines(text: str) -> str:
    """Return the lines of a document as blocks, those with numbers before their text with a hanging indent."""
    lines = (line or " " for line in text.rstrip("\n").split("\n"))
    return "".join(f"<div{' class=hanging' if _HANGING.match(line) else ''}>{line}</div>" for line in lines)


def _vega() -> str:
    try:
        from vl_convert import javascript_bundle  # imported here because pages without figures do not need it
    except ImportError as error:
        raise DataError(
            "html needs the package vl-convert-python, which verl-ext[show] names; it is not installed"
        ) from error
    return javascript_bundle(_LIBRARY)


def title_of(paths: Sequence[str]) -> str:
    """Return the title of a page about these paths."""
    return f"verl-ext show {' '.join(map(str, paths))}"
