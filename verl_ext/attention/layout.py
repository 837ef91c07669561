"""Where the documents of a micro-batch begin and end, computed once on the host and handed to every layer.

verl's own patched attention gathers ``position_ids`` over the sequence-parallel ranks and searches them for zeros in
every layer: one collective and one device synchronisation each. Here both happen zero times.

Legend: T tokens of the micro-batch with padding, D documents.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DocumentLayout:
    """Document boundaries of one flattened micro-batch.

    Attributes:
        offsets: D + 1 host integers from 0 to T; document d is ``[offsets[d], offsets[d + 1])``.
        cu_seqlens: int32[D + 1], the same on the device of the attention.
        max_length: tokens of the longest document.
    """

    offsets: tuple[int, ...]
    cu_seqlens: torch.Tensor
    max_length: int

    @property
    def total(self) -> int:
        """T."""
        return self.offsets[-1]

    def padded(self, pad: int) -> "DocumentLayout":
        """Append ``pad`` tokens as one last pseudo-document, as Ulysses needs where T is no multiple of the ranks."""
        if pad == 0:
            return self
        end = self.total + pad
        cu_seqlens = torch.nn.functional.pad(self.cu_seqlens, (0, 1), value=end)
        return DocumentLayout((*self.offsets, end), cu_seqlens, max(self.max_length, pad))


def document_layout(position_ids: torch.Tensor, device: torch.device | str = "cpu") -> DocumentLayout:
    """Boundaries from ``position_ids[T]`` on the host, which restart at 0 with every document.

    ```
    position_ids   0 1 2 | 0 1 2 3 | 0        offsets 0 3 7 8    max_length 4
    ```
    """
    assert position_ids.dim() == 1
    assert position_ids.numel() > 0
    assert position_ids.device.type == "cpu"
    assert int(position_ids[0]) == 0, "a micro-batch begins with a document's first token"
    starts = (position_ids == 0).nonzero().flatten()
    edges = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    cu_seqlens = edges.to(torch.int32)
    return DocumentLayout(
        offsets=tuple(edges.tolist()),
        cu_seqlens=cu_seqlens.to(device, non_blocking=True),
        max_length=int(edges.diff().max()),
    )
