"""Coefficients of every loss mode computed by hand, labels that stay inside documents, token losses in fp32."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.lib.errors import refused
from verl_ext.losses import (
    MODES,
    LossOptions,
    LossSpec,
    category_weight_table,
    pack_coefficients,
    shift_left,
    token_nll,
)

# Two documents of a pack, three and one target tokens, two categories:
#
#   token          a0 a1 a2 a3 | b0 b1 b2
#   loss_mask       0  1  1  1 |  0  0  1
#   category        0  1  2  1 |  0  0  2         weights  category 1: 0.5   category 2: 4
#   loss_weight     1  2  1  1 |  1  1  3
#   weighted        0  1  4 .5 |  0  0 12         loss_mask · loss_weight · c
MASK = np.array([0, 1, 1, 1, 0, 0, 1])
CATEGORY = np.array([0, 1, 2, 1, 0, 0, 2])
WEIGHT = np.array([1, 2, 1, 1, 1, 1, 3], dtype=np.float32)
OFFSETS = np.array([0, 4, 7])
CATEGORY_WEIGHTS = np.array([1, 0.5, 4])
WEIGHTED = np.array([0, 1, 4, 0.5, 0, 0, 12])


# mode: g of the first and of the second document, and Z
#   sequence     1/N_doc              1/3 and 1
#   sqrt         1/√N_doc             1/√3 and 1
#   pack         1/N_pack             1/4 for both; one pack
#   longwriter   n_docs/(30·N_pack)   2/(30·4) for both; one pack
@pytest.mark.parametrize(
    ("mode", "first", "second", "normaliser"),
    [
        ("token", 1, 1, 17.5),
        ("sequence", 1 / 3, 1, 5.5 / 3 + 12),
        ("sqrt", 3**-0.5, 1, 5.5 * 3**-0.5 + 12),
        ("pack", 1 / 4, 1 / 4, 1),
        ("longwriter", 2 / 120, 2 / 120, 1),
    ],
)
def test_a_small_pack_by_hand(mode, first, second, normaliser):
    found = pack_coefficients(LossSpec(mode, CATEGORY_WEIGHTS), MASK, CATEGORY, OFFSETS, WEIGHT)
    g = np.array([first] * 4 + [second] * 3)
    np.testing.assert_allclose(found.coefficients, WEIGHTED * g, rtol=1e-12)
    assert found.normaliser == pytest.approx(normaliser, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_category_weights_and_token_weights_of_one_are_no_weights(mode):
    plain = pack_coefficients(LossSpec(mode), MASK, np.zeros_like(CATEGORY), OFFSETS)
    weighted = pack_coefficients(LossSpec(mode, np.ones(3)), MASK, CATEGORY, OFFSETS, np.ones(7, np.float32))
    np.testing.assert_array_equal(plain.coefficients, weighted.coefficients)
    assert plain.normaliser == weighted.normaliser


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_without_a_target_adds_nothing(mode):
    found = pack_coefficients(LossSpec(mode), np.zeros(4), np.zeros(4, int), np.array([0, 1, 4]))
    assert found.normaliser == 0
    np.testing.assert_array_equal(found.coefficients, np.zeros(4))


@pytest.mark.parametrize("mode", MODES)
def test_a_document_without_a_target_and_padding_change_no_other_token(mode):
    # Padding is a last pseudo-document; documents=2 excludes it.
    longer = np.append(OFFSETS, 12)
    padded = [np.append(x, np.zeros(5, x.dtype)) for x in (MASK, CATEGORY, WEIGHT)]
    spec = LossSpec(mode, CATEGORY_WEIGHTS)
    plain = pack_coefficients(spec, MASK, CATEGORY, OFFSETS, WEIGHT)
    found = pack_coefficients(spec, padded[0], padded[1], longer, padded[2], documents=2)
    np.testing.assert_array_equal(found.coefficients[:7], plain.coefficients)
    assert not found.coefficients[7:].any()
    assert found.normaliser == plain.normaliser


documents = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(lambda targets: [0, *targets])


def _steps(packs: list[list[int]], mode: str, per_pack: int = 30) -> tuple[list[list[float]], float]:
    """Return each document's loss (a_t·ℓ_t with ℓ = 1 + its number) before Z, and Z. Lists hold documents' targets."""
    terms, normaliser, number = [], 0.0, 0
    for targets in packs:
        lengths = [n + 1 for n in targets]
        mask = np.concatenate([[0] + [1] * n for n in targets])
        offsets = np.cumsum([0, *lengths])
        spec = LossSpec(mode, documents_per_pack=per_pack)
        found = pack_coefficients(spec, mask, np.zeros(len(mask), int), offsets)
        nll = np.repeat(np.arange(number, number + len(targets)) + 1.0, lengths)
        terms.append(np.add.reduceat(found.coefficients * nll, offsets[:-1]).tolist())
        normaliser += found.normaliser
        number += len(targets)
    return terms, normaliser


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_sequence_mode_is_longaligns_formula(packs):
    # LongAlign scales document i's summed loss L_i by K/(N_i·M) in the mean over K packs of sums: (1/M) Σ L_i / N_i.
    terms, normaliser = _steps(packs, "sequence")
    targets = [n for pack in packs for n in pack]
    losses = [n * (i + 1.0) for i, n in enumerate(targets)]  # L_i
    count, packs_k = len(targets), len(packs)
    longalign = sum(loss * packs_k / (n * count) for loss, n in zip(losses, targets, strict=True)) / packs_k
    assert sum(map(sum, terms)) / normaliser == pytest.approx(longalign, rel=1e-12)
    assert normaliser == pytest.approx(count)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 50))
def test_longwriter_mode_is_a_packs_token_mean_times_its_documents(packs, per_pack):
    terms, normaliser = _steps(packs, "longwriter", per_pack)
    numbers = iter(range(1, 100))
    losses = [[n * next(numbers) for n in pack] for pack in packs]
    means = [sum(loss) / sum(pack) * len(pack) / per_pack for loss, pack in zip(losses, packs, strict=True)]
    assert sum(map(sum, terms)) / normaliser == pytest.approx(sum(means) / len(packs), rel=1e-12)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_longwriter_mode_counts_documents_as_its_authors_code_does(packs):
    """A pack's count is the sum of weights that add up to 1 in every document that has a target (sort_and_group.py)."""
    for targets in packs:
        mask = np.concatenate([[0] + [1] * n for n in targets])
        offsets = np.cumsum([0, *(n + 1 for n in targets)])
        found = pack_coefficients(LossSpec("longwriter"), mask, np.zeros(len(mask), int), offsets)
        weights = np.concatenate([np.ones(n) / n for n in targets if n] or [np.zeros(0)])
        assert found.coefficients.sum() == pytest.approx(weights.sum() / 30)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_pack_mode_is_the_mean_over_packs_of_token_means(packs):
    terms, normaliser = _steps(packs, "pack")
    numbers = iter(range(1, 100))
    means = [sum(n * next(numbers) for n in pack) / sum(pack) for pack in packs]
    assert sum(map(sum, terms)) / normaliser == pytest.approx(sum(means) / len(packs), rel=1e-12)


def test_a_first_token_that_is_a_target_is_a_broken_pack():
    with refused("first token", error=AssertionError):
        pack_coefficients(LossSpec(), np.array([0, 1, 1]), np.zeros(3, int), np.array([0, 2, 3]))


def test_an_unknown_mode_is_refused():
    with refused("loss.mode", "token", "mean"):
        LossSpec("mean")


def test_category_weights_become_a_table_by_dense_index():
    np.testing.assert_array_equal(category_weight_table({"code": 3}, ("gsm8k", "code")), [1, 1, 3])
    np.testing.assert_array_equal(category_weight_table(None, ("gsm8k",)), [1, 1])


def test_a_category_that_only_another_dataset_has_weighs_nothing_here():
    np.testing.assert_array_equal(category_weight_table({"maths": 5}, ("gsm8k", "code")), [1, 1, 1])
    np.testing.assert_array_equal(category_weight_table({"maths": 5}, ()), [1])


# values  1 2 3 | 4 | 5 6        shifted  2 3 0 | 0 | 6 0
def test_labels_shift_inside_documents():
    shifted = shift_left(np.array([1, 2, 3, 4, 5, 6]), np.array([0, 3, 4, 6]))
    np.testing.assert_array_equal(shifted, [2, 3, 0, 0, 6, 0])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_shifting_a_pack_is_shifting_each_document(lengths):
    offsets = np.cumsum([0, *lengths])
    values = np.arange(1, offsets[-1] + 1)
    each = [np.append(part[1:], 0) for part in np.split(values, offsets[1:-1])]
    np.testing.assert_array_equal(shift_left(values, offsets), np.concatenate(each))
    np.testing.assert_array_equal(values, np.arange(1, offsets[-1] + 1))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4, 7, 1024])  # 11 tokens: 4 4 3, 7 4, and all at once
def test_token_nll_is_fp32_cross_entropy_in_value_and_gradient(rows, dtype, inplace):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(11, 37, generator=generator) * 5).to(dtype)
    labels = torch.randint(37, (11,), generator=generator)
    weights = torch.randn(11, generator=generator)
    weights[3] = 0.0  # not a target

    own, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_nll(own * 1, labels, inplace_backward=inplace, rows=rows)
    expected = torch.nn.functional.cross_entropy(plain.float(), labels, reduction="none")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert own.grad.dtype == dtype
    digits = 1e-6 if dtype == torch.float32 else 8e-3  # one unit in bf16's last place, where fp32 rounds either way
    torch.testing.assert_close(own.grad, plain.grad, rtol=digits, atol=1e-6)
    assert not own.grad[3].any()


def test_token_nll_writes_over_logits_only_when_asked():
    logits = torch.randn(5, 9)
    for inplace in (False, True):
        head = logits.clone().requires_grad_() * 1
        token_nll(head, torch.arange(5), inplace_backward=inplace).sum().backward()
        assert torch.equal(head, logits) is not inplace


def test_token_nll_of_logits_far_from_zero_stays_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]])
    nll = token_nll(logits, torch.tensor([1, 2]))
    torch.testing.assert_close(nll, torch.tensor([2e4, np.log(2)], dtype=torch.float32), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("weight", [-1, float("nan")])
def test_an_option_that_cannot_be_used_is_refused_by_key_and_value(weight):
    with refused("loss.category_weights.code", weight):
        LossOptions(category_weights={"code": weight})


def test_options_become_the_loss_over_the_categories_of_the_data():
    options = LossOptions.read(OmegaConf.create({"mode": "sqrt", "category_weights": {"code": 2, 7: 0.5}}))
    assert options.category_weights == {"code": 2.0, "7": 0.5}
    spec = options.spec(("gsm8k", "7", "code"))
    assert (spec.mode, spec.category_weights.tolist(), spec.documents_per_pack) == ("sqrt", [1, 1, 0.5, 2], 30)
    assert LossOptions.read({"category_weights": None}) == LossOptions()


@pytest.mark.parametrize(("mode", "expected"), [("longwriter", 2 / (30 * 3)), ("pack", 1 / 3)])
def test_a_document_whose_targets_weigh_nothing_is_still_counted(mode, expected):
    spec = LossSpec(mode, np.array([1.0, 0.0, 1.0]))
    targets, categories, documents = np.array([0, 1, 1, 0, 1]), np.array([0, 2, 2, 0, 1]), np.array([0, 3, 5])
    weights, normaliser = pack_coefficients(spec, targets, categories, documents)
    np.testing.assert_allclose(weights, [0, expected, expected, 0, 0])
    assert normaliser == 1


@pytest.mark.parametrize("mode", ["longwriter", "pack"])
def test_a_pack_whose_targets_weigh_nothing_is_still_counted(mode):
    spec = LossSpec(mode, np.array([1.0, 0.0]))
    weights, normaliser = pack_coefficients(spec, np.array([0, 1]), np.array([0, 1]), np.array([0, 2]))
    assert not weights.any()
    assert normaliser == 1
