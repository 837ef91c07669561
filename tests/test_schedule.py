"""A schedule that ends on a floor, `lr/10 + lr/2·(1 + cos(π·step/total))`, as verl's own cosine.

It begins at 1.1·lr and ends at lr/10: a cosine with peak `optim.lr` = 1.1·lr and `optim.min_lr_ratio` = 1/11. Step s of
a run, counted from 1 as its metrics are, trains at the formula's value for s − 1: the first step at exactly 1.1·lr, the
last one a step short of lr/10.
"""

import math

import numpy as np
import pytest

from tests.packed_engine import build_worker
from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import metrics, train_alone
from verl_ext.config import compose

LR = 5e-4
OVERRIDES = (
    f"optim.lr={1.1 * LR}",
    f"optim.min_lr_ratio={1 / 11}",
    "optim.lr_warmup_steps=0",
    "optim.lr_scheduler_type=cosine",
)
TOTAL = 1000  # the steps of build_worker's schedule


def formula(step: int, total: int) -> float:
    return LR / 10 + 0.5 * LR * (1 + math.cos(math.pi * step / total))


def _rates(model: str) -> list[float]:
    """The engine's learning rate before any step, and after each of TOTAL."""
    engine = build_worker(model, overrides=OVERRIDES).engine
    engine.optimizer_step()  # torch asks for one before the first step of a schedule
    return [engine.lr_scheduler.get_last_lr()[0], *(engine.lr_scheduler_step() for _ in range(TOTAL))]


def test_verls_cosine_is_the_schedule_from_the_first_step_to_the_last(tiny_model):
    (rates,) = run_ranks(_rates, 1, str(tiny_model))
    assert rates[0] == pytest.approx(1.1 * LR)
    assert rates[TOTAL // 2] == pytest.approx(0.6 * LR)
    assert rates[TOTAL] == pytest.approx(0.1 * LR)
    assert rates == pytest.approx([formula(step, TOTAL) for step in range(TOTAL + 1)], rel=1e-12)


def test_step_s_of_a_run_trains_at_the_formula_for_s_minus_1(tiny_model, tmp_path):
    documents = random_documents(np.random.default_rng(0), [20] * 8, VOCABULARY, 1)
    folder = write_tokenized(tmp_path / "data", documents)
    overrides = [
        f"data.train_dir={folder}",
        f"model.path={tiny_model}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    run_ranks(train_alone, 1, [*overrides, *OVERRIDES, "trainer.total_training_steps=6"])
    rates = {step: value for (step, name), value in metrics(tmp_path / "run").items() if name == "train/lr"}
    assert rates == pytest.approx({step: formula(step - 1, 6) for step in range(1, 7)}, rel=1e-12)


def test_the_recipe_of_minimind_has_this_schedule():
    optim = compose(["recipe=minimind_pretrain", "data.train_dir=unused", "model.path=unused"]).optim
    assert optim.lr == pytest.approx(1.1 * LR)
    assert optim.min_lr_ratio == pytest.approx(1 / 11, rel=1e-12)
    assert (optim.lr_scheduler_type, optim.lr_warmup_steps, optim.lr_warmup_steps_ratio) == ("cosine", 0, 0)
