"""Runs as a page: tables, curves as figures, and facts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from verl_ext.tools.page import COLUMNS, FIT, Chart, curve_chart, interval_chart, score_scale, write_page
from verl_ext.tools.show.answers import score_table
from verl_ext.tools.show.experts import expert_loads
from verl_ext.tools.show.picture import category_spec, picture_values
from verl_ext.tools.show.run_tables import ANSWERS, EVALUATIONS, OF_LENGTHS, by_length, run_tables, shown_metrics
from verl_ext.tools.show.runs import ShownRun

_SCORES = ("answer", "exact match", "accuracy", "token accuracy")
_UNDRAWN = ("tokens", "target tokens", "packs", "epoch", "answers", "total target tokens")  # counts, in the table alone
_COUNTERS = ("skipped steps", "spikes")  # drawn if anything was counted


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
        values = [value for one in curves for value in runs[one["run"]].curves[one["metric"]].finite]
        if values and (title not in _COUNTERS or any(values)):
            charts.append(_curve_chart(title, curves, values))
    for metric, points in by_length(runs).items():
        charts.append(interval_chart(f"{metric} by document length, first and last", points, "group"))
    charts += (scores.chart() for scores in map(score_table, runs) if scores)
    return [*charts, *(loads.chart() for loads in map(expert_loads, runs) if loads)]


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
