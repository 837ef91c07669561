"""Tracked runs keep one id from the first step to the last over any resumes, and never prompt the user."""

import json
import os
import pty
import sys
from pathlib import Path

import pytest

from tests.lib.errors import names, refused
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.training import into
from verl_ext.checkpoint.layout import remove_run_files
from verl_ext.config.compose import compose
from verl_ext.config.run import RunConfig
from verl_ext.trainer.hooks.tracking import (
    RUN_IDS,
    continued_lines,
    continued_runs,
    keep_run_ids,
    open_tracking,
    read_run_ids,
)

pytestmark = pytest.mark.slow

TRACKERS = ["wandb", "swanlab"]


def _alone(folder: Path, **more: str) -> None:
    """Set an environment in which trackers write below `folder`, and find no login of this machine."""
    for name in [name for name in os.environ if name.startswith(("WANDB", "SWANLAB"))]:
        del os.environ[name]
    os.environ.update(HOME=str(folder), WANDB_DIR=str(folder), SWANLAB_LOG_DIR=str(folder / "swanlog"), **more)
    os.chdir(folder)


def _ids_of(folder: Path, tracker: str, first_steps: list[int]) -> list[str]:
    """Return the ids of runs begun in turn, each after a step; the last gets its id from the environment."""
    _alone(folder, WANDB_MODE="offline", WANDB_SILENT="true", SWANLAB_MODE="offline")
    sys.argv = ["train.py", "data.train_dir=https://me:a_secret_of_mine@host/a.jsonl", "trainer.seed=3"]
    config = compose([f"trainer.logger=[{tracker}]", into(folder / "out")])
    seen = []
    for number, first_step in enumerate(first_steps, start=1):
        if number == len(first_steps):
            os.environ |= {f"{tracker.upper()}_RUN_ID": "chosen", f"{tracker.upper()}_RESUME": "allow"}
        tracking = open_tracking(RunConfig.from_composed(config), first_step)
        tracking.log({"train/loss": 1.0}, first_step + 1)
        run = tracking.logger[tracker]
        seen.append((run.run if tracker == "wandb" else run.get_run()).id)
        assert seen[-1] == json.loads((folder / "out" / RUN_IDS).read_text())[tracker]
        tracking.finish()
        if tracker == "wandb":
            run.teardown()  # as in a new process, as wandb reads its environment once per process
    return seen


def _told_on_a_terminal(folder: Path, tracker: str) -> str:
    """Return the error about a tracker without a login, on a terminal that could be asked."""
    _alone(folder)
    _, terminal = pty.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as raw:
        sys.stdin = sys.stderr = open(raw.fileno(), "w+b", buffering=0, closefd=False)  # noqa: SIM115
        asked = sys.stdin
        config = compose([f"trainer.logger=[{tracker}]", into(folder / "out")])
        try:
            open_tracking(RunConfig.from_composed(config), 0)
        except ValueError as error:
            assert sys.stdin is asked, "the terminal is given back"
            return str(error)
        finally:
            sys.stdin, sys.stderr = sys.__stdin__, sys.__stderr__
    return ""


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_resume_keeps_the_id_a_fresh_run_has_its_own_and_a_missing_login_is_no_question(tracker, tmp_path):
    calls = [(_ids_of, tmp_path, tracker, [0, 3, 0, 3]), (_told_on_a_terminal, tmp_path, tracker)]
    (((first, resumed, fresh, chosen), told),) = run_ranks(in_turn, 1, calls)
    assert resumed == first
    assert fresh != first
    assert chosen == "chosen"  # the environment's id, also on a resume
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert tracker != "wandb" or b"trainer.seed=3" in written  # the command line is uploaded
    assert b"a_secret_of_mine" not in written
    assert names(told, "trainer.logger", f"['{tracker}']")
    assert "\n" not in told


def test_a_tracker_that_is_not_installed_is_told_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    config = compose(["trainer.logger=[swanlab]", into(tmp_path)])
    with refused("trainer.logger", "['swanlab']"):
        open_tracking(RunConfig.from_composed(config), 0)


def test_lines_that_were_torn_cost_no_others(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", [f'{{"step": {step}, "data": {{}}}}\n' for step in range(1, 6)]
    path.write_text(f'{whole[0]}{{"step": 2, "da{whole[2]}[]\n{{}}\n{whole[3]}{whole[4]}{{"st')
    continued_lines(path, 4)
    assert path.read_text() == whole[0] + whole[3]


def test_a_resumed_metrics_file_goes_on_behind_its_lines(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    config = RunConfig.from_composed(compose(["trainer.logger=[file]", into(tmp_path)]))
    for first_step, loss in ((0, 3.0), (1, 2.0)):
        tracking = open_tracking(config, first_step)
        for step in range(first_step + 1, 4):
            tracking.log({"loss": loss}, step)
        tracking.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["data"]["loss"]) for line in lines] == [(1, 3.0), (2, 2.0), (3, 2.0)]
    open_tracking(config, 0).finish()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert len((tmp_path / "metrics.jsonl.before_restart").read_text().splitlines()) == 3


class _Run:
    def __init__(self, run_id):
        self.run = self
        self.id = run_id

    def get_run(self):
        return self


def test_ids_of_trackers_are_kept_over_a_resume_and_forgotten_by_a_fresh_run_and_an_overwritten_one(tmp_path):
    keep_run_ids(tmp_path, {}, {"wandb": _Run("a"), "swanlab": _Run("b"), "console": object()})
    assert read_run_ids(tmp_path) == {"wandb": "a", "swanlab": "b"}
    keep_run_ids(tmp_path, read_run_ids(tmp_path), {"swanlab": _Run("c")})  # a resume that leaves one out
    assert read_run_ids(tmp_path) == {"wandb": "a", "swanlab": "c"}
    keep_run_ids(tmp_path, {}, {"console": object()})
    assert read_run_ids(tmp_path) == {}
    keep_run_ids(tmp_path, {}, {"wandb": _Run("a")})
    remove_run_files(tmp_path)
    assert read_run_ids(tmp_path) == {}
    (tmp_path / RUN_IDS).write_text('["a"')
    with refused("trainer.default_local_dir", "run_ids.json"):
        read_run_ids(tmp_path)


def test_only_the_named_trackers_see_an_id_and_the_environment_is_given_back(monkeypatch):
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "SWANLAB_RUN_ID", "SWANLAB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_RESUME", "must")
    before = dict(os.environ)
    with continued_runs({"wandb": "a", "swanlab": "b"}, ["swanlab", "console"]):
        added = {name: value for name, value in os.environ.items() if before.get(name) != value}
        assert added == {"SWANLAB_RUN_ID": "b"}
    assert dict(os.environ) == before
