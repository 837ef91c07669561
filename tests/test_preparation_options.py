"""Options that are settled before training but show only in its steps: the order of documents, the logged steps."""

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import build, metrics, train_each

pytestmark = pytest.mark.slow

LENGTHS = (9, 30, 4, 17, 12, 22, 7, 26, 14, 5)


@pytest.fixture
def options(tmp_path, tiny_model):
    """Return options of a run with two documents a step and five steps an epoch."""
    documents = random_documents(np.random.default_rng(0), LENGTHS, VOCABULARY, 1)
    return [
        f"data.train_dir={write_tokenized(tmp_path / 'data', documents)}",
        *(f"model.path={tiny_model}", f"trainer.default_local_dir={tmp_path / 'run'}"),
        *("data.strategy=none", "data.train_batch_size=2"),
    ]


def _lengths_read(options):
    """Return the lengths of this rank's documents in each of two epochs, in order."""
    trainer = build(options)
    run, steps = trainer.run, trainer.run.plan.steps_per_epoch
    batches = [batch.pack_lengths for batch in trainer.rank.batches(run.train_set, run.plan, 0, 2 * steps)]
    return [[length for batch in epoch for length in batch] for epoch in (batches[:steps], batches[steps:])]


def test_without_a_shuffle_every_epoch_reads_the_documents_in_their_order(options):
    in_order = [*options, "data.shuffle=false", "data.balance=none"]
    assert run_ranks(_lengths_read, 1, in_order)[0] == [list(LENGTHS)] * 2
    for rank, read in enumerate(run_ranks(_lengths_read, 2, in_order)):
        assert read == [list(LENGTHS[rank::2])] * 2


def test_a_shuffle_is_another_order_each_epoch(options):
    first, second = run_ranks(_lengths_read, 1, [*options, "data.balance=none"])[0]
    assert sorted(first) == sorted(second) == sorted(LENGTHS)
    assert list(LENGTHS) != first != second != list(LENGTHS)


def test_steps_are_logged_every_so_many_batches_of_a_rank(options, tmp_path):
    all_steps = {1, 2, 3, 4, 5}
    # A step is two batches of a single rank; the last step is always logged.
    for ranks, logged_of in ((1, {4: {2, 4, 5}, 3: {2, 4, 5}, 1: all_steps}), (2, {4: {4, 5}})):
        runs = {batches: tmp_path / f"{ranks} {batches}" for batches in logged_of}
        words = {n: [f"trainer.log_every_batches={n}", f"trainer.default_local_dir='{runs[n]}'"] for n in runs}
        # log_every_batches replaces log_freq
        run_ranks(train_each, ranks, [[*options, "trainer.log_freq=50", *words[n]] for n in runs])
        for batches, logged in logged_of.items():
            assert {step for step, name in metrics(runs[batches]) if name == "train/loss"} == logged
