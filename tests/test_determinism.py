"""With `engine.full_determinism=true`, every kernel of a run is deterministic, or the run ends."""

import dataclasses

import pytest
import torch

from tests.ranks import in_turn, run_ranks
from tests.training import into, settle, small_run
from verl_ext.trainer.trainer import SFTTrainer

pytestmark = pytest.mark.slow


def strictness(overrides):
    """Build a trainer with torch's varlen attention, and return whether torch refuses nondeterministic kernels."""
    run = settle(overrides)
    SFTTrainer(dataclasses.replace(run, model=dataclasses.replace(run.model, backend="varlen")))
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def test_full_determinism_is_strict_with_torchs_varlen_attention(tmp_path, tiny_model):
    """verl only warns of nondeterministic kernels; varlen's backward is one unless torch is strict."""
    run = small_run(tmp_path, tiny_model, [20] * 8, into(tmp_path / "run"))
    calls = [(strictness, [*run, f"engine.full_determinism={full}"]) for full in ("false", "true")]
    assert run_ranks(in_turn, 1, calls) == [[False, True]]
