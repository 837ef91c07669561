"""Options that are settled before training but show only in its steps: order, logged steps, determinism."""

import dataclasses

import pytest
import torch

from tests.lib.ranks import run_cases
from tests.lib.training import build, into, metrics, settle, small_run, train_alone
from verl_ext.trainer.trainer import SFTTrainer

pytestmark = pytest.mark.slow

LENGTHS = (9, 30, 4, 17, 12, 22, 7, 26, 14, 5)
ALL = {1, 2, 3, 4, 5}
# Ranks: the logged steps of an epoch by log_every_batches; a step is two batches of a single rank.
LOGGED = {1: {4: {2, 4, 5}, 3: {2, 4, 5}, 1: ALL}, 2: {4: {4, 5}}}  # the last step is always logged


def _lengths_read(options):
    """Return the lengths of this rank's documents in each of two epochs, in order."""
    trainer = build(options)
    steps = trainer.run.plan.steps_per_epoch
    batches = [batch.pack_lengths for batch in trainer.batches(0, 2 * steps)]
    return [[length for batch in epoch for length in batch] for epoch in (batches[:steps], batches[steps:])]


def strictness(overrides):
    """Build a trainer with torch's varlen attention, and return whether torch refuses nondeterministic kernels."""
    run = settle(overrides)
    SFTTrainer(dataclasses.replace(run, model=dataclasses.replace(run.model, backend="varlen")))
    is_strict = torch.get_deterministic_debug_mode() == 2
    torch.use_deterministic_algorithms(False)
    return is_strict


@pytest.fixture(scope="module")
def done(tmp_path_factory, tiny_model):
    """Return the folder of runs by ranks and log_every_batches, and the results of the functions above."""
    folder = tmp_path_factory.mktemp("runs")
    one_each = ("data.strategy=none", "data.train_batch_size=2", into(folder / "read"))  # five steps an epoch
    options, cases = small_run(folder, tiny_model, LENGTHS, *one_each), {}
    for ranks, by_batches in LOGGED.items():
        cases[ranks, "in order"] = (ranks, _lengths_read, [*options, "data.shuffle=false", "data.balance=none"])
        cases[ranks, "shuffled"] = (ranks, _lengths_read, [*options, "data.balance=none"])
        for batches in by_batches:  # which replaces log_freq
            output = into(folder / f"{ranks}-{batches}")
            logs = [f"trainer.log_every_batches={batches}", output, "trainer.log_freq=50"]
            cases[ranks, batches] = (ranks, train_alone, [*options, *logs])
    run = small_run(folder / "strict", tiny_model, [20] * 8, into(folder / "strict" / "run"))
    for full in ("false", "true"):  # the last, which changes torch
        cases["strict", full] = (1, strictness, [*run, f"engine.full_determinism={full}"])
    return folder, run_cases(cases)


@pytest.mark.parametrize("ranks", LOGGED)
def test_without_a_shuffle_every_epoch_reads_the_documents_in_their_order_and_else_in_another_each(ranks, done):
    in_order, shuffled = (done[1][ranks, order] for order in ("in order", "shuffled"))
    assert list(in_order) == [[list(LENGTHS[rank::ranks])] * 2 for rank in range(ranks)]
    first, second = ([length for read in shuffled for length in read[epoch]] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(LENGTHS)
    assert [length for read in in_order for length in read[0]] != first != second


@pytest.mark.parametrize("ranks", LOGGED)
def test_steps_are_logged_every_so_many_batches_of_a_rank(ranks, done):
    for batches, logged in LOGGED[ranks].items():
        assert {step for step, name in metrics(done[0] / f"{ranks}-{batches}") if name == "train/loss"} == logged


def test_full_determinism_is_strict_with_torchs_varlen_attention(done):
    """verl only warns of nondeterministic kernels; varlen's backward is one unless torch is strict."""
    assert [done[1]["strict", full] for full in ("false", "true")] == [(False,), (True,)]
