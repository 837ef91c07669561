"""Models with recurrent states, sinks, soft caps or their own positions train as in plain Hugging Face."""

import math

import pytest

from tests.lib.engine_steps import DOCUMENTS, PACKS, engine_steps
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, load_eager
from tests.lib.small_models import write_small_models

# Formulas that differ from transformers' round differently; in fp64 they agree to 1e-13 (test_layers.py).
TOLERANCE = 2e-4


FAMILIES = ("qwen3_5_text", "nemotron_h", "lfm2", "jamba", "gpt_oss", "gemma2", "bart", "roberta")


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
        Reference(plain, DOCUMENTS).step(PACKS, "token", {}).assert_taken(steps[name], gradients=TOLERANCE)
