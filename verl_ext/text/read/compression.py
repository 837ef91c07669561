"""Decompressed streams of whole files, of all members or frames."""

import gzip
import io
import lzma
from collections.abc import Callable
from typing import Any, BinaryIO

_BLOCK = 1 << 16  # bytes of a compressed file read at once


class _XzStreams(io.RawIOBase):
    """An xz file's streams; LZMAFile takes a damaged one for the end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._stream = raw, lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            compressed = b""
            if self._stream.eof:
                compressed = self._stream.unused_data.lstrip(b"\0")  # zeros between streams are padding
                while not compressed:
                    if not (block := self._raw.read(_BLOCK)):
                        return 0
                    compressed = block.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._stream.needs_input and not (compressed := self._raw.read(_BLOCK)):
                raise EOFError("it ends before its end-of-stream marker")
            data = self._stream.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _arrow_stream(raw: BinaryIO, codec: str) -> BinaryIO:
    import pyarrow as pa  # heavy; unlike Python's readers it refuses a truncated file and a damaged later member

    stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec)
    return io.BufferedReader(stream, _BLOCK)


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".bz2": lambda raw: _arrow_stream(raw, "bz2"),
    ".xz": lambda raw: io.BufferedReader(_XzStreams(raw), _BLOCK),
    ".zst": lambda raw: _arrow_stream(raw, "zstd"),
}
