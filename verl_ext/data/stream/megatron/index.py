r"""Read and write Megatron's indexed form of tokens, PREFIX.bin and .idx.

As in megatron-core 0.16, PREFIX.bin holds the token ids of all sequences and PREFIX.idx their places, little-endian:

    byte             size  field
    0                34    MMIDIDX\0\0, version 1 (8 bytes), dtype code of .bin (1), N sequences (8), M (8)
    34               4·N   lengths int32, in tokens
    34 + 4·N         8·N   pointers int64, the byte of .bin where each sequence begins
    34 + 12·N        8·M   document indices int64: 0, then the number of sequences before the end of each document
    34 + 12·N + 8·M  N     modes int8, only in multimodal files

A document of `preprocess_data.py` is one sequence, or one for every sentence if it splits sentences. Megatron's
GPTDataset shuffles and cuts sequences; here the sequences of a document stay together.
"""

import contextlib
import os
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from verl_ext.cache import fingerprint
from verl_ext.options import must

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, M
_TYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(kind) for code, kind in enumerate(_TYPES, 1)}
MAX_LENGTH = np.iinfo(np.int32).max
BLOCK = 1 << 18  # sequences or documents in memory at a time
BLOCK_TOKENS = 1 << 22
SUFFIXES = (".bin", ".idx")


class IndexWriter:
    """A writer of PREFIX.bin and .idx, every document being one sequence.

    The files are byte for byte those of megatron-core's builder. `add` writes the lengths; `close` writes the pointers
    and last the header, so that an unfinished .idx cannot be opened. `key`: the config key that errors name.

    Raises FileExistsError if one of the two files exists.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, key: str = "model.path") -> None:
        self.dtype = np.dtype(dtype)
        self.key = key
        self.num_documents = 0
        self.files = (f"{prefix}.bin", f"{prefix}.idx")
        self._code = next(code for code, kind in DTYPES.items() if kind == self.dtype)
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
        """Append documents: `tokens` int[ΣT] one after another, `lengths` int[D] of each.

        Raises ValueError if the dtype cannot hold a token id, or a document has more than 2^31 - 1 tokens.
        """
        lengths = np.asarray(lengths, np.int64)
        assert int(lengths.sum()) == len(tokens), "lengths must sum to the number of tokens"
        if len(lengths) and lengths.max() > MAX_LENGTH:
            where = f"{lengths.max()} in document {self.num_documents + int(lengths.argmax())} of {self.files[0]}"
            most = f"at most {MAX_LENGTH} tokens, what an .idx can count"
            raise ValueError(must(self.key, f"give documents of {most}", where))
        if tokens.dtype != self.dtype and len(tokens):
            limits = np.iinfo(self.dtype)
            wrong = (tokens < limits.min) | (tokens > limits.max)
            if wrong.any():
                at = int(wrong.argmax())
                document = self.num_documents + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
                held = f"{self.dtype.name} holds ({limits.min}..{limits.max})"
                got = f"{tokens[at]} in document {document} of {self.files[0]}"
                raise ValueError(must(self.key, f"give token ids that {held}", got))
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._idx.write(lengths.astype(np.int32).data)
        self.num_documents += len(lengths)

    def close(self, block: int = BLOCK) -> None:
        """Write pointers and document indices, then the header; close the files."""
        documents, begin = self.num_documents, 0
        lengths_at, pointers_at, borders_at, _ = _offsets(documents, documents + 1)
        for first in range(0, documents, block):
            self._idx.seek(lengths_at + 4 * first)
            lengths = np.frombuffer(self._idx.read(4 * min(block, documents - first)), np.int32)
            pointers, begin = _pointers(lengths, self.dtype.itemsize, begin)
            self._idx.seek(pointers_at + 8 * first)
            self._idx.write(pointers.data)
        self._idx.seek(borders_at)
        for first in range(0, documents + 1, block):
            self._idx.write(np.arange(first, min(first + block, documents + 1), dtype=np.int64).data)
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, self._code, documents, documents + 1))
        for file in self._open.values():
            file.close()
        self._open = {}

    def abandon(self) -> None:
        """Close and remove the files, after an error. Does nothing after `close`."""
        for path, file in self._open.items():
            with contextlib.suppress(OSError):  # closing writes the rest, which fails on a full disk
                file.close()
            os.remove(path)
        self._open = {}


class TokenIndex:
    """Documents of PREFIX.bin and .idx, memory-mapped, read when needed or checked.

    lengths int32[D] (int64 if a document of several sequences needs it), pointers int64[D] (bytes), num_documents,
    num_sequences, num_tokens, dtype; files: (PREFIX.bin, PREFIX.idx). A document without a sequence is left out. If all
    others are one sequence, the arrays are read-only views of the files. A TokenIndex pickles as its prefix.

    Args:
        prefix: may end with .bin or .idx.
        key: the config key that errors name.
        check: False skips the pass over all lengths and pointers (12 bytes a sequence).

    Raises ValueError if a file is missing or does not follow the format, or the two do not belong together.
    """

    first_token = 0  # the place in its document at which a first document begins

    def __init__(
        self, prefix: str | Path, key: str = "data.train_dir", check: bool = True, *, block: int = BLOCK
    ) -> None:
        text = os.fspath(prefix)
        self.prefix = text[:-4] if text.endswith(SUFFIXES) else text
        self.key = key
        self.files = (f"{self.prefix}.bin", f"{self.prefix}.idx")
        bin_size, idx_size = (self._size(path) for path in self.files)
        self.dtype, self.num_sequences, num_borders = self._read_header(idx_size)
        self.num_documents = self.num_sequences
        self._idx = _mapped(self.files[1], np.uint8)
        lengths_at, pointers_at, borders_at, _ = _offsets(self.num_sequences, num_borders)
        self.lengths: NDArray[Any] = np.frombuffer(self._idx, np.int32, self.num_sequences, lengths_at)
        self.pointers = np.frombuffer(self._idx, np.int64, self.num_sequences, pointers_at)
        if check:
            self._check_sequences(block)
        last = self.num_sequences - 1
        expected = self.pointers.item(last) + self.lengths.item(last) * self.dtype.itemsize if last >= 0 else 0
        if bin_size != expected:
            wanted = f"a .bin of {expected} bytes, what the lengths in {self.files[1]} sum to"
            raise ValueError(must(self.key, f"have {wanted}", f"{bin_size} bytes in {self.files[0]}"))
        borders = np.frombuffer(self._idx, np.int64, num_borders, borders_at)
        if self._longest_document(borders, block) > 1:
            borders = np.unique(borders)
            self.num_documents = len(borders) - 1
            self.pointers = self.pointers[borders[:-1]]
            lengths = np.diff(self.pointers, append=bin_size) // self.dtype.itemsize
            self.lengths = lengths if lengths.max() > MAX_LENGTH else lengths.astype(np.int32)
        self.num_tokens = bin_size // self.dtype.itemsize
        self._tokens = _mapped(self.files[0], self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIndex, (self.prefix, self.key, False)

    @cached_property
    def digest(self) -> str:
        """A digest (16 hex digits) of what decides sampling: header and lengths."""
        joined = [self.lengths] if self.num_documents < self.num_sequences else []
        return fingerprint(self._idx[: HEADER.size + 4 * self.num_sequences], *joined, digits=16)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return a view of a document's tokens start..stop-1 (None: its end)."""
        length = self.lengths.item(document)
        stop = length if stop is None else stop
        assert 0 <= start <= stop <= length, "a document's tokens must lie inside it"
        first = self._first_token(document)
        return self._tokens[first + start : first + stop]

    def gather(self, document: NDArray[Any], start: NDArray[Any], stop: NDArray[Any]) -> NDArray[Any]:
        """Return all pieces' tokens start[p]..stop[p]-1 of document[p] in a new array."""
        first = self.pointers[document] // self.dtype.itemsize
        begins, ends = (first + start).tolist(), (first + stop).tolist()
        return np.concatenate([self._tokens[begin:end] for begin, end in zip(begins, ends, strict=True)])

    def token_range(self, first: int = 0, last: int | None = None, *, block: int = BLOCK_TOKENS) -> tuple[int, int]:
        """Return (lowest, highest) id of documents first..last-1; (0, -1) without a token."""
        begin, end = self._first_token(first), self._first_token(self.num_documents if last is None else last)
        blocks = (self._tokens[at : min(at + block, end)] for at in range(begin, end, block))
        lowest, highest = zip(*[(part.min(), part.max()) for part in blocks] or [(0, -1)], strict=True)
        return int(min(lowest)), int(max(highest))

    def _first_token(self, document: int) -> int:
        if document == self.num_documents:
            return self.num_tokens
        return self.pointers.item(document) // self.dtype.itemsize

    def _size(self, path: str) -> int:
        try:
            with open(path, "rb") as file:
                return os.fstat(file.fileno()).st_size
        except OSError as error:
            needed = "name a corpus in Megatron's indexed form, PREFIX.bin and PREFIX.idx"
            raise ValueError(must(self.key, needed, f"{self.prefix}: {path}: {error.strerror}")) from error

    def _read_header(self, size: int) -> tuple[np.dtype[Any], int, int]:
        """Return (dtype of .bin, N, M) of an .idx of `size` bytes."""
        with open(self.files[1], "rb") as file:
            head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise self._idx_error(f"begin with {MAGIC!r}", repr(head[: len(MAGIC)]))
        if len(head) < HEADER.size:
            raise self._idx_error(f"have a header of {HEADER.size} bytes", f"{size} bytes")
        _, version, code, sequences, borders = HEADER.unpack(head)
        if version != VERSION:
            raise self._idx_error(f"have version {VERSION}", version)
        integers = {number: kind for number, kind in DTYPES.items() if kind.kind in "iu"}
        if code not in integers:
            known = ", ".join(f"{number} ({kind.name})" for number, kind in integers.items())
            raise self._idx_error(f"have a dtype code of {known}", code)
        needed = _offsets(sequences, borders)[-1]
        if size not in (needed, needed + sequences):  # with modes
            counts = f"the {sequences} sequences and {borders} document indices it names"
            raise self._idx_error(f"have {needed} bytes, for {counts}", f"{size} bytes")
        return integers[code], sequences, borders

    def _check_sequences(self, block: int) -> None:
        """Check that lengths are at least 0, and pointers earlier lengths' ends."""
        begin = 0
        for first in range(0, self.num_sequences, block):  # copies, because the file's own arrays are not aligned
            lengths, pointers = (array[first : first + block].copy() for array in (self.lengths, self.pointers))
            if lengths.min() < 0:
                at = int((lengths < 0).argmax())
                raise self._idx_error(f"have lengths of at least 0; sequence {first + at}", lengths[at])
            expected, begin = _pointers(lengths, self.dtype.itemsize, begin)
            if not np.array_equal(pointers, expected):
                at = int((pointers != expected).argmax())
                where = f"for sequence {first + at}, where the lengths before it end"
                raise self._idx_error(f"have pointer {expected[at]} {where}", pointers[at])

    def _longest_document(self, borders: NDArray[np.int64], block: int) -> int:
        """Return the most sequences in a document; check the document indices."""
        requirement = f"have document indices that go from 0 to its {self.num_sequences} sequences and never fall"
        if len(borders) == 0:
            raise self._idx_error(requirement, "none")
        before = longest = 0
        for first in range(0, len(borders), block):
            part = borders[first : first + block].copy()
            steps = np.diff(part, prepend=before)
            wrong = (steps < 0) | (part > self.num_sequences)
            wrong[0] |= first == 0 and part[0] != 0
            wrong[-1] |= first + len(part) == len(borders) and part[-1] != self.num_sequences
            if wrong.any():
                at = int(wrong.argmax())
                raise self._idx_error(requirement, f"{part[at]} at place {first + at}")
            before, longest = int(part[-1]), max(longest, int(steps.max()))
        return longest

    def _idx_error(self, requirement: str, found: object) -> ValueError:
        return ValueError(must(self.key, f"{requirement} in {self.files[1]}", found))


class IndexPart(TokenIndex):
    """Tokens first..last-1 of a one-document index, as a document of its own."""

    def __init__(self, prefix: str | Path, key: str, first: int, last: int) -> None:
        super().__init__(prefix, key, check=False)  # the whole index was checked
        assert self.num_documents == 1, "only a single document is cut"
        self.first_token = first
        self.pointers = self.pointers[:1] + first * self.dtype.itemsize
        self.lengths = np.array([last - first], np.int32 if last - first <= MAX_LENGTH else np.int64)
        self.num_tokens = last - first

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexPart, (self.prefix, self.key, self.first_token, self.first_token + self.num_tokens)

    @cached_property
    def digest(self) -> str:
        """A digest (16 hex digits) of the index's digest and the part."""
        return fingerprint([super().digest, self.first_token, self.num_tokens], digits=16)

    def _first_token(self, document: int) -> int:
        return self.first_token + document * self.num_tokens


def _offsets(sequences: int, borders: int) -> tuple[int, int, int, int]:
    """Return an .idx's offsets: lengths, pointers, document indices, end without modes."""
    pointers_at = HEADER.size + 4 * sequences
    borders_at = pointers_at + 8 * sequences
    return HEADER.size, pointers_at, borders_at, borders_at + 8 * borders


def _pointers(lengths: NDArray[Any], itemsize: int, begin: int) -> tuple[NDArray[np.int64], int]:
    """Return (sequences' first bytes, the last one's end), from byte `begin` on."""
    sizes = lengths.astype(np.int64) * itemsize
    ends = np.cumsum(sizes) + begin
    return ends - sizes, int(ends[-1])


def _mapped(path: str, dtype: Any) -> NDArray[Any]:
    """Map a whole file read-only as a plain array."""
    if os.path.getsize(path) == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)  # slices of np.memmap cost five times as much
