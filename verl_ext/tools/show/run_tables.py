"""Runs in a terminal: progress, curves, figures by length, differences of configs."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text
from tqdm import tqdm

from verl_ext.checkpoint.curves import Curve
from verl_ext.options import leaves, one_line, spell
from verl_ext.progress import four_digits
from verl_ext.tables import pivot, plain_table
from verl_ext.tools.show.heat_maps import heat_maps
from verl_ext.tools.show.runs import ShownRun

BLOCKS = "▁▂▃▄▅▆▇█"
OTHERS = tuple(f"train/{name}" for name in ("grad_norm", "lr", "tokens_per_second", "pack_fill", "memory_gib"))
OTHERS += ("train/router_loss", "train/expert_rows_max", "perf/mfu")
EVALUATIONS = ("exact_match", "accuracy", "perplexity")
# A metric of a bin of document lengths.
OF_LENGTHS = re.compile(r"val/(loss|answer|exact_match|accuracy|target_tokens)_(\d+_(?:\d+|inf))")
ANSWERS = "val/answer"  # the name of the mean score; a category's follows a slash


def run_tables(runs: Sequence[ShownRun], width: int) -> Iterator[RenderableType]:
    """Yield the tables of runs for a terminal of `width` columns."""
    for run in runs:
        yield Text(one_line(headline(run)), "bold")
        if run.torn is not None:
            yield Text(f"shown up to line {run.torn - 1:,}: line {run.torn:,} of its metrics is not whole", "yellow")
    if len(runs) > 1 and (table := config_differences(runs)):
        yield table
    names = list(dict.fromkeys(name for run in runs for name in shown_metrics(run)))
    longest = max(map(len, names), default=0)
    words = ["metric", "run"] if len(runs) > 1 else ["metric"]
    table = plain_table(*words, "first", "last", "least", left=len(words))
    table.add_column("curve", no_wrap=True)
    taken = longest + 3 * 9 + 4 * 2 + (max(len(run.name) for run in runs) + 2 if len(runs) > 1 else 0)
    for name in names:
        for run in runs:
            curve = run.curves.get(name)
            if curve is None or not (values := [value for _, value in curve.points]):
                continue
            numbers = (four_digits(value) for value in (values[0], values[-1], min(values)))
            of_run = [Text(one_line(run.name))] if len(runs) > 1 else []
            table.add_row(Text(one_line(name)), *of_run, *numbers, sparkline(curve, max(width - taken, 10)))
    yield table
    for metric, points in by_length(runs).items():
        cells = {(point["model"], point["group"]): four_digits(point["mean"]) for point in points}
        yield pivot(f"{metric} by document length", cells)
    for heat_map in heat_maps(runs):
        yield from heat_map.tables(width)


def headline(run: ShownRun) -> str:
    """Return a run's progress, its last checkpoint and its hardware."""
    total = run.facts.get("total_steps")
    parts = [f"{run.name}: step {run.step:,}" + (f" of {total:,} ({run.step / total:.0%})" if total else "")]
    if total and run.step != total and not run.is_alive:
        parts.append("not running")
    elif run.seconds_left:
        parts.append(f"{tqdm.format_interval(run.seconds_left)} left")
    parts.append("no checkpoint" if run.checkpoint is None else f"last checkpoint at step {run.checkpoint:,}")
    parts += [run.facts["runs_on"]] if "runs_on" in run.facts else []
    return " · ".join(parts)


def shown_metrics(run: ShownRun) -> list[str]:
    """Return the shown metrics: losses, categories, answers, evaluation, then others."""
    wanted = ["train/loss", "val/loss", *(key for key in run.curves if OF_LENGTHS.fullmatch(key))]
    wanted += [f"{split}/{name}_loss" for name in run.categories() for split in ("train", "val")]
    wanted += [key for key in run.curves if key == ANSWERS or key.startswith(f"{ANSWERS}/")]
    wanted += [key for key in run.curves if key.startswith("val/") and key.endswith(EVALUATIONS)]
    wanted += OTHERS
    kinds = {"train": ("tokens", "entropy", "token_accuracy"), "val": ("tokens", "entropy")}
    details = {f"{split}/{name}_{kind}" for split in kinds for name in run.categories() for kind in kinds[split]}
    wanted += [key for key in run.curves if key not in details]
    wanted = [name for name in wanted if not name.startswith("val/target_tokens_")]
    return [name for name in dict.fromkeys(wanted) if name in run.curves]


def by_length(runs: Sequence[ShownRun]) -> dict[str, list[dict[str, Any]]]:
    """Return each run's first and last loss and scores by bin of document lengths.

    They are {metric: [{model: "RUN, step S", group: the bin, mean, low, high, cases: its target tokens}]}.
    """
    values: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for at in (0, -1):
            for name, curve in run.curves.items():
                found = OF_LENGTHS.fullmatch(name)
                points = curve.points
                if found is None or found[1] == "target_tokens" or not points or (at and len(points) == 1):
                    continue
                step, value = points[at]
                tokens = run.curves.get(f"val/target_tokens_{found[2]}")
                point = {"model": f"{run.name}, step {step:,}", "group": found[2], "mean": value}
                point |= {"low": value, "high": value, "cases": tokens.values[-1] if tokens else None}
                values.setdefault(found[1], []).append(point)
    return values


def sparkline(curve: Curve, width: int) -> str:
    """Return means as blocks of eight heights, spaces where none is finite."""
    values = np.array([np.nan if value is None else value for value in curve.values], float)
    parts = np.array_split(values, min(width, len(values)))
    means = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts])
    low, high = np.nanmin(means), np.nanmax(means)
    span = high - low if high - low > 1e-9 * abs(high) else 1.0  # the means of a constant differ by rounding
    heights = (np.nan_to_num((means - low) / span) * (len(BLOCKS) - 1)).round().astype(int)
    return "".join(BLOCKS[height] if np.isfinite(mean) else " " for height, mean in zip(heights, means, strict=True))


def config_differences(runs: Sequence[ShownRun]) -> RenderableType | None:
    """Return a table of differing config keys; None if equal."""
    runs = [run for run in runs if "config" in run.facts]
    configs = [dict(leaves(run.facts["config"])) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    table = plain_table("differs", *(one_line(run.name) for run in runs), left=1 + len(runs))
    for key in keys:
        values = [spell(config[key]) if key in config else "-" for config in configs]
        if len(set(values)) > 1:
            table.add_row(key, *(Text(one_line(value)) for value in values))
    return table if table.row_count else None
