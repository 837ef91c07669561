"""The report.json and the closing tables of the tokenize and index commands."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from verl_ext.commands.preview import Decode, Run, preview_of
from verl_ext.options import DataError, Options, must, one_line, shortened
from verl_ext.redaction import redacted
from verl_ext.tables import Row, aligned
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.chat.parts import KINDS, PROMPT, REASONING, TOOL_CALL
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Documents

# Options that change neither tokens nor counts are left out, so that equal data has equal reports.
NOT_REPORTED = ("backend", "num_workers", "output_dir", "overwrite", "preview")
MAX_CATEGORIES = 1000
NAMED = 12  # names (of fields and the like) in a line of the closing tables
_LEFT = ("source", "category", "encoded as text", "bad record", "first")  # left-aligned columns


class Report:
    """The counts by source and by category.

    The category is the source unless records name one. decode: turns tokens into text, for the first `preview`
    documents of each source. read: the number of records by source, including those that `sample` left out.
    empty_files: the files without a record by source. files_left_out: by source, the files of its folders that are not
    read, by suffix.
    """

    def __init__(self, options: ChatOptions, sources: Sequence[str], preview: int = 0, decode: Decode = str) -> None:
        self.options, self._preview, self._decode = options, preview, decode
        self.sources = {name: Counts() for name in sources}
        self.categories = {} if options.category_field else self.sources
        self.read: Counter[str] = Counter()
        self.empty_files: Counter[str] = Counter()
        self.files_left_out: dict[str, Counter[str]] = {name: Counter() for name in sources}
        self.previews: dict[str, list[list[Run]]] = {name: [] for name in sources}
        self.chat_template: str | None = None
        self.end_of_chat: str | None = None
        self.new_tokens: dict[str, int] = {}  # the ids of model.new_tokens
        self.held_out: Report | None = None  # that of the validation part

    def add(self, documents: Documents) -> None:
        """Count a chunk. Raises `DataError` if there are more than MAX_CATEGORIES categories."""
        name = list(self.sources)[documents.category_id - 1]
        self.sources[name].add(documents.counts, documents.counted())
        self.chat_template = self.chat_template or documents.chat_template
        self.end_of_chat = self.end_of_chat or documents.end_of_chat
        places = zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)
        for start, length in islice(places, self._preview - len(self.previews[name])):
            ids, mask = (values[start : start + length] for values in (documents.input_ids, documents.loss_mask))
            self.previews[name].append(preview_of(ids, mask, self._decode))
        for category, counts in documents.category_counts.items():
            of_category = np.array([own == category for own in documents.category_names or ()], bool)
            self.categories.setdefault(category, Counts()).add(counts, documents.counted(of_category))
        if len(self.categories) > MAX_CATEGORIES and self.options.category_field:
            key, some = f"category_field={self.options.category_field}", ", ".join(list(self.categories)[-3:])
            raise DataError(must(key, f"give at most {MAX_CATEGORIES:,} categories", f"more, such as {some}"))

    def check(self, sources: Mapping[str, Any]) -> None:
        """Raise `DataError` for sources without records, or without any usable record."""
        for name in self.sources:
            if not self._records(name) and (read := self.read[name]):
                raise DataError(f"sample must leave a record of sources.{name}, which has {read}; it left none")
            if not self._records(name):
                raise DataError(must(f"sources.{name}", "hold at least one record", f"none in {sources[name]}"))
        if not self.total.documents and (self.held_out is None or not self.held_out.total.documents):
            raise DataError(f"no record could be used, so that nothing was written:\n{self.table()}")

    def _records(self, source: str) -> int:
        """Return the number of a source's records on both sides."""
        return self.sources[source].records + (self.held_out.sources[source].records if self.held_out else 0)

    def division(self) -> dict[str, Any]:
        """Return both sides' records by category, for the folder above both."""
        assert self.held_out is not None, "only a divided dataset has two parts"
        sides = {"train": self.categories, "val": self.held_out.categories}
        names = dict.fromkeys(name for categories in sides.values() for name in categories)
        counts = {
            name: {side: categories.get(name, Counts()).records for side, categories in sides.items()} for name in names
        }
        return {"options": reported_options(self.options), "records": counts}

    @property
    def total(self) -> Counts:
        """The counts of all sources."""
        return Counts().add(*self.sources.values())

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's content, without times: equal runs write equal files."""
        return {
            "tokenizer": self.options.model.tokenizer,
            "new_tokens": self.new_tokens,
            "options": reported_options(self.options),
            "working_folder": os.getcwd(),
            "chat_template": self.chat_template,
            "end_of_chat": self.end_of_chat,
            "categories": {name: counts.as_dict() for name, counts in self.categories.items()},
            "target_kinds": {
                name: {
                    kind: counts.target_kinds[kind] for kind in (*KINDS, *[PROMPT] * (self.options.prompts == "learn"))
                }
                for name, counts in self.categories.items()
            },
            "sources": {name: self._source(name, counts) for name, counts in self.sources.items()},
            "total": total_entry(self.sources.values(), sum(self.files_left_out.values(), Counter[str]())),
        }

    def _source(self, name: str, counts: Counts) -> dict[str, Any]:
        """Return a source's entry; with counts if categories are not the sources."""
        found: dict[str, Any] = {"records_read": self.read[name], "records_sampled": counts.records}
        found["empty_files"] = self.empty_files[name]
        found["left_out_files"] = dict(sorted(self.files_left_out[name].items()))
        if self.options.category_field:
            found |= {"records_without_category": counts.uncategorised, **counts.as_dict()}
        return {**found, "preview": self.previews[name]}

    def table(self) -> str:
        """Return the closing tables and a line for each further finding."""
        cut: list[Row] = []
        for name, counts in self.categories.items():
            if over := counts.over_length:
                gone = {f"{what} removed": f"{over[what]:,}" for what in ("tokens", "targets")}
                share = f"{over['tokens'] / (counts.tokens + over['tokens']):.2%}"
                cut.append(
                    {"category": name, "over max_document_tokens": f"{over['documents']:,}", **gone, "share": share}
                )
        notes = [f"{name}: {note}" for name, counts in self.sources.items() for note in self._notes(name, counts)]
        if isinstance(self.options.system, Mapping):
            unknown = [name for name in self.options.system if name not in self.categories]
            notes += [f"system.{name}: no record for training has this category" for name in unknown]
        summary, *problems = tables("category", self.categories, targets=True)
        if len(self.categories) > 1:
            summary.append(_summary("category", "all", self.total, targets=True))
        parts = [aligned_rows(summary, cut, *problems), "\n".join(notes)]
        return "\n\n".join(filter(None, parts))

    def short_table(self) -> str:
        """Return the table of documents by category alone."""
        return aligned_rows(tables("category", self.categories, targets=True)[0])

    def _notes(self, name: str, counts: Counts) -> Iterator[str]:
        """Yield a line for each finding in a source."""
        if files := self.files_left_out[name]:
            yield f"files left out, of other formats: {most_frequent(files)}"
        if empty := self.empty_files[name]:
            yield f"warning: {empty:,} files without a record"
        if self.read[name] > (both := self._records(name)):
            yield f"sampled: {both:,} of {self.read[name]:,} records"
        if held := both - counts.records:
            yield f"held out for validation: {held:,} of {both:,} records ({held / both:.2%})"
        if counts.uncategorised:
            records = f"{counts.uncategorised:,} records, which have the source's name as their category"
            yield f"no {self.options.category_field}: {records}"
        if counts.preferences:
            yield f"preferences: {_preferences(counts.preferences)}"
        # The ends of turns come first: where they are missing, the model does not learn to stop.
        if ends := {text: count for text, count in counts.end_of_turn.items() if text}:
            yield f"end of turn: {most_frequent(ends, ' turns')}"
        if counts.text_ends:
            ends_as_text = most_frequent(counts.text_ends, " turns")
            hint = "model.new_special_tokens makes it one"
            yield f"no token of the tokenizer, but learnt as text, is the end of turn {ends_as_text}: {hint}"
        if open_turns := counts.end_of_turn[""]:
            yield f"warning: {open_turns:,} turns have no end-of-turn token to stop at; end_of_chat=TOKEN adds one"
        if counts.border_tokens:
            yield f"{counts.border_tokens:,} tokens at borders of turns hold text of the template too, and are learnt"
        if any(counts.target_kinds[kind] for kind in (REASONING, TOOL_CALL, PROMPT)):
            targets = {kind.replace("_", " "): count for kind, count in counts.target_kinds.items() if count}
            yield f"target tokens: {most_frequent(targets)}"
        if counts.context_parts:
            context = {kind.replace("_", " "): count for kind, count in counts.context_parts.items()}
            yield f"in the text and no target: {most_frequent(context, ' parts of turns')}"
        for field, values in counts.loss_weights.items():
            weights = f"from {values['least']:g} to {values['most']:g}, in {values['records']:,} records"
            yield f"weights of targets from the field {field}: {weights}; columns={{{field}: null}} leaves it out"
        # The rest tells what the tokens lack of the records, or hold in another form.
        if counts.duplicates:
            yield f"left out: {counts.duplicates:,} records with the tokens of an earlier one"
        if counts.replaced:
            yield f"texts of `replace` stood in {counts.replaced:,} records"
        if counts.default_system:
            yield f"the system prompt of `system` begins {counts.default_system:,} chats without one of their own"
        if counts.dropped_reasoning:
            yield f"left out: the reasoning of {counts.dropped_reasoning:,} turns"
        if counts.dropped_blocks:
            yield f"left out: empty thinking blocks of {counts.dropped_blocks:,} chats drawn by drop_empty_reasoning"
        if counts.text_calls:
            yield f"{counts.text_calls:,} messages of function_call are not JSON of a call, and are learnt as text"
        if counts.readings:
            yield f"texts read as: {most_frequent(counts.readings, ' records')}"
        if counts.closed_again:
            yield f"{counts.closed_again:,} answers close a thinking block that is closed before them already"
        if counts.unprinted:
            yield f"not printed by the chat template: {most_frequent(counts.unprinted, ' records')}"
        if counts.dropped_media:
            yield f"left out: {most_frequent(counts.dropped_media)}"
        if counts.unused_fields:
            yield f"fields not used: {most_frequent(counts.unused_fields)}"


def _preferences(counts: Mapping[str, int]) -> str:
    """Count units, and what sets their answers apart beside the preference."""
    units, pairs, labels = (counts.get(name, 0) for name in ("units", "pairs", "labels"))
    parts = [f"{units:,} units"]
    if pairs:
        longer = counts.get("chosen_longer", 0) / pairs
        parts = [f"{units - labels:,} units of {pairs:,} pairs; the chosen answer has more targets in {longer:.0%}"]
    if labels:
        parts.append(f"{labels:,} answers with a label")
    if counts.get("tied"):
        parts.append(f"left out: {counts['tied']:,} answers that are ranked like the best")
    for name, meaning in (("parts", "reasoning"), ("ends", "an end of turn")):
        if unequal := counts.get(f"unequal_{name}"):
            parts.append(f"{unequal:,} pairs of which only one answer has {meaning}")
    if unequal := counts.get("unequal_prompts"):
        parts.append(f"{unequal:,} pairs whose prompt the template prints in another form before each answer")
    if turned := counts.get("scores_reversed"):
        parts.append(f"warning: {turned:,} pairs whose preferred answer has the lower score")
    return "; ".join(parts)


def most_frequent(counts: Mapping[str, int], unit: str = "") -> str:
    """List the most frequent names: `a (3 turns), b (1 turns)`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return shortened([f"{one_line(name)} ({count:,}{unit})" for name, count in ordered], NAMED)


def total_entry(counts: Iterable[Counts], left_out: Mapping[str, int]) -> dict[str, Any]:
    """Return report.json's entry of all sources: their counts, and the files that are not read."""
    total = Counts().add(*counts).as_dict()
    del total["examples"]
    return {**total, "left_out_files": dict(sorted(left_out.items()))}


def reported_options(options: Options) -> dict[str, Any]:
    """Return the options that affect tokens and counts, with secrets masked."""
    given = asdict(options)  # type: ignore[call-overload]
    return redacted({key: value for key, value in given.items() if key not in NOT_REPORTED})


def tables(what: str, counts: Mapping[str, Counts], targets: bool) -> list[list[Row]]:
    """Return table rows by category or source: counts, special tokens, bad records."""
    special = [
        {
            what: name,
            "encoded as text": "special tokens",
            **{key: f"{each.special_tokens[key]:,}" for key in ("records", "occurrences")},
        }
        for name, each in counts.items()
        if each.special_tokens
    ]
    bad = [
        {what: name, "bad record": reason, "records": f"{count:,}", "first": each.examples[reason][0]}
        for name, each in counts.items()
        for reason, count in sorted(each.bad.items())
    ]
    return [[_summary(what, name, each, targets) for name, each in counts.items()], special, bad]


def aligned_rows(*rows: list[Row]) -> str:
    """Format the non-empty lists as tables with empty lines between them."""
    return "\n\n".join(aligned(table, _LEFT) for table in rows if table)


def _summary(what: str, name: str, counts: Counts, targets: bool) -> Row:
    row: dict[str, str | int] = {
        what: name,
        "records": counts.records,
        "bad": counts.bad.total(),
        "documents": counts.documents,
        "tokens": counts.tokens,
    }
    if targets:
        row |= {"targets": counts.target_tokens, "share": f"{counts.target_share:.1%}"}
    row |= {
        "median": counts.length_quantile(0.5),
        "p95": counts.length_quantile(0.95),
        "max": max(counts.lengths, default=0),
    }
    return {key: f"{value:,}" if isinstance(value, int) else value for key, value in row.items()}
