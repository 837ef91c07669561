"""A rank's packs of a step as flat tensors: shifted coefficients, counts without padding, splits into micro-batches."""

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from tests.reference import Document, pack_row
from verl_ext.data import CategoryTable
from verl_ext.losses import MODES, LossSpec
from verl_ext.trainer.batch import StepBatch, StepCollator

# Category ids are not dense indices: 7 is slot 1, 9 is slot 2.
CATEGORIES = CategoryTable((7, 9), ("gsm8k", "code"))

#                 doc A          doc B
# input_ids       10 11 12 13  | 14 15 16
# loss_mask        0  1  1  1  |  0  0  1
# category_ids     0  7  9  0  |  0  0  9        token 13 is a target of no category
# loss_weight      1  2  3  4  |  5  6  7
A = Document([10, 11, 12, 13], [0, 1, 1, 1], [0, 7, 9, 0], [1, 2, 3, 4])
B = Document([14, 15, 16], [0, 0, 1], [0, 0, 9], [5, 6, 7])
ONE_TOKEN = Document([20], [0], [0], [1])


def _collate(*packs: list[Document] | None, pad_to: int | None = None, mode: str = "token") -> StepBatch:
    rows = [None if pack is None else pack_row(pack, pad_to) for pack in packs]
    return StepCollator(LossSpec(mode, np.array([1.0, 0.5, 2.0])), CATEGORIES)(rows)


def _counts(batch: StepBatch) -> dict[str, object]:
    normaliser, tokens, computed, targets, packs, *slots = batch.counts.tolist()
    assert computed == tokens
    return {"normaliser": normaliser, "tokens": tokens, "targets": targets, "packs": packs, "slots": slots}


def test_coefficients_and_categories_stand_where_their_token_is_predicted():
    batch = _collate([A, B])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.coefficients.tolist() == [2 * 0.5, 3 * 2, 4, 0, 0, 7 * 2, 0]
    assert batch.category_index.tolist() == [1, 2, 0, -1, -1, 2, -1]
    assert batch.pack_lengths == [7]
    assert _counts(batch) == {"normaliser": 25, "tokens": 7, "targets": 4, "packs": 1, "slots": [1, 1, 2]}
    assert batch.normalisers.tolist() == [25]


def test_counts_are_float64_and_tensors_are_what_the_engine_takes():
    batch = _collate([A], None, [B])
    assert batch.counts.dtype == torch.float64
    assert batch.coefficients.dtype == torch.float32
    assert {batch.input_ids.dtype, batch.position_ids.dtype, batch.category_index.dtype} == {torch.int64}


def test_an_idle_slot_is_one_token_that_counts_for_nothing():
    busy, idle = _collate([A, B]), _collate([A, B], None)
    assert idle.pack_lengths == [7, 1]
    assert idle.position_ids.tolist()[7:] == [0]
    assert idle.coefficients.tolist()[7:] == [0]
    assert torch.equal(busy.counts, idle.counts)


def test_a_rank_that_idles_through_a_step_has_counts_of_zero():
    batch = _collate(None, None)
    assert not batch.counts.any()
    assert batch.pack_lengths == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_a_document_that_counts_for_nothing(mode):
    plain, padded = _collate([A, B], mode=mode), _collate([A, B], pad_to=10, mode=mode)
    assert torch.equal(plain.counts, padded.counts)
    assert padded.pack_lengths == [10]
    assert torch.equal(padded.coefficients[:7], plain.coefficients)
    assert padded.coefficients.tolist()[7:] == [0, 0, 0]
    assert padded.position_ids.tolist()[7:] == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_that_fills_the_budget_has_no_padding_to_leave_out(mode):
    assert torch.equal(_collate([A, B], pad_to=7, mode=mode).counts, _collate([A, B], mode=mode).counts)


def test_a_one_token_document_predicts_nothing_and_is_predicted_by_nothing():
    batch = _collate([ONE_TOKEN, A, ONE_TOKEN])
    assert batch.coefficients.tolist() == [0, 1, 6, 4, 0, 0]
    assert _counts(batch)["targets"] == 3


def test_the_category_of_a_token_that_is_no_target_is_not_counted():
    # SFTDataSet cleans this whatever wrote the folder; a user's own dataset may not.
    stray = Document([1, 2, 3], [0, 0, 1], [7, 7, 9], [1, 1, 1])
    batch = _collate([stray])
    assert _counts(batch)["slots"] == [0, 0, 1]
    assert batch.category_index.tolist() == [-1, 2, -1]


def test_a_category_that_the_table_lacks_is_refused():
    with pytest.raises(ValueError, match="8"):
        _collate([Document([1, 2], [0, 1], [0, 8], [1, 1])])


@pytest.mark.parametrize(
    ("size", "lengths"), [(1, [[7], [1], [4], [3]]), (2, [[7, 1], [4, 3]]), (3, [[7, 1, 4], [3]]), (9, [[7, 1, 4, 3]])]
)
def test_micro_batches_cut_between_packs(size, lengths):
    batch = _collate([A, B], None, [A], [B])
    micro_batches = list(batch.micro_batches(size))
    assert [m["input_ids"].offsets().diff().tolist() for m in micro_batches] == lengths
    for key, whole in (
        ("input_ids", batch.input_ids),
        ("position_ids", batch.position_ids),
        ("loss_coefficients", batch.coefficients),
        ("category_index", batch.category_index),
    ):
        assert torch.equal(torch.cat([m[key].values() for m in micro_batches]), whole)
        assert all(m[key].offsets()[0] == 0 for m in micro_batches)


def test_micro_batches_say_what_verls_engine_asks():
    (micro_batch,) = _collate([A]).micro_batches(1)
    assert tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=None) is True
    assert tu.get_non_tensor_data(micro_batch, "pad_mode", default=None) == DatasetPadMode.NO_PADDING
    assert tu.get_non_tensor_data(micro_batch, "temperature", default=None) == 1.0


def test_the_collator_does_not_change_the_packs_it_is_given():
    row = pack_row([A, B], 9)
    before = {key: value.clone() for key, value in row.items()}
    StepCollator(LossSpec(category_weights=np.ones(3)), CATEGORIES)([row])
    assert all(torch.equal(row[key], before[key]) for key in row)
