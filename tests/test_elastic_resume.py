"""A checkpoint is resumed on any layout of ranks and with what it was made with; verl's own form by as many ranks."""

import contextlib
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import SMALL, build, metrics
from verl_ext.config import compose
from verl_ext.config.checkpoints import MANIFEST, TRACKER, saved_folders
from verl_ext.trainer.setup import prepare

STEPS, SAVED = 6, 2


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """The overrides of a run of six steps over two epochs; each step has six packs, for 1, 2 or 3 ranks to share."""
    rng = np.random.default_rng(0)
    documents = random_documents(rng, rng.integers(5, 60, 24), VOCABULARY, 2)
    data = write_tokenized(tmp_path_factory.mktemp("data") / "data", documents, {1: "maths", 2: "code"})
    return [
        *(f"data.train_dir={data}", f"model.path={tiny_model}", "data.train_batch_size=6"),
        *(f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVED}", "optim.lr=1e-3"),
    ]


def runs(several: list[list[str]]) -> list[str]:
    """Whole runs one after the other; what rank 0 says of each on stderr, errors that end it included."""
    words = []
    for overrides in several:
        os.environ.pop("VERL_FILE_LOGGER_PATH", None)  # of the run before
        said = io.StringIO()
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(said),
            contextlib.suppress(SystemExit),
        ):
            trainer = build(overrides)
            trainer.resume()
            trainer.fit()
        words.append(said.getvalue())
    return words


def into(folder: Path, *more: str) -> list[str]:
    return [f"trainer.default_local_dir={folder}", *more]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """The folder of an uninterrupted run on two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(runs, 2, [[*options, *into(folder)]])
    return folder


def begun(whole: Path, folder: Path) -> Path:
    """A copy of the run as it was at its first checkpoint."""
    shutil.copytree(whole, folder)
    for later in saved_folders(folder)[1:]:
        shutil.rmtree(later)
    (folder / TRACKER).write_text(str(SAVED))
    return folder


def curve(folder: Path, *names: str) -> dict:
    return {key: value for key, value in metrics(folder).items() if key[1] in names}


LOSSES = ("train/loss", "train/maths_loss", "train/code_loss", "train/grad_norm")
COUNTS = ("train/tokens", "train/target_tokens", "train/maths_tokens", "train/packs", "train/lr")


def assert_same_course(folder: Path, whole: Path, tolerance: float) -> None:
    assert curve(folder, *COUNTS) == curve(whole, *COUNTS)
    assert curve(folder, *LOSSES) == pytest.approx(curve(whole, *LOSSES), rel=tolerance, abs=0)
    assert len(curve(folder, "train/loss")) == STEPS


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, 1), (2, 2), (3, 1)])
def test_a_checkpoint_is_resumed_on_another_layout_of_ranks_with_the_same_losses(
    options, whole, tmp_path, ranks, sequence_parallel
):
    folder = begun(whole, tmp_path / "run")
    layout = f"engine.ulysses_sequence_parallel_size={sequence_parallel}"
    run_ranks(runs, ranks, [[*options, *into(folder, layout)]])
    assert_same_course(folder, whole, 1e-5)


def as_verl_wrote_it(overrides: list[str], folder: Path) -> None:
    """Replace a run's checkpoint by verl's own form of it, as earlier versions wrote it; on every rank."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        trainer = build(overrides)
        trainer.resume()
        saved = folder / f"global_step_{SAVED}"
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(saved)
            del trainer._lock
        torch.distributed.barrier()
        trainer.engine.checkpoint_manager.save_checkpoint(str(saved), global_step=SAVED)
        if torch.distributed.get_rank() == 0:
            state = {key: value for key, value in trainer.plan_state.state_dict().items() if "skipped" not in key}
            torch.save(state, saved / "data_0.pt")
        torch.distributed.barrier()
    runs([overrides])


def test_verls_own_form_is_resumed_by_as_many_ranks_and_refused_by_others(options, whole, tmp_path):
    folder, other = begun(whole, tmp_path / "run"), tmp_path / "other"
    overrides = [*options, *into(folder)]
    run_ranks(as_verl_wrote_it, 2, overrides, folder)
    assert not (folder / f"global_step_{SAVED}" / MANIFEST).exists()
    assert_same_course(folder, whole, 0)
    shutil.copytree(folder, other)
    for later in saved_folders(other)[1:]:
        shutil.rmtree(later)
    (other / TRACKER).write_text(str(SAVED))
    ((refused,),) = run_ranks(runs, 1, [[*options, *into(other)]])
    assert "was saved by 2 rank(s) in verl's own form and can only be resumed by as many; got 1" in refused


def refusals(several: list[list[str]]) -> list[str]:
    """What is said of runs before a model is loaded."""
    words = []
    for overrides in several:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            prepare(compose([*SMALL, *overrides]))
        words.append(said.getvalue())
    return words


def test_a_resume_that_disagrees_is_refused_with_the_key_unless_it_is_allowed(options, whole, tmp_path, tiny_model):
    folder = begun(whole, tmp_path / "run")
    other = random_documents(np.random.default_rng(1), [20] * 24, VOCABULARY, 2)
    data = write_tokenized(tmp_path / "other", other, {1: "maths", 2: "code"})
    changes = {
        "optim.lr": "optim.lr=1e-4",
        "trainer.seed": "trainer.seed=2",
        "loss.mode": "loss=sequence",
        "data.max_tokens": "data.max_tokens=128",
        "model.config.rope_parameters": "model.override_config={rope_theta: 1e6}",
        "data.train_dir": f"data.train_dir={data}",
        "model.lora_rank": "model.lora_rank=4",
    }
    several = [[*options, *into(folder), change] for change in changes.values()]
    allowed = [
        [*options, *into(folder), change, f"trainer.allow_resume_mismatch=[{key}]"] for key, change in changes.items()
    ]
    (words,) = run_ranks(refusals, 1, [*several, *allowed])
    for key, refused, passed in zip(changes, words[: len(changes)], words[len(changes) :], strict=True):
        assert refused.count("error: ") == 1, refused
        assert f"{key} is " in refused
        assert f"trainer.allow_resume_mismatch=[{key}]" in refused
        assert f"allow_resume_mismatch=[{key}]" not in passed


def test_a_learning_rate_that_is_allowed_to_change_takes_effect(options, whole, tmp_path):
    folder = begun(whole, tmp_path / "run")
    change = ("optim.lr=1e-4", "trainer.allow_resume_mismatch=[optim.lr]")
    run_ranks(runs, 1, [[*options, *into(folder, *change)]])
    rates = [value for (_, name), value in sorted(metrics(folder).items()) if name == "train/lr"]
    assert rates == pytest.approx([1e-3] * SAVED + [1e-4] * (STEPS - SAVED))


def test_a_resume_of_an_earlier_checkpoint_sets_the_later_ones_aside(options, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    named = (f"trainer.resume_from_path={folder / 'global_step_2'}", "trainer.resume_mode=resume_path")
    (said, complete), _ = run_ranks(
        runs, 2, [[*options, *into(folder, *named)], [*options, *into(folder, "trainer.total_training_steps=4")]]
    )
    assert_same_course(folder, whole, 0)
    assert said.count("is set aside") == 2
    assert sorted(path.name for path in folder.glob("global_step_*")) == [
        *("global_step_2", "global_step_4", "global_step_4.set_aside", "global_step_6", "global_step_6.set_aside")
    ]
    assert "error" not in complete
