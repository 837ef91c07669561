"""Loss and every gradient of a step with gated delta nets, Mamba 2 and attention sinks on the GPU.

fp32 is compared with plain Hugging Face on the same GPU, document by document; bf16 with the engine in fp32.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.gpu.deviations import BF16, assert_close, deviation
from tests.lib.engine_steps import DOCUMENTS, PACKS
from tests.lib.packed_engine import build_worker, train_step
from tests.lib.reference import Reference, load_eager, pack_row
from tests.lib.small_models import write_small_models
from verl_ext.attention.packed import set_backend
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.collator import StepCollator

# On a GPU flash-linear-attention multiplies fp32 in TF32, which has 10 bits.
TOLERANCE = 5e-3 if find_spec("fla") else 1e-3
FAMILIES = ("qwen3_5_text", "nemotron_h", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory, tiny_model):
    """Write a small model of a family, and return its folder."""
    return write_small_models([request.param], tmp_path_factory.mktemp("models"), tiny_model)[request.param]


def step(folder, overrides=(), backend="auto"):
    """Take one step over all packs."""
    set_backend(backend)
    engine = build_worker(folder, overrides=overrides, parallel="auto").engine
    collate = StepCollator(LossSpec("token", np.ones(1)), CategoryTable((), ()))
    return train_step(engine, [pack_row(pack) for pack in PACKS], collate, len(PACKS), "fused")


def test_in_fp32_a_step_equals_single_documents_in_plain_hugging_face(folder, device, one_rank):
    found = step(folder, backend="sdpa")
    with torch.device(device):
        want = Reference(load_eager(folder).to(device), DOCUMENTS).step(PACKS, "token", {})
    assert found.report["train/loss"] == pytest.approx(want.loss, rel=1e-4)
    largest = max(float(truth.norm()) for truth in want.gradients.values())
    for name, truth in want.gradients.items():
        if float(truth.norm()) > 1e-5 * largest:
            assert deviation(found.gradients[name], truth.cpu()) < TOLERANCE, name


def test_half_precision_stays_near_fp32(folder, gpu, one_rank):
    assert_close(step(folder, BF16), step(folder, backend="sdpa"), 1e-2, 1e-1)
