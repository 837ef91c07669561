"""One HTML file that opens offline, with the tables of the terminal and figures.

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
from verl_ext.values import DataError

COLUMNS = 140  # width of the tables in characters; they scroll on a narrower screen
POINTS = 2000  # points of a curve that are drawn, about as many as a screen shows
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
    charts: Sequence[Chart] = (),
    runs: Sequence[Mapping[str, Any]] = (),
    closing: Iterable[RenderableType] = (),
    folded: Mapping[str, str] | None = None,
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

    Raises:
        DataError: there are figures to draw, but vl-convert is not installed.
    """
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, highlight=False)
    tables = "".join(f'<pre class="part">{_html(console, part)}</pre>' for part in parts)
    written = "".join(f'<pre class="document">{_lines(_html(console, text, wrap=False))}</pre>' for text in documents)
    data = {"charts": [*charts], "runs": [*runs]}
    environment = Environment(loader=PackageLoader("verl_ext.tools", "."), autoescape=select_autoescape())
    text = environment.get_template("page.html").render(
        title=title,
        parts=[tables],
        closing="".join(f'<pre class="part">{_html(console, part)}</pre>' for part in closing),
        documents=written,
        charts=charts,
        points=POINTS,
        thinned=any(len(curve["steps"]) > POINTS for run in runs for curve in run["curves"].values()),
        details=dict(folded or {}),
        data=json.dumps(data).replace("<", "\\u003c"),
        vega=_vega().replace("</script", "<\\/script") if charts else "",
    )
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def score_scale(values: Iterable[float]) -> dict[str, Any]:
    """Return the axis of scores: from 0 to 1 or to 100, whichever holds them all; else as the values are."""
    values = list(values)
    tops = (top for top in (1, 100) if all(0 <= value <= top for value in values))
    return {"domain": [0, top]} if (top := next(tops, None)) else {"zero": False}


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
