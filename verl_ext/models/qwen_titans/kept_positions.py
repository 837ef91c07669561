"""Which positions of a sequence the head sees, chunk by chunk: no other hidden state outlives its chunk.

```
wanted        . . . x | . . . . | . x x .        bool [B, T], C = 4
kept of each  3       | none    | 9 10           columns that any row wants
```

Legend: B samples, T tokens, n kept columns, N wanted positions.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch


class KeptPositions:
    """``logits_to_keep`` as transformers has it: the last so many (0: all), indices, or bool ``[B, T]``.

    Reads a mask or indices on the host, once.
    """

    def __init__(self, logits_to_keep: int | torch.Tensor, length: int) -> None:
        self._asked, self._length = logits_to_keep, length
        self._columns: Sequence[int]
        if isinstance(logits_to_keep, int):
            self._columns = range(max(length - logits_to_keep, 0) if logits_to_keep else 0, length)
        elif logits_to_keep.dtype == torch.bool:
            self._columns = logits_to_keep.any(0).nonzero().flatten().tolist()
        else:
            self._columns = sorted({place % length for place in logits_to_keep.tolist()})

    def of_chunk(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """``[B, n of this chunk, …]`` of a chunk's ``values[B, C, …]``, whose first token is token ``start``."""
        size = values.shape[1]
        columns = self._columns[bisect_left(self._columns, start) : bisect_left(self._columns, start + size)]
        if len(columns) == size:
            return values
        return values[:, torch.tensor([column - start for column in columns], dtype=torch.long, device=values.device)]

    def of_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Of kept ``values[B, n, …]`` what was asked for: ``[B, n, …]``, of a mask ``[N, …]`` in row-major order."""
        if isinstance(self._asked, int):
            return values
        columns = torch.tensor(self._columns, dtype=torch.long, device=values.device)
        if self._asked.dtype == torch.bool:
            return values[self._asked[:, columns]]
        return values[:, torch.searchsorted(columns, self._asked % self._length)]
