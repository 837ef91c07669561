"""Checkpoints resume on any layout of ranks, with unchanged settings."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.lib.errors import names
from tests.lib.ranks import run_cases
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import fit, heard, into, metrics, settle, stopped_at

pytestmark = pytest.mark.slow

STEPS, SAVED = 6, 2
# name: (ranks, overrides) of runs that resume from the first checkpoint of a run on two data-parallel ranks
LAYOUTS = {
    "one rank": (1, ()),
    "a sequence-parallel group": (2, ("engine.ulysses_sequence_parallel_size=2",)),
    "replicas of the weights": (2, ("engine.fsdp_size=1",)),
    "more ranks": (3, ()),
}
# Changes by name, with their overrides.
CHANGES = {
    "optim.lr": "optim.lr=1e-4",
    "trainer.seed": "trainer.seed=2",
    "loss.mode": "loss=sequence",
    "data.max_tokens": "data.max_tokens=128",
    "model.config.rope_parameters": "model.override_config={rope_theta: 1e6}",
    "data.train_dir": "data.train_dir={other}",
    "model.lora_rank": "model.lora_rank=4",
    "model.path": "model.path={other}_model",
    "optim.lr_warmup_steps": "optim.lr_warmup_steps=3",
    "engine.mixed_precision": "+engine.mixed_precision={param_dtype: bf16}",
}
ANOTHER_RATE = (CHANGES["optim.lr"], "trainer.allow_resume_mismatch=[optim.lr]")


def folder_of(name: str) -> str:
    return name.replace(" ", "_")


def run(overrides: list[str], folder: Path, *more: str) -> str:
    """Execute a whole run, and return rank 0's stderr, including the error that ends it."""
    return heard(fit, [*overrides, into(folder), *more])


def on_two_ranks(options: list[str], folder: Path) -> dict[str, str]:
    """Execute the uninterrupted run and all other runs on two ranks, and return the messages of two."""
    whole = folder / "whole"
    run(options, whole)
    for name, (ranks, layout) in LAYOUTS.items():
        if ranks == 2:
            run(options, stopped_at(whole, folder / folder_of(name), SAVED), *layout)
    named = (f"trainer.resume_from_path={folder / 'back' / 'global_step_2'}", "trainer.resume_mode=resume_path")
    said = run(options, stopped_at(whole, folder / "back", STEPS), *named)
    return {"back": said}


def on_one_rank(options: list[str], folder: Path, other: str) -> dict[str, str]:
    """Execute the runs on one rank; return the messages for every change, refused or allowed."""
    whole, said = folder / "whole", {}
    run(options, stopped_at(whole, folder / folder_of("one rank"), SAVED))
    run(options, stopped_at(whole, folder / "rate", SAVED), *ANOTHER_RATE)
    begun = [*options, into(stopped_at(whole, folder / "begun", SAVED))]
    for key, change in CHANGES.items():
        changed = [*begun, change.replace("{other}", other)]
        said[key] = heard(settle, changed)
        said[f"{key} allowed"] = heard(settle, [*changed, f"trainer.allow_resume_mismatch=[{key}]"])
    said["unknown"] = heard(settle, [*begun, "trainer.allow_resume_mismatch=[optim.rl]"])
    own, resumed = (settle(words).facts()["plan"]["group_size"] for words in ([*options, into(folder / "new")], begun))
    return said | {"groups": f"{own} {resumed}"}


def on_three_ranks(options: list[str], folder: Path) -> None:
    run(options, stopped_at(folder / "whole", folder / folder_of("more ranks"), SAVED))


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory):
    """Execute all runs, on 1, 2 and 3 ranks; return their folder and messages. Runs have six steps over two epochs of
    three; a full step has six packs, which any of these numbers of ranks can share."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    names = {1: "maths", 2: "code"}
    data = write_tokenized(folder / "data", random_documents(rng, rng.integers(5, 60, 24), VOCABULARY, 2), names)
    other = write_tokenized(folder / "other", random_documents(rng, [20] * 24, VOCABULARY, 2), names)
    weights = Path(shutil.copytree(tiny_model, f"{other}_model")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    options = [
        *(f"data.train_dir={data}", f"model.path={tiny_model}", "data.train_batch_size=6"),
        *(f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVED}", "optim.lr=1e-3"),
    ]
    others = {"one": (1, on_one_rank, options, folder, other), "three": (3, on_three_ranks, options, folder)}
    found = run_cases({"two": (2, on_two_ranks, options, folder)}, others)
    return folder, found["two"][0] | found["one"][0]


def curve(folder: Path, *names: str) -> dict:
    return {key: value for key, value in metrics(folder).items() if key[1] in names}


LOSSES = ("train/loss", "train/maths_loss", "train/code_loss", "train/grad_norm")
COUNTS = ("train/tokens", "train/total_tokens", "train/target_tokens", "train/maths_tokens", "train/packs", "train/lr")


def assert_same_course(folder: Path, whole: Path, tolerance: float) -> None:
    assert curve(folder, *COUNTS) == curve(whole, *COUNTS)
    assert curve(folder, *LOSSES) == pytest.approx(curve(whole, *LOSSES), rel=tolerance, abs=0)
    assert len(curve(folder, "train/loss")) == STEPS


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_resumed_on_another_layout_of_ranks_with_the_same_losses(name, done):
    folder, _ = done
    assert_same_course(folder / folder_of(name), folder / "whole", 1e-5)


def test_a_resumed_run_is_planned_and_described_in_the_groups_of_its_first_ranks(done):
    _, said = done
    assert said["groups"] == "1 2"


@pytest.mark.parametrize("key", CHANGES)
def test_a_resume_that_disagrees_is_refused_with_the_key_unless_it_is_allowed(key, done):
    _, said = done
    assert said[key].count("error: ") == 1, said[key]
    assert f"trainer.allow_resume_mismatch=[{key}]" in said[key]
    assert f"allow_resume_mismatch=[{key}]" not in said[f"{key} allowed"]


def test_a_key_that_no_checkpoint_remembers_is_unknown(done):
    _, said = done
    assert names(said["unknown"], "trainer.allow_resume_mismatch", "optim.rl", "nearest: optim.lr")


def test_a_learning_rate_that_is_allowed_to_change_takes_effect(done):
    folder, _ = done
    rates = [value for (_, key), value in sorted(metrics(folder / "rate").items()) if key == "train/lr"]
    assert rates == pytest.approx([1e-3] * SAVED + [1e-4] * (STEPS - SAVED))


def test_a_resume_of_an_earlier_checkpoint_sets_the_later_ones_aside(done):
    folder, said = done
    assert_same_course(folder / "back", folder / "whole", 0)
    assert said["back"].count("is set aside") == 2
    assert sorted(path.name for path in (folder / "back").glob("global_step_*")) == [
        *("global_step_2", "global_step_4", "global_step_4.set_aside", "global_step_6", "global_step_6.set_aside")
    ]
