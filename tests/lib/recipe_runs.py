"""Run a recipe's script with the packages of this Python, and read its metrics."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.lib.project import ROOT

RECIPES = ROOT / "recipes"


def run_recipe(script: str, folder: Path, *overrides: str, seconds: float = 400) -> str:
    """Run a script of recipes/ in a folder; return its output, or fail with what slow threads were doing."""
    folder.parent.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"cwd": folder.parent, "env": {**os.environ, "PATH": path, "PYTHONFAULTHANDLER": "1"}, "text": True}
    command = [RECIPES / script, folder, *overrides]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)
    try:
        output, errors = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for process in psutil.Process(started.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
        output, errors = started.communicate()
        errors = "\n".join(line for line in errors.splitlines() if not line.startswith("Extension modules"))
        pytest.fail(f"{script} took longer than {seconds} s: {output[-3000:]}{errors[-9000:]}")
    assert started.returncode == 0, output[-2000:] + errors[-2000:]
    return output


def values(run: Path, metric: str) -> list[float]:
    """Return a metric's values by step."""
    lines = (json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line[metric] for line in lines if metric in line]
