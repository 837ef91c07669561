"""Whole fp16 runs follow fp32, find their scale within a few skipped steps, and resume as if uninterrupted."""

import contextlib
import math
import os

import numpy as np
import pytest

from tests.lib.ranks import in_turn, run_ranks
from tests.lib.training import FP16, build, into, metrics, small_run, stopped_at, train_alone

pytestmark = pytest.mark.slow

COSINE = ("optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.1")
STEPS = 14
TOO_HIGH = 2.0**24  # like a scale that has grown over many quiet steps


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """Return the overrides of a run; an epoch has 6 steps."""
    lengths = np.random.default_rng(0).integers(5, 60, 40).tolist()
    return small_run(tmp_path_factory.mktemp("data"), tiny_model, lengths)


def column(folder, name):
    """Return a metric's values by step."""
    return {step: value for (step, key), value in metrics(folder).items() if key == name}


def test_fp16_follows_the_loss_of_fp32_within_half_a_percent(options, tmp_path):
    two = [*options, "trainer.total_epochs=2"]
    runs = [[*two, into(tmp_path / "fp32")], [*two, into(tmp_path / "fp16"), FP16]]
    run_ranks(in_turn, 2, [(train_alone, run) for run in runs])
    exact, half = (column(tmp_path / name, "train/loss") for name in ("fp32", "fp16"))
    assert len(exact) > 10
    assert half == pytest.approx(exact, rel=5e-3)
    assert half != exact
    assert set(column(tmp_path / "fp16", "train/skipped_steps").values()) == {0}
    assert exact[max(exact)] < 0.9 * exact[1]


def _from_a_scale_too_high(overrides):
    """Execute a run whose first scale is TOO_HIGH, and return its scaler's final state."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        trainer = build(overrides)
        scaler = trainer.engine.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": TOO_HIGH})
        trainer.resume()
        trainer.fit()
    return trainer.engine.scaler.state_dict()


@pytest.fixture(scope="module")
def runs(options, tmp_path_factory):
    """Run 14 steps from too high a scale, saved at step 8, and resume it there; return both folders and the scalers'
    final states."""
    whole, resumed = (tmp_path_factory.mktemp("runs") / name for name in ("whole", "resumed"))
    run = [*options, FP16, *COSINE, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=8"]
    calls = [(_from_a_scale_too_high, [*run, into(folder)]) for folder in (whole, resumed)]
    ((state, _, again),) = run_ranks(in_turn, 1, [calls[0], (stopped_at, whole, resumed, 8), calls[1]])
    return whole, resumed, state, again


def test_a_scale_that_is_too_high_costs_a_few_steps_at_the_start_and_the_schedule_goes_on(runs):
    folder, _, state, _ = runs
    skipped = column(folder, "train/skipped_steps")
    few = skipped[STEPS]
    assert 2 <= few <= 7  # trainer.max_skipped_steps is 10
    assert [skipped[step] for step in range(1, STEPS + 1)] == [min(step, few) for step in range(1, STEPS + 1)]
    assert (state["scale"], state["_growth_tracker"]) == (TOO_HIGH / 2**few, STEPS - few)
    norms = column(folder, "train/grad_norm")
    assert [norms[step] is not None for step in range(1, STEPS + 1)] == [step > few for step in range(1, STEPS + 1)]
    lr = {step: 1e-2 * (0.55 + 0.45 * math.cos(math.pi * (step - 1) / STEPS)) for step in range(1, STEPS + 1)}
    assert column(folder, "train/lr") == pytest.approx(lr)  # skipped steps count


def test_a_resumed_run_goes_on_with_the_scale_as_if_uninterrupted(runs):
    folder, resumed, state, again = runs
    assert again == state
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert column(resumed, name) == column(folder, name)
