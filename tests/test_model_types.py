"""Every model type that transformers has for text is trained exactly on packs, or refused with the cause."""

import pytest
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.checked import support_problems
from tests.documents_alone import largest_errors
from tests.ranks import run_ranks
from tests.small_models import model_config

KINDS = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
AT_LEAST = 98  # types that are trained, of 224 in transformers 5.10
TOLERANCE = 1e-11  # fp64


def _verdict(kind):
    """Why a type is refused; None if it is trained."""
    try:
        config = model_config(kind)
    except Exception as error:
        return f"transformers makes no default config: {error}"
    problems = support_problems(config)
    return problems[0] if problems else None


def _errors(kinds, layouts):
    """By type: an error for each layout, or how it failed."""
    errors = {}
    for kind in kinds:
        try:
            errors[kind] = largest_errors(kind, *layouts)
        except Exception as error:
            errors[kind] = f"{type(error).__name__}: {error}"
    return errors


def _wrong(errors):
    return {kind: found for kind, found in errors.items() if isinstance(found, str) or not max(found) < TOLERANCE}


def _verdicts_and_errors(kinds):
    """The verdict of each of this rank's types, and the errors on one rank of those that are trained."""
    own = kinds[torch.distributed.get_rank() :: 2]
    verdicts = {kind: _verdict(kind) for kind in own}
    return verdicts, _errors([kind for kind in own if verdicts[kind] is None], [(1, 1)])


@pytest.mark.slow
def test_every_type_is_exact_on_one_rank_and_on_two_or_refused_with_the_cause():
    verdicts, errors = {}, {}
    for of_rank in run_ranks(_verdicts_and_errors, 2, KINDS):
        verdicts |= of_rank[0]
        errors |= of_rank[1]
    assert _wrong(errors) == {}
    assert len(errors) >= AT_LEAST
    assert all("\n" not in cause for cause in verdicts.values() if cause is not None)
    for of_rank in run_ranks(_errors, 2, sorted(errors), [(2, 1), (1, 2)]):
        assert _wrong(of_rank) == {}
