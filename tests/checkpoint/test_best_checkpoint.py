"""The best checkpoint stays and is linked, a run ends early, and both go on over a resume, on other ranks too."""

import contextlib
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.lib.errors import names
from tests.lib.ranks import run_cases
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import differences, fit, heard, into, metrics, refusals, stopped_at
from verl_ext.__main__ import main
from verl_ext.checkpoint.layout import BEST, saved_folders, step_of

pytestmark = pytest.mark.slow

STEPS = 12
FEW = 20  # tokens of the documents
BEST_OF = "checkpoint.keep_best=val/loss"
EARLY = "trainer.early_stop={metric: val/loss, patience: 2}"


def options(folder: Path, model: Path) -> list[str]:
    """Return a run that learns its few documents by heart, so that the loss of others falls and rises."""
    rng = np.random.default_rng(1)
    names = ("train", "val")
    train, val = (write_tokenized(folder / n, random_documents(rng, [30] * 8, FEW, 1), {1: "maths"}) for n in names)
    data = (f"data.train_dir={train}", f"data.val_dir={val}", f"model.path={model}")
    return [*data, f"trainer.total_training_steps={STEPS}", "trainer.test_freq=1", "trainer.max_ckpt_to_keep=1"]


def told(overrides: list[str]) -> str:
    """Execute a run; return what it prints, without errors."""
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(io.StringIO()):
        fit(overrides)
    return words.getvalue()


def on_one_rank(given: list[str], folder: Path) -> dict[str, str]:
    """Execute the runs; return the messages of those that end early."""
    heard(fit, [*given, BEST_OF, into(folder / "best")])
    all_kept = [*given, BEST_OF, EARLY, "trainer.max_ckpt_to_keep=null", "trainer.saves_per_epoch=2"]
    said = {"early": told([*all_kept, into(folder / "early")])}
    shutil.copytree(folder / "early", folder / "again", symlinks=True)
    said["again"] = told([*all_kept, into(folder / "again")])
    shutil.copytree(folder / "early", folder / "patient", symlinks=True)
    heard(fit, [*all_kept, "trainer.early_stop.patience=4", into(folder / "patient")])
    # The resumed run has seen the best step, or begins before it, where the link is of the abandoned part.
    best = best_step(folder / "early")
    for name, step in (("after", best + 1), ("before", best - 1)):
        stopped_at(folder / "early", folder / name, step)
        heard(fit, [*all_kept, into(folder / name)])
    shutil.copytree(folder / "best", folder / "anew", symlinks=True)
    heard(fit, [*given, into(folder / "anew"), "trainer.overwrite=true", "trainer.total_training_steps=1"])
    os.symlink("global_step_9", folder / "anew" / BEST)  # of an abandoned part, which a resume does not keep
    heard(fit, [*given, into(folder / "anew"), "trainer.total_training_steps=1"])
    stopped_at(folder / "early", folder / "back", best - 1)
    heard(fit, [*all_kept, into(folder / "back"), f"trainer.total_training_steps={best - 1}"])
    heard(fit, [*given, into(folder / "plain"), f"trainer.resume_from_path={folder / 'early' / BEST}"])
    return said


def on_two_ranks(given: list[str], folder: Path) -> None:
    stopped_at(folder / "early", folder / "elastic", best_step(folder / "early") + 1)
    heard(fit, [*given, BEST_OF, EARLY, into(folder / "elastic")])
    dist.barrier()


def best_step(folder: Path) -> int:
    return step_of(folder / os.readlink(folder / BEST))


def measured(folder: Path) -> dict[int, float]:
    return {step: value for (step, name), value in metrics(folder).items() if name == "val/loss" and step}


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    given = options(folder, tiny_model)
    found = run_cases({"one": (1, on_one_rank, given, folder)}, {"two": (2, on_two_ranks, given, folder)})
    return folder, found["one"][0]


def test_the_best_step_is_kept_beside_the_newest_and_linked(runs):
    folder = runs[0] / "best"
    losses = measured(folder)
    best = min(losses, key=losses.__getitem__)
    assert 1 < best < STEPS, f"the loss must fall and rise; got {losses}"
    assert best_step(folder) == best
    assert [step_of(checkpoint) for checkpoint in saved_folders(folder)] == [best, STEPS]


def test_a_run_ends_after_so_many_measurements_without_an_improvement_and_stays_ended(runs):
    folder, said = runs
    losses = measured(folder / "best")
    best = next(step for step in losses if min(losses[step + 1], losses[step + 2]) >= min(list(losses.values())[:step]))
    assert max(measured(folder / "early")) == best + 2 == step_of(saved_folders(folder / "early")[-1])
    ends = f"2 measurements ago: the run ends after step {best + 2} of {STEPS}"
    line = f"trainer.early_stop: val/loss is best at step {best}, {losses[best]:.6g}, {ends}"
    assert line in said["early"]
    assert line in said["again"]
    assert measured(folder / "again") == measured(folder / "early")
    assert max(measured(folder / "patient")) > best + 2


def test_a_resumed_run_has_the_best_value_so_far_and_ends_where_the_whole_run_ends(runs):
    folder, _ = runs
    last = max(measured(folder / "early"))
    for name in ("after", "before"):
        assert differences(folder / name, folder / "early", last) == []
        assert best_step(folder / name) == best_step(folder / "early")
    assert best_step(folder / "back") == best_step(folder / "early") - 1
    assert max(measured(folder / "elastic")) == last
    assert best_step(folder / "elastic") == best_step(folder / "early")


def test_the_link_names_a_checkpoint_to_resume_from_and_to_export_and_goes_with_its_run(runs, tmp_path, capsys):
    folder, _ = runs
    assert main(["export", f"checkpoint={folder / 'best' / BEST}", f"output_dir={tmp_path / 'model'}"]) == 0
    assert f"step {best_step(folder / 'best')}: " in capsys.readouterr().out
    assert not (folder / "anew" / BEST).is_symlink()
    assert min(measured(folder / "plain")) == best_step(folder / "early") + 1


def test_what_no_run_measures_is_refused_in_one_line(tiny_model, tmp_path):
    given = [*options(tmp_path, tiny_model), into(tmp_path / "run")]
    best, often, unset = "checkpoint.keep_best", "trainer.tests_per_epoch=2", "trainer.test_freq=-1"
    cases = [
        ((best, "val/loss", "got loss"), [f"{best}=loss"]),
        ((best, "val/math_loss", "nearest: val/maths_loss"), [f"{best}=val/math_loss"]),
        ((best, "val/loss_0_8", "nearest: val/loss_0_9"), [f"{best}=val/loss_0_8", "trainer.length_bins=[9]"]),
        (("eval.prompts", f"{best}=val/answer", None), [f"{best}=val/answer"]),
        (("data.val_dir", "trainer.early_stop.metric=val/loss", None), [EARLY, "data.val_dir=null", unset]),
        (("trainer.test_freq", "trainer.tests_per_epoch", f"{best}=val/loss", "-1 and null"), [BEST_OF, unset]),
        (("data.val_dir", often, None), ["data.val_dir=null", unset, often]),
        (("trainer.early_stop.metric", "trainer.early_stop.patience=5", None), ["trainer.early_stop.patience=5"]),
    ]
    right = [f"{best}=val/loss_9_inf", "trainer.length_bins=[9]", EARLY, unset, often]
    *told, of_right = refusals(given, [*(change for _, change in cases), right])
    assert of_right == ""
    for line, (things, _) in zip(told, cases, strict=True):
        assert "\n" not in line
        assert names(line, *things), line
