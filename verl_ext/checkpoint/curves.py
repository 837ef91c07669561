"""The metrics and facts that a run wrote, read from its files.

metrics.jsonl    {"step": 1, "data": {"train/loss": 7.4, …}}    one curve for each metric, without steps that lack it
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.options import DataError, UsageError, must
from verl_ext.redaction import redacted


@dataclass(frozen=True)
class Curve:
    """A metric's ascending steps and values; None for a non-finite value."""

    steps: list[int]
    values: list[float | None]

    @property
    def points(self) -> list[tuple[int, float]]:
        """The steps whose values are finite, with their values."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]


def read_curves(file: Path) -> tuple[dict[str, Curve], int | None]:
    """Return curves up to the first unreadable line, its number or None.

    Raises:
        UsageError: there is no such file.
        DataError: it holds no metrics.
    """
    if not file.is_file():
        raise UsageError(f"{file.parent} must hold {file.name}, which trainer.logger=[file] writes; it does not")
    curves: dict[str, Curve] = {}
    torn = None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                step, data = int(record["step"]), dict(record["data"])
            except (ValueError, TypeError, KeyError):
                torn = number
                break
            for name, value in data.items():
                if value is None or isinstance(value, (int, float)):
                    curve = curves.setdefault(name, Curve([], []))
                    curve.steps.append(step)
                    curve.values.append(value if value is not None and math.isfinite(value) else None)
    if not curves:
        raise DataError(must(f"{file}", 'hold lines like {"step": 1, "data": {…}}', "none"))
    return curves, torn


def read_facts(path: Path) -> dict[str, Any]:
    """Return a file's JSON object with secrets masked, else {}."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return redacted(value) if isinstance(value, dict) else {}
