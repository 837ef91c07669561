"""Losses of preferences, and packs of pairs on which they must be equal."""

import numpy as np

from tests.lib.reference import Document
from tests.lib.reference_pairs import Loss, Unit
from verl_ext.losses import PreferenceOptions

CATEGORY_WEIGHTS = {"chat": 0.5, "code": 2.0}
LOSSES = {
    "dpo": Loss("dpo", 0.1, nll_weight=0.3),
    "cdpo": Loss("dpo", 0.4, smoothing=0.2, answers="mean", nll_weight=0.5, nll_mode="sequence", sft_weight=0.25),
    "common": Loss("dpo", 0.1, length="common", tail_weight=0.3),
    "dpo_norm": Loss("dpo_norm", 5.0, length="mean"),
    "robust": Loss("robust", 0.1, smoothing=0.1),
    "ipo": Loss("ipo", 0.1, length="mean"),
    "hinge": Loss("hinge", 0.1),
    "simpo": Loss("simpo", 2.0, length="mean", has_reference=False, margin=0.4),
    "cpo": Loss("cpo", 0.1, has_reference=False, nll_weight=1.0),
    "orpo": Loss("orpo", 0.1, length="mean", has_reference=False, nll_weight=1.0),
    "apo_zero": Loss("apo_zero", 0.1),
    "apo_down": Loss("apo_down", 0.1),
    "dpop": Loss("dpop", 0.1, penalty=3.0, sft_weight=0.0),
    "labels": Loss("apo_zero", 0.2, nll_weight=0.1),
    "kto": Loss("kto", 0.3, desirable=1.5, undesirable=0.75),
    "kto_labels": Loss("kto", 0.3),
}


def _packs(labels: bool) -> list[list[Unit]]:
    """Make packs of units: unequal answers, one that shares nothing, three answers, one token, weight 0, SFT rows."""
    rng = np.random.default_rng(8)

    def tokens(size: int) -> list[int]:
        return rng.integers(4, 128, size).tolist()

    def document(prompt: list[int], answer: list[int], category: int) -> Document:
        ids, mask = [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)
        return Document(ids, mask, [category * m for m in mask], rng.uniform(0.25, 2.0, len(ids)).tolist())

    def unit(prompt: int, *answers: int, category: int = 7, weight: float = 1.0, alike: int = 0) -> Unit:
        begin, start = tokens(prompt), tokens(alike)
        made = [document(begin, [*start, *tokens(size)], category) for size in answers]
        return Unit(made, [1, *[-1] * (len(answers) - 1)], weight)

    one, other = tokens(3), tokens(4)
    different = Unit([document(one, tokens(4), 9), document(other, tokens(2), 9)], [1, -1], 0.5)
    rows = [Unit([document(tokens(5), tokens(4), category)], [0]) for category in (7, 9, 0)]
    if labels:
        alone = [Unit([document(tokens(4), tokens(3 + n), 7)], [(-1) ** n], 0.5 + n) for n in range(7)]
        return [
            [alone[0], rows[0]],
            [alone[1], alone[2]],
            [unit(6, 3, 5)],
            [alone[3], alone[4]],
            [rows[1]],
            [alone[5]],
            [alone[6]],
        ]
    return [
        [unit(6, 3, 5), rows[0]],
        [unit(9, 4, 2, 6, category=9)],
        [unit(5, 2, 3, alike=3, weight=2.0), different],
        [rows[1]],  # no pair
        [unit(1, 1, 7, category=0)],
        [unit(8, 3, 3, category=9, weight=0.0), unit(2, 9, 1), rows[2]],
        [unit(4, 5, 5, 1, 2, weight=0.5)],
    ]


PACKS = {labels: _packs(labels) for labels in (False, True)}


def options_of(o: Loss) -> PreferenceOptions:
    """Return the package's options of a loss."""
    given = {"mode": o.mode, "beta": o.beta, "length": o.length, "label_smoothing": o.smoothing}
    given |= {"nll_weight": o.nll_weight, "nll_mode": o.nll_mode, "sft_weight": o.sft_weight, "answers": o.answers}
    given |= {"margin": o.margin, "penalty": o.penalty, "tail_weight": o.tail_weight}
    given |= {"desirable_weight": o.desirable, "undesirable_weight": o.undesirable}
    return PreferenceOptions.read({**given, "category_weights": CATEGORY_WEIGHTS})
