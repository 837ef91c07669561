"""How often a run reads its documents, by source and length.

source   low    high   documents  tokens  share  epochs
web      0      2048   40         50,000  71%    1.00       1 <= length <= 2048
papers   8192   32768  1          20,000  29%    6.00       read six times in the run
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_ext.metrics import LengthBins

BINS = LengthBins((2048, 8192, 32768, 131072))  # of a run without bins of its own
MOST_EPOCHS = 4  # up to which repeated data is about as good as new data (Muennighoff et al. 2023)


@dataclass
class DataUse:
    """The documents of a source with low < length <= high (None: any longer one).

    documents: those that are read at all. tokens: of an epoch, as often as it reads each document; share: of those of
    all sources. epochs = tokens / tokens of all these documents; of a run after `times`.
    """

    source: str
    low: int
    high: int | None
    documents: int
    tokens: int
    share: float
    epochs: float

    def times(self, epochs: float) -> "DataUse":
        """Return the use in a run of so many epochs."""
        return DataUse(**{**vars(self), "epochs": self.epochs * epochs})


def data_use(
    source: NDArray[np.int64],
    names: Mapping[int, str],
    lengths: NDArray[np.int64],
    draws: NDArray[np.int64],
    bins: LengthBins = BINS,
) -> list[DataUse]:
    """Return the use of D documents by source, in the order of `names`, and length.

    source int64[D]: a key of `names`; draws int64[D]: how often an epoch reads each document.
    """
    keys = np.array(list(names), np.int64)
    by_key = np.argsort(keys)
    cell = by_key[np.searchsorted(keys[by_key], source)] * len(bins) + bins.index(lengths)
    read, total, documents = (
        np.bincount(cell, weights, len(keys) * len(bins)) for weights in (lengths * draws, lengths, draws > 0)
    )
    edges, rows = (0, *bins.edges, None), []
    for at in np.flatnonzero(total).tolist():
        of, length = divmod(at, len(bins))
        share, epochs = float(read[at] / max(read.sum(), 1)), float(read[at] / total[at])
        low_high = edges[length] or 0, edges[length + 1]
        rows.append(DataUse(list(names.values())[of], *low_high, int(documents[at]), int(read[at]), share, epochs))
    return rows


def repetition_notices(rows: Iterable[DataUse], key: str) -> Iterator[str]:
    """Yield a line if the run reads documents in more than MOST_EPOCHS epochs."""
    often = [row for row in rows if row.epochs > MOST_EPOCHS]
    if often:
        most = max(often, key=lambda row: row.epochs)
        upper = "" if most.high is None else f" <= {most.high}"
        yield (
            f"{key}: {sum(row.share for row in often):.0%} of the tokens are of documents that the run reads more than "
            f"{MOST_EPOCHS} times, after which repetition gains little; most often {most.source}, {most.low} < "
            f"length{upper}: {most.epochs:.3g} epochs"
        )
