"""Models with recurrent states, sinks, soft caps or their own positions train as in plain Hugging Face."""

import math

import pytest

from tests.ranks import run_cases
from tests.reference import Reference, documents_of_answers, load_eager
from tests.small_models import write_small_models

FAMILIES = ("qwen3_5_text", "nemotron_h", "lfm2", "jamba", "gpt_oss", "gemma2", "bart", "roberta")
# Formulas that differ from transformers' round differently; in fp64 they agree to 1e-13 (test_layers.py).
TOLERANCE = 2e-4


DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [[DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[2]], [DOCUMENTS[3]], [DOCUMENTS[4], DOCUMENTS[5]]]


def engine_steps(folders, ulysses, groups, overrides=()):
    """Take a step of each model, on ranks that share every pack."""
    from tests.packed_engine import build_worker, token_step

    steps, context = {}, f"parallel.context_parallel_size={groups}"
    for name, folder in folders.items():
        engine = build_worker(folder, ulysses * groups if groups == 1 else ulysses, [context, *overrides]).engine
        steps[name] = token_step(engine, PACKS)
    return steps


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    """Write a small model of each family, and return the folders by name."""
    return write_small_models(FAMILIES, tmp_path_factory.mktemp("models"), tiny_model)


LAYOUTS = [(1, 1), (2, 1), (1, 2)]  # ranks of Ulysses, groups


@pytest.fixture(scope="module")
def found(folders):
    return run_cases({layout: (math.prod(layout), engine_steps, folders, *layout) for layout in LAYOUTS})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_plain_hugging_face(layout, folders, found):
    steps = found[layout][0]
    for name, folder in folders.items():
        plain = load_eager(folder)
        for parameter in (p for path, p in plain.named_parameters() if ".encoder_attn" in path):
            parameter.requires_grad_(False)  # BART's attention to an encoder, which plain text does not use
        expected = Reference(plain, DOCUMENTS).step(PACKS, "token", {})
        assert steps[name].gradients.keys() == expected.gradients.keys()
        assert steps[name].report["train/loss"] == pytest.approx(expected.loss, rel=1e-5), name
        errors = expected.gradient_errors(steps[name].gradients)
        assert max(errors.values()) < TOLERANCE, f"{name}: {errors}"
