"""`verl-ext show` in this process: its output, and documents written for it."""

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from tests.lib.tokenized_data import write_tokenized
from verl_ext.tools.show.command import main


def show(*words: object) -> tuple[int, str, str]:
    """Return the exit code and the output on stdout and stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main(list(map(str, words)))
    return code, out.getvalue(), errors.getvalue()


def view(*words: object) -> str:
    """Return what a command that succeeds shows."""
    code, out, errors = show(*words)
    assert code == 0, errors
    return out


def refused_line(*words: object, code: int | None = None) -> str:
    """Return the line with which a command fails, with an exit code if one is given."""
    got, _, errors = show(*words)
    assert got != 0 if code is None else got == code, errors
    assert errors.count("\n") == 1, errors
    return errors


def page_data(page: Path) -> dict[str, Any]:
    """Return the figures and the curves of a page."""
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


def audit_of(tmp_path: Path, *words: object) -> dict[str, Any]:
    view(*words, f"json={tmp_path / 'audit.json'}")
    return json.loads((tmp_path / "audit.json").read_text())


def document(ids: Sequence[int], targets: Sequence[int], category: int = 1) -> dict[str, Any]:
    """Make a document from its ids and the places of its targets."""
    mask = np.zeros(len(ids), np.int8)
    mask[list(targets)] = 1
    return {"input_ids": np.array(ids, np.int32), "loss_mask": mask, "category_ids": mask * np.int32(category)}


def write_data(path: Path, documents: Sequence[Mapping[str, Any]], report: Mapping[str, Any] | None = None) -> str:
    folder = write_tokenized(path, documents, {1: "maths", 2: "code"})  # type: ignore[arg-type]
    if report is not None:
        (path / "report.json").write_text(json.dumps(report))
    return folder


def write_metrics(folder: Path, steps: int, categories: Sequence[str] = ("maths", "code")) -> Path:
    """Write a run's metrics, with a validation every tenth step."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        data = {"train/loss": 3 / step, "train/tokens": 1000, "train/tokens_per_second": 500.0, "train/lr": 1e-3 / step}
        for category in categories:
            data |= {f"train/{category}_loss": 4 / step, f"train/{category}_tokens": 10}
        lines.append({"step": step, "data": data})
        if step % 10 == 0:
            lines.append({"step": step, "data": {"val/loss": 3.5 / step}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
