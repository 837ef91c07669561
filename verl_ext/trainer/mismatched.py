"""KTO's mismatched answers: each answer of a pack after the prompt of the next unit.

    units          P Q a b     R c     S d e          prompts P Q, R and S: a unit's tokens before its first target
    mismatched     R a b       S c     P Q d e        at most as many tokens as the pack's whole documents

Their mean log-ratio is the baseline z of the step. A pack of one unit has none. Several answers of a unit follow each
other after the same prompt, which they share where the pack's documents share theirs.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.packing.plan import offsets_of
from verl_ext.parallel.trees import read_documents, text_rows
from verl_ext.trainer.texts import Pack


def mismatched_pack(pack: Pack, shares: bool) -> dict[str, torch.Tensor] | None:
    """Return the pack of mismatched answers as a `PreferenceDataSet` would; None without any.

    Each is a unit of its own, with weight 1.
    """
    documents = read_documents(pack["position_ids"].numpy())
    offsets, unit, answer = (
        offsets_of(documents.lengths + documents.begins),
        pack["unit"].numpy(),
        pack["answer"].numpy(),
    )
    number = np.cumsum(unit > 0) - 1
    units = np.unique(number[answer != 0])
    if len(units) < 2:
        return None
    # Whole texts, one after the other, cut where each document's answer begins.
    ids = pack["input_ids"].numpy()[np.concatenate(text_rows(documents))]
    columns = {"input_ids": ids} | {name: pack[name].numpy() for name in ("loss_mask", "loss_weight") if name in pack}
    first = [_first_target(columns["loss_mask"], *offsets[at : at + 2]) for at in range(len(unit))]
    after = dict(zip(units.tolist(), np.roll(units, -1).tolist(), strict=True))
    texts: list[dict[str, NDArray[Any]]] = []
    begins: list[int] = []
    answers = np.flatnonzero(answer)
    room = int(offsets[-1])  # units of unequal numbers of answers may need more: what does not fit is left out
    is_next = np.append(False, number[answers[1:]] == number[answers[:-1]])  # of the answers of one unit
    for at, follows in zip(answers.tolist(), is_next.tolist(), strict=True):
        prompt = int(np.flatnonzero(number == after[int(number[at])])[0])
        head, tail = slice(offsets[prompt], first[prompt]), slice(first[at], offsets[at + 1])
        text = {name: np.concatenate([values[head], values[tail]]) for name, values in columns.items()}
        if len(text["input_ids"]) > room:
            continue
        room -= len(text["input_ids"])
        begins.append(
            max(_common(texts[-1]["input_ids"], text["input_ids"]) - 1, 0) if shares and follows and texts else 0
        )
        texts.append(text)
    out = {name: np.concatenate([text[name] for text in texts]) for name in columns if name != "input_ids"}
    own = list(zip(texts, begins, strict=True))
    out["input_ids"] = np.concatenate([text["input_ids"][begin:] for text, begin in own])
    out["position_ids"] = np.concatenate([np.arange(begin, len(text["input_ids"])) for text, begin in own])
    out["category_ids"] = np.zeros(len(out["loss_mask"]), np.int64)
    out |= {name: np.ones(len(texts), np.int64) for name in ("unit", "answer")}
    out["pair_weight"] = np.ones(len(texts))
    return {name: torch.from_numpy(values) for name, values in out.items()}


def _first_target(mask: NDArray[np.int64], begin: int, end: int) -> int:
    """Return the place of a document's first target; its end without any."""
    return begin + int(mask[begin:end].argmax()) if mask[begin:end].any() else end


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many tokens two texts begin with in common."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size
