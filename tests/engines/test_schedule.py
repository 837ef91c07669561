"""Schedules equal the formulas of verl, transformers and Megatron, also over a resume and with an early decay.

The first is `lr/10 + lr/2·(1 + cos(π·step/total))`, like verl's own cosine. It begins at 1.1·lr and ends at lr/10: a
cosine with peak `optim.lr` = 1.1·lr and `optim.min_lr_ratio` = 1/11. Step s of a run, counted from 1 like its metrics,
trains at the formula's value for s − 1: the first step at exactly 1.1·lr, the last one a step short of lr/10.
"""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup, get_linear_schedule_with_warmup
from verl.utils.torch_functional import get_wsd_schedule_with_warmup

from tests.lib.errors import names
from tests.lib.packed_engine import build_worker
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.training import differences, into, metrics, refusals, resume_run, small_run, stopped_at, train_alone
from verl_ext.config.compose import compose
from verl_ext.engines.schedule import DECAYS, StepOptimizerConfig, rate_factor

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


def _rates(model: str, *cycles: float) -> list[list[float]]:
    """Return by number of cycles the engine's learning rate before any step, and after each of TOTAL steps."""
    found = []
    for number in cycles:
        engine = build_worker(model, overrides=[*OVERRIDES, f"optim.num_cycles={number}"]).engine
        engine.optimizer_step()  # torch requires one before the first step of a schedule
        found.append([engine.lr_scheduler.get_last_lr()[0], *(engine.lr_scheduler_step() for _ in range(TOTAL))])
    return found


def test_verls_cosine_is_the_schedule_from_the_first_step_to_the_last_with_as_many_waves_as_cycles(tiny_model):
    ((rates, waves),) = run_ranks(_rates, 1, str(tiny_model), 0.5, 1.5)
    low, high = 0.1 * LR, 1.1 * LR
    ends = {0: high, TOTAL // 3: low, 2 * TOTAL // 3: high, TOTAL: low}
    assert {step: waves[step] for step in ends} == pytest.approx(ends, rel=1e-4)
    assert rates[0] == pytest.approx(1.1 * LR)
    assert rates[TOTAL // 2] == pytest.approx(0.6 * LR)
    assert rates[TOTAL] == pytest.approx(0.1 * LR)
    assert rates == pytest.approx([formula(step, TOTAL) for step in range(TOTAL + 1)], rel=1e-12)


def _factors(total: int, **options) -> list[float]:
    factor = rate_factor(StepOptimizerConfig(lr=1.0, **options), total)
    return [factor(step) for step in range(total + 1)]


def _of_others(schedule, total: int, *args, **options) -> list[float]:
    """Return the rates of another library's schedule over an optimizer whose rate is 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = schedule(optimizer, *args, **options), []
    for _ in range(total + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("total", [50, 93])
def test_wsd_without_options_is_that_of_verl(total, warmup):
    found = _factors(total, lr_scheduler_type="wsd", lr_warmup_steps=warmup, min_lr_ratio=0.1)
    wanted = _of_others(get_wsd_schedule_with_warmup, total, warmup, total, min_lr_ratio=0.1)
    assert found == pytest.approx(wanted, rel=1e-12)


def test_linear_is_that_of_transformers():
    found = _factors(50, lr_scheduler_type="linear", lr_warmup_steps_ratio=0.1)
    assert found == pytest.approx(_of_others(get_linear_schedule_with_warmup, 50, 5, 50), abs=1e-12)


def test_a_cosine_with_restarts_is_that_of_transformers():
    found = _factors(60, lr_scheduler_type="cosine_with_restarts", lr_warmup_steps=6, num_cycles=3)
    wanted = _of_others(get_cosine_with_hard_restarts_schedule_with_warmup, 60, 6, 60, num_cycles=3)
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("style", DECAYS)
def test_the_decays_of_wsd_are_those_of_megatron(style):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts that need a GPU
        scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0, "weight_decay": 0.0, "is_decoupled_lr": False}])
    peer = scheduler(optimizer, 0.0, 1.0, 0.1, 4, 40, "WSD", 0.0, 0.0, 40, "constant", False, False, 12, style)
    wanted = []
    for step in range(41):
        peer.num_steps = step
        wanted.append(peer.get_lr(optimizer.param_groups[0]))
    options = {"lr_wsd_decay_steps": 12, "lr_wsd_decay_style": style}
    found = _factors(40, lr_scheduler_type="wsd", lr_warmup_steps=4, min_lr_ratio=0.1, **options)
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine_with_restarts", "wsd"])
def test_steps_are_counted_from_one_where_verls_option_says_so(kind):
    options = {"lr_scheduler_type": kind, "lr_warmup_steps": 4, "num_cycles": 1}
    assert _factors(20, **options)[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert _factors(20, **options, zero_indexed_step=False)[:-1] == _factors(20, **options)[1:]


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory):
    """Execute runs of a cosine and of WSD, and runs that resume those of WSD; return their folder and refusals."""
    folder = tmp_path_factory.mktemp("runs")
    run = small_run(folder, tiny_model, [20] * 32, "data.train_batch_size=1", "trainer.save_freq=2")
    wsd = [*run, "optim.lr_scheduler_type=wsd", "optim.min_lr_ratio=0.1", "trainer.total_training_steps=8"]
    decay = ["optim.lr_wsd_decay_steps=4"]
    early = ["optim.lr_wsd_decay_steps=2", "optim.lr_wsd_decay_style=linear", "trainer.total_training_steps=6"]
    runs = {"whole": [*wsd, *decay], "long": wsd, "short": [*wsd, *early]}
    runs["cosine"] = [*run, *OVERRIDES, "trainer.total_training_steps=6"]
    changes = [["optim.lr_wsd_decay_steps=2"], ["optim.lr_wsd_decay_steps=9", into(folder / "new")]]
    calls = [(train_alone, [*words, into(folder / name)]) for name, words in runs.items()]
    calls += [
        (resume_run, runs["whole"], folder / "whole", folder / "resumed", 6),  # in the middle of the decay
        (resume_run, runs["short"], folder / "long", folder / "early", 4),
        (stopped_at, folder / "whole", folder / "refused", 6),
        (refusals, [*wsd, into(folder / "refused")], changes),
    ]
    return folder, run_ranks(in_turn, 1, calls)[0][-1]


def _learning_rates(folder) -> list[float]:
    found = metrics(folder)
    return [found[step, "train/lr"] for step, name in sorted(found) if name == "train/lr"]


@pytest.mark.slow
def test_a_resumed_wsd_run_is_the_uninterrupted_one_to_the_last_bit_and_its_decay_keeps_its_length(done):
    folder, (told_of_decay, told_of_run) = done
    assert names(told_of_decay, "optim.lr_wsd_decay_steps", 2, 4)
    assert names(told_of_run, "optim.lr_wsd_decay_steps", 8, "got 9")
    assert differences(folder / "resumed", folder / "whole", 8) == []


@pytest.mark.slow
def test_a_resumed_wsd_run_may_begin_its_decay_early_and_is_the_run_that_was_so_short_from_the_start(done):
    folder, _ = done
    expected = pytest.approx([1e-2] * 5 + [1e-2 * (0.1 + 0.9 / 2)], rel=1e-12)
    assert _learning_rates(folder / "early") == expected
    assert differences(folder / "early", folder / "short", 6) == []


@pytest.mark.slow
def test_step_s_of_a_run_trains_at_the_formula_for_s_minus_1(done):
    folder, _ = done
    expected = pytest.approx([formula(step - 1, 6) for step in range(1, 7)], rel=1e-12)
    assert _learning_rates(folder / "cosine") == expected


def test_the_recipes_of_minimind_have_their_schedules():
    optim = compose(["recipe=minimind_pretrain", "data.train_dir=unused", "model.path=unused"]).optim
    assert optim.lr == pytest.approx(1.1 * LR)
    assert optim.min_lr_ratio == pytest.approx(1 / 11, rel=1e-12)
    assert (optim.lr_scheduler_type, optim.lr_warmup_steps, optim.lr_warmup_steps_ratio) == ("cosine", 0, 0)
    config = compose(["recipe=minimind_pretrain/minimind3", "data.train_dir=unused", "model.path=unused"])
    assert (config.optim.lr, config.optim.min_lr_ratio, config.data.max_length) == (LR, 0.1, 340)
    assert config.trainer.experiment_name == "minimind3_pretrain"
