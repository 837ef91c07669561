"""The invariant of preferences: every loss, shared or not, on any ranks, is that of single documents.

Each case runs the trainer's own path (collator, micro-batches, head, loss, engine, reduction) on gloo ranks and is
compared with tests/lib/reference_pairs.py. The pairs have a reference of other weights than the trained model.
"""

import pickle
from dataclasses import dataclass

import pytest
import torch

from tests.lib.packed_engine import build_worker, train_step
from tests.lib.preference_cases import CATEGORY_WEIGHTS, LOSSES, PACKS, options_of
from tests.lib.ranks import run_cases
from tests.lib.reference import load_eager
from tests.lib.reference_pairs import Expected, PairReference, Unit
from tests.lib.tiny_model import write_tiny_model
from verl_ext.data import CategoryTable
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.objective import PreferenceObjective

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
CATEGORIES = {7: "chat", 9: "code"}


@dataclass(frozen=True)
class Case:
    """One step: its loss, whether documents share tokens, a rank's micro-batches and its head."""

    loss: str
    shared: bool
    accumulation: int
    head: str = "fused"

    def __str__(self) -> str:
        return f"{self.loss}-{'shared' if self.shared else 'whole'}-{self.accumulation}-{self.head}"


CASES = [Case(loss, shared, k) for loss in LOSSES for shared in (False, True) for k in (1, 4)]
CASES += [Case("kto", True, 2), Case("dpo", False, 2)]
CASES += [Case(loss, True, 4, head) for loss in ("cdpo", "simpo") for head in ("targets", "plain")]
FEW = [
    Case("kto", True, 2),
    Case("cdpo", True, 1),
    Case("orpo", True, 4),
    Case("dpo", False, 2),
    Case("cdpo", True, 4, "targets"),
]
_LEAN = ("engine.use_no_sync_for_gradient_accumulation=true", "model.enable_gradient_checkpointing=false")
_TILED = ("model.tile_tokens=5", "model.activation_offload=true")
LAYOUTS = {  # (ranks, of which so many share a pack, overrides)
    (1, 1, ()): CASES,
    (2, 1, ()): CASES,
    (2, 2, ()): CASES,
    (2, 2, _TILED): FEW,
    (4, 2, _LEAN): FEW,
    (4, 4, ()): FEW,
    (3, 3, ()): FEW,
    (2, 1, ("parallel.context_parallel_size=2",)): [
        Case("dpo", False, 2),
        Case("kto", False, 4),
        Case("cdpo", False, 1),
    ],
}
RUNS = [pytest.param(layout, case, id=f"{layout}-{case}") for layout, cases in LAYOUTS.items() for case in cases]


def packs_of(case: Case) -> list[list[Unit]]:
    """Return the units of each pack."""
    return PACKS["labels" in case.loss]


def _train(model: str, layout: tuple, rows: bytes) -> dict:
    answers = {}
    categories = CategoryTable(tuple(CATEGORIES), tuple(CATEGORIES.values()))
    engine = build_worker(model, layout[1], layout[2]).engine
    for case in LAYOUTS[layout]:
        options = options_of(LOSSES[case.loss])
        spec = options.spec(categories.names)
        objective, packs = PreferenceObjective(options), pickle.loads(rows)[case.loss, case.shared]
        collate = StepCollator(spec, categories, shares_prefixes=case.shared, objective=objective)
        answers[case] = train_step(engine, packs, collate, case.accumulation, case.head)
    return answers


@pytest.fixture(scope="module")
def reference(tiny_model, tmp_path_factory):
    """Return the plain computation, with a reference model of other weights."""
    other = write_tiny_model(tmp_path_factory.mktemp("reference"), seed=1)
    units = [unit for packs in PACKS.values() for pack in packs for unit in pack]
    return PairReference(load_eager(str(tiny_model)), load_eager(str(other)), units)


@pytest.fixture(scope="module")
def expected(reference):
    """Return a function that computes a loss's reference on its first use."""
    weights = {number: CATEGORY_WEIGHTS[name] for number, name in CATEGORIES.items()}
    found: dict[str, Expected] = {}

    def of(case: Case) -> Expected:
        if case.loss not in found:
            found[case.loss] = reference.step(packs_of(case), LOSSES[case.loss], weights)
        return found[case.loss]

    return of


@pytest.fixture(scope="module")
def measured(tiny_model, reference):
    """Return a function for every rank's result of a case on a layout; the ranks start once."""
    packs = {(case.loss, case.shared): packs_of(case) for case in CASES}
    rows = {(loss, shared): reference.rows(units, LOSSES[loss], shared) for (loss, shared), units in packs.items()}
    whole = pickle.dumps(rows)  # as tensors, they would be passed as files
    runs = run_cases({layout: (layout[0], _train, str(tiny_model), layout, whole) for layout in LAYOUTS})
    return lambda layout, case: [answers[case] for answers in runs[layout]]


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_a_step_of_preferences_equals_single_documents_in_plain_hugging_face(layout, case, expected, measured):
    want, ranks = expected(case), measured(layout, case)
    report = ranks[0].report
    want.assert_taken(ranks[0], TOLERANCE, TOLERANCE, floor=0)
    assert {name: report[f"train/{name}"] for name in want.metrics} == pytest.approx(
        want.metrics, rel=TOLERANCE, abs=1e-6
    )
    assert ("train/chosen_drop" in report) == LOSSES[case.loss].has_reference
    assert all(rank.report == report for rank in ranks)


def test_counts_are_of_documents_and_pairs(measured):
    case = Case("dpo", True, 1)
    report, packs = measured((1, 1, ()), case)[0].report, packs_of(case)
    documents = [document for pack in packs for unit in pack for document in unit.documents]
    assert report["train/tokens"] == sum(len(document.input_ids) for document in documents)
    assert report["train/computed_tokens"] < report["train/tokens"]
    assert report["train/target_tokens"] == sum(document.targets for document in documents)
    assert report["train/pairs"] == sum(len(unit.pairs) for pack in packs for unit in pack)
    kept = [
        document
        for pack in packs
        for unit in pack
        for document, side in zip(unit.documents, unit.sides, strict=True)
        if side >= 0
    ]
    of_chat = sum(c == 7 for document in kept for c in document.category_ids)
    assert report["train/chat_tokens"] == of_chat  # rejected answers are in no mean of token losses
    assert torch.isfinite(torch.tensor(report["train/chat_loss"]))


def test_the_baselines_of_kto_lie_on_both_sides_of_their_bound(reference):
    assert reference.baseline(PACKS[False], LOSSES["kto"]) > 0.1
    assert reference.baseline(PACKS[True], LOSSES["kto_labels"]) == 0
