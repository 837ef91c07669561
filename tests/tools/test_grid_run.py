"""recipes/grid_run.sh: what a grid runs, runs again and names, with programs that only write how they are called."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lib.errors import names
from tests.lib.project import ROOT

RECIPES = ROOT / "recipes"
VERL_EXT = """#!/usr/bin/env bash
if [[ "$1" == launch ]]; then
    echo "train ${*:2}" >>"$CALLS"
    if [[ "$*" == *bad* ]]; then exit 3; fi
    if [[ "$*" == *slow* ]]; then echo $$ >"$PIDS"; exec sleep 600; fi
    exit 0
fi
echo "$*" >>"$CALLS"
for word in "$@"; do
    if [[ "$1 $word" == judge\\ output_dir=* ]]; then mkdir -p "${word#*=}" && touch "${word#*=}/results.json"; fi
done
"""
GRID = """set -euo pipefail
here=$1 run=$2
source "{recipes}/small_run.sh"
source "{recipes}/grid_run.sh"
for seed in $SEEDS; do
    for cell in $CELLS; do train_cell "$seed" "$cell" "loss=$cell" $MORE; done
done
wait
for seed in $SEEDS; do judge_cells "$seed" task=t; done
show_grid S_l good
"""


@pytest.fixture
def grid(tmp_path):
    """Return a function that starts a grid of those cells over two seeds."""
    program = tmp_path / "bin" / "verl-ext"
    program.parent.mkdir()
    program.write_text(VERL_EXT)
    program.chmod(0o755)
    here, run = tmp_path / "recipes" / "x", tmp_path / "run"
    here.mkdir(parents=True)
    for seed in (1, 2):
        (run / f"seed_{seed}").mkdir(parents=True)
    script = tmp_path / "grid.sh"
    script.write_text(GRID.format(recipes=RECIPES))

    def start(cells, more="", jobs=2):
        variables = {"CELLS": cells, "SEEDS": "1 2", "MORE": more, "JOBS": str(jobs)}
        variables |= {"CALLS": f"{tmp_path}/calls", "PIDS": f"{tmp_path}/pids"}
        environment = {**os.environ, **variables, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", script, here, run], env=environment, **pipes)

    return start


def calls_of(tmp_path, command):
    """Return the calls of a command since the last look."""
    path = tmp_path / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(f"{line}\n" for line in lines if not line.startswith(command)))
    return [line for line in lines if line.startswith(command)]


def test_a_cell_that_is_done_is_not_run_again_and_one_that_fails_is_named_beside_the_table(grid, tmp_path):
    program = grid("good bad other")
    error = program.communicate(timeout=60)[1]
    assert program.returncode == 1
    failed = [line for line in error.splitlines() if line.startswith("failed: ")]
    assert failed == [f"failed: seed_{n}/bad: see {tmp_path}/run/seed_{n}/bad.log" for n in (1, 2)]
    assert len(calls_of(tmp_path, "train")) == 6
    judged = calls_of(tmp_path, "judge")
    assert len(judged) == 2
    assert f"models.good={tmp_path}/run/seed_1/good models.other={tmp_path}/run/seed_1/other" in judged[0]
    (table,) = calls_of(tmp_path, "grid")
    assert f"judged=[{tmp_path}/run/seed_1/judged,{tmp_path}/run/seed_2/judged] score=S_l base=good" in table

    # What failed is run again, what is judged is not judged again.
    assert grid("good bad other").wait(60) == 1
    assert [line.split()[-1] for line in calls_of(tmp_path, "train")] == ["loss=bad"] * 2
    assert not calls_of(tmp_path, "judge")
    # A cell more is judged with the others.
    assert grid("good other more").wait(60) == 0
    assert len(calls_of(tmp_path, "train")) == len(calls_of(tmp_path, "judge")) == 2
    # A cell that was run with other options is not taken for done.
    program = grid("good", "optim.lr=1")
    error = program.communicate(timeout=60)[1]
    assert program.returncode == 2
    assert names(error, "seed_1/good")


def test_a_grid_that_is_stopped_ends_its_cells(grid, tmp_path):
    program = grid("slow", jobs=1)
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    program.wait(60)
    number = int((tmp_path / "pids").read_text())
    while Path(f"/proc/{number}").exists() and "Z" not in Path(f"/proc/{number}/stat").read_text().split()[2]:
        pass
    assert not (tmp_path / "run" / "seed_1" / "slow.done").exists()
