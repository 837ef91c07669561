"""The items of a run, documents or instructions read from files, and the random numbers for each item.

Random numbers follow from the seed and the name of the item. So the choice of items and the questions about them
depend neither on the order nor on the number of concurrent requests.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from verl_ext.text.json_records import BadRecord, check_characters, read_record
from verl_ext.text.readers import TextFile, read_chunks
from verl_ext.text.sources import SourceFile
from verl_ext.values import DataError


@dataclass(frozen=True)
class Item:
    """A document or an instruction. tokens: the length of the text, 0 if not counted. kind: its class or source."""

    name: str
    source: str
    text: str
    tokens: int = 0
    kind: str = ""


def drawn(seed: int, *facts: str) -> int:
    """Return a 64-bit number that follows from the seed and the facts alone."""
    digest = blake2b("\0".join((str(seed), *facts)).encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def read_items(
    files: Iterable[SourceFile],
    sources: Sequence[str],
    text_key: str,
    class_field: str | None,
    left_out: Counter[str],
    skip_bad: bool,
) -> Iterator[Item]:
    """Yield the items of the files in order; `left_out` counts bad records.

    class_field: the field of a record with its class; None: its source is its class. Raises `DataError` at the first
    bad record unless `skip_bad`.
    """
    times: Counter[str] = Counter()
    for file in files:
        source = sources[file.category_id - 1]
        name = f"{source}/{Path(file.path).name}"
        times[name] += 1
        if times[name] > 1:  # folders may move and are not in the name, so files in two folders can have one name
            name = f"{name}#{times[name]}"
        for chunk in read_chunks(file):
            for number, raw in chunk.records:
                try:
                    record = read_record(raw)
                    text = record.get(text_key)
                    if isinstance(text, TextFile):
                        text = "".join(text.blocks())
                    if not isinstance(text, str) or not text.strip():
                        got = "nothing" if text is None or text == "" else type(text).__name__
                        raise BadRecord("no_text", f"text_key={text_key} must name a field with a text; got {got}")
                    check_characters(text)
                    kind = source if class_field is None else record.get(class_field)
                    if not isinstance(kind, str) or not kind:
                        raise BadRecord("no_class", f"class_field={class_field} must name a field with a text")
                except BadRecord as error:
                    if not skip_bad:
                        raise DataError(f"{chunk.place(number)}: {error}") from error
                    left_out[error.reason] += 1
                    continue
                yield Item(f"{name}:{number}", source, text.strip(), kind=kind)
