"""The invariant of preferences: every loss, shared or not, on any ranks, is that of single documents.

Each case runs the trainer's own path (collator, micro-batches, head, loss, engine, reduction) on gloo ranks and is
compared with tests/reference_pairs.py. The pairs have a reference of other weights than the trained model.
"""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.reference import Document, load_eager
from tests.reference_pairs import Expected, Loss, PairReference, Unit, unit_row
from tests.tiny_model import write_tiny_model
from verl_ext.data import CategoryTable
from verl_ext.losses import PreferenceOptions
from verl_ext.trainer.objective import PreferenceObjective
from verl_ext.trainer.preference import PreferenceCollator

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
CATEGORIES = {7: "chat", 9: "code"}
CATEGORY_WEIGHTS = {"chat": 0.5, "code": 2.0}
LOSSES = {
    "dpo": Loss("dpo", 0.1, nll_weight=0.3),
    "cdpo": Loss("dpo", 0.4, smoothing=0.2, answers="mean", nll_weight=0.5, nll_mode="sequence", sft_weight=0.25),
    "common": Loss("dpo", 0.1, length="common", tail_weight=0.3),
    "dpo_norm": Loss("dpo_norm", 5.0, length="mean"),
    "robust": Loss("robust", 0.1, smoothing=0.1),
    "ipo": Loss("ipo", 0.1, length="mean"),
    "hinge": Loss("hinge", 0.1),
    "simpo": Loss("simpo", 2.0, length="mean", has_reference=False, margin=0.4),
    "cpo": Loss("cpo", 0.1, has_reference=False, nll_weight=1.0),
    "orpo": Loss("orpo", 0.1, length="mean", has_reference=False, nll_weight=1.0),
    "apo_zero": Loss("apo_zero", 0.1),
    "apo_down": Loss("apo_down", 0.1),
    "dpop": Loss("dpop", 0.1, penalty=3.0, sft_weight=0.0),
    "labels": Loss("apo_zero", 0.2, nll_weight=0.1),
    "kto": Loss("kto", 0.3, desirable=1.5, undesirable=0.75),
    "kto_labels": Loss("kto", 0.3),
}


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


def _packs(labels: bool) -> list[list[Unit]]:
    """Make packs of units: unequal answers, one that shares nothing, three answers, one token, weight 0, SFT rows."""
    rng = np.random.default_rng(8)

    def tokens(size: int) -> list[int]:
        return rng.integers(4, 128, size).tolist()

    def document(prompt: list[int], answer: list[int], category: int) -> Document:
        ids, mask = [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)
        return Document(ids, mask, [category * m for m in mask], rng.uniform(0.25, 2.0, len(ids)).tolist())

    def unit(prompt: int, *answers: int, category: int = 7, weight: float = 1.0, alike: int = 0) -> Unit:
        begin, start = tokens(prompt), tokens(alike)
        made = [document(begin, [*start, *tokens(size)], category) for size in answers]
        return Unit(made, [1, *[-1] * (len(answers) - 1)], weight)

    one, other = tokens(3), tokens(4)
    different = Unit([document(one, tokens(4), 9), document(other, tokens(2), 9)], [1, -1], 0.5)
    rows = [Unit([document(tokens(5), tokens(4), category)], [0]) for category in (7, 9, 0)]
    if labels:
        alone = [Unit([document(tokens(4), tokens(3 + n), 7)], [(-1) ** n], 0.5 + n) for n in range(7)]
        return [
            [alone[0], rows[0]],
            [alone[1], alone[2]],
            [unit(6, 3, 5)],
            [alone[3], alone[4]],
            [rows[1]],
            [alone[5]],
            [alone[6]],
        ]
    return [
        [unit(6, 3, 5), rows[0]],
        [unit(9, 4, 2, 6, category=9)],
        [unit(5, 2, 3, alike=3, weight=2.0), different],
        [rows[1]],  # no pair
        [unit(1, 1, 7, category=0)],
        [unit(8, 3, 3, category=9, weight=0.0), unit(2, 9, 1), rows[2]],
        [unit(4, 5, 5, 1, 2, weight=0.5)],
    ]


PACKS = {labels: _packs(labels) for labels in (False, True)}


def packs_of(case: Case) -> list[list[Unit]]:
    """Return the units of each pack."""
    return PACKS["labels" in case.loss]


def options_of(o: Loss) -> PreferenceOptions:
    """Return the package's options of a loss."""
    given = {"mode": o.mode, "beta": o.beta, "length": o.length, "label_smoothing": o.smoothing}
    given |= {"nll_weight": o.nll_weight, "nll_mode": o.nll_mode, "sft_weight": o.sft_weight, "answers": o.answers}
    given |= {"margin": o.margin, "penalty": o.penalty, "tail_weight": o.tail_weight}
    given |= {"desirable_weight": o.desirable, "undesirable_weight": o.undesirable}
    return PreferenceOptions.read({**given, "category_weights": CATEGORY_WEIGHTS})


def _train(model: str, ranks: int, rows: bytes) -> dict:
    from tests.packed_engine import build_worker, train_step

    answers = {}
    categories = CategoryTable(tuple(CATEGORIES), tuple(CATEGORIES.values()))
    for layout, cases in LAYOUTS.items():
        if layout[0] != ranks:
            continue
        engine = build_worker(model, layout[1], layout[2]).engine
        for case in cases:
            options = options_of(LOSSES[case.loss])
            spec = options.spec(categories.names)
            collate = PreferenceCollator(spec, categories, shares_prefixes=case.shared, options=options)
            packs, objective = pickle.loads(rows)[case.loss, case.shared], PreferenceObjective(options)
            answers[layout, case] = train_step(engine, packs, collate, case.accumulation, case.head, objective)
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
    """Return a function for every rank's result of a case on a layout; each number of ranks starts once."""
    runs: dict[int, list[dict]] = {}
    rows = {}
    for case in CASES:
        references = [[reference.reference_sums(unit, LOSSES[case.loss]) for unit in pack] for pack in packs_of(case)]
        both = zip(packs_of(case), references, strict=True)
        rows[case.loss, case.shared] = packs = [unit_row(pack, of_pack, case.shared) for pack, of_pack in both]
        for row, pack in zip(packs, packs_of(case), strict=True):
            row["mismatched_reference"] = torch.tensor([sum(other for _, other in reference.mismatched(pack))]).double()

    def of(layout: tuple, case: Case) -> list:
        if layout[0] not in runs:
            arguments = str(tiny_model), layout[0], pickle.dumps(rows)  # as tensors, they would be passed as files
            runs[layout[0]] = run_ranks(_train, layout[0], *arguments)
        return [answers[layout, case] for answers in runs[layout[0]]]

    return of


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_a_step_of_preferences_equals_single_documents_in_plain_hugging_face(layout, case, expected, measured):
    want, ranks = expected(case), measured(layout, case)
    report = ranks[0].report
    assert report["train/loss"] == pytest.approx(want.loss, rel=TOLERANCE)
    assert {name: report[f"train/{name}"] for name in want.metrics} == pytest.approx(
        want.metrics, rel=TOLERANCE, abs=1e-6
    )
    assert ("train/chosen_drop" in report) == LOSSES[case.loss].has_reference
    assert all(rank.report == report for rank in ranks)
    assert ranks[0].gradients.keys() == want.gradients.keys()
    deviations = {
        name: float((ranks[0].gradients[name].double() - gradient).norm() / gradient.norm())
        for name, gradient in want.gradients.items()
    }
    worst = max(deviations, key=deviations.get)
    assert deviations[worst] < TOLERANCE, f"{worst} is off by {deviations[worst]:.1e} of its norm"


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
