"""The choice of documents to show."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import Options, UsageError, choice_problem, must, option, options_of
from verl_ext.tools.show.documents import ShownDocuments


@dataclass(frozen=True)
class SelectOptions(Options):
    """Options that select documents; a document must meet all given."""

    row: int | None = option(None, "the document of this row, counted from 0 over all paths", least=0)
    category: str | None = option(None, "only documents of this category")
    no_target: bool = option(False, "true: documents without a target")
    cut: bool = option(False, "true: documents that were cut when they were tokenized")
    matches: str | None = option(None, "documents whose decoded text matches this regular expression")
    longest: bool = option(False, "true: the longest documents first")
    shortest: bool = option(False, "true: the shortest documents first")
    random: int | None = option(None, "documents in a random order, with this seed", least=0)
    documents: int = option(1, "number of documents to show", least=1)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for several orders, and for an invalid regex."""
        orders = [name for name in ("longest", "shortest") if getattr(self, name)]
        orders += ["random"] if self.random is not None else []
        if len(orders) > 1:
            yield must("longest, shortest and random", "name one order", ", ".join(orders))
        if self.matches is not None:
            try:
                re.compile(self.matches)
            except re.error as error:
                yield must("matches", "be a regular expression", f"{self.matches}: {error}")


_SELECTORS = [name for name in options_of(SelectOptions) if name != "documents"]


def selected(documents: ShownDocuments, options: SelectOptions, decode: Callable[[list[int]], str]) -> Iterator[int]:
    """Yield the selected rows in order, `matches` decoding one by one.

    Raises:
        UsageError: the row is past the end, the data lacks the category, or no document is selected.
    """
    if options.row is not None and options.row >= len(documents):
        raise UsageError(must("row", f"be below {len(documents):,}, the documents of paths", options.row))
    rows = np.arange(len(documents)) if options.row is None else np.array([options.row])
    rows = rows[_wanted(documents, options)[rows]]
    lengths = documents.lengths[rows].astype(np.int64)
    if options.longest or options.shortest:
        rows = rows[np.argsort(-lengths if options.longest else lengths, kind="stable")]
    elif options.random is not None:
        rows = np.random.default_rng(options.random).permutation(rows)
    pattern = None if options.matches is None else re.compile(options.matches)
    shown = 0
    for row in rows.tolist():
        if pattern is not None and not pattern.search(decode(documents.row(row).input_ids.tolist())):
            continue
        yield row
        shown += 1
        if shown == options.documents:
            return
    if not shown:
        asked = ", ".join(f"{name}={options.changed()[name]}" for name in _SELECTORS if name in options.changed())
        raise UsageError(must("a document", "match the selection", f"none with {asked}"))


def _wanted(documents: ShownDocuments, options: SelectOptions) -> NDArray[np.bool_]:
    wanted = np.ones(len(documents), bool)
    if options.category is not None:
        numbers = {name: number for number, name in documents.names.items()}
        if problem := choice_problem("category", options.category, numbers):
            raise UsageError(problem)
        wanted &= documents.categories == numbers[options.category]
    if options.no_target:
        wanted &= documents.targets == 0
    if options.cut:
        wanted &= documents.full_lengths > documents.lengths
    return wanted
