"""Which samples or documents are for training and which for validation."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.packing import check_choice

SPLITS = ("train", "val")


def check_train_ratio(ratio: Any) -> None:
    """ValueError for a data.train_ratio that is no share."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ValueError(f"data.train_ratio must be a number above 0 and at most 1; got {ratio!r}")


def split_rows(samples: int, split: str | None, train_ratio: float, seed: int) -> NDArray[np.int64]:
    """int64[rows], ascending: the samples of `split` ("train", "val", or None for all), of samples 0..samples-1.

    The members are those of torch.utils.data.random_split(data, [n, samples - n], generator=manual_seed(seed)) with
    n = int(train_ratio * samples).

    Raises:
        ValueError: the part has no sample.
    """
    if split is None:
        return np.arange(samples)
    check_choice("split", split, SPLITS)
    shuffled = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).numpy()
    train = int(train_ratio * samples)
    rows = shuffled[:train] if split == "train" else shuffled[train:]
    if len(rows) == 0:
        raise ValueError(
            f"data.train_ratio must leave samples for training and for validation; got {train_ratio} of {samples}"
        )
    return np.sort(rows)
