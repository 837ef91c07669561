"""Hooks of a user's file see what the trainer's own see, log metrics, and end a run."""

import json
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.training import into, metrics, refusals, small_run, train_alone
from verl_ext.checkpoint.layout import saved_folders, step_of
from verl_ext.trainer.hooks import HOOKS, ConsoleHook, SavingHook, ValidationHook, hook_classes

OWN = """
import json
import torch.distributed as dist
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

NOT_ONE = 3
"""


@pytest.fixture
def own(tmp_path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.slow
def test_a_hook_is_called_around_each_step_logs_and_ends_the_run_with_a_checkpoint(own, tiny_model, tmp_path):
    more = (f"trainer.hooks=[{own}:Witness]", "trainer.total_training_steps=6", "trainer.save_freq=2")
    run = [*small_run(tmp_path, tiny_model, [30] * 8, *more), into(tmp_path / "run")]
    run_ranks(train_alone, 2, run)
    steps = [[name, step] for step in (1, 2, 3) for name in ("pre_step", "post_step")]
    calls = json.loads((tmp_path / "run" / "calls.json").read_text())
    assert calls == [["pre_train", 0], *steps, ["post_train", 3], ["close", 0]]
    logged = metrics(tmp_path / "run")
    assert {step: logged[step, "own/loss"] for step in (1, 2, 3)} == {s: logged[s, "train/loss"] for s in (1, 2, 3)}
    assert [step_of(folder) for folder in saved_folders(tmp_path / "run")] == [2, 3]


def test_own_hooks_stand_between_measurements_and_the_console(own):
    table = [hook.__name__ for hook in hook_classes([f"{own}:Witness"])]
    assert [hook.__name__ for hook in hook_classes([])] == [hook.__name__ for hook in HOOKS]
    place = table.index("Witness")
    assert table.index(ValidationHook.__name__) < place == table.index(ConsoleHook.__name__) - 1
    assert place < table.index(SavingHook.__name__)


def test_a_name_that_is_no_hook_is_refused_before_the_data_is_read(own, tiny_model, tmp_path):
    run = [*small_run(tmp_path, tiny_model, [30] * 4), into(tmp_path / "run")]
    changes = [[f"trainer.hooks=[{own}:{name}]"] for name in ("NOT_ONE", "Witnes")] + [["trainer.hooks=[nowhere:A]"]]
    told = refusals(run, changes)
    assert told[0].startswith("trainer.hooks must name subclasses of verl_ext.trainer.hooks.Hook; got ")
    assert told[1] == f"trainer.hooks must be a name in {own}; got Witnes (nearest: Witness)"
    assert told[2].startswith("trainer.hooks must be Python code that can be imported; got pkg://nowhere")
