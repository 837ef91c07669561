"""Every model type that transformers has for text trains exactly on packs, or is refused with the reason."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.lib.documents_alone import largest_errors
from tests.lib.model_types import PAGE, each_tried, named, parts
from tests.lib.project import ROOT
from tests.lib.ranks import run_ranks
from tests.lib.small_models import KINDS, model_class, model_config, refusal
from verl_ext.layers.trial import sharing_problem, trial_model

TOLERANCE = 1e-11  # fp64
ROUNDED_SUMS = 1e-6  # some routers compute in fp32 even so, and a shared token's gradient is the sum of several
AT_LEAST = {218: 157, 224: 161, 282: 197}  # types that are trained, of all of transformers 5.9, 5.10 and 5.24


def row(mechanism):
    """Return the model types of a mechanism on the page."""
    (line,) = re.findall(rf"^\| {mechanism} \|.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [kind for kind in re.findall(r"`([^`]+)`", line) if kind in KINDS]


def _errors(kinds, layouts, shares=False):
    """Return by type an error for each layout, or the failure."""
    return each_tried(lambda kind: largest_errors(kind, *layouts, shares=shares), kinds)


def _wrong(errors, tolerance=TOLERANCE):
    return {kind: found for kind, found in errors.items() if isinstance(found, str) or not max(found) < tolerance}


def _verdicts_and_errors(kinds):
    """Return the verdict on each of this rank's types, and the one-rank errors of those that are trained."""
    own = kinds[torch.distributed.get_rank() :: 2]
    verdicts = {kind: refusal(kind) for kind in own}
    return verdicts, _errors([kind for kind in own if verdicts[kind] is None], [(1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_the_rounding_of_experts_is_no_leak(threads):
    """As MKL divides a product among the threads of a fresh process, a row is rounded by the expert's other rows."""
    kinds = ("flex_olmo", "qwen3_omni_moe_thinker")
    code = f"from tests.lib.small_models import refusal; print([refusal(kind) for kind in {kinds}])"
    command, environment = [sys.executable, "-c", code], {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[None, None]"


@pytest.mark.slow
def test_every_type_is_exact_on_one_rank_and_on_two_or_refused_with_the_cause():
    verdicts, errors = {}, {}
    for some in parts(KINDS):
        for of_rank in run_ranks(_verdicts_and_errors, 2, some):
            verdicts |= of_rank[0]
            errors |= of_rank[1]
    assert _wrong(errors) == {}
    assert sorted(errors) == sorted(named("Trained")), "python docs/make_models.py writes the page"
    assert all("\n" not in cause for cause in verdicts.values() if cause is not None)
    for some in parts(sorted(errors)):
        for of_rank in run_ranks(_errors, 2, some, [(2, 1), (1, 2)]):
            assert _wrong(of_rank) == {}


def _refusal_to_share(kind):
    try:
        return sharing_problem(trial_model(model_config(kind), model_class(kind)))
    except ValueError as error:
        return str(error)


def _verdicts_and_shared_errors(kinds):
    """Return by type why documents cannot share tokens, and the errors of those that can, with Ulysses 1 and 2."""
    verdicts = {kind: _refusal_to_share(kind) for kind in kinds}
    return verdicts, _errors([kind for kind in kinds if verdicts[kind] is None], [(1, 1), (2, 1)], shares=True)


@pytest.mark.slow
def test_every_type_that_carries_nothing_but_attention_shares_tokens_exactly():
    verdicts = {}
    for some in parts(named("Trained")):
        for of_rank, errors in run_ranks(_verdicts_and_shared_errors, 2, some):
            assert _wrong(errors, ROUNDED_SUMS) == {}
            verdicts |= of_rank
    attention = [kind for name in ("attention", "attention with windows", "soft caps", "sinks") for kind in row(name)]
    assert sorted(kind for kind, problem in verdicts.items() if problem is None) == sorted(attention)


def test_the_page_names_each_type_once():
    trained, refused = named("Trained"), named("Refused")
    assert sorted([*trained, *refused]) == KINDS
    assert len(trained) >= AT_LEAST.get(len(KINDS), 0)
