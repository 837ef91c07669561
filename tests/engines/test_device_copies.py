"""Copies to the device for a micro-batch: the loader's page-locked flat tensors, without a wait.

The device is torch's ``meta``, which holds no values, so code that would wait for a value raises.
"""

import math

import pytest
import torch

from tests.lib.attention_packs import LENGTHS, attention_pack
from tests.lib.errors import refused
from tests.lib.packed_engine import build_worker
from tests.lib.ranks import run_cases
from tests.lib.tensor_calls import Copies
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import StepLoss

META = torch.device("meta")


def _batch() -> StepBatch:
    """Make two packs, each of several documents."""
    ids, positions = attention_pack(LENGTHS)
    zeros = torch.zeros_like(ids)
    pack = {"input_ids": ids, "position_ids": positions, "loss_mask": (positions > 0).long(), "category_ids": zeros}
    return StepCollator(LossSpec(), CategoryTable((), ()))([pack, pack])


def _copies(model: str, ulysses: int, groups: int) -> dict:
    engine = build_worker(model, ulysses, [f"parallel.context_parallel_size={groups}"]).engine
    batch = _batch()
    columns = [*batch.targets.values(), *(column for column in vars(batch).values() if torch.is_tensor(column))]
    flat = {column.untyped_storage().data_ptr() for column in columns}
    (micro_batch,) = batch.micro_batches(2)
    with Copies() as seen:
        inputs, outputs, moved = engine.prepare_micro_batch(micro_batch, META)
        prepared = len(seen.non_blocking)
        if groups > 1:
            inputs["document_layout"].exchange(None)  # for the first layer
        nll = torch.zeros(len(batch.input_ids), device=META)
        sums = StepSums.zeros(1, META)
        StepLoss(1.0, 1, sums)(
            {"log_probs": torch.nested.nested_tensor_from_jagged(nll, moved["input_ids"].offsets())}, moved
        )
    if groups > 1:
        (asks_for_more,) = batch.micro_batches(2, calculate_entropy=True)
        with refused("parallel.context_parallel_size", 1, 2):
            engine.prepare_micro_batch(asks_for_more, META)
    return {
        "non_blocking": seen.non_blocking,
        "prepared": prepared,
        "flat": sum(source in flat for source in seen.sources),
        "shapes": [tuple(inputs["input_ids"].shape), tuple(inputs["position_ids"].shape), tuple(outputs.labels.shape)],
        "devices": {tensor.device.type for tensor in (inputs["input_ids"], outputs.labels, moved["input_ids"])},
    }


LAYOUTS = [(1, 1), (2, 1), (1, 2)]  # ranks of Ulysses, groups


@pytest.fixture(scope="module")
def copies(tiny_model):
    return run_cases({layout: (math.prod(layout), _copies, str(tiny_model), *layout) for layout in LAYOUTS})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_travels_in_flat_copies_that_nothing_waits_for(layout, copies):
    ranks, groups = math.prod(layout), layout[1]
    tokens = -(-2 * sum(LENGTHS) // (2 * groups)) * 2 * groups
    for seen in copies[layout]:
        assert all(seen["non_blocking"])
        assert seen["flat"] == 3 + 4  # each column of tokens and of targets, once
        assert seen["prepared"] == 3 + 4 + 3  # and the offsets of packs, of targets in packs and of documents
        assert seen["shapes"] == [(1, tokens // ranks)] * 2 + [(tokens // ranks,)]
        assert seen["devices"] == {"meta"}
