"""One pack as tensors, sliced from the memory-mapped columns: no Python per token.

    doc A (3)      doc B (4)        with pad_mode=right, max_tokens = 9
    input_ids      a0 a1 a2 | b0 b1 b2 b3 | P P
    position_ids    0  1  2 |  0  1  2  3 | 0 1
    loss_mask       0  0  1 |  0  1  1  1 | 0 0
    category_ids    0  0  1 |  0  2  2  2 | 0 0
    attention_mask  1  1  1 |  1  1  1  1 | 0 0

A document's first token is never a target, and a token that is no target has category 0.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data.tokenised_data import TokenisedData


def pack_row(
    data: TokenisedData,
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    pad_to: int | None = None,
    padding_value: int = 0,
) -> dict[str, torch.Tensor]:
    """The documents (tokens start..start+length of each dataset row) one after the other: 1-D tensors of T tokens.

    input_ids, position_ids, loss_mask, category_ids int64, loss_weight float32 when the dataset has it. With `pad_to`,
    T is that many tokens, the rest one last pseudo-document of `padding_value`, and attention_mask int64 is added.
    """
    tokens = int(length.sum())
    size = tokens if pad_to is None else pad_to
    out = {name: np.empty(size, np.int64) for name in ("input_ids", "loss_mask", "category_ids")}
    if data.has_loss_weight:
        out["loss_weight"] = np.empty(size, np.float32)
    pieces = data.pieces(row, start, length)
    for name, values in out.items():
        data.columns[name].gather(pieces, values[:tokens])
        values[tokens:] = padding_value if name == "input_ids" else 0
    out["loss_mask"][np.cumsum(length) - length] = 0
    out["category_ids"] *= out["loss_mask"]
    out["position_ids"] = _positions(length, size)
    if pad_to is not None:
        out["attention_mask"] = np.zeros(size, np.int64)
        out["attention_mask"][:tokens] = 1
    return {name: torch.from_numpy(values) for name, values in out.items()}


def _positions(length: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """int64[size]: 0, 1, … from every document's first token, and from the first token of the padding."""
    counts = [*length.tolist(), size - int(length.sum())]
    ramp = np.arange(max(counts))
    return np.concatenate([ramp[:count] for count in counts])
