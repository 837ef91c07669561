"""A rank's packs of a step as flat tensors: shifted coefficients, counts without padding, splits into micro-batches."""

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from tests.lib.errors import refused
from tests.lib.reference import Document, pack_row
from verl_ext.data import CategoryTable
from verl_ext.losses import MODES, LossSpec
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator

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
    counts = batch.counts
    assert counts["computed_tokens"] == counts["tokens"]
    numbers = {name: counts[name].item() for name in ("tokens", "target_tokens", "packs")}
    return {"normaliser": counts.normalisers.item(), **numbers, "slots": counts["targets"].tolist()}


def _targets(batch: StepBatch, *names: str) -> list[list[float]]:
    """Return columns of the targets."""
    return [batch.targets[name].tolist() for name in names]


def test_targets_stand_where_their_token_is_predicted():
    batch = _collate([A, B])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert _targets(batch, "row", "slot") == [[0, 1, 2, 5], [1, 2, 0, 2]]
    assert _targets(batch, "document", "coefficient") == [[0, 0, 0, 1], [2 * 0.5, 3 * 2, 4, 7 * 2]]
    assert batch.pack_lengths == [7]
    assert _counts(batch) == {"normaliser": 25, "tokens": 7, "target_tokens": 4, "packs": 1, "slots": [1, 1, 2]}
    assert batch.normalisers.tolist() == [25]


def test_counts_are_float64_and_tensors_are_what_the_engine_takes():
    batch = _collate([A], None, [B])
    assert batch.counts.values.dtype == torch.float64
    assert batch.targets["coefficient"].dtype == torch.float64
    integers = [batch.input_ids, batch.position_ids, *(batch.targets[name] for name in ("row", "slot", "document"))]
    assert {column.dtype for column in integers} == {torch.int64}


def test_an_idle_slot_is_one_token_that_counts_for_nothing():
    busy, idle = _collate([A, B]), _collate([A, B], None)
    assert idle.pack_lengths == [7, 1]
    assert idle.position_ids.tolist()[7:] == [0]
    assert _targets(idle, "row", "coefficient") == _targets(busy, "row", "coefficient")
    assert torch.equal(busy.counts.values, idle.counts.values)


def test_a_rank_that_idles_through_a_step_has_counts_of_zero():
    batch = _collate(None, None)
    assert not batch.counts.values.any()
    assert batch.pack_lengths == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_a_document_that_counts_for_nothing(mode):
    plain, padded = _collate([A, B], mode=mode), _collate([A, B], pad_to=10, mode=mode)
    assert torch.equal(plain.counts.values, padded.counts.values)
    assert padded.pack_lengths == [10]
    assert _targets(padded, *padded.targets) == _targets(plain, *plain.targets)
    assert padded.position_ids.tolist()[7:] == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_that_fills_the_budget_has_no_padding_to_leave_out(mode):
    padded, plain = _collate([A, B], pad_to=7, mode=mode), _collate([A, B], mode=mode)
    assert torch.equal(padded.counts.values, plain.counts.values)


def test_a_one_token_document_predicts_nothing_and_is_predicted_by_nothing():
    batch = _collate([ONE_TOKEN, A, ONE_TOKEN])
    assert _targets(batch, "row", "document", "coefficient") == [[1, 2, 3], [1, 1, 1], [1, 6, 4]]
    assert _counts(batch)["target_tokens"] == 3


def test_the_category_of_a_token_that_is_no_target_is_not_counted():
    # SFTDataSet cleans this whatever wrote the folder; a user's own dataset may not.
    stray = Document([1, 2, 3], [0, 0, 1], [7, 7, 9], [1, 1, 1])
    batch = _collate([stray])
    assert _counts(batch)["slots"] == [0, 0, 1]
    assert _targets(batch, "row", "slot") == [[1], [2]]


def test_a_category_that_the_table_lacks_is_refused():
    with refused(8):
        _collate([Document([1, 2], [0, 1], [0, 8], [1, 1])])


@pytest.mark.parametrize(
    ("size", "lengths"), [(1, [[7], [1], [4], [3]]), (2, [[7, 1], [4, 3]]), (3, [[7, 1, 4], [3]]), (9, [[7, 1, 4, 3]])]
)
def test_micro_batches_cut_between_packs(size, lengths):
    batch = _collate([A, B], None, [A], [B])
    micro_batches = list(batch.micro_batches(size))
    assert [m["input_ids"].offsets().diff().tolist() for m in micro_batches] == lengths
    of_targets = {f"target_{name}": batch.targets[name] for name in ("slot", "coefficient")}
    columns = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **of_targets}
    for key, whole in columns.items():
        assert torch.equal(torch.cat([m[key].values() for m in micro_batches]), whole)
        assert all(m[key].offsets()[0] == 0 for m in micro_batches)
    # Rows and documents count from the first of each micro-batch: documents of 4, 3, 4 and 3 tokens, the second idle.
    parts = [[slot for slot in range(4) if slot // size == number] for number in range(len(lengths))]
    of_pack = {0: ([0, 1, 2, 5], [0, 0, 0, 1]), 1: ([], []), 2: ([0, 1, 2], [0, 0, 0]), 3: ([1], [0])}
    for micro_batch, slots in zip(micro_batches, parts, strict=True):
        rows, documents, tokens, before = [], [], 0, 0
        for slot in slots:
            rows += [row + tokens for row in of_pack[slot][0]]
            documents += [document + before for document in of_pack[slot][1]]
            tokens, before = tokens + batch.pack_lengths[slot], before + batch.document_counts[slot]
        assert micro_batch["target_row"].values().tolist() == rows
        assert micro_batch["target_document"].values().tolist() == documents


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
