"""A run of two ranks survives kill -9 while it saves; `make test-chaos` does it fifty times, at any moment."""

import pytest

from tests.chaos.kills import options_of, survive
from tests.lib.ranks import run_ranks
from tests.lib.training import into, train_alone

pytestmark = pytest.mark.slow


def test_a_run_that_is_killed_while_it_saves_ends_as_an_uninterrupted_one(tmp_path):
    options, whole = options_of(tmp_path, steps=4), tmp_path / "whole"
    run_ranks(train_alone, 2, [*options, into(whole)])
    chaos = survive(options, whole, tmp_path, kills=2, ranks=2, seed=1, life=0, seconds=200)
    assert chaos.kills == 2
    assert chaos.completed >= 1
