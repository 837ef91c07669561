"""The search for near-duplicates, and for passages of given files."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from verl_ext.cache import fingerprint
from verl_ext.options import DataError, UsageError, first_line
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import find_source_files

NGRAM = 13  # words of a passage that two texts hardly share by chance (GPT-3, arXiv 2005.14165, appendix C)
SHINGLE = 5  # words of a run; the similarity of two texts counts the runs that they share
PERMUTATIONS = 128
# A word, or one character of a script that is written without spaces.
_WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def runs_of_words(text: str, length: int) -> Iterator[str]:
    """Yield every run of `length` lower-case words, or a shorter text."""
    words = _WORD.findall(text.lower())
    for start in range(max(len(words) - length + 1, 1)):
        yield " ".join(words[start : start + length])


class NearDuplicates:
    """A finder of texts by Jaccard similarity of 5-word runs.

    A text repeats an earlier one from the similarity `threshold` on.
    """

    def __init__(self, threshold: float) -> None:
        try:
            from datasketch import MinHashLSH  # imported here because it takes half a second
        except ImportError as error:
            needed = "needs a package (pip install 'verl-ext[synth]'), or null"
            raise UsageError(f"near_duplicates {needed}: {first_line(error)}") from error
        self._index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._threshold = threshold
        self._hashes: dict[str, object] = {}

    def repeats(self, name: str, text: str) -> str | None:
        """Return the name of the earlier text repeated; else remember this."""
        from datasketch import MinHash

        found = MinHash(num_perm=PERMUTATIONS)
        found.update_batch([run.encode() for run in set(runs_of_words(text, SHINGLE))])
        for other in sorted(self._index.query(found)):
            if found.jaccard(self._hashes[other]) >= self._threshold:
                return other
        self._index.insert(name, found)
        self._hashes[name] = found
        return None


class Passages:
    """The runs of 13 words of texts not to train on."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs = {fingerprint(run, digits=16) for text in texts for run in runs_of_words(text, NGRAM)}

    def found_in(self, text: str) -> str | None:
        """Return the text's first run that a passage holds, or None."""
        if not self._runs:
            return None
        return next((run for run in runs_of_words(text, NGRAM) if fingerprint(run, digits=16) in self._runs), None)


def benchmark_texts(paths: Sequence[str]) -> Iterator[str]:
    """Yield every text in the records of files."""
    for file in find_source_files({"decontaminate": list(paths)}, "decontaminate") if paths else ():
        for chunk in read_chunks(file):
            for place, raw in chunk.records:
                try:
                    yield from _texts_in(read_record(raw))
                except BadRecord as error:
                    raise DataError(f"{place}: {error}") from error


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(child)
