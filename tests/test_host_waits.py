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

from tests.reference import pack_row, tree_row
from tests.reference_pairs import unit_row
from tests.small_models import write_small_models
from tests.test_parity import DOCUMENTS, TRIES
from tests.test_preference_parity import LOSSES, PACKS, options_of
from verl_ext.data import CategoryTable
from verl_ext.losses import LossOptions, LossSpec
from verl_ext.trainer.batch import StepCollator
from verl_ext.trainer.objective import Objective, PreferenceObjective
from verl_ext.trainer.preference import PreferenceCollator

pytestmark = pytest.mark.slow

# (part of a step, wait, place without its line): why it is there
_OPTIMIZER = "verl/workers/engine/fsdp/transformer_impl.py:optimizer_step"
ALLOWED = {("optimizer", "item", _OPTIMIZER): "verl skips a step whose norm is not finite, and returns the norm"}
DOCUMENT_PACKS = [pack_row([DOCUMENTS[i] for i in group]) for group in ([8, 12], [6, 7])]


def _of_documents(model, ulysses=1, *overrides, shares=False):
    packs = [tree_row(TRIES[0]), tree_row(TRIES[3])] if shares else DOCUMENT_PACKS
    collate = StepCollator(LossSpec("token", np.ones(3)), CategoryTable((7, 9), ("a", "b")), shares_prefixes=shares)
    return model, ulysses, overrides, collate, packs, Objective(LossOptions())


def _of_pairs(model, loss, ulysses=1, shares=True):
    options = options_of(LOSSES[loss])
    categories = CategoryTable((7, 9), ("chat", "code"))
    of_options = options.spec(categories.names), categories
    collate = PreferenceCollator(*of_options, shares_prefixes=shares, options=options)
    units = PACKS["labels" in loss][:2]
    packs = [unit_row(pack, [[-1.0] * len(unit.documents) for unit in pack], shares) for pack in units]
    for row in packs:
        row["mismatched_reference"] = torch.tensor([-1.0]).double()
    return model, ulysses, (), collate, packs, PreferenceObjective(options)


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    """Return what each case's process recorded."""
    tiny = str(tiny_model)
    small = write_small_models(["gpt_oss", "qwen3_moe"], tmp_path_factory.mktemp("models"), tiny_model)
    cases = {
        "documents": _of_documents(tiny),
        "shared prefixes": _of_documents(tiny, shares=True),
        "shared heads": _of_documents(tiny, 2),
        "travelling keys": _of_documents(tiny, 1, "parallel.context_parallel_size=2"),
        "tiles on the host": _of_documents(tiny, 1, "model.tile_tokens=5", "model.activation_offload=true"),
        "sinks": _of_documents(small["gpt_oss"], 2),
        "experts": _of_documents(small["qwen3_moe"]),
        "pairs": _of_pairs(tiny, "cdpo"),
        "mismatched answers": _of_pairs(tiny, "kto"),
        "pairs of shared heads": _of_pairs(tiny, "cdpo", 2),
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.host_waits"], input=pickle.dumps(cases), capture_output=True, check=False
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


def test_kernels_and_collectives_of_a_step_are_given_what_they_take(found):
    for case, record in found.items():
        assert not record["problems"], case
        assert record["calls"]["flash"] > 0 < record["calls"]["flash backward"], case
        assert record["calls"]["collectives"] > 0, case
