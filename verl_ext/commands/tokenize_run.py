"""The closing table and report.json: what was written, and everything that was not, by category and source."""

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.commands.tokenize import REPORT, TokenizeConfig
from verl_ext.files import OutputFolder
from verl_ext.progress import Progress, aligned
from verl_ext.text.counts import Counts, Run
from verl_ext.text.documents import Documents
from verl_ext.text.readers import CHUNK_BYTES, Chunk, read_chunks
from verl_ext.text.sources import SourceFile, find_source_files, total_bytes
from verl_ext.text.tokenized import DatasetWriter
from verl_ext.text.tokenizer import tokenizer_module
from verl_ext.text.workers import ChunkTokenizer, available_cpus, ordered_results
from verl_ext.values import DataError, one_line

# TYPE_CHECKING merged


# Options that change neither tokens nor counts: left out, so that equal data has equal reports.
NOT_REPORTED = ("num_workers", "overwrite", "preview")
MAX_CATEGORIES = 1000
NAMED = 12  # of fields and the like, in a line of the closing table
_TEXT = ("category", "over max_tokens", "encoded as text", "bad record", "first")  # columns to the left


class Report:
    """One tally per source, in the order of `sources`, and one per category: the source, unless records give theirs.

    `numbers` are those of the categories, from 1: in the order of `sources`, or of the first document of each.
    """

    def __init__(self, config: TokenizeConfig) -> None:
        self.config = config
        self.tallies = {name: Counts() for name in config.sources}
        self.categories = {} if config.category_field else self.tallies
        self.numbers = {} if config.category_field else {name: i for i, name in enumerate(config.sources, start=1)}
        self.read: Counter[str] = Counter()  # records by source, those that `sample` left out included
        self.previews: dict[str, list[list[Run]]] = {name: [] for name in config.sources}

    def add(self, result: Documents) -> None:
        """Count a chunk; where records give their category, number those of its documents.

        Raises `DataError` for more than MAX_CATEGORIES of them.
        """
        name = list(self.tallies)[result.category_id - 1]
        self.tallies[name].add(result.counts)
        self.previews[name] += result.preview[: self.config.preview - len(self.previews[name])]
        for category, tally in result.category_counts.items():
            self.categories.setdefault(category, Counts()).add(tally)
        if len(self.categories) > MAX_CATEGORIES and self.config.category_field:
            raise DataError(
                f"category_field={self.config.category_field} must give at most {MAX_CATEGORIES:,} categories;"
                f" got more, such as {', '.join(list(self.categories)[-3:])}"
            )
        if result.category_names is not None:
            numbers = [self.numbers.setdefault(category, len(self.numbers) + 1) for category in result.category_names]
            result.category_ids = np.array(numbers, dtype=np.int32)

    @property
    def total(self) -> Counts:
        """All sources together."""
        total = Counts()
        for tally in self.tallies.values():
            total.add(tally)
        return total

    def as_dict(self) -> dict[str, Any]:
        """The content of report.json; it names no time, so that equal runs give equal files."""
        options = {key: value for key, value in asdict(self.config).items() if key not in NOT_REPORTED}
        total = self.total.as_dict()
        del total["examples"]
        categories = {name: tally.as_dict() for name, tally in self.categories.items()}
        sources = {name: self._source(name) for name in self.tallies}
        return {
            "tokenizer": self.config.model.tokenizer,
            "options": options,
            "categories": categories,
            "sources": sources,
            "total": total,
        }

    def _source(self, name: str) -> dict[str, Any]:
        """What report.json has of a source beside its category's counts, or with counts where records give that."""
        counts = self.tallies[name].as_dict() if self.config.category_field else {}
        read = {"records_read": self.read[name], "records_sampled": self.tallies[name].records}
        without = {"records_without_category": self.tallies[name].uncategorised} if self.config.category_field else {}
        return {**read, **without, **counts, "preview": self.previews[name]}

    def write(self, folder: Path) -> None:
        """Write report.json and categories.json into the dataset's folder."""
        names = {str(number): name for name, number in self.numbers.items()}
        for file, content in ((REPORT, self.as_dict()), ("categories.json", names)):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / file).write_text(text, encoding="utf-8")

    def table(self) -> str:
        """The closing table, and one each of documents over max_tokens, special tokens in text and bad records, where
        there are any; then a line for everything else that a source's records were found to have."""
        rows = [_row(name, tally) for name, tally in self.categories.items()]
        if len(rows) > 1:
            rows.append(_row("all", self.total))
        parts = [aligned(rows, _TEXT)]
        cut = [row for name, tally in self.categories.items() for row in _cut_rows(name, tally)]
        if cut:
            parts.append(aligned(cut, _TEXT))
        if special := special_token_rows("category", self.categories):
            parts.append(aligned(special, _TEXT))
        bad = [
            {"category": name, "bad record": reason, "records": f"{count:,}", "first": tally.examples[reason][0]}
            for name, tally in self.categories.items()
            for reason, count in sorted(tally.bad.items())
        ]
        if bad:
            parts.append(aligned(bad, _TEXT))
        if notes := [f"{name}: {note}" for name, tally in self.tallies.items() for note in self._notes(name, tally)]:
            parts.append("\n".join(notes))
        return "\n\n".join(parts)

    def _notes(self, name: str, tally: Counts) -> Iterator[str]:
        """One line for each thing that a reader should know of a source."""
        if self.read[name] > tally.records:
            yield f"sampled: {tally.records:,} of {self.read[name]:,} records"
        if tally.uncategorised:
            field = self.config.category_field
            yield f"no {field}: {tally.uncategorised:,} records, which have the source's name as their category"
        if ends := {text: count for text, count in tally.end_of_turn.most_common() if text}:
            yield f"end of turn: {_counted(ends, 'turns')}"
        if tally.text_ends:
            told = _counted(tally.text_ends, "turns")
            yield f"no token of the tokenizer, but learnt as text, is the end of turn {told}"
        if open_turns := tally.end_of_turn[""]:
            yield f"warning: {open_turns:,} turns have no end-of-turn token: the model does not learn to stop there"
        if tally.border_tokens:
            yield f"{tally.border_tokens:,} tokens at borders of turns hold text of the template too, and are learnt"
        if tally.unprinted:
            yield f"not printed by the chat template: {_counted(tally.unprinted, 'records')}"
        if tally.dropped_media:
            yield f"left out: {_counted(tally.dropped_media, '')}"
        if tally.unused_fields:
            yield f"fields not used: {_counted(tally.unused_fields, '')}"


def _counted(counts: Mapping[str, int], what: str) -> str:
    """`a (3 turns), b (1 turns)`: the most frequent."""
    unit = f" {what}" if what else ""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:NAMED]
    told = [f"{one_line(name)} ({count:,}{unit})" for name, count in most]
    return ", ".join(told) + (f" and {len(counts) - NAMED} more" if len(counts) > NAMED else "")


def _row(name: str, tally: Counts) -> dict[str, str]:
    row: dict[str, str | int] = {
        "category": name,
        "records": tally.records,
        "bad": tally.bad.total(),
        "documents": tally.documents,
        "tokens": tally.tokens,
        "targets": tally.target_tokens,
        "share": f"{tally.target_share:.1%}",
        "median": tally.length_quantile(0.5),
        "p95": tally.length_quantile(0.95),
        "max": max(tally.lengths, default=0),
    }
    return {key: f"{value:,}" if isinstance(value, int) else value for key, value in row.items()}


def special_token_rows(what: str, tallies: Mapping[str, Counts]) -> list[dict[str, str]]:
    """A row for each category (`what` it is called) whose texts hold names of special tokens."""
    return [
        {
            what: name,
            "encoded as text": "special tokens",
            "records": f"{tally.special_tokens['records']:,}",
            "occurrences": f"{tally.special_tokens['occurrences']:,}",
        }
        for name, tally in tallies.items()
        if tally.special_tokens
    ]


def _cut_rows(name: str, tally: Counts) -> Iterator[dict[str, str]]:
    """A row for each thing that was done to documents over max_tokens: tokens are those removed (of `split`, cut)."""
    over = tally.over_length
    before = tally.tokens + over["dropped_tokens"] + over["truncated_tokens"]
    for reason in ("dropped", "truncated", "split"):
        if over[f"{reason}_documents"]:
            tokens = over[f"{reason}_tokens"]
            yield {
                "category": name,
                "over max_tokens": reason,
                "documents": f"{over[f'{reason}_documents']:,}",
                "tokens": f"{tokens:,}",
                "share": f"{tokens / before:.2%}",
                "targets lost": "all" if reason == "dropped" else f"{over[f'{reason}_targets_lost']:,}",
                "last target lost": f"{over[f'{reason}_last_target_lost']:,}" if reason == "truncated" else "–",
            }


BITS = 128


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


def tokenize(config: TokenizeConfig) -> Report:
    """Tokenise `config.sources` into a dataset at `config.output_dir`; return what was counted.

    Raises `UsageError` and `DataError`, each one line, and leaves nothing at `output_dir` then.
    """
    sources = find_source_files(config.source_patterns())
    report = Report(config)
    chunks = SampledSources(sources, list(config.sources), config.sample, config.seed)
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        writer = DatasetWriter(folder.path)
        try:
            _write_documents(config, chunks, writer, report)
            _refuse_nothing(report)
            report.write(folder.path)
            writer.close()
        finally:
            writer.abandon()
        folder.publish()
    return report


def _write_documents(config: TokenizeConfig, chunks: SampledSources, writer: DatasetWriter, report: Report) -> None:
    num_bytes = total_bytes(chunks.files)
    num_workers = config.num_workers or available_cpus()
    if num_bytes is not None:
        num_workers = min(num_workers, max(math.ceil(num_bytes / CHUNK_BYTES), 1))
    results = ordered_results(
        partial(ChunkTokenizer, config),
        ChunkTokenizer.tokenise,
        chunks,
        num_workers,
        name="tokenise",
        preload=[tokenizer_module()],
    )
    with Progress(num_bytes) as progress:
        for result in results:
            report.add(result)
            writer.add(result)
            progress.add(result)
    report.read.update(chunks.read)


def _refuse_nothing(report: Report) -> None:
    for name, tally in report.tallies.items():
        if not tally.records and report.read[name]:
            raise DataError(
                f"sample must leave a record of sources.{name}, which has {report.read[name]}; it left none"
            )
        if not tally.records:
            raise DataError(f"sources.{name} must hold at least one record; got none in {report.config.sources[name]}")
    if not report.total.documents:
        raise DataError(f"no record could be used, so that nothing was written:\n{report.table()}")
