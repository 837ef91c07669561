"""With `engine.full_determinism=true`, every kernel of a run is deterministic, or the run ends."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import SMALL
from verl_ext.config import compose
from verl_ext.trainer.setup import prepare
from verl_ext.trainer.trainer import SFTTrainer


def strictness(overrides, backend):
    """Build a trainer with an attention backend, and return whether torch refuses nondeterministic kernels."""
    run = prepare(compose([*SMALL, "trainer.logger=[file]", *overrides]))
    SFTTrainer(dataclasses.replace(run, model=dataclasses.replace(run.model, backend=backend)))
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(("full", "strict"), [("true", True), ("false", False)])
def test_full_determinism_is_strict_with_torchs_varlen_attention(tmp_path, tiny_model, full, strict):
    """verl only warns of nondeterministic kernels; varlen's backward is one unless torch is strict."""
    data = write_tokenized(tmp_path / "data", random_documents(np.random.default_rng(0), [20] * 8, VOCABULARY, 1))
    overrides = [
        *(f"data.train_dir={data}", f"model.path={tiny_model}", f"trainer.default_local_dir={tmp_path / 'run'}"),
        f"engine.full_determinism={full}",
    ]
    assert run_ranks(strictness, 1, overrides, "varlen") == [strict]
