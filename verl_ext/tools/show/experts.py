"""How evenly tokens choose a mixture's experts, layer by layer: the last line of a run's experts.jsonl."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from verl_ext.checkpoint.layout import EXPERTS
from verl_ext.options import DataError, one_line
from verl_ext.progress import four_digits
from verl_ext.tables import plain_table
from verl_ext.tools.page import Chart, heat_map
from verl_ext.tools.show.runs import ShownRun

SHADES = " ░▒▓█"  # none, and up to twice an even share or more
_LOAD = "times an even share"


class ExpertLoads(NamedTuple):
    """The share of each expert in the choices of a layer over an even one; loads are by layer."""

    run: str
    step: int
    layers: Sequence[int]
    loads: Sequence[Sequence[float]]

    @property
    def title(self) -> str:
        """What the table and the chart show."""
        return one_line(f"{self.run}: experts of each layer at step {self.step:,}, over an even share")

    def table(self, width: int) -> RenderableType:
        """Return a line of shades for each layer, for a terminal of so many columns."""
        table = plain_table("layer", "least", "most", left=0)
        table.add_column("experts", no_wrap=True)
        for layer, loads in zip(self.layers, self.loads, strict=True):
            parts = np.array_split(np.array(loads), min(len(loads), max(width - 30, 10)))
            shades = "".join(SHADES[min(round(2 * float(part.mean())), len(SHADES) - 1)] for part in parts)
            table.add_row(str(layer), four_digits(min(loads)), four_digits(max(loads)), Text(f"│{shades}│"))
        return table

    def chart(self) -> Chart:
        """Return a heat map for a page."""
        records = [
            {"layer": layer, "expert": expert, _LOAD: load}
            for layer, loads in zip(self.layers, self.loads, strict=True)
            for expert, load in enumerate(loads)
        ]
        return heat_map(
            self.title,
            records,
            {"field": "expert", "axis": {"labelOverlap": True}},
            {"field": "layer"},
            {"field": _LOAD},
            form=".2f",
            colour={"scale": {"domain": [0, 1, 3], "range": ["white", "#9ecae1", "#08306b"], "clamp": True}},
            ink={"value": "transparent"},
            size={"width": "container", "height": {"step": 10}},
        )


def expert_loads(run: ShownRun) -> ExpertLoads | None:
    """Return a run's last shares of experts; None without trainer.log_experts. Raises DataError for another file."""
    path = (run.path if run.path.is_dir() else run.path.parent) / EXPERTS
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    for line in reversed(lines[:-1]):  # the last one is empty, or is still being written
        try:
            row: dict[str, Any] = json.loads(line)
            loads = [[len(shares) * float(share) for share in shares] for shares in row["shares"]]
            return ExpertLoads(run.name, int(row["step"]), [*map(int, row["layers"])], loads)
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(f"{path} must hold lines with step, layers and shares; {error!r}") from error
    return None
