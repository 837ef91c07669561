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

IndexWriter: a corpus in Megatron's indexed form, written as a stream.

TokenIndex: a corpus in Megatron's indexed form, memory-mapped.
"""

import contextlib
import hashlib
import os
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

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


WRITE_BLOCK = 1 << 18  # documents whose pointers are made at a time
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
        for first in range(0, self.num_documents, WRITE_BLOCK):
            count = min(WRITE_BLOCK, self.num_documents - first)
            self._idx.seek(layout.lengths_at + 4 * first)
            lengths = np.frombuffer(self._idx.read(4 * count), np.int32)
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + begin
            self._idx.seek(layout.pointers_at + 8 * first)
            self._idx.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).data)
            begin = int(ends[-1])
        self._idx.seek(layout.documents_at)
        for first in range(0, layout.documents, WRITE_BLOCK):
            self._idx.write(np.arange(first, min(first + WRITE_BLOCK, layout.documents), dtype=np.int64).data)
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


BLOCK = 1 << 18  # sequences or documents checked at a time
BLOCK_TOKENS = 1 << 22
SUFFIXES = (".bin", ".idx")


class TokenIndex:
    """Documents of PREFIX.bin as PREFIX.idx has them; nothing is read before it is asked for, but to be checked.

    lengths int32[D] (int64 where a document of several sequences needs it), pointers int64[D] (bytes), num_documents,
    num_sequences, num_tokens, dtype; files: (PREFIX.bin, PREFIX.idx). A document of no sequence is left out; where all
    others are one sequence, the arrays are read-only views of the files. It pickles as its prefix.
    """

    def __init__(self, prefix: str | Path, key: str = "data.train_dir", check: bool = True) -> None:
        """`prefix` may end with .bin or .idx. `key`: the config key that errors name. `check=False` leaves out the
        pass over all lengths and pointers (12 bytes a sequence), for files that have been checked.

        Raises:
            ValueError: a file that is missing or not what the format says, or two that do not belong together.
        """
        text = os.fspath(prefix)
        self.prefix = text[:-4] if text.endswith(SUFFIXES) else text
        self.key = key
        self.files = (f"{self.prefix}.bin", f"{self.prefix}.idx")
        bin_size, idx_size = (self._size(path) for path in self.files)
        self.dtype, layout = self._read_header(idx_size)
        self._idx = _mapped(self.files[1], np.uint8)
        self.num_documents = self.num_sequences = layout.sequences
        self.lengths: NDArray[Any] = self._array(np.int32, layout.sequences, layout.lengths_at)
        self.pointers: NDArray[np.int64] = self._array(np.int64, layout.sequences, layout.pointers_at)
        if check:
            self._check_sequences()
        self._check_bin(bin_size)
        borders = self._array(np.int64, layout.documents, layout.documents_at)
        if self._longest_step(borders) > 1:
            self._join_sequences(np.unique(borders), bin_size)
        self.num_tokens = bin_size // self.dtype.itemsize
        self._tokens = _mapped(self.files[0], self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIndex, (self.prefix, self.key, False)

    @cached_property
    def digest(self) -> str:
        """16 hex digits of the header and the lengths: the same for corpora that are sampled in the same way."""
        found = hashlib.sha256(self._idx[: HEADER.size + 4 * self.num_sequences].data)
        if self.num_documents < self.num_sequences:
            found.update(self.lengths.data)
        return found.hexdigest()[:16]

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Tokens start..stop-1 of a document (to its end where `stop` is None), as a view."""
        length = self.lengths.item(document)
        stop = length if stop is None else stop
        assert 0 <= start <= stop <= length, "a document's tokens must lie inside it"
        first = self.pointers.item(document) // self.dtype.itemsize
        return self._tokens[first + start : first + stop]

    def gather(self, document: NDArray[Any], start: NDArray[Any], stop: NDArray[Any]) -> NDArray[Any]:
        """Tokens start[p]..stop[p]-1 of document[p] for every piece p, one after the other, as a new array."""
        first = self.pointers[document] // self.dtype.itemsize
        begins, ends = (first + start).tolist(), (first + stop).tolist()
        return np.concatenate([self._tokens[begin:end] for begin, end in zip(begins, ends, strict=True)])

    def token_range(self, first_document: int = 0, last_document: int | None = None) -> tuple[int, int]:
        """(smallest, largest) token id of documents first..last-1; (0, -1) where they have no token."""
        last = self.num_documents if last_document is None else last_document
        lowest, highest = [], []
        for begin in range(self._first_token(first_document), self._first_token(last), BLOCK_TOKENS):
            block = self._tokens[begin : min(begin + BLOCK_TOKENS, self._first_token(last))]
            lowest.append(block.min())
            highest.append(block.max())
        return (int(min(lowest)), int(max(highest))) if lowest else (0, -1)

    def _first_token(self, document: int) -> int:
        if document == self.num_documents:
            return self.num_tokens
        return self.pointers.item(document) // self.dtype.itemsize

    def _size(self, path: str) -> int:
        try:
            with open(path, "rb") as file:
                return os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ValueError(
                f"{self.key} must name a corpus in Megatron's indexed form, PREFIX.bin and PREFIX.idx; got "
                f"{self.prefix}: {path}: {error.strerror}"
            ) from error

    def _read_header(self, size: int) -> tuple[np.dtype[Any], IdxLayout]:
        with open(self.files[1], "rb") as file:
            head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise self._idx_error(f"begin with {MAGIC!r}", repr(head[: len(MAGIC)]))
        if len(head) < HEADER.size:
            raise self._idx_error(f"have a header of {HEADER.size} bytes", f"{size} bytes")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != VERSION:
            raise self._idx_error(f"have version {VERSION}", str(version))
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            integers = [f"{number} ({kind.__name__})" for number, kind in DTYPES.items() if kind().dtype.kind in "iu"]
            raise self._idx_error(f"have a dtype code of {', '.join(integers)}", str(code))
        layout = IdxLayout(sequences, documents)
        if size not in (layout.size, layout.size + sequences):  # with modes
            raise self._idx_error(
                f"have {layout.size} bytes, for the {sequences} sequences and {documents} document indices it names",
                f"{size} bytes",
            )
        return np.dtype(DTYPES[code]), layout

    def _array(self, dtype: Any, count: int, offset: int) -> NDArray[Any]:
        return np.frombuffer(self._idx, dtype, count=count, offset=offset)

    def _longest_step(self, borders: NDArray[np.int64]) -> int:
        """The most sequences of a document. Document indices that do not go from 0 to all sequences, or fall, are a
        ValueError."""
        requirement = f"have document indices that go from 0 to its {self.num_sequences} sequences and never fall"
        if len(borders) == 0:
            raise self._idx_error(requirement, "none")
        before = longest = 0
        for first in range(0, len(borders), BLOCK):
            part = borders[first : first + BLOCK].copy()
            steps = np.diff(part, prepend=before)
            wrong = (steps < 0) | (part > self.num_sequences)
            wrong[0] |= first == 0 and part[0] != 0
            wrong[-1] |= first + len(part) == len(borders) and part[-1] != self.num_sequences
            if wrong.any():
                at = int(wrong.argmax())
                raise self._idx_error(requirement, f"{part[at]} at place {first + at}")
            before, longest = int(part[-1]), max(longest, int(steps.max()))
        return longest

    def _join_sequences(self, borders: NDArray[np.int64], bin_size: int) -> None:
        """Lengths and pointers of documents in place of those of their sequences."""
        self.num_documents = len(borders) - 1
        self.pointers = self.pointers[borders[:-1]]
        lengths = np.diff(self.pointers, append=bin_size) // self.dtype.itemsize
        self.lengths = lengths if lengths.max() > np.iinfo(np.int32).max else lengths.astype(np.int32)

    def _check_sequences(self) -> None:
        """Every length at least 0, every pointer where the lengths before it end."""
        begin = 0
        for first in range(0, self.num_sequences, BLOCK):  # copies, because the file's own arrays are not aligned
            lengths, pointers = (array[first : first + BLOCK].copy() for array in (self.lengths, self.pointers))
            if lengths.min() < 0:
                at = int((lengths < 0).argmax())
                raise self._idx_error(f"have lengths of at least 0; sequence {first + at}", str(lengths[at]))
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + begin
            expected = ends - lengths.astype(np.int64) * self.dtype.itemsize
            if not np.array_equal(pointers, expected):
                at = int((pointers != expected).argmax())
                raise self._idx_error(
                    f"have pointer {expected[at]} for sequence {first + at}, where the lengths before it end",
                    str(pointers[at]),
                )
            begin = int(ends[-1])

    def _check_bin(self, size: int) -> None:
        last = self.num_sequences - 1
        expected = self.pointers.item(last) + self.lengths.item(last) * self.dtype.itemsize if last >= 0 else 0
        if size != expected:
            raise ValueError(
                f"{self.key} must have a .bin of {expected} bytes, what the lengths in {self.files[1]} sum to; got "
                f"{size} bytes in {self.files[0]}"
            )

    def _idx_error(self, requirement: str, found: str) -> ValueError:
        return ValueError(f"{self.key} must {requirement} in {self.files[1]}; got {found}")


def _mapped(path: str, dtype: Any) -> NDArray[Any]:
    """The whole file, read-only, as a plain array: slices of np.memmap cost five times as much."""
    if os.path.getsize(path) == 0:  # cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)
