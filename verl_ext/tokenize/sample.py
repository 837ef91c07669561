"""Which records of a source are tokenised where `sample` asks for a part of them.

Every record draws a 128-bit number from `seed`, its source's name, its file's place among the source's files and its
own place in the file. A fraction f keeps the records whose number is below f · 2^128, a count n those with the n lowest
numbers (a bottom-n sample: without replacement, each set of n records as likely as any other). So the same records
are drawn whatever the number of workers and the other sources, and a larger sample holds the smaller one. A count reads
its source once more.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from verl_ext.tokenize.chunks import Chunk, read_chunks
from verl_ext.tokenize.source_files import SourceFile

BITS = 128
Sample = float | int | Mapping[str, float | int] | None


class SampledSources:
    """The chunks of `files`, each less the records that are not drawn; `read` counts all records by source."""

    def __init__(self, files: Sequence[SourceFile], names: Sequence[str], sample: Any, seed: int) -> None:
        """`names` are the sources', in the order of their numbers, from 1."""
        self.files, self.names, self.sample, self.seed = files, names, sample, seed
        self.read: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Chunk]:
        for number, name in enumerate(self.names, start=1):
            files = [file for file in self.files if file.category_id == number]
            limit = self._limit(name, files)
            for place, file in enumerate(files):
                drawn = self._numbers(name, place)
                for chunk in read_chunks(file):
                    self.read[name] += len(chunk.records)
                    if limit is not None:
                        chunk = replace(chunk, records=[r for r in chunk.records if next(drawn) < limit])
                    yield chunk

    def _limit(self, name: str, files: list[SourceFile]) -> int | None:
        """What a record's number must be below to be kept; None keeps all."""
        share = self.sample.get(name) if isinstance(self.sample, Mapping) else self.sample
        if share is None:
            return None
        if isinstance(share, float):
            return round(share * (1 << BITS))
        lowest = heapq.nsmallest(share, self._all_numbers(name, files))
        return lowest[-1] + 1 if lowest else 0

    def _all_numbers(self, name: str, files: list[SourceFile]) -> Iterator[int]:
        for place, file in enumerate(files):
            drawn = self._numbers(name, place)
            for chunk in read_chunks(file):
                for _ in chunk.records:
                    yield next(drawn)

    def _numbers(self, name: str, place: int) -> Iterator[int]:
        """The numbers that a file's records draw, in order."""
        start = blake2b(f"{self.seed}\0{name}\0{place}".encode(errors="surrogateescape"), digest_size=BITS // 8)
        record = 0
        while True:
            drawn = start.copy()
            drawn.update(record.to_bytes(8, "little"))
            yield int.from_bytes(drawn.digest(), "little")
            record += 1


def sample_problems(sample: Any, sources: Sequence[str]) -> list[str]:
    """One line for every mistake in `sample`."""
    by_key = {f"sample.{name}": share for name, share in sample.items()} if isinstance(sample, dict) else {}
    problems = [
        f"sample.{name} must be one of sources ({', '.join(sources)}); got {name}"
        for name in (sample if isinstance(sample, dict) else ())
        if name not in sources
    ]
    for key, share in by_key.items() if isinstance(sample, dict) else [("sample", sample)]:
        fraction = isinstance(share, float) and 0 < share <= 1
        count = isinstance(share, int) and not isinstance(share, bool) and share >= 1
        if share is not None and not fraction and not count:
            problems.append(
                f"{key} must be a fraction above 0 and at most 1.0, or a number of records from 1; got {share}"
            )
    return problems
