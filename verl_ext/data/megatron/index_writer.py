"""IndexWriter: a corpus in Megatron's indexed form, written as a stream."""

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from verl_ext.data.megatron.idx_format import HEADER, MAGIC, VERSION, IdxLayout, dtype_code

BLOCK = 1 << 18  # documents whose pointers are made at a time
MAX_LENGTH = np.iinfo(np.int32).max


class IndexWriter:
    """Writes PREFIX.bin and PREFIX.idx, every document one sequence, byte for byte as megatron-core's builder does.

    Only one batch is in memory: lengths go to PREFIX.idx as they come, pointers are made from them at the end, and the
    header is written last, so that an unfinished .idx opens nowhere.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, key: str = "model.path") -> None:
        """`dtype`: what token ids are written as, see `optimal_dtype`. `key`: the config key that errors name.

        Raises:
            FileExistsError: one of the two files is there.
        """
        self.dtype = np.dtype(dtype)
        self.key = key
        self.num_documents = self.num_tokens = 0
        self._code = dtype_code(self.dtype)
        self.files = (f"{prefix}.bin", f"{prefix}.idx")
        self._open: dict[str, BinaryIO] = {}
        try:
            for path in self.files:
                self._open[path] = open(path, "x+b")  # noqa: SIM115
        except OSError:
            self.abandon()
            raise
        self._bin, self._idx = self._open.values()
        self._idx.write(bytes(HEADER.size))

    def add(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append documents: `tokens` int[ΣT] one after the other, `lengths` int[D] of each.

        Raises:
            ValueError: a token id that the dtype cannot hold, a document of more than 2^31 - 1 tokens.
        """
        lengths = np.asarray(lengths, np.int64)
        assert int(lengths.sum()) == len(tokens), "lengths must sum to the number of tokens"
        assert len(lengths) == 0 or lengths.min() >= 0, "lengths must not be negative"
        self._check_lengths(lengths)
        self._bin.write(np.ascontiguousarray(self._as_written(tokens, lengths)).data)
        self._idx.write(lengths.astype(np.int32).data)
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def close(self) -> None:
        """Write what follows from the lengths, and the header."""
        layout = IdxLayout(self.num_documents, self.num_documents + 1)
        begin = 0
        for first in range(0, self.num_documents, BLOCK):
            count = min(BLOCK, self.num_documents - first)
            self._idx.seek(layout.lengths_at + 4 * first)
            lengths = np.frombuffer(self._idx.read(4 * count), np.int32)
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + begin
            self._idx.seek(layout.pointers_at + 8 * first)
            self._idx.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).data)
            begin = int(ends[-1])
        self._idx.seek(layout.documents_at)
        for first in range(0, layout.documents, BLOCK):
            self._idx.write(np.arange(first, min(first + BLOCK, layout.documents), dtype=np.int64).data)
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, self._code, layout.sequences, layout.documents))
        for file in self._open.values():
            file.close()
        self._open = {}

    def abandon(self) -> None:
        """Close and remove what was opened, after an error. Does nothing after `close`."""
        for path, file in self._open.items():
            with contextlib.suppress(OSError):  # of what it still held, on a full disk
                file.close()
            os.remove(path)
        self._open = {}

    def _check_lengths(self, lengths: NDArray[np.int64]) -> None:
        if len(lengths) and lengths.max() > MAX_LENGTH:
            at = int(lengths.argmax())
            raise ValueError(
                f"{self.key} must give documents of at most {MAX_LENGTH} tokens, what an .idx can count; got "
                f"{lengths[at]} in document {self.num_documents + at} of {self.files[0]}"
            )

    def _as_written(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[Any]:
        if tokens.dtype == self.dtype or len(tokens) == 0:
            return tokens.astype(self.dtype, copy=False)
        limits = np.iinfo(self.dtype)
        if tokens.min() < limits.min or tokens.max() > limits.max:
            at = int(((tokens < limits.min) | (tokens > limits.max)).argmax())
            document = self.num_documents + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            raise ValueError(
                f"{self.key} must give token ids that {self.dtype.name} holds ({limits.min}..{limits.max}); got "
                f"{tokens[at]} in document {document} of {self.files[0]}"
            )
        return tokens.astype(self.dtype)
