"""Options that are settled before training but show only in its steps: order, logged steps, determinism."""

import dataclasses

import pytest
import torch

from tests.ranks import in_turn, run_ranks
from tests.training import build, into, metrics, settle, small_run, train_each
from verl_ext.trainer.trainer import SFTTrainer

pytestmark = pytest.mark.slow

LENGTHS = (9, 30, 4, 17, 12, 22, 7, 26, 14, 5)
ALL = {1, 2, 3, 4, 5}
# Ranks: the logged steps of an epoch by log_every_batches; a step is two batches of a single rank.
LOGGED = {1: {4: {2, 4, 5}, 3: {2, 4, 5}, 1: ALL}, 2: {4: {4, 5}}}  # the last step is always logged


def _lengths_read(options):
    """Return the lengths of this rank's documents in each of two epochs, in order."""
    trainer = build(options)
    run, steps = trainer.run, trainer.run.plan.steps_per_epoch
    batches = [batch.pack_lengths for batch in trainer.rank.batches(run.train_set, run.plan, 0, 2 * steps)]
    return [[length for batch in epoch for length in batch] for epoch in (batches[:steps], batches[steps:])]


@pytest.fixture(scope="module", params=LOGGED)
def done(request, tmp_path_factory, tiny_model):
    """Return (ranks, folder of runs by log_every_batches, documents read by each rank in order, and shuffled)."""
    folder, ranks = tmp_path_factory.mktemp("runs"), request.param
    one_each = ("data.strategy=none", "data.train_batch_size=2", into(folder / "read"))  # five steps an epoch
    options = small_run(folder, tiny_model, LENGTHS, *one_each)
    logs = [[f"trainer.log_every_batches={n}", into(folder / str(n)), "trainer.log_freq=50"] for n in LOGGED[ranks]]
    calls = [
        (_lengths_read, [*options, "data.shuffle=false", "data.balance=none"]),
        (_lengths_read, [*options, "data.balance=none"]),
        (train_each, [[*options, *words] for words in logs]),  # log_every_batches replaces log_freq
    ]
    in_order, shuffled, _ = zip(*run_ranks(in_turn, ranks, calls), strict=True)
    return ranks, folder, in_order, shuffled


def test_without_a_shuffle_every_epoch_reads_the_documents_in_their_order_and_else_in_another_each(done):
    ranks, _, in_order, shuffled = done
    assert list(in_order) == [[list(LENGTHS[rank::ranks])] * 2 for rank in range(ranks)]
    first, second = ([length for read in shuffled for length in read[epoch]] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(LENGTHS)
    assert [length for read in in_order for length in read[0]] != first != second


def test_steps_are_logged_every_so_many_batches_of_a_rank(done):
    ranks, folder, _, _ = done
    for batches, logged in LOGGED[ranks].items():
        assert {step for step, name in metrics(folder / str(batches)) if name == "train/loss"} == logged


def strictness(overrides):
    """Build a trainer with torch's varlen attention, and return whether torch refuses nondeterministic kernels."""
    run = settle(overrides)
    SFTTrainer(dataclasses.replace(run, model=dataclasses.replace(run.model, backend="varlen")))
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def test_full_determinism_is_strict_with_torchs_varlen_attention(tmp_path, tiny_model):
    """verl only warns of nondeterministic kernels; varlen's backward is one unless torch is strict."""
    run = small_run(tmp_path, tiny_model, [20] * 8, into(tmp_path / "run"))
    calls = [(strictness, [*run, f"engine.full_determinism={full}"]) for full in ("false", "true")]
    assert run_ranks(in_turn, 1, calls) == [[False, True]]
