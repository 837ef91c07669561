"""Where the host waits for the GPU in a step, and what kernels and NCCL are given there; no GPU computes anything.

:data:`ALLOWED` is the whole list of waits. Anything that is not in it stops the host until the device has caught up.
"""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.lib.four_bits import write_model
from tests.lib.parity_cases import DOCUMENTS, TRIES
from tests.lib.preference_cases import LOSSES, PACKS, options_of
from tests.lib.reference import pack_row, tree_row
from tests.lib.reference_pairs import unit_row
from tests.lib.small_models import write_small_models
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.objective import PreferenceObjective

pytestmark = pytest.mark.slow

# (part of a step, wait, place without its line): why it is there
_OPTIMIZER = "verl/workers/engine/fsdp/transformer_impl.py:optimizer_step"
ALLOWED = {("optimizer", "item", _OPTIMIZER): "verl skips a step whose norm is not finite, and returns the norm"}
NF4 = ("model.lora_rank=4", "model.quantization=nf4", "model.target_modules=[q_proj]", "model.use_dora=true")
_ROWS = "verl_ext/parallel/experts.py:row_counts"
ALLOWED |= {(part, "item", _ROWS): "rows of tokens that arrive from others" for part in ("accumulate", "validation")}
DOCUMENT_PACKS = [pack_row([DOCUMENTS[i] for i in group]) for group in ([8, 12], [6, 7])]


def _of_documents(model, ulysses=1, *overrides, shares=False):
    packs = [tree_row(TRIES[0]), tree_row(TRIES[3])] if shares else DOCUMENT_PACKS
    collate = StepCollator(LossSpec("token", np.ones(3)), CategoryTable((7, 9), ("a", "b")), shares_prefixes=shares)
    return model, ulysses, overrides, collate, packs


def _of_pairs(model, loss, ulysses=1, shares=True):
    options = options_of(LOSSES[loss])
    categories = CategoryTable((7, 9), ("chat", "code"))
    objective = PreferenceObjective(options)
    collate = StepCollator(options.spec(categories.names), categories, shares_prefixes=shares, objective=objective)
    units = PACKS["labels" in loss][:2]
    packs = [unit_row(pack, [[-1.0] * len(unit.documents) for unit in pack], shares) for pack in units]
    for row in packs:
        row["mismatched_reference"] = torch.tensor([-1.0]).double()
    return model, ulysses, (), collate, packs


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    """Return what each case's process recorded."""
    tiny = str(tiny_model)
    small = write_small_models(["gpt_oss", "qwen3_moe"], tmp_path_factory.mktemp("models"), tiny_model)
    packed = write_model(tmp_path_factory.mktemp("packed"), "qwen3_moe")
    cases = {
        "documents": _of_documents(tiny),
        "shared prefixes": _of_documents(tiny, shares=True),
        "shared heads": _of_documents(tiny, 2),
        "travelling keys": _of_documents(tiny, 1, "parallel.context_parallel_size=2"),
        "tiles on the host": _of_documents(tiny, 1, "model.tile_tokens=5", "model.activation_offload=true"),
        "sinks": _of_documents(small["gpt_oss"], 2),
        "experts": _of_documents(small["qwen3_moe"]),
        "adapters on NF4": _of_documents(packed, 1, *NF4),
        "shared experts": _of_documents(small["qwen3_moe"], 1, "parallel.expert_parallel=4"),
        "pairs": _of_pairs(tiny, "cdpo"),
        "mismatched answers": _of_pairs(tiny, "kto"),
        "pairs of shared heads": _of_pairs(tiny, "cdpo", 2),
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.lib.host_waits"], input=pickle.dumps(cases), capture_output=True, check=False
    )
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    return json.loads(process.stdout)


def test_the_host_waits_for_the_device_at_these_places_and_no_others(found):
    seen, lines = set(), {}
    for case, record in found.items():
        for part, waits in record["waits"].items():
            for wait, count in waits.items():
                kind, _, place = wait.rpartition(" ")
                name, _, line = place.rpartition(":")
                seen.add((part, kind, name))
                lines[part, kind, name] = f"{count} × {kind} at {name}:{line} in {part} of {case}"
    assert not (new := seen - ALLOWED.keys()), "\n".join(lines[each] for each in sorted(new))
    assert not (gone := ALLOWED.keys() - seen), f"no longer there: {gone}"


def test_the_host_waits_for_rows_of_experts_once_a_layer_and_never_in_a_recomputation(found):
    counts = [sum(waits.values()) for part, waits in found["shared experts"]["waits"].items() if part != "optimizer"]
    layers, micro_batches, numbers = 2, 2, 2 * 4  # those that go and come, of four ranks
    assert counts == [layers * micro_batches * numbers] * 2  # accumulate and validation


def test_kernels_and_collectives_of_a_step_are_given_what_they_take(found):
    for case, record in found.items():
        assert not record["problems"], case
        assert record["calls"]["flash"] > 0 < record["calls"]["flash backward"], case
        assert record["calls"]["collectives"] > 0, case
