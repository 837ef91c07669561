"""Hooks of a user's file see what the trainer's own see, log metrics, end a run, and resume with their state."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from tests.lib.errors import names
from tests.lib.ranks import in_turn, run_cases
from tests.lib.training import differences, fit, heard, into, metrics, refusals, small_run, stopped_at, train_alone
from verl_ext.checkpoint.layout import saved_folders, step_of
from verl_ext.trainer.hooks import HOOKS, ConsoleHook, SavingHook, ValidationHook, hook_classes

OWN = """
import json
import torch.distributed as dist
from verl_ext.launch.protocol import Ending
from verl_ext.trainer.hooks import Hook

class Witness(Hook):
    def pre_train(self):
        self.calls = [["pre_train", self.trainer.first_step]]

    def pre_step(self, step):
        self.calls.append(["pre_step", step])

    def post_step(self, step, outcome):
        self.calls.append(["post_step", step])
        self.trainer.log({"own/loss": outcome.sums.loss}, step)
        if step == 3:
            self.trainer.last_step = step

    def post_train(self):
        self.calls.append(["post_train", self.trainer.last_step])

    def close(self):
        if dist.get_rank() == 0:
            (self.run.output / "calls.json").write_text(json.dumps([*self.calls, ["close", 0]]))

class Mean(Hook):
    state_names = ("count", "mean")
    count, mean = 0, 0.0

    def post_step(self, step, outcome):
        self.count += 1
        self.mean += (outcome.sums.loss - self.mean) / self.count
        self.trainer.log({"own/count": self.count, "own/mean": self.mean}, step)

class Longest(Mean):
    state_names = ("most",)
    most = 0.0

    def log(self, metrics, step):
        self.most = max(self.most, metrics.get("train/grad_norm", 0.0))

    def post_step(self, step, outcome):
        self.count += 1
        self.trainer.log({"own/steps": self.count, "own/most": self.most}, step)

class Journal(Hook):
    def pre_train(self):
        self.steps = []

    def state(self):
        return {"steps": self.steps, "none": [float("nan"), None]}

    def load(self, state):
        self.steps = state["steps"]

    def post_step(self, step, outcome):
        self.steps.append(step)
        self.trainer.log({"own/sum": sum(self.steps)}, step)

    def close(self):
        if dist.get_rank() == 0:
            (self.run.output / "journal.json").write_text(json.dumps(self.steps))

class Fails(Hook):
    def pre_train(self):
        if self.options.experiment_name == "at once":
            raise ValueError("as asked")

    def post_step(self, step, outcome):
        if step == 2:
            raise Ending("as asked")

    def close(self):
        if self.options.experiment_name == "at once":
            raise AssertionError("it has not begun")

class Late(Hook):
    state_names = ("count",)
    count = 0

class Pair(Hook):
    pair = (1, 2)
    state_names = ("pair",)

NOT_ONE = 3
"""


STEPS, SAVED = 6, 2


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


def said(overrides: list[str]) -> str:
    """Execute a run; return what it prints, without its errors."""
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(io.StringIO()):
        fit(overrides)
    return words.getvalue()


@pytest.fixture(scope="module")
def runs(own, tiny_model, tmp_path_factory):
    """Return the folder of runs with hooks of a user's file, and what was heard of each."""
    folder = tmp_path_factory.mktemp("runs")
    length = (f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVED}")
    options = small_run(folder, tiny_model, [30] * 8, *length)

    def run(name: str, *hooks: str) -> list[str]:
        return [*options, f"trainer.hooks=[{','.join(f'{own}:{hook}' for hook in hooks)}]", into(folder / name)]

    def resumed(name: str, *hooks: str) -> list[tuple]:
        return [(stopped_at, folder / "whole", folder / name, SAVED), (said, run(name, *hooks))]

    kept = ("Mean", "Longest", "Journal")
    two = {
        "witness": [(train_alone, run("witness", "Witness"))],
        "whole": [(said, run("whole", *kept))],
        "resumed": resumed("resumed", *kept),
        "others": resumed("others", "Mean", "Longest", "Late"),
        "fails": [(heard, fit, run("fails", "Journal", "Fails"))],
        "fails at once": [(heard, fit, [*run("fails at once", "Fails"), "trainer.experiment_name=at once"])],
        "pair": [(heard, fit, run("pair", "Pair"))],
    }
    one = {"elastic": resumed("elastic", *kept)}
    found = run_cases(
        {name: (2, in_turn, calls) for name, calls in two.items()},
        {name: (1, in_turn, calls) for name, calls in one.items()},
    )
    return folder, {name: of_ranks[0][-1] for name, of_ranks in found.items()}


@pytest.mark.slow
def test_a_hook_is_called_around_each_step_logs_and_ends_the_run_with_a_checkpoint(runs):
    run = runs[0] / "witness"
    steps = [[name, step] for step in (1, 2, 3) for name in ("pre_step", "post_step")]
    calls = json.loads((run / "calls.json").read_text())
    assert calls == [["pre_train", 0], *steps, ["post_train", 3], ["close", 0]]
    logged = metrics(run)
    assert {step: logged[step, "own/loss"] for step in (1, 2, 3)} == {s: logged[s, "train/loss"] for s in (1, 2, 3)}
    assert [step_of(folder) for folder in saved_folders(run)] == [2, 3]


def own_metrics(run: Path) -> dict:
    return {key: value for key, value in metrics(run).items() if key[1].startswith("own/")}


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_states_of_its_hooks_to_the_last_bit(runs):
    folder, _ = runs
    assert not differences(folder / "resumed", folder / "whole", STEPS)
    whole = own_metrics(folder / "whole")
    assert len(whole) == 5 * STEPS
    assert whole[STEPS, "own/steps"] == STEPS
    norms = [metrics(folder / "whole")[step, "train/grad_norm"] for step in range(1, STEPS + 1)]
    assert whole[STEPS, "own/most"] == max(norms)
    assert whole[STEPS, "own/sum"] == sum(range(STEPS + 1))


@pytest.mark.slow
def test_on_other_ranks_the_states_are_the_same(runs):
    folder, _ = runs
    assert own_metrics(folder / "elastic") == pytest.approx(own_metrics(folder / "whole"), rel=1e-5)


@pytest.mark.slow
def test_a_state_without_its_hook_and_a_hook_without_its_state_are_named(runs):
    folder, words = runs
    assert "trainer.hooks has no Journal: its state in the checkpoint is not loaded" in words["others"]
    assert "trainer.hooks: Late begins at this step: the checkpoint has no state of it" in words["others"]
    assert words["others"].count("trainer.hooks") == 2  # hooks without a state are not named
    assert "trainer.hooks" not in words["resumed"]
    assert own_metrics(folder / "others")[STEPS, "own/mean"] == own_metrics(folder / "whole")[STEPS, "own/mean"]


@pytest.mark.slow
def test_a_hook_that_has_begun_is_closed_after_a_failure(runs):
    folder, words = runs
    assert "error: as asked" in words["fails"]
    assert json.loads((folder / "fails" / "journal.json").read_text()) == [1, 2]
    assert [line for line in words["fails at once"].splitlines() if "as asked" in line or "close" in line] == [
        "error: as asked"
    ]


@pytest.mark.slow
def test_a_state_that_is_not_json_ends_the_run_before_its_first_step(runs):
    folder, words = runs
    (line,) = [line for line in words["pair"].splitlines() if line.startswith("error: ")]
    assert names(line, "trainer.hooks", "Pair.state", "JSON")
    assert not (folder / "pair" / "global_step_2").exists()


def test_own_hooks_stand_between_measurements_and_the_console(own):
    table = [hook.__name__ for hook in hook_classes([f"{own}:Witness"])]
    assert [hook.__name__ for hook in hook_classes([])] == [hook.__name__ for hook in HOOKS]
    place = table.index("Witness")
    assert table.index(ValidationHook.__name__) < place == table.index(ConsoleHook.__name__) - 1
    assert place < table.index(SavingHook.__name__)


def test_a_name_that_is_no_hook_is_refused_before_the_data_is_read(own, tiny_model, tmp_path):
    run = [*small_run(tmp_path, tiny_model, [30] * 4), into(tmp_path / "run")]
    mistakes = {
        f"{own}:NOT_ONE": ("verl_ext.trainer.hooks.Hook", f"{own}:NOT_ONE"),
        f"{own}:Witnes": (own, "Witnes", "nearest: Witness"),
        "nowhere:A": ("pkg://nowhere",),
        f"{own}:Mean,{own}:Mean": ("different names", "Mean"),
    }
    told = refusals(run, [[f"trainer.hooks=[{name}]"] for name in mistakes])
    for line, things in zip(told, mistakes.values(), strict=True):
        assert names(line, "trainer.hooks", *things), line
