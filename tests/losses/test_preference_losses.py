"""Losses of preferences: formulas written out with plain numbers, finite differences, and gradients through tokens."""

import math

import numpy as np
import pytest
import torch

from tests.lib.errors import refused
from tests.lib.reference_pairs import Loss, of_answer, of_pair
from verl_ext.config.run import reader_of
from verl_ext.losses import (
    PREFERENCE_MODES,
    LossOptions,
    PreferenceOptions,
    Units,
    checked_formula,
    kto_baseline,
    preference_slopes,
    preference_terms,
    preference_values,
    target_coefficients,
    target_scales,
    total_weight,
)
from verl_ext.losses.modes import MODES
from verl_ext.metrics import StepSums
from verl_ext.trainer.objective import PreferenceObjective

# Units of a pair, of three answers and of another pair, and a document that is no answer.
UNIT, ANSWER = np.array([2, 0, 3, 0, 0, 2, 0, 1]), np.array([1, -1, 1, -1, -1, 1, -1, 0])
WEIGHT, TARGETS = np.array([1.0, 1, 0.5, 0.5, 0.5, 2, 2, 1]), np.array([7, 3, 12, 5, 1, 4, 4, 9])
PAIRS = [(0, 1, 1.0), (2, 3, 0.5), (2, 4, 0.5), (5, 6, 2.0)]
LABELS = np.array([1, 1, 1, 1]), np.array([1, -1, -1, 1]), np.array([1.0, 0.5, 2, 1]), np.array([3, 8, 1, 2])
CASES = [
    ("dpo", {}),
    ("dpo", {"label_smoothing": 0.2, "beta": 0.3}),
    ("dpo", {"length": "mean"}),
    ("dpo", {"length": "common", "tail_weight": 0.3}),
    ("dpo_norm", {"label_smoothing": 0.1}),
    ("robust", {"label_smoothing": 0.1}),
    ("ipo", {}),
    ("ipo", {"length": "sum", "beta": 0.7}),
    ("hinge", {}),
    ("simpo", {}),
    ("simpo", {"margin": 0.4, "label_smoothing": 0.1}),
    ("cpo", {"label_smoothing": 0.1}),
    ("orpo", {}),
    ("apo_zero", {}),
    ("apo_down", {}),
    ("dpop", {"penalty": 3.0}),
    ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.7}),
]
IDS = [f"{mode} {more}" for mode, more in CASES]


def units_of(reference=None, answers="sum", columns=(UNIT, ANSWER, WEIGHT, TARGETS)):
    return Units.of_rows(*columns, reference=reference, answers=answers)


def drawn(seed, count, has_reference, mean):
    """Draw sums of log-probabilities, of means for modes of means."""
    rng = np.random.default_rng(seed)
    sums = -rng.uniform(0.05, 2.5, count) * (1 if mean else 9)
    reference = sums + rng.normal(0, 0.4 if mean else 4, count) if has_reference else np.zeros(count)
    return sums, np.minimum(reference, -1e-3) if has_reference else reference


def written_out(o):
    """Return options for the papers' formulas."""
    numbers = {"smoothing": o.label_smoothing, "margin": o.margin, "penalty": o.penalty}
    return Loss(o.mode, o.scale, **numbers, desirable=o.desirable_weight, undesirable=o.undesirable_weight)


@pytest.mark.parametrize("answers", ["sum", "mean"])
@pytest.mark.parametrize(("mode", "more"), CASES, ids=IDS)
def test_every_loss_is_its_formula_over_the_pairs(mode, more, answers):
    o = PreferenceOptions(mode, **more)
    for seed in range(5):
        sums, reference = map(
            torch.from_numpy, drawn(seed, len(UNIT), o.of_mode.has_reference, o.chosen_length == "mean")
        )
        units = units_of(reference.numpy(), answers)
        terms = preference_terms(sums, units, o, baseline=0.3)
        if mode == "kto":
            rows = np.flatnonzero(ANSWER)
            ratios = sums - reference
            of_terms = [(float(of_answer(written_out(o), ANSWER[d], ratios[d], 0.3)), WEIGHT[d]) for d in rows]
        else:
            shares = [1, 2, 2, 1] if answers == "mean" else [1] * 4
            of_terms = [
                (float(of_pair(written_out(o), sums[c], sums[r], reference[c], reference[r])), w / share)
                for (c, r, w), share in zip(PAIRS, shares, strict=True)
            ]
        expected = sum(weight * loss for loss, weight in of_terms)
        assert terms.losses.dtype == torch.float64
        assert terms.losses.tolist() == pytest.approx([loss for loss, _ in of_terms], rel=1e-12)
        assert float(terms.weighted_sum) == pytest.approx(expected, rel=1e-12)
        assert float(total_weight(units, o)) == pytest.approx(sum(weight for _, weight in of_terms), rel=1e-15)


@pytest.mark.parametrize("mode", ["apo_zero", "kto"])
def test_answers_with_labels_are_terms_of_their_own(mode):
    o = PreferenceOptions(mode)
    sums, reference = drawn(3, 4, True, False)
    units = units_of(reference, columns=LABELS)
    terms = preference_terms(torch.from_numpy(sums), units, o, baseline=0.2)
    baseline, ratios = 0.2 * (mode == "kto"), torch.from_numpy(sums - reference)
    expected = [float(of_answer(written_out(o), LABELS[1][d], ratios[d], baseline)) for d in range(4)]
    assert terms.losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert terms.weights.tolist() == [1, 0.5, 2, 1]
    assert float(total_weight(units, o)) == 4.5
    mixed = [np.concatenate(columns) for columns in zip((UNIT, ANSWER, WEIGHT, TARGETS), LABELS, strict=True)]
    both = preference_terms(torch.zeros(12).double() - 1, units_of(None, columns=mixed), o)
    assert len(both.losses) == (11 if mode == "kto" else 8)


def test_answers_with_labels_are_refused_where_a_mode_compares():
    with refused("loss.mode", "apo_zero, kto", "dpo"):
        preference_terms(torch.zeros(4).double(), units_of(columns=LABELS), PreferenceOptions())


@pytest.mark.parametrize(("mode", "more"), CASES, ids=IDS)
def test_slopes_are_the_finite_differences_of_the_loss(mode, more):
    o, normaliser = PreferenceOptions(mode, **more), 3.7
    sums, reference = drawn(11, len(UNIT), o.of_mode.has_reference, o.chosen_length == "mean")
    units = units_of(reference)
    terms, slopes = preference_slopes(torch.from_numpy(sums), units, o, normaliser, baseline=0.3)

    def loss(values):
        return float(preference_terms(torch.from_numpy(values), units, o, baseline=0.3).weighted_sum) / normaliser

    assert float(terms.weighted_sum) / normaliser == loss(sums)
    for document in range(len(sums)):
        step = np.zeros(len(sums))
        step[document] = 1e-5
        expected = (loss(sums + step) - loss(sums - step)) / 2e-5
        assert float(slopes[document]) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert slopes[-1] == 0  # a document that is no answer


@pytest.mark.parametrize("length", ["sum", "mean", "common"])
def test_coefficients_of_targets_give_the_gradient_through_the_model(length):
    o = PreferenceOptions("dpo", length=length, nll_weight=0.3, **({"tail_weight": 0.25} if length == "common" else {}))
    torch.manual_seed(0)
    documents = torch.from_numpy(np.repeat(np.arange(len(TARGETS)), TARGETS))
    hidden = torch.randn(len(documents), 6, dtype=torch.float64)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    labels, reference = torch.randint(11, (len(documents),)), -torch.rand(len(TARGETS), dtype=torch.float64) * 9
    units = units_of(reference.numpy())
    scales = torch.from_numpy(target_scales(TARGETS, UNIT, o.chosen_length, o.tail_weight))

    # The whole loss by autograd: pairs over Z, and the mean likelihood of the preferred answers.
    log_probs = torch.log_softmax(hidden @ weight.T, -1)[torch.arange(len(labels)), labels]
    sums = torch.zeros(len(TARGETS), dtype=torch.float64).index_add(0, documents, scales * log_probs)
    chosen = torch.from_numpy(ANSWER == 1)[documents]
    z = total_weight(units, o)
    loss = preference_terms(sums, units, o).weighted_sum / z - o.likelihood_weight * log_probs[chosen].mean()
    (expected,) = torch.autograd.grad(loss, weight)

    # The same by coefficients that do not know the model.
    _, slopes = preference_slopes(sums, units, o, z)
    nll = o.likelihood_weight * chosen.double() / chosen.sum()
    coefficients = target_coefficients(slopes, scales, documents, nll)
    log_probs = torch.log_softmax(hidden @ weight.T, -1)[torch.arange(len(labels)), labels]
    (found,) = torch.autograd.grad((coefficients * -log_probs).sum(), weight)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_scales_of_targets_are_those_of_the_answers_length():
    targets, unit = [3, 1, 2, 4], [2, 0, 1, 1]
    assert target_scales(targets, unit, "sum").tolist() == [1.0] * 10
    assert target_scales(targets, unit, "mean").tolist() == pytest.approx([1 / 3] * 3 + [1] + [1 / 2] * 2 + [1 / 4] * 4)
    assert target_scales(targets, unit, "common", 0.5).tolist() == [1, 0.5, 0.5, 1, 1, 1, 1, 1, 1, 1]


def test_extreme_sums_stay_finite_and_a_lost_margin_is_not_hidden():
    pair = np.array([2, 0]), np.array([1, -1]), np.ones(2), np.array([5, 5])
    for mode in PREFERENCE_MODES:
        o = PreferenceOptions(mode)
        for sums in ([-1e-14, -60.0], [-60.0, -1e-14], [0.0, 0.0]):
            units = units_of(None if not o.of_mode.has_reference else np.array([-30.0, -30.0]), columns=pair)
            terms, slopes = preference_slopes(torch.tensor(sums, dtype=torch.float64), units, o, 1.0)
            assert torch.isfinite(terms.losses).all(), (mode, sums)
            assert torch.isfinite(slopes).all(), (mode, sums)
    lost, _ = preference_slopes(
        torch.tensor([math.nan, -1.0]).double(), units_of(columns=pair), PreferenceOptions(), 1.0
    )
    assert torch.isnan(lost.weighted_sum)


def test_equal_models_have_the_loss_of_no_preference_exactly():
    sums = torch.from_numpy(drawn(1, len(UNIT), False, False)[0])
    terms = preference_terms(sums, units_of(sums.numpy()), PreferenceOptions())
    assert set(terms.losses.tolist()) == {math.log(2)}


def test_the_baseline_of_kto_is_the_scaled_mean_ratio_and_never_below_zero():
    assert float(kto_baseline(6.0, 3, 0.1)) == pytest.approx(0.2)
    assert float(kto_baseline(-6.0, 3, 0.1)) == 0


@pytest.mark.parametrize(
    ("values", "things"),
    [
        ({"mode": "dop"}, ("loss.mode", "dpo", "dop")),
        ({"beta": 0}, ("loss.beta", 0)),
        ({"label_smoothing": 0.5}, ("loss.label_smoothing", "got 0.5")),
        ({"mode": "ipo", "label_smoothing": 0.1}, ("loss.label_smoothing", "dpo", "0.1 with loss.mode=ipo")),
        ({"margin": 0.5}, ("loss.margin", "simpo", "0.5 with loss.mode=dpo")),
        ({"penalty": 1.0}, ("loss.penalty", "dpop", "1.0 with loss.mode=dpo")),
        ({"mode": "simpo", "length": "sum"}, ("loss.length", "mean", "loss.mode=simpo", "sum")),
        ({"tail_weight": 0.5}, ("loss.tail_weight", "loss.length=common", "0.5 with sum")),
        ({"length": "common", "tail_weight": 1.5}, ("loss.tail_weight", 1, 1.5)),
        ({"nll_weight": -1}, ("loss.nll_weight", 0, "-1.0")),
        ({"desirable_weight": 2.0}, ("loss.desirable_weight", "kto", "2.0 with loss.mode=dpo")),
        (
            {"mode": "kto", "desirable_weight": 0, "undesirable_weight": 0},
            ("loss.desirable_weight", "loss.undesirable_weight", "0 and 0"),
        ),
    ],
)
def test_a_mistake_in_the_options_is_one_line(values, things):
    with refused(*things):
        PreferenceOptions.read(values)


def test_the_mode_decides_which_class_reads_the_node():
    for modes, cls in ((PREFERENCE_MODES, PreferenceOptions), (MODES, LossOptions)):
        assert {reader_of("loss", {"loss": {"mode": mode}}) for mode in modes} == {cls}


def test_a_loss_of_the_users_own_replaces_the_formula_and_is_tried_first(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def squared(sides, options):\n    return (sides.gap - options.margin) ** 2\n", encoding="utf-8")
    sums, reference = drawn(2, len(UNIT), True, False)
    o = PreferenceOptions.read({"custom_cls": {"path": str(own), "name": "squared"}})
    terms = preference_terms(torch.from_numpy(sums), units_of(reference), o)
    gaps = [sums[c] - reference[c] - sums[r] + reference[r] for c, r, _ in PAIRS]
    assert terms.losses.tolist() == pytest.approx([(gap - 1) ** 2 for gap in gaps])
    for wrong, thing in (
        (lambda sides, options: sides.gap.sum(), "float64"),
        (lambda sides, options: sides.gap.detach(), "RuntimeError"),
        (lambda sides, options: torch.log(sides.chosen) + sides.rejected, "finite"),
        (lambda sides, options: torch.log(sides.chosen - sides.rejected), "finite"),
        (lambda sides: sides.gap, "TypeError"),
    ):
        with refused("loss.custom_cls.name=wrong", thing):
            checked_formula(wrong, "loss.custom_cls.name=wrong")


def test_metrics_are_weighted_means_over_all_packs_and_ties_are_half_right():
    o, names = PreferenceOptions("dpo", beta=0.5), ("chat", "code")
    sums, reference = drawn(4, len(UNIT), True, False)
    sums[5], sums[6] = reference[5] + 1, reference[6] + 1  # a tie
    units, log_probs, slots = units_of(reference), torch.from_numpy(sums * 2), torch.tensor([1, 1, 2, 2, 2, 2, 2, 0])
    terms = preference_terms(torch.from_numpy(sums), units, o)
    values = preference_values(terms, torch.from_numpy(sums), log_probs, units, o)
    total = StepSums.zeros(3, "cpu", PreferenceObjective(o).measures)
    total.add_terms(values, slots[terms.documents])
    found = (total + total).reduced(lambda values: values.mul_(3)).report("train", names)

    rewards = 0.5 * (sums - reference)
    weights = np.array([w for _, _, w in PAIRS])

    def mean(numbers):
        return float(np.dot(weights, numbers) / weights.sum())

    margins = [rewards[c] - rewards[r] for c, r, _ in PAIRS]
    right = [float(margin > 0) + 0.5 * (margin == 0) for margin in margins]
    assert right[3] == 0.5
    chosen, rejected = ([pair[side] for pair in PAIRS] for side in (0, 1))
    expected = {
        "preference": mean([math.log(1 + math.exp(-margin)) for margin in margins]),
        "reward_chosen": mean(rewards[chosen]),
        "reward_rejected": mean(rewards[rejected]),
        "reward_margin": mean(margins),
        "reward_accuracy": mean(right),
        "chosen_drop": mean(rewards[chosen] < 0),
        "logp_chosen": 2 * sums[chosen].sum() / TARGETS[chosen].sum(),
        "logp_rejected": 2 * sums[rejected].sum() / TARGETS[rejected].sum(),
        "chosen_length": TARGETS[chosen].mean(),
        "rejected_length": TARGETS[rejected].mean(),
        "pairs": 6 * 4,
        "chat_reward_margin": margins[0],
        "chat_pairs": 6,
        "code_reward_margin": float(np.dot(weights[1:], margins[1:]) / weights[1:].sum()),
    }
    assert {name: found[f"train/{name}"] for name in expected} == pytest.approx(expected)
    bare = StepSums.zeros(3, "cpu", PreferenceObjective(PreferenceOptions("simpo")).measures)
    bare.add_terms(values, slots[terms.documents])
    assert "train/chosen_drop" not in bare.report("train", names)


def test_metrics_of_labels_are_means_by_label():
    o = PreferenceOptions("kto")
    sums, reference = drawn(3, 4, True, False)
    units = units_of(reference, columns=LABELS)
    terms = preference_terms(torch.from_numpy(sums), units, o)
    total = StepSums.zeros(1, "cpu", PreferenceObjective(o).measures)
    values = preference_values(terms, torch.from_numpy(sums), torch.from_numpy(sums), units, o)
    total.add_terms(values, torch.zeros(4, dtype=torch.int64))
    found, rewards = total.report("val", ()), 0.1 * (sums - reference)
    chosen, rejected = (rewards[0] + rewards[3]) / 2, (0.5 * rewards[1] + 2 * rewards[2]) / 2.5
    margin = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": chosen - rejected, "pairs": 0}
    assert {name: found[f"val/{name}"] for name in margin} == pytest.approx(margin)
    assert "val/reward_accuracy" not in found
