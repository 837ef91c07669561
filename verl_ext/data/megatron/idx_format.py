"""Megatron's indexed form of a tokenised corpus, as megatron-core 0.16 writes it: PREFIX.bin and PREFIX.idx.

PREFIX.bin holds the token ids of all sequences one after the other. PREFIX.idx says where each begins:

    byte            size   field
    0               9      MMIDIDX\\0\\0
    9               8      version, 1
    17              1      dtype code of the token ids in .bin
    18              8      N, number of sequences
    26              8      M, number of document indices
    34              4·N    lengths int32, in tokens
    34 + 4·N        8·N    pointers int64, the byte of .bin where each sequence begins
    34 + 12·N       8·M    document indices int64: 0, then the sequences before the end of each document
    34 + 12·N + 8·M N      modes int8, only in multimodal files

All numbers are little-endian. A document of `preprocess_data.py` is one sequence, or one for every sentence where it
splits sentences. Megatron's GPTDataset shuffles and splits sequences, whatever document they are of; this package keeps
a document's sequences together. Where each document is one sequence that is the same.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, M
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
UINT16_VOCABULARY = 65500  # vocabularies below it are written as uint16


class IdxLayout(NamedTuple):
    """Where the arrays of an .idx of N = `sequences` and M = `documents` lie, in bytes."""

    sequences: int
    documents: int

    @property
    def lengths_at(self) -> int:
        return HEADER.size

    @property
    def pointers_at(self) -> int:
        return self.lengths_at + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def size(self) -> int:
        """Bytes of the file, without modes."""
        return self.documents_at + 8 * self.documents


def dtype_code(dtype: DTypeLike) -> int:
    """The number that stands for a dtype in an .idx. KeyError where Megatron has none."""
    wanted = np.dtype(dtype)
    codes: dict[np.dtype[Any], int] = {np.dtype(kind): code for code, kind in DTYPES.items()}
    return codes[wanted]


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron writes the ids of a vocabulary as: uint16 below 65,500 tokens, else int32."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)
