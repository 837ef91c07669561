"""A text file, whose text is one record."""

import codecs
import io
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from verl_ext.text.read.bad_record import BadRecord, check_length
from verl_ext.text.read.sources import encoding_problem, open_source

BLOCK = 1 << 20  # bytes that are read at once


@dataclass(frozen=True)
class TextFile:
    """A text file's record; if long, it is read by the process that tokenizes it."""

    path: str
    text: str | None = None

    def read(self) -> str:
        """Return the text. Raises `BadRecord` if it is too long to be tokenized, and as `text_blocks`."""
        return self.text if self.text is not None else "".join(self._blocks())

    def _blocks(self) -> Iterator[str]:
        length = 0
        for text, _ in text_blocks(self.path):
            check_length(length := length + len(text))
            yield text


def text_blocks(path: str) -> Generator[tuple[str, int], None, None]:
    """Yield (block, bytes of the file) for a text file.

    The line ends are those of Python's text files. A block ends with a line if no line is longer than a block. Raises
    `BadRecord` if the text is not UTF-8 or has a NUL byte, and `DataError` if the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    position = done = 0  # bytes of the text, bytes of the file
    with open_source(path) as file:
        while True:
            data = file.stream.read(BLOCK)
            data += file.stream.readline(BLOCK)
            if not position and (problem := encoding_problem(data[:4])):
                raise BadRecord("not_utf8", f"text must be UTF-8; {problem}")
            if (nul := data.find(b"\0")) >= 0:
                raise BadRecord("nul_byte", f"text must have no NUL bytes; byte {position + nul + 1} is one")
            begun = len(decoder.getstate()[0])  # bytes of a character that the last block cut in two
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                byte = position - begun + error.start + 1
                raise BadRecord("not_utf8", f"text must be UTF-8; byte {byte} is not") from error
            if text := lines.decode(text if position else text.removeprefix("\ufeff"), final=not data):
                yield text, file.position - done
                done = file.position
            if not data:
                file.check_end()
                return
            position += len(data)
