"""Every supported model type takes a step in the engine, sharded over two ranks, as in plain transformers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from tests.lib.model_types import each_tried, named, parts
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.reference import Reference, documents_of_answers
from tests.lib.small_models import model_class, packed_and_plain

# In fp32, in which formulas that differ from transformers' round differently; test_model_types.py compares in fp64.
# Gradients of key biases are only rounding.
TOLERANCE = 2e-3
DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [DOCUMENTS[:3], DOCUMENTS[3:]]


def _off(kind, folder, tokenizer):
    """Return the largest relative error of a step's loss and gradients on rank 0; 0 on other ranks."""
    if dist.get_rank() == 0:
        packed_and_plain(kind)[1].save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()
    checkpointing = str(model_class(kind).supports_gradient_checkpointing).lower()
    engine = build_worker(folder, overrides=[f"model.enable_gradient_checkpointing={checkpointing}"]).engine
    step = token_step(engine, PACKS)
    if dist.get_rank() > 0:
        return 0.0
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    plain = model_class(kind).from_pretrained(folder, **given).eval()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in step.gradients)  # text does not reach the others: test_model_types.py
    expected = Reference(plain, DOCUMENTS).step(PACKS, "token", {})
    errors = expected.gradient_errors(step.gradients)
    return max(abs(step.report["train/loss"] / expected.loss - 1), *errors.values())


def _all_off(kinds, tiny_model, folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, bos_token="<|unk|>")
    found = each_tried(lambda kind: _off(kind, Path(folder) / kind, tokenizer), kinds)
    return {kind: off for kind, off in found.items() if isinstance(off, str) or not off < TOLERANCE}


@pytest.mark.slow
def test_a_sharded_step_of_every_type_equals_plain_transformers(tiny_model, tmp_path):
    calls = [(_all_off, kinds, str(tiny_model), str(tmp_path)) for kinds in parts(named("Trained"), 30)]
    for of_rank in run_ranks(in_turn, 2, calls):
        assert of_rank == [{}] * len(calls)
