"""Models with recurrent states, sinks, soft caps or their own positions train as in plain Hugging Face."""

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.reference import Reference, documents_of_answers, load_eager, pack_row
from tests.small_models import write_small_models
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.batch import StepCollator

FAMILIES = ("qwen3_5_text", "nemotron_h", "lfm2", "jamba", "gpt_oss", "gemma2", "bart", "roberta")
# Formulas that differ from transformers' round differently; in fp64 they agree to 1e-13 (test_layers.py).
TOLERANCE = 2e-4


DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [[DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[2]], [DOCUMENTS[3]], [DOCUMENTS[4], DOCUMENTS[5]]]


def engine_steps(folders, ulysses, groups, overrides=()):
    """Take a step of each model, on ranks that share every pack."""
    from tests.packed_engine import build_worker, train_step

    collate = StepCollator(LossSpec("token", np.ones(1)), CategoryTable((), ()))
    context = f"parallel.context_parallel_size={groups}"
    packs, steps = [pack_row(pack) for pack in PACKS], {}
    for name, folder in folders.items():
        engine = build_worker(folder, ulysses * groups if groups == 1 else ulysses, [context, *overrides]).engine
        steps[name] = train_step(engine, packs, collate, len(packs), "fused")
    return steps


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    """Write a small model of each family, and return the folders by name."""
    return write_small_models(FAMILIES, tmp_path_factory.mktemp("models"), tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_a_step_equals_plain_hugging_face(ulysses, groups, folders):
    steps = run_ranks(engine_steps, ulysses * groups, folders, ulysses, groups)[0]
    for name, folder in folders.items():
        plain = load_eager(folder)
        for parameter in (p for path, p in plain.named_parameters() if ".encoder_attn" in path):
            parameter.requires_grad_(False)  # BART's attention to an encoder, which plain text does not use
        expected = Reference(plain, DOCUMENTS).step(PACKS, "token", {})
        assert steps[name].gradients.keys() == expected.gradients.keys()
        assert steps[name].report["train/loss"] == pytest.approx(expected.loss, rel=1e-5), name
        errors = expected.gradient_errors(steps[name].gradients)
        assert max(errors.values()) < TOLERANCE, f"{name}: {errors}"
