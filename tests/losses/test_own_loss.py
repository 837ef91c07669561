"""A user's own loss mode is as exact on every layout as the built-in ones; errors in it are one line."""

import re

import pytest
import torch

from tests.lib.checked import checked
from tests.lib.errors import refused
from tests.lib.packed_engine import build_worker, train_step
from tests.lib.parity_cases import CATEGORIES, CATEGORY_WEIGHTS, DOCUMENTS, GROUPS, MAX_TOKENS, TOLERANCE
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, load_eager, pack_row
from tests.lib.training import differences, into, refusals, small_run, train_alone
from verl_ext.config.compose import compose
from verl_ext.data import CategoryTable
from verl_ext.losses import LossOptions, LossSpec, category_weight_table
from verl_ext.trainer.collator import StepCollator

pytestmark = pytest.mark.slow

OWN = '''
import numpy as np


def per_document(values, lengths):
    return np.array([part.sum() for part in np.split(values, np.cumsum(lengths)[:-1])])


def square_root(mask, weights, lengths):
    """loss=sqrt, written another way."""
    targets = np.maximum(per_document(mask, lengths), 1)
    coefficients = weights * np.repeat(targets**-0.5, lengths)
    return coefficients, coefficients.sum()


def own(mask, weights, lengths):
    """N_doc ** -3/4 times the document's tokens, over the number of documents with a target."""
    targets = per_document(mask, lengths)
    share = np.maximum(targets, 1) ** -0.75 * lengths
    return weights * np.repeat(share, lengths), (targets > 0).sum()
'''
LAYOUTS = [(1, 1), (2, 1), (2, 2)]  # (ranks, ranks that share a sequence)
NAMES = CategoryTable(tuple(CATEGORIES), tuple(CATEGORIES.values()))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


def _steps(model, file, sequence_parallel):
    """Take, on every rank, a step of each loss for each packing."""
    engine = build_worker(model, sequence_parallel).engine
    own = {
        name: LossOptions.read({"custom_cls": {"path": file, "name": name}, "category_weights": CATEGORY_WEIGHTS}).spec(
            NAMES.names
        )
        for name in ("square_root", "own")
    }
    losses = {"sqrt": LossSpec("sqrt", category_weight_table(CATEGORY_WEIGHTS, NAMES.names)), **own}
    answers = {}
    for packing in ("none", "packed", "padded"):
        groups = [[DOCUMENTS[i] for i in group] for group in GROUPS[packing]]
        packs = [pack_row(group, MAX_TOKENS if packing == "padded" else None) for group in groups]
        for name, loss in losses.items():
            answers[name, packing] = train_step(engine, packs, StepCollator(loss, NAMES), 4, "fused")
    return answers


@pytest.fixture(scope="module")
def runs(tiny_model, file, tmp_path_factory):
    """Return a folder, and the overrides of two runs below it: with a mode, and with a function."""
    folder = tmp_path_factory.mktemp("runs")
    usual = small_run(folder, tiny_model, [9, 40, 3, 64, 17, 23, 31, 8], categories=2)
    (folder / "mine.py").write_text(file.read_text())
    own = [f"loss.custom_cls.path={folder}/mine.py", "loss.custom_cls.name=square_root", into(folder / "own")]
    return folder, [*usual, "loss=sqrt", into(folder / "run")], [*usual, *own]


@pytest.fixture(scope="module")
def steps(tiny_model, file, runs):
    """Return each rank's steps of a layout, and execute both runs."""
    cases = {layout: (layout[0], _steps, str(tiny_model), str(file), layout[1]) for layout in LAYOUTS}
    return run_cases(cases | {number: (1, train_alone, run) for number, run in enumerate(runs[1:])})


@pytest.mark.parametrize("packing", ["none", "packed", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_that_repeats_a_built_in_mode_gives_its_loss_and_gradients(steps, layout, packing):
    found, wanted = steps[layout][0]["square_root", packing], steps[layout][0]["sqrt", packing]
    assert found.report == pytest.approx(wanted.report, rel=1e-12)
    assert found.gradients.keys() == wanted.gradients.keys()
    assert all(torch.equal(found.gradients[name], wanted.gradients[name]) for name in wanted.gradients)


@pytest.fixture(scope="module")
def expected(tiny_model):
    reference = Reference(load_eager(str(tiny_model)), DOCUMENTS)
    weights = {c: CATEGORY_WEIGHTS[name] for c, name in CATEGORIES.items() if name in CATEGORY_WEIGHTS}
    return reference.step([[document] for document in DOCUMENTS], "own", weights)  # no pack is involved


@pytest.mark.parametrize("packing", ["none", "packed", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_unlike_the_built_in_modes_equals_plain_hugging_face(steps, expected, layout, packing):
    expected.assert_taken(steps[layout][0]["own", packing], TOLERANCE, TOLERANCE, floor=0)


def test_a_run_with_a_function_is_that_of_the_mode_and_no_resume_changes_its_code(steps, runs):
    folder, _, own = runs
    assert differences(folder / "own", folder / "run", 1) == []
    (folder / "mine.py").write_text(OWN.replace("-0.5", "-0.6"))
    (told,) = refusals(own, [["trainer.total_epochs=2"]])
    assert re.match(r"loss\.mode is square_root \(\w{8}\), .* square_root \(\w{8}\)", told)


@pytest.mark.parametrize(
    ("code", "things"),
    [
        ("own = 3", ("loss.custom_cls.name", "got own")),
        ("def own(mask): return mask, 1", ("loss.custom_cls.name=own", "(mask, weights, lengths)", "TypeError")),
        ("def own(m, w, l): return w", ("loss.custom_cls.name=own", "(coefficients, its term of Z)", "ValueError")),
        ("def own(m, w, l): return w[1:], 1", ("loss.custom_cls.name=own", "10 tokens", "shape (9,)")),
        ("def own(m, w, l): return -w, 1", ("loss.custom_cls.name=own", "-2.0 at token 1")),
        ("def own(m, w, l): return w / 0.0, 1", ("loss.custom_cls.name=own", "nan at token 0")),
        ("def own(m, w, l): return w + 1, 1", ("loss.custom_cls.name=own", "mask", "1.0 at token 0")),
        ("def own(m, w, l): return w, 0", ("loss.custom_cls.name=own", "term of Z", "got 0.0")),
        ("def own(m, w, l): return w, float('nan')", ("loss.custom_cls.name=own", "term of Z", "got nan")),
        (
            "def own(m, w, l): return w / m.sum(), 1",
            ("loss.custom_cls.name=own", "nan at token 0", "4, 3, 1, 2 tokens"),
        ),
    ],
)
def test_a_function_that_is_no_loss_is_refused_before_a_model_is_loaded(code, things, tmp_path, tiny_model):
    (tmp_path / "own.py").write_text(code)
    keys = [f"loss.custom_cls.path={tmp_path / 'own.py'}", "loss.custom_cls.name=own", "trainer.device=cpu"]
    run = [f"model.path={tiny_model}", f"data.train_dir={tmp_path}", *keys]
    with refused(*things):
        checked(compose(run), 1)


def test_a_function_and_a_mode_at_once_are_refused(tmp_path, tiny_model, file):
    keys = ["loss=sqrt", f"loss.custom_cls.path={file}", "loss.custom_cls.name=own", "trainer.device=cpu"]
    with refused("loss.mode", "token", "sqrt"):
        checked(compose([f"model.path={tiny_model}", f"data.train_dir={tmp_path}", *keys]), 1)


def test_a_pack_that_the_function_cannot_do_is_one_line_as_well(tmp_path):
    (tmp_path / "own.py").write_text("def own(m, w, l): return w / (l.max() < 9), 1")
    spec = LossOptions.read({"custom_cls": {"path": str(tmp_path / "own.py"), "name": "own"}}).spec(["a", "b"])
    pack = pack_row([DOCUMENTS[0]])
    with refused("loss.custom_cls.name=own", "24 tokens"):
        StepCollator(spec, CategoryTable((7, 9), ("a", "b")))([pack])
