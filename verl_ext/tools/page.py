"""One offline HTML file with the terminal's tables and figures.

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
from verl_ext.options import DataError

COLUMNS = 140  # width of the tables in characters; they scroll on a narrower screen
POINTS = 2000  # points of a curve that are drawn, about as many as a screen shows
# A document's line goes on below its text, and not below the numbers before it.
_HANGING = re.compile(r"(?:<[^>]*>)*(?: {32}|[ \d,]{17}  )")
_LIBRARY = "window.vegaEmbed = vegaEmbed;"
# A figure is as wide as its frame. A long legend adds to its height.
FIT: dict[str, Any] = {"width": "container", "height": 220, "autosize": {"type": "fit-x", "contains": "padding"}}

Chart = dict[str, Any]
_MODELS: Chart = {"field": "model", "type": "nominal", "sort": None, "legend": {"orient": "bottom", "title": None}}


def write_page(
    path: Path,
    title: str,
    parts: Iterable[RenderableType],
    documents: Iterable[Text] = (),
    charts: Sequence[Chart] = (),
    runs: Sequence[Mapping[str, Any]] = (),
    closing: Iterable[RenderableType] = (),
    folded: Mapping[str, str] | None = None,
    first: Chart | None = None,
) -> None:
    """Write a page of tables, documents with their lines wrapped, and figures.

    Args:
        path: the file.
        title: the title of the page.
        parts: tables and lines above the figures.
        documents: texts, whose long lines go on below their text.
        charts: figures, {title, spec, values} or, of curves, {title, spec, curves: [{run, metric, …}]}.
        runs: the curves that figures draw, {name, curves: {metric: {steps, values}}}.
        closing: tables below the figures.
        folded: {heading: text that a click opens}.
        first: a figure above everything else.

    Raises:
        DataError: there are figures to draw, but vl-convert is not installed.
    """
    # The terminal's own rendering becomes HTML, so that a page says what the terminal says.
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, highlight=False)
    tables = "".join(f'<pre class="part">{_html(console, part)}</pre>' for part in parts)
    texts = "".join(f'<pre class="document">{_lines(_html(console, text, wrap=False))}</pre>' for text in documents)
    # The figures' numbers stand once, as JSON that cannot end its script element; vega's library only beside figures.
    charts = [*([first] if first else []), *charts]
    data = {"charts": charts, "runs": [*runs]}
    environment = Environment(loader=PackageLoader("verl_ext.tools", "."), autoescape=select_autoescape())
    text = environment.get_template("page.html").render(
        title=title,
        parts=[tables],
        closing="".join(f'<pre class="part">{_html(console, part)}</pre>' for part in closing),
        documents=texts,
        charts=charts,
        on_top=int(first is not None),
        points=POINTS,
        thinned=any(len(curve["steps"]) > POINTS for run in runs for curve in run["curves"].values()),
        details=dict(folded or {}),
        data=json.dumps(data).replace("<", "\\u003c"),
        vega=vl_convert("html").javascript_bundle(_LIBRARY).replace("</script", "<\\/script") if charts else "",
    )
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def score_scale(values: Iterable[float]) -> dict[str, Any]:
    """Return the axis of scores: to 1, to 100, or free."""
    values = list(values)
    tops = (top for top in (1, 100) if all(0 <= value <= top for value in values))
    return {"domain": [0, top]} if (top := next(tops, None)) else {"zero": False}


def curve_chart(title: str, curves: Sequence[Mapping[str, Any]], axis: Chart, scale: Chart) -> Chart:
    """Return a figure of curves, with points for rare validation.

    curves: [{run, metric, series, kind}], whose values are those of the page's runs.
    """
    fields = (("series", "nominal"), ("step", "quantitative"), ("value", "quantitative"))
    layers: list[Chart] = [{"mark": {"type": "line", "strokeWidth": 1.5}}]
    if any(curve["kind"] == "val" for curve in curves):
        points = {
            "mark": {"type": "point", "filled": True, "size": 40},
            "transform": [{"filter": "datum.kind == 'val'"}],
            "encoding": {"tooltip": [{"field": name, "type": kind} for name, kind in fields]},
        }
        layers.append(points)
    legend: Chart | None = {"orient": "bottom", "columns": 3, "title": None} if len(curves) > 1 else None
    encoding = {
        "x": {"field": "step", "type": "quantitative", "axis": {"format": "~s"}, "scale": {"nice": False}},
        "y": {"field": "value", "type": "quantitative", "axis": {**axis, "title": None}, "scale": scale},
        "color": {"field": "series", "type": "nominal", "legend": legend},
    }
    return {"title": title, "curves": curves, "spec": {"title": title, **FIT, "encoding": encoding, "layer": layers}}


def interval_chart(title: str, values: Sequence[Mapping[str, Any]], across: str) -> Chart:
    """Return a figure of means and intervals, models side by side.

    values: [{model, group, mean, low, high, cases}]; across: model or group.
    """
    ends = (value[name] for value in values for name in ("mean", "low", "high"))
    scale = score_scale(end for end in ends if end is not None)
    y = {"type": "quantitative", "axis": {"title": None}, "scale": scale}
    offset: Chart = {} if across == "model" else {"xOffset": {"field": "model", "sort": None}}
    tooltip = [{"field": name} for name in ("model", "group", "mean", "low", "high", "cases")]
    encoding = {
        "x": {"field": across, "type": "nominal", "sort": None, "axis": {"title": None, "labelAngle": -30}},
        **offset,
        "color": _MODELS,
    }
    mark = {"type": "point", "filled": True, "size": 60}
    layers = [
        {"mark": "rule", "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}}},
        {"mark": mark, "encoding": {"y": {"field": "mean", **y}, "tooltip": tooltip}},
    ]
    return _chart(title, values, **FIT, encoding=encoding, layer=layers)


def scatter_chart(title: str, values: Sequence[Mapping[str, Any]], across: str, up: str) -> Chart:
    """Return a figure of points, their medians, and the line of equality.

    values: [{asked, is, model, case}].
    """
    scale = {"type": "log", "nice": False}  # has no place for 0, which only the table shows
    x = {"field": "asked", "type": "quantitative", "scale": scale, "axis": {"title": across, "format": "~s"}}
    y = {"type": "quantitative", "scale": scale, "axis": {"title": up, "format": "~s"}}
    tooltip = [{"field": name} for name in ("model", "case", "asked", "is")]
    equal = {"type": "line", "strokeDash": [4, 4], "color": "#888888"}
    median = {"field": "is", "aggregate": "median", **y}
    points = {"x": x, "y": {"field": "is", **y}, "color": _MODELS, "tooltip": tooltip}
    layers = [
        {"mark": equal, "encoding": {"x": x, "y": {"field": "asked", **y}}},
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": {"x": x, "y": median, "color": _MODELS}},
        {"mark": {"type": "point", "filled": True, "opacity": 0.6}, "encoding": points},
    ]
    return {**_chart(f"{title}; lines: medians", values, **FIT, layer=layers), "title": title}


def heat_map(
    title: str,
    values: Sequence[Mapping[str, Any]],
    across: Chart,
    down: Chart,
    score: Chart,
    *,
    form: str,
    colour: Chart,
    ink: Chart,
    size: Chart = FIT,
) -> Chart:
    """Return a heat map of a score over two fields.

    A cell without a score stays empty.

    across, down, score: the channels of the two fields and of the score. form: the format of a cell's number. colour:
    what makes `score` the channel of a cell's colour. ink: the channel of the number's colour.
    """
    score = {"type": "quantitative", **score}
    fields = [{"field": channel["field"], "type": "ordinal"} for channel in (across, down)]
    tooltip = [*fields, score, *([{"aggregate": "count"}] if "aggregate" in score else [])]
    layers = [
        {"mark": "rect", "encoding": {"color": {**score, **colour}, "tooltip": tooltip}},
        {"mark": "text", "encoding": {"text": {**score, "format": form}, "color": ink}},
    ]
    encoding = {"x": {"type": "ordinal", **across}, "y": {"type": "ordinal", "sort": None, **down}}
    return _chart(title, values, **size, encoding=encoding, layer=layers)


def _chart(title: str, values: Sequence[Mapping[str, Any]], **spec: Any) -> Chart:
    return {"title": title, "spec": {"title": title, **spec}, "values": list(values)}


def _html(console: Console, part: RenderableType, wrap: bool = True) -> str:
    """Return the terminal's rendering as escaped HTML with inline styles."""
    console.print(part, soft_wrap=not wrap or bool(isinstance(part, Text) and part.no_wrap))
    return console.export_html(inline_styles=True, code_format="{code}")


def _lines(text: str) -> str:
    """Return a document's lines as blocks, numbered ones with hanging indents."""
    lines = (line or " " for line in text.rstrip("\n").split("\n"))
    return "".join(f"<div{' class=hanging' if _HANGING.match(line) else ''}>{line}</div>" for line in lines)


def vl_convert(option: str) -> Any:
    """Return the package that draws figures, or raise DataError for the option that needs it."""
    try:
        import vl_convert as package  # imported here because pages without figures do not need it
    except ImportError as error:
        needed = f"{option} needs the package vl-convert-python, which verl-ext[show] names"
        raise DataError(f"{needed}; it is not installed") from error
    return package
