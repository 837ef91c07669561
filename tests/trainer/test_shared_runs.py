"""Runs with data.share_prefixes: the losses of runs without it, validation, resume on other layouts, LoRA, offload."""

import pytest

from tests.lib.ranks import run_cases
from tests.lib.shared_tries import random_tries
from tests.lib.tokenized_data import write_tokenized
from tests.lib.training import into, metrics, resume_run, train_alone

pytestmark = pytest.mark.slow

SHARES = ("data.share_prefixes=true", "data.share_least=3")
# All packs are one step, so that runs with more or fewer packs take the same steps.
WHOLE = ("data.train_batch_size=64", "data.drop_last=false", "trainer.total_epochs=3", "loss=sequence")
VARIANTS = {
    "plain": (),
    "heads and tiles": ("loss.head=targets", "model.tile_tokens=16", "model.activation_offload=true"),
    "adapters": ("model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=all-linear"),
    "category weights": ("loss.category_weights={maths: 0.5, code: 3}", "engine.ulysses_sequence_parallel_size=2"),
}


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    data = write_tokenized(tmp_path_factory.mktemp("data") / "tries", random_tries(8), {1: "maths", 2: "code"})
    return [f"data.train_dir={data}", f"data.val_dir={data}", f"model.path={tiny_model}", "trainer.test_freq=1"]


@pytest.fixture(scope="module")
def runs(options, tmp_path_factory):
    """Return the folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    saved = [*options, *SHARES, "data.train_batch_size=2", "trainer.total_training_steps=4", "trainer.save_freq=2"]
    by_three = [*saved, "data.train_batch_size=3"]
    cases = {}
    for name, more in VARIANTS.items():
        for shares in ((), SHARES):
            output = f"{name}{len(shares)}"
            cases[output] = (2, train_alone, [*options, *WHOLE, *more, *shares, into(folder / output)])
    cases["whole1"] = (2, train_alone, [*saved, into(folder / "whole1")])
    cases["resumed1"] = (1, resume_run, saved, folder / "whole1", folder / "resumed1", 2)
    cases["whole3"] = (1, train_alone, [*by_three, into(folder / "whole3")])
    run_cases(cases, {"resumed3": (3, resume_run, by_three, folder / "whole3", folder / "resumed3", 2)})
    return folder


def test_a_run_that_shares_has_the_losses_of_one_that_does_not(runs):
    for name in VARIANTS:
        plain, shared = (metrics(runs / f"{name}{number}") for number in (0, len(SHARES)))
        assert shared[1, "train/computed_tokens"] < plain[1, "train/tokens"] == shared[1, "train/tokens"]
        assert shared[1, "train/packs"] < plain[1, "train/packs"]
        kinds = ("loss", "perplexity", "grad_norm", "target_tokens", "maths_tokens", "total_tokens", "lr")
        keys = [key for key in plain if key[1].endswith(kinds)]
        assert len({step for step, _ in keys}) == 4
        assert {key: shared[key] for key in keys} == pytest.approx({key: plain[key] for key in keys}, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_shares_is_resumed_on_other_ranks_with_the_same_losses(runs, ranks):
    whole, again = metrics(runs / f"whole{ranks}"), metrics(runs / f"resumed{ranks}")
    keys = [key for key in whole if key[1].endswith(("loss", "grad_norm", "tokens"))]
    assert {key: again[key] for key in keys} == pytest.approx({key: whole[key] for key in keys}, rel=1e-5)
