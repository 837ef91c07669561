"""PackPlan: which document lies in which pack, as an index (CSR); no token is copied.

pack_offsets      0        2           5     6
                  |        |           |     |
document_index    7  0  |  4  1  2  |  3
                  pack 0   pack 1      pack 2
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class PackPlan(NamedTuple):
    """document_index int32 or int64[N] and pack_offsets int64[P+1]: pack k holds
    `document_index[pack_offsets[k]:pack_offsets[k+1]]`, in the order in which they stand in it. The packers name every
    document once; a plan over a sample may name one several times or never."""

    document_index: NDArray[np.integer]
    pack_offsets: NDArray[np.int64]

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1

    def documents(self, pack: int) -> NDArray[np.integer]:
        """integer[n]: the documents of one pack."""
        return self.document_index[self.pack_offsets[pack] : self.pack_offsets[pack + 1]]

    def pack_sums(self, values: ArrayLike) -> NDArray[np.int64]:
        """int64[P]: `values` (integer[D], one a document) summed over each pack."""
        running = np.zeros(len(self.document_index) + 1, np.int64)
        np.cumsum(np.asarray(values)[self.document_index], out=running[1:])
        return np.diff(running[self.pack_offsets])

    def of(self, documents: NDArray[np.integer]) -> "PackPlan":
        """The same packs with document i named `documents[i]`: a plan of a selection, in the numbers of the whole."""
        return PackPlan(documents[self.document_index], self.pack_offsets)


def index_type(documents: int) -> "type[np.signedinteger]":
    """What holds the numbers of so many documents."""
    return np.int32 if documents < 2**31 else np.int64
