"""The documents of tokenized folders or Megatron corpora.

row        0   1   2  |  3   4         numbers continue over all folders
folder     train      |  papers
lengths    812 90  17 |  5000 64       one number per document; targets, full_lengths and categories alike
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.stream.megatron.index import SUFFIXES, TokenIndex
from verl_ext.data.tokenized.arrow import TokenizedData, fitting
from verl_ext.data.tokenized.beginnings import SHARE_LEAST, find_beginnings
from verl_ext.data.tokenized.facts import check_answers, main_categories
from verl_ext.data.tokenized.units import UnitRows
from verl_ext.files import REPORT
from verl_ext.options import DataError, UsageError, must
from verl_ext.packing import MOST_TOKENS, cut_spans
from verl_ext.packing.plan import offsets_of
from verl_ext.text.arrow_folder import count_targets
from verl_ext.text.read.sources import absolute_path
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer

BLOCK_TOKENS = 1 << 22
Report = dict[str, Any]


class Row(NamedTuple):
    """A document: input_ids integer[T], loss_mask bool[T], weights[T] of targets or None.

    The first token is never a target.
    """

    input_ids: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    weights: NDArray[Any] | None


class Block(NamedTuple):
    """Documents first..first+len(lengths)-1, their tokens one after the other."""

    first: int
    lengths: NDArray[np.int64]
    input_ids: NDArray[Any]
    loss_mask: NDArray[Any]  # 1 for targets; a document's first token may have a 1 but is never a target


class ShownDocuments:
    """Documents of several paths of one kind, numbered one after the other.

    Attributes:
        paths: the absolute paths.
        first_rows: int64[F+1], the first row of every path, and the number of rows.
        lengths, targets, full_lengths, categories: integer[D]; full_lengths are those before a cut, -1 if unknown.
        names: the name of each category number.
        reports: the `report.json` of each path, {} without one.
        all_targets: whether every token after a document's first is a target, as in text for pretraining.
        units: the preferences among the rows; None if no document is an answer.
    """

    paths: tuple[str, ...]
    first_rows: NDArray[np.int64]
    lengths: NDArray[Any]
    targets: NDArray[Any]
    full_lengths: NDArray[Any]
    categories: NDArray[Any]
    names: dict[int, str]
    reports: tuple[Report, ...]
    all_targets = False
    units: UnitRows | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, row: int) -> tuple[str, int]:
        """Return the path that holds a row, and its number there."""
        folder = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return self.paths[folder], row - int(self.first_rows[folder])

    def row(self, row: int) -> Row:
        """Read one document."""
        raise NotImplementedError

    def blocks(self) -> Iterator[Block]:
        """Read all documents that have tokens, in order."""
        raise NotImplementedError

    def shared_tokens(self) -> NDArray[np.int64] | None:
        """Return int64[D], the tokens that data.share_prefixes does not compute again.

        It reads what documents share. None if packs of such documents never share.
        """
        return None

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of the reports; None if they name none or several."""
        named = {report.get("tokenizer") for report in self.reports} - {None}
        return named.pop() if len(named) == 1 else None

    @property
    def model(self) -> ModelOptions | None:
        """That tokenizer with its new tokens; None without one."""
        named = [report for report in self.reports if report.get("tokenizer")]
        return model_of(named[0]) if self.tokenizer else None


class FolderDocuments(ShownDocuments):
    """The documents of tokenized folders; missing counts are read from tokens."""

    def __init__(self, folders: Sequence[str], key: str) -> None:
        self.data = data = TokenizedData([absolute_path(folder) for folder in folders], key, with_answers=True)
        self.units = data.units
        self.paths, self.first_rows, self.lengths = data.folders, data.first_rows(), data.lengths
        self.names = data.category_names
        self.reports = tuple(_read_report(Path(folder)) for folder in data.folders)
        columns = data.document_columns
        if columns is not None and columns.num_targets.min() >= 0:
            self.targets, self.full_lengths, self.categories = (
                columns.num_targets,
                columns.full_length,
                columns.category,
            )
            return
        self.targets, self.categories = (np.zeros(len(data), np.int32) for _ in range(2))
        self.full_lengths = np.full(len(data), -1) if columns is None else columns.full_length
        for begin, end in data.blocks(0, len(data), BLOCK_TOKENS):
            values, length = data.block(begin, end), data.lengths[begin:end].astype(np.int64)
            has_tokens = length > 0
            starts = offsets_of(length)[:-1][has_tokens]
            if not len(starts):
                continue
            rows = begin + np.flatnonzero(has_tokens)
            self.targets[rows] = count_targets(values["loss_mask"] != 0, starts)
            self.categories[rows] = main_categories(values["category_ids"], starts)
        check_answers(data, self.targets > 0)

    def row(self, row: int) -> Row:
        """Read one document."""
        at, length = np.array([row]), np.array([int(self.lengths[row])])
        columns = {
            name: np.empty(length[0], np.float32 if name == "loss_weight" else np.int64) for name in self.data.columns
        }
        self.data.gather(at, np.zeros(1, np.int64), length, columns)
        mask = columns["loss_mask"] != 0
        mask[:1] = False
        return Row(columns["input_ids"], mask, columns.get("loss_weight"))

    def shared_tokens(self) -> NDArray[np.int64] | None:
        """Return int64[D], the tokens that data.share_prefixes does not compute again."""
        if not self.lengths.any():
            return None
        spans = cut_spans(self.lengths, MOST_TOKENS, "split")  # whole documents
        kin = find_beginnings(self.data, spans, SHARE_LEAST)
        shared = np.zeros(len(self), np.int64)
        shared[spans.row[kin.documents]] = np.maximum(kin.shared - 1, 0)
        return shared

    def blocks(self) -> Iterator[Block]:
        """Read all documents that have tokens, in order."""
        for begin, end in self.data.blocks(0, len(self), BLOCK_TOKENS):
            length = self.lengths[begin:end].astype(np.int64)
            ids, mask = (self.data.columns[name].block(begin, end) for name in ("input_ids", "loss_mask"))
            yield Block(begin, length, ids, mask)


class IndexDocuments(ShownDocuments):
    """The documents of Megatron corpora, each of which is a category.

    All tokens of a document but the first are targets, or those of PREFIX_mask, which `verl-ext tokenize` writes.
    """

    def __init__(self, prefixes: Sequence[str], key: str) -> None:
        self.indices = [TokenIndex(absolute_path(prefix), key) for prefix in prefixes]
        self.paths = tuple(index.prefix for index in self.indices)
        self.first_rows = offsets_of(np.array([index.num_documents for index in self.indices]))
        self.lengths = self.full_lengths = np.concatenate([index.lengths for index in self.indices])
        self.targets = np.maximum(self.lengths - 1, 0)
        self.categories = np.repeat(np.arange(1, len(prefixes) + 1), np.diff(self.first_rows))
        short = [Path(prefix).name for prefix in self.paths]
        self.names = {
            number: name if short.count(name) == 1 else prefix
            for number, (name, prefix) in enumerate(zip(short, self.paths, strict=True), start=1)
        }
        if len(set(self.paths)) < len(self.paths):
            raise ValueError(must(key, "name each corpus once", ", ".join(prefixes)))
        self.reports = tuple(map(_report_of_corpus, self.paths))
        # Targets are counted without a pass over the tokens.
        self.masks = [_mask_of(index, key) for index in self.indices]
        self.all_targets = not any(self.masks)
        for first, mask in zip(self.first_rows.tolist(), self.masks, strict=False):
            if mask is None:
                continue
            for begin, end in fitting(0, mask.lengths, BLOCK_TOKENS):
                rows = begin + np.flatnonzero(mask.lengths[begin:end])
                if len(rows):
                    is_target = mask.gather(rows, np.zeros(len(rows), np.int64), mask.lengths[rows]) != 0
                    self.targets[first + rows] = count_targets(is_target, offsets_of(mask.lengths[rows])[:-1])

    def row(self, row: int) -> Row:
        """Read one document."""
        number = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        (index, mask), at = (self.indices[number], self.masks[number]), row - int(self.first_rows[number])
        ids = index.tokens(at).astype(np.int64)
        is_target = np.ones(len(ids), bool) if mask is None else mask.tokens(at) != 0
        return Row(ids, is_target & (np.arange(len(ids)) > 0), None)

    def blocks(self) -> Iterator[Block]:
        """Read all documents, in order."""
        for first, index, mask in zip(self.first_rows.tolist(), self.indices, self.masks, strict=False):
            for begin, end in fitting(0, index.lengths, BLOCK_TOKENS):
                rows = np.arange(begin, end)
                length = index.lengths[begin:end].astype(np.int64)
                ids, *of_mask = (
                    each.gather(rows, np.zeros(len(rows), np.int64), length) for each in (index, mask) if each
                )
                yield Block(first + begin, length, ids, of_mask[0] if of_mask else np.ones(len(ids), np.int8))


def _mask_of(index: TokenIndex, key: str) -> TokenIndex | None:
    """Return the loss masks of a corpus' documents; None without any."""
    if not os.path.exists(f"{index.prefix}_mask.idx"):
        return None
    mask = TokenIndex(f"{index.prefix}_mask", key)
    if not np.array_equal(mask.lengths, index.lengths):
        raise ValueError(must(key, "have as many masks as tokens", f"other lengths in {mask.prefix}"))
    return mask


def open_documents(paths: Sequence[str], key: str = "paths") -> ShownDocuments:
    """Open tokenized folders or Megatron corpora.

    Raises:
        UsageError: the paths are of both kinds.
        DataError: a folder or corpus cannot be read.
    """
    kinds = {p: not os.path.isdir(p) and (p.endswith(SUFFIXES) or os.path.exists(f"{p}.idx")) for p in paths}
    if len(set(kinds.values())) != 1:
        raise UsageError(must(key, "be of one kind, tokenized folders or Megatron's corpora", ", ".join(paths)))
    try:
        return (IndexDocuments if kinds[paths[0]] else FolderDocuments)(paths, key)
    except (ValueError, OSError) as error:
        raise DataError(str(error)) from error


def model_of(report: Report) -> ModelOptions:
    """Return a report's tokenizer with its new tokens."""
    own = report.get("options", {}).get("model") or {}
    tokens = {name: own[name] for name in ("new_tokens", "new_special_tokens") if name in own}
    return ModelOptions.read({"path": report["tokenizer"], **tokens})


def tokenizer_of(model: ModelOptions, of_data: ModelOptions | None, is_needed: bool = False) -> Any:
    """Return the user's tokenizer, else the data's; None without both.

    is_needed: raise UsageError instead of returning None.
    """
    chosen = model if model.tokenizer or of_data is None else of_data
    if not chosen.tokenizer and not is_needed:
        return None
    if not chosen.tokenizer:
        raise UsageError(must("model.path", "name the tokenizer of the data, whose report.json names none", None))
    trusted = model.trust_remote_code
    return load_tokenizer(replace(chosen, path=chosen.tokenizer, tokenizer_path=None, trust_remote_code=trusted))


def _report_of_corpus(prefix: str) -> Report:
    """Return the part of a folder's report that is of one corpus, {} without it."""
    path = Path(prefix)
    report = _read_report(path.parent)
    counts = {**(report.get("sources") or {}), **(report.get("categories") or {})}  # the latter of `tokenize`
    if path.name not in counts:
        return {}
    kinds = report.get("target_kinds") or {}
    of_corpus = {
        "total": counts[path.name],
        "target_kinds": {path.name: kinds[path.name]} if path.name in kinds else {},
    }
    return {**report, **of_corpus}


def _read_report(folder: Path) -> Report:
    """Return a folder's report, or {}; raise ValueError if it is malformed."""
    path = folder / REPORT
    if not path.is_file():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict):
        raise ValueError(must(f"{path}", "be the report of `verl-ext tokenize`, a JSON object", "another file"))
    if report.get("working_folder") and report.get("tokenizer"):
        tokenizer = os.path.join(report["working_folder"], report["tokenizer"])
        report["tokenizer"] = tokenizer if os.path.isdir(tokenizer) else report["tokenizer"]  # else a Hub name
    return report
