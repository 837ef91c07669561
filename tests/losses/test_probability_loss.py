"""`loss.by_probability` (DFT) is Σ a·p·ℓ / Z with p outside the gradient, on every layout and with every head."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.errors import refused
from tests.lib.packed_engine import build_worker, train_step
from tests.lib.ranks import run_cases
from tests.lib.reference import documents_of_answers, load_eager, pack_row
from verl_ext.data import CategoryTable
from verl_ext.losses import LossOptions, LossSpec, PreferenceOptions
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import ProbabilityLoss, StepLoss
from verl_ext.trainer.objective import Objective

pytestmark = pytest.mark.slow

BY_PROBABILITY = Objective(LossOptions(by_probability=True))
DOCUMENTS = documents_of_answers(9, 14, 6, 11)
LAYOUTS = [(1, 1), (2, 1), (2, 2)]  # (ranks, ranks that share a pack)
HEADS = ("fused", "targets", "plain")


def _steps(model: str, sequence_parallel: int):
    engine = build_worker(model, sequence_parallel).engine
    packs = [pack_row(DOCUMENTS[:2]), pack_row(DOCUMENTS[2:])]
    collate = StepCollator(LossSpec(), CategoryTable((), ()), objective=BY_PROBABILITY)
    return {head: train_step(engine, packs, collate, 1, head) for head in HEADS}


def _expected(model: str):
    """Return the loss and the gradients of the formula, one document at a time."""
    plain = load_eager(model)
    total, targets = torch.zeros(()), sum(document.targets for document in DOCUMENTS)
    for document in DOCUMENTS:
        ids = torch.tensor([document.input_ids])
        log_probs = plain(ids).logits[0, :-1].float().log_softmax(-1)
        nll = -log_probs.gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(document.loss_mask[1:])
        total = total + (mask * nll * (-nll).exp().detach()).sum() / targets
    total.backward()
    return float(total), {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.fixture(scope="module")
def steps(tiny_model):
    return run_cases({layout: (layout[0], _steps, str(tiny_model), layout[1]) for layout in LAYOUTS})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_the_formula_by_whole_documents(layout, steps, tiny_model):
    found, *_ = steps[layout]
    loss, gradients = _expected(str(tiny_model))
    for head in HEADS:
        assert found[head].report["train/loss"] == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            error = (found[head].gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
            assert error < 1e-4, (head, name)


def test_validation_is_of_likelihoods_and_preferences_have_no_probabilities():
    rank: Any = SimpleNamespace(size=1)
    assert type(BY_PROBABILITY.begin((), rank)) is StepLoss
    assert isinstance(BY_PROBABILITY.begin((), rank, [1.0]), ProbabilityLoss)
    with refused("loss.by_probability", "loss.mode=dpo", True):
        PreferenceOptions("dpo", by_probability=True)
