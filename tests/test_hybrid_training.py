"""Models with a state over time, sinks, soft caps and positions of their own train through the engine as plain Hugging Face does."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.ranks import run_ranks
from tests.reference import Document, Reference, load_eager, pack_row
from tests.small_models import packed_and_plain
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.batch import StepCollator

FAMILIES = ("qwen3_5_text", "nemotron_h", "lfm2", "jamba", "gpt_oss", "gemma2", "bart", "roberta")
# Formulas other than transformers' own round otherwise: in fp64 they agree to 1e-13 (test_layers.py).
TOLERANCE = 2e-4


def _documents():
    rng = np.random.default_rng(3)
    documents = []
    for size in (21, 2, 13, 30, 9, 17):
        mask = [0, *rng.integers(0, 2, size - 2).tolist(), 1]
        documents.append(Document(rng.integers(4, 128, size).tolist(), mask, [0] * size, [1.0] * size))
    return documents


DOCUMENTS = _documents()
PACKS = [[DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[2]], [DOCUMENTS[3]], [DOCUMENTS[4], DOCUMENTS[5]]]


def engine_steps(folders, ulysses, groups, overrides=()):
    """A step of each model, on ranks that share every pack."""
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
    """Folders of a small model of each family, by name."""
    written = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        _, plain = packed_and_plain(name)
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        written[name] = str(folder)
    return written


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_a_step_equals_plain_hugging_face(ulysses, groups, folders):
    steps = run_ranks(engine_steps, ulysses * groups, folders, ulysses, groups)[0]
    for name, folder in folders.items():
        expected = Reference(load_eager(folder), DOCUMENTS).step(PACKS, "token", {})
        assert steps[name].report["train/loss"] == pytest.approx(expected.loss, rel=1e-5), name
        largest = max(float(gradient.norm()) for gradient in expected.gradients.values())
        for parameter, gradient in expected.gradients.items():
            got = steps[name].gradients[parameter].double()
            off = float((got - gradient).norm()) / max(float(gradient.norm()), 1e-5 * largest)
            assert off < TOLERANCE, f"{name}: {parameter} is off by {off:.1e} of its norm"
