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
    """document_index int64[D] and pack_offsets int64[P+1]: pack k holds
    `document_index[pack_offsets[k]:pack_offsets[k+1]]`, in the order in which they stand in it."""

    document_index: NDArray[np.int64]
    pack_offsets: NDArray[np.int64]

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1

    def documents(self, pack: int) -> NDArray[np.int64]:
        """int64[n]: the documents of one pack."""
        return self.document_index[self.pack_offsets[pack] : self.pack_offsets[pack + 1]]

    def pack_sums(self, values: ArrayLike) -> NDArray[np.int64]:
        """int64[P]: `values` (integer[D], one a document) summed over each pack."""
        running = np.zeros(len(self.document_index) + 1, np.int64)
        np.cumsum(np.asarray(values)[self.document_index], out=running[1:])
        return np.diff(running[self.pack_offsets])


def plan_from_assignment(order: NDArray[np.int64], pack_of: ArrayLike, num_packs: int) -> PackPlan:
    """The plan in which document `order[i]` lies in pack `pack_of[i]`, packs and documents in order of placement."""
    pack_of = np.asarray(pack_of, np.int64)
    offsets = np.zeros(num_packs + 1, np.int64)
    np.cumsum(np.bincount(pack_of, minlength=num_packs), out=offsets[1:])
    return PackPlan(order[np.argsort(pack_of, kind="stable")], offsets)
