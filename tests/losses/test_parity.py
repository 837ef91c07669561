"""The invariant: for every loss mode, packed = unpacked, 1 rank = N ranks, SP 1 = SP N, accumulation 1 = K.

Each case runs the trainer's own path (collator, micro-batches, loss, engine, reduction) on gloo ranks and is compared
with tests/lib/reference.py, which runs plain Hugging Face over single documents. Deviations are relative; a parameter's
gradient is measured by the 2-norm.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from tests.lib.packed_engine import build_worker, train_step
from tests.lib.parity_cases import (
    _GROUPS,
    CATEGORIES,
    CATEGORY_WEIGHTS,
    DOCUMENTS,
    MAX_TOKENS,
    TOLERANCE,
    TRIES,
    packs_of,
)
from tests.lib.ranks import run_ranks
from tests.lib.reference import Expected, Reference, load_eager, pack_row, tree_row
from tests.lib.tokenized_data import write_tokenized
from verl_ext.data import CategoryTable, SFTDataSet
from verl_ext.losses import MODES, LossSpec, category_weight_table
from verl_ext.trainer.collator import StepCollator

CLIPPED = 1e-3  # the norm to which every step's gradients are scaled


@dataclass(frozen=True)
class Layout:
    """The number of ranks, how many of them share a sequence (Ulysses × groups), and further engine overrides."""

    ranks: int
    ulysses: int
    overrides: tuple[str, ...] = ()
    groups: int = 1

    def __str__(self) -> str:
        shared = f"{self.ulysses}x{self.groups}" if self.groups > 1 else f"{self.ulysses}"
        shape = f"dp{self.ranks // (self.ulysses * self.groups)}_sp{shared}"
        return "-".join([shape, *(override.split("=")[0].rpartition(".")[2] for override in self.overrides)])


@dataclass(frozen=True)
class Case:
    """One step: its loss mode, the packing of its documents, and a rank's number of micro-batches."""

    mode: str
    packing: str
    accumulation: int
    head: str = "fused"

    def __str__(self) -> str:
        return f"{self.mode}-{self.packing}-accumulate{self.accumulation}-{self.head}"


CASES = [Case(mode, packing, k) for mode in MODES for packing in ("none", "packed") for k in (1, 4)]
CASES += [Case(mode, packing, 4) for mode in MODES for packing in ("padded", "labelled")]
CASES += [Case("sequence", "packed", 2)]
CASES += [Case("sequence", packing, 4, head) for packing in ("packed", "labelled") for head in ("targets", "plain")]
# Modes and layouts interact in Z, accumulation and idle ranks, so purely data-parallel layouts run every case; those
# with sequence parallelism run each mode, packing, accumulation and head.
MANY_CASES = [Case(mode, "packed", 4) for mode in MODES] + [Case("sequence", "packed", k) for k in (1, 2)]
MANY_CASES += [Case("token", packing, 4) for packing in ("none", "padded", "labelled")]
MANY_CASES += [Case("longwriter", "padded", 4), Case("longwriter", "none", 1)]
MANY_CASES += [case for case in CASES if case.head != "fused"]
FEW_CASES = [Case("token", packing, 4) for packing in ("none", "labelled")]
FEW_CASES += [Case("longwriter", packing, 4) for packing in ("packed", "padded")]
SHARED_CASES = [Case(mode, "shared", 4) for mode in MODES]
SHARED_CASES += [Case("sequence", "shared", k, head) for k, head in ((1, "fused"), (2, "targets"), (4, "plain"))]
CASES += SHARED_CASES
MANY_CASES += SHARED_CASES
FEW_CASES += SHARED_CASES[:2]
CONTEXT_CASES = [Case("token", packing, 4) for packing in ("packed", "labelled", "padded")]
CONTEXT_CASES += [Case("sequence", "packed", 4, head) for head in ("targets", "plain")]
# Gradients are reduced only after the last micro-batch, without verl's default recomputation.
_LEAN = ("engine.use_no_sync_for_gradient_accumulation=true", "model.enable_gradient_checkpointing=false")
LAYOUTS = {  # the fifth and sixth have more ranks than key/value heads, and packs shorter than the number of ranks
    Layout(1, 1): CASES,
    Layout(2, 1): CASES,
    Layout(2, 2): MANY_CASES,
    Layout(4, 2, _LEAN): MANY_CASES,
    Layout(4, 4): FEW_CASES,
    Layout(3, 3): FEW_CASES,  # 4 query and 2 key/value heads become 6 and 6
    # Chunks of 1 to 6 tokens, shorter than most documents; on three ranks every pack but one is padded.
    Layout(2, 1, groups=2): CONTEXT_CASES[:2],
    Layout(4, 1, groups=4): CONTEXT_CASES[:2],
    Layout(4, 2, _LEAN, groups=2): CONTEXT_CASES,
    Layout(3, 1, groups=3): CONTEXT_CASES[:2],
}
# Kept activations: on the host, of tiles of 5 tokens.
_ON_HOST, _TILED = ("model.activation_offload=true",), ("model.tile_tokens=5",)
_KEPT = {(2, 1): [_ON_HOST, _TILED + _ON_HOST], (2, 2): [_TILED, _TILED + _ON_HOST]}
for shape, asked in _KEPT.items():
    for overrides in asked:
        LAYOUTS[Layout(*shape, overrides)] = [Case("sequence", "packed", accumulation) for accumulation in (1, 2)]
RUNS = [pytest.param(layout, case, id=f"{layout}-{case}") for layout, cases in LAYOUTS.items() for case in cases]


def _train(model: str, ranks: int) -> dict:
    """Train the cases of all layouts of these ranks, with one engine for each; gradients come only from rank 0."""
    answers = {}
    for layout, cases in LAYOUTS.items():
        if layout.ranks == ranks:
            context = f"parallel.context_parallel_size={layout.groups}"
            clipping = f"optim.clip_grad={CLIPPED}"
            engine = build_worker(model, layout.ulysses, (*layout.overrides, context, clipping)).engine
            assert engine.get_data_parallel_size() * layout.ulysses * layout.groups == layout.ranks
            answers |= {(layout, case): _train_case(engine, case) for case in cases}
    return answers


def _train_case(engine, case: Case):
    row, size = (tree_row if case.packing == "shared" else pack_row), MAX_TOKENS if case.packing == "padded" else None
    packs = [row(pack, *[size] * (size is not None)) for pack in packs_of(case.packing)]
    categories = CategoryTable(tuple(CATEGORIES), tuple(CATEGORIES.values()))
    loss = LossSpec(case.mode, category_weight_table(CATEGORY_WEIGHTS, categories.names))
    labelled, shared = case.packing == "labelled", case.packing == "shared"
    collate = StepCollator(loss, categories, last_is_label=labelled, shares_prefixes=shared)
    return train_step(engine, packs, collate, case.accumulation, case.head)


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Return a function that computes a case's reference on its first use."""
    reference = Reference(load_eager(str(tiny_model)), [*DOCUMENTS, *(document for pack in TRIES for document in pack)])
    weights = {c: CATEGORY_WEIGHTS[name] for c, name in CATEGORIES.items() if name in CATEGORY_WEIGHTS}
    found: dict[tuple[str, str], Expected] = {}

    def of(case: Case) -> Expected:
        key = (case.mode, case.packing if case.packing in ("none", "shared") else "packed")  # padding changes nothing
        if key not in found:
            found[key] = reference.step(packs_of(case.packing), case.mode, weights)
        return found[key]

    return of


@pytest.fixture(scope="module")
def measured(tiny_model):
    """Return a function for every rank's result of a case on a layout; each number of ranks starts once."""
    runs: dict[int, list[dict]] = {}

    def of(layout: Layout, case: Case) -> list:
        if layout.ranks not in runs:
            runs[layout.ranks] = run_ranks(_train, layout.ranks, str(tiny_model), layout.ranks)
        return [answers[layout, case] for answers in runs[layout.ranks]]

    return of


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_a_step_equals_single_documents_in_plain_hugging_face(layout, case, expected, measured):
    want, ranks = expected(case), measured(layout, case)
    report = ranks[0].report
    want.assert_taken(ranks[0], TOLERANCE, TOLERANCE, floor=0)
    for category, name in CATEGORIES.items():
        assert report[f"train/{name}_tokens"] == want.category_tokens.get(category, 0)
        if category in want.category_loss:
            assert report[f"train/{name}_loss"] == pytest.approx(want.category_loss[category], rel=TOLERANCE)
        else:
            assert f"train/{name}_loss" not in report
    for kind, values in (("token_accuracy", want.accuracy), ("entropy", want.entropy)):
        for category, value in values.items():
            name = kind if category is None else f"{CATEGORIES[category]}_{kind}"
            assert report[f"train/{name}"] == pytest.approx(value, rel=TOLERANCE)

    assert all(rank.grad_norm == pytest.approx(want.grad_norm, rel=1e-6) for rank in ranks)
    clipped = {name: gradient * (want.grad_norm / CLIPPED) for name, gradient in ranks[0].clipped.items()}
    assert max(want.gradient_errors(clipped, floor=0).values()) < TOLERANCE


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_counts_and_losses_are_the_same_on_every_rank_and_at_any_world_size(layout, case, measured):
    one = measured(Layout(1, 1), case)[0].report
    assert (one.get("train/computed_tokens", math.inf) < one["train/tokens"]) == (case.packing == "shared")
    packs = packs_of(case.packing)
    unread = len(packs) if case.packing == "labelled" else 0
    assert one["train/tokens"] == sum(len(d.input_ids) for pack in packs for d in pack) - unread
    assert one["train/target_tokens"] == sum(d.targets for pack in packs for d in pack)
    assert one["train/packs"] == len(packs)
    ranks = measured(layout, case)
    assert all(answer.report == ranks[0].report for answer in ranks)
    assert ranks[0].report == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("mode", ["token", "sequence", "sqrt"])
def test_packing_changes_nothing_where_the_loss_is_no_mean_overpacks_of(mode, expected):
    unpacked, packed = expected(Case(mode, "none", 1)), expected(Case(mode, "packed", 1))
    assert packed.loss == pytest.approx(unpacked.loss, rel=1e-12)


def test_the_cases_hold_what_they_are_meant_to():
    assert sorted(i for group in _GROUPS for i in group) == list(range(len(DOCUMENTS)))
    lengths = [sum(len(DOCUMENTS[i].input_ids) for i in group) for group in _GROUPS]
    assert max(lengths) == len(DOCUMENTS[0].input_ids) == MAX_TOKENS
    assert any(n % 2 for n in lengths)
    assert len(_GROUPS) % 2 == 1
    assert any(m and not c for d in DOCUMENTS for m, c in zip(d.loss_mask, d.category_ids, strict=True))
    assert DOCUMENTS[1].targets == DOCUMENTS[2].targets == 0


@pytest.mark.parametrize("pad_mode", ["no_padding", "right"])
def test_a_dataset_yields_the_rows_that_are_trained_on_here(pad_mode, tmp_path):
    columns = [vars(document) for document in DOCUMENTS]
    folder = write_tokenized(tmp_path / "data", columns, categories=CATEGORIES, loss_weight=True)
    dataset = SFTDataSet(train_dir=folder, max_tokens=MAX_TOKENS, pad_mode=pad_mode)
    rows, offsets = dataset.spans.row[dataset.plan().document_index], dataset.plan().pack_offsets
    assert sorted(rows) == list(range(len(DOCUMENTS)))
    for k, (first, end) in enumerate(pairwise(offsets)):
        expected = pack_row([DOCUMENTS[i] for i in rows[first:end]], MAX_TOKENS if pad_mode == "right" else None)
        found = dataset[k]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
