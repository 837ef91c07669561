"""fp16 with a gradient scaler: losses are scaled, gradients unscaled before the norm, bad ones skipped on all ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.packed_engine import build_worker
from tests.lib.ranks import run_cases
from tests.lib.reference import Document, pack_row
from tests.lib.tiny_model import VOCABULARY
from tests.lib.training import FP16
from verl_ext.checkpoint.save import Snapshot
from verl_ext.checkpoint.state import EXTRA, load_engine
from verl_ext.data import CategoryTable
from verl_ext.engines.step import StepEngine
from verl_ext.losses import LossSpec
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import StepLoss

pytestmark = pytest.mark.slow

# Plain SGD steps show a wrong scale or a late clip in the update; Adam would hide both.
CLIPPED_SGD = ("optim.optimizer=SGD", "optim.lr=0.5", "optim.weight_decay=0", "optim.clip_grad=0.01")
TARGETS = 2 * 15  # in both ranks' packs, or in the two packs of one rank


def engine_of(model: str, *overrides: str) -> StepEngine:
    return build_worker(model, overrides=overrides).engine


def accumulated(engine: StepEngine, normaliser: float = TARGETS) -> None:
    """Accumulate gradients of two packs of 16 tokens, over one rank or two."""
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    rng = np.random.default_rng(0)
    documents = [
        Document(rng.integers(4, VOCABULARY, 16).tolist(), [0] + [1] * 15, [0] * 16, [1.0] * 16) for _ in range(2)
    ]
    collate = StepCollator(LossSpec("token", np.ones(1)), CategoryTable((), ()))
    batch = collate([pack_row([document]) for document in documents[rank::ranks]])
    engine.optimizer_zero_grad()
    engine.accumulate(list(batch.micro_batches(1)), StepLoss(normaliser, ranks, None))


def gradients(engine: StepEngine) -> torch.Tensor:
    """Return all gradients in one vector, the same on every rank."""
    return torch.cat([p.grad.full_tensor().flatten() for p in engine.module.parameters()]).clone()


def parameters(engine: StepEngine) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in engine.module.parameters()]).clone()


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory):
    """Return by number of ranks the results of all functions below, which must be the same on every rank."""
    model, saved = str(tiny_model), str(tmp_path_factory.mktemp("saved") / "saved")
    calls = {
        1: [(_scalers, model), (_clipped_step, model), (_step_with_a_bad_gradient, model, 0, float("nan"))],
        2: [
            *((_deviations, model, 1e8), (_clipped_step, model), (_step_with_a_bad_gradient, model, 1, float("inf"))),
            *((_saved_and_loaded, model, saved), (_loaded_without_a_scaler, model, saved)),
        ],
    }
    cases = {(ranks, call[0].__name__): (ranks, *call) for ranks, each in calls.items() for call in each}
    found = run_cases(cases)
    assert all(other == first for first, *others in found.values() for other in others)
    return {case: results[0] for case, results in found.items()}


def _scalers(model: str) -> list[tuple[bool, float] | None]:
    scalers = [engine_of(model, *more).scaler for more in ((), ("engine.mixed_precision.param_dtype=bf16",), (FP16,))]
    return [scaler and (scaler.is_enabled(), scaler.get_scale()) for scaler in scalers]


def test_fp16_alone_has_a_scaler_and_it_works_where_there_is_no_gpu(done):
    assert done[1, "_scalers"] == [None, None, (True, 65536.0)]


def _deviations(model: str, normaliser: float) -> dict[str, float]:
    """Return the relative deviation of fp16's gradient from fp32's, with the scaler and without."""
    exact = engine_of(model)
    accumulated(exact, normaliser)
    expected = gradients(exact).double()
    found = {}
    half = engine_of(model, FP16)
    for name in ("scaled", "plain"):
        accumulated(half, normaliser)
        if half.scaler is not None:
            half.scaler.unscale_(half.optimizer)
            half.scaler = None
        found[name] = float((gradients(half).double() - expected).norm() / expected.norm())
    return found


def test_a_gradient_that_would_underflow_arrives_with_the_scaler(done):
    deviations = done[2, "_deviations"]
    assert deviations["plain"] > 0.9  # nearly nothing is left of it
    assert deviations["scaled"] < 5e-3


def _clipped_step(model: str) -> dict[str, float]:
    """Return a clipped step's deviation from the step of fp32's gradient, and its reported norm."""
    exact = engine_of(model)
    accumulated(exact)
    expected = gradients(exact).double()
    engine = engine_of(model, FP16, *CLIPPED_SGD)
    before = parameters(engine).double()
    accumulated(engine)
    scaled = gradients(engine).double().norm()
    told = engine.optimizer_step()
    moved = parameters(engine).double() - before
    prescribed = -0.5 * 0.01 * expected / expected.norm()
    return {
        "scaled norm": float(scaled / expected.norm()),
        "told norm": told / float(expected.norm()),
        "update": float((moved - prescribed).norm() / prescribed.norm()),
        "update norm": float(moved.norm() / (0.5 * 0.01)),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_and_the_clipped_update_are_those_of_the_unscaled_gradient(done, ranks):
    seen = done[ranks, "_clipped_step"]
    assert seen["scaled norm"] == pytest.approx(65536, rel=5e-3)  # the backward pass's gradients are scaled
    assert seen["told norm"] == pytest.approx(1, rel=5e-3)
    assert seen["update norm"] == pytest.approx(1, rel=1e-3)
    assert seen["update"] < 5e-3


def _step_with_a_bad_gradient(model: str, rank: int, value: float) -> dict[str, Any]:
    """Take a sound step, one with a bad number in a rank's gradient, a sound one; return norms, scales, movements."""
    engine = engine_of(model, FP16, "optim.lr=1e-3")
    seen: dict[str, Any] = {"finite": [], "moved": [], "scale": [], "steady": []}
    for bad in (False, True, False):
        accumulated(engine)
        if bad and engine.rank == rank:
            next(p for p in engine.module.parameters() if p.grad.to_local().numel()).grad.to_local()[0] = value
        before = parameters(engine)
        seen["finite"].append(bool(np.isfinite(engine.optimizer_step())))
        seen["moved"].append(not torch.equal(parameters(engine), before))
        state = engine.scaler.state_dict()
        seen["scale"].append(state["scale"])
        seen["steady"].append(state["_growth_tracker"])
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_halves_the_scale(done, ranks):
    assert done[ranks, "_step_with_a_bad_gradient"] == {
        "finite": [True, False, True],
        "moved": [True, False, True],
        "scale": [65536, 32768, 32768],
        "steady": [1, 0, 1],
    }


def _saved_and_loaded(model: str, folder: str) -> dict[str, Any]:
    """Return the scaler's state when saved, and after loading with and without its file."""
    saving = engine_of(model, FP16)
    accumulated(saving)
    saving.optimizer_step()
    saving.scaler.update(256.0)
    accumulated(saving)
    saving.optimizer_step()
    Snapshot(saving, Path(folder)).write()
    states = {"saved": saving.scaler.state_dict()}
    loading = engine_of(model, FP16)
    accumulated(loading)  # a scale is in use
    load_engine(loading, Path(folder))
    states["loaded"] = loading.scaler.state_dict()
    return states


def _loaded_without_a_scaler(model: str, folder: str) -> dict[str, Any]:
    """Return the scaler's state after loading a checkpoint as from a run in another precision."""
    path = Path(folder) / EXTRA
    extra = json.loads(path.read_text())
    dist.barrier()
    path.write_text(json.dumps({**extra, "scaler": None}))
    dist.barrier()
    engine = engine_of(model, FP16)
    load_engine(engine, Path(folder))
    return engine.scaler.state_dict()


def test_the_scale_and_its_growth_are_of_the_checkpoint_and_begin_anew_after_another_precision(done):
    states, anew = done[2, "_saved_and_loaded"], done[2, "_loaded_without_a_scaler"]
    assert (states["saved"]["scale"], states["saved"]["_growth_tracker"]) == (256, 2)
    assert states["loaded"] == states["saved"]
    assert (anew["scale"], anew["_growth_tracker"]) == (65536, 0)
