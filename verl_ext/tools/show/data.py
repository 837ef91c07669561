"""`verl-ext show data`: an audit, documents, a pack, or differences."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from verl_ext.commands.command_line import as_list
from verl_ext.files import write_json
from verl_ext.options import DataError, UsageError, must, one_line, option, options_of
from verl_ext.redaction import redacted
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.page import write_page
from verl_ext.tools.show.audit import audit
from verl_ext.tools.show.audit_tables import audit_tables
from verl_ext.tools.show.compare import comparison
from verl_ext.tools.show.document import RUN_CELLS, RUN_CELLS_OF_PAGE, Drawing
from verl_ext.tools.show.documents import ShownDocuments, open_documents, tokenizer_of
from verl_ext.tools.show.packs import PackOptions, open_packs, pack_view, plan_facts
from verl_ext.tools.show.raw import is_raw_file, tokenized_raw
from verl_ext.tools.show.record import RecordFinder
from verl_ext.tools.show.require import broken, read_requirements
from verl_ext.tools.show.select import SelectOptions, selected
from verl_ext.tools.show.terminal import has_colours, print_parts

_OF_AUDIT = ("val", "scan", "require", "json")
_SIDES, _LABELS = {1: "chosen", -1: "rejected"}, {1: "desirable", -1: "undesirable"}
_OF_DOCUMENTS = (*options_of(SelectOptions), "record", "tokens")


@dataclass(frozen=True)
class ShowDataOptions(SelectOptions, PackOptions):
    """Show DATA: tokenized folders, Megatron corpora or raw files.

    DATA alone shows the audit: documents, tokens and targets by category, common mistakes with row numbers, and with
    max_tokens the packs and steps of a run. A selection (row=7, longest, category=NAME …) shows documents with their
    targets; pack=K shows one pack of max_tokens; against=OTHER shows the differences between two sets.
    """

    paths: list[str] = option([], "DATA: a list of paths; words without `=` are paths too", required=True)
    model: ModelOptions = option(ModelOptions, "the tokenizer; by default that of report.json")
    val: Any = option(None, "validation data, which is searched for training documents")
    scan: bool | None = option(None, "tokens that the audit reads; true: all; false: none; null: up to 100 million")
    require: str | None = option(None, "bounds on findings, e.g. no_target=0,duplicates<0.1%; exit code 1 if one fails")
    tokenize: Any = option({}, "for raw DATA: options of verl-ext tokenize, e.g. {turns: each, chat_template: FILE}")
    record: bool = option(False, "true: show a document's record, rendered text and prompts of inference too")
    tokens: bool = option(False, "true: show documents token by token, with ids")
    pack: int | None = option(None, "number of the pack to show, of max_tokens tokens", least=0)
    against: Any = option(None, "other DATA of the same records, or other options for raw DATA: show differing rows")
    html: str | None = option(None, "file for an HTML page in place of the terminal")
    json: str | None = option(None, "file for the audit's numbers as JSON")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible without the data."""
        yield from SelectOptions.problems(self)
        yield from PackOptions.problems(self)
        if self.model.tokenizer:
            yield from self.model.tokenizer_problems()
        if self.pack is not None and self.max_tokens is None:
            yield "max_tokens is required with pack; got null"

    @property
    def shows_documents(self) -> bool:
        """Whether an option other than `against`'s `documents` asks for documents."""
        return bool(self.changed().keys() & {*_OF_DOCUMENTS} - ({"documents"} if self.against is not None else set()))

    @property
    def shows_audit(self) -> bool:
        """Whether an option asks for the audit, or none for anything else."""
        others = self.shows_documents or self.pack is not None or self.against is not None
        plans = self.max_tokens is not None and self.pack is None
        return plans or not others or bool(self.changed().keys() & {*_OF_AUDIT})


def show_data(options: ShowDataOptions) -> str:
    """Show the data on the terminal or as a page."""
    with TemporaryDirectory(prefix="verl-ext-show-") as folder:
        _show(_tokenized(options, Path(folder)), options.paths)
    return ""


def _tokenized(options: ShowDataOptions, folder: Path) -> ShowDataOptions:
    """Return the options with raw files tokenized into folders below `folder`."""

    def tokenized(value: Any, key: str, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        paths = as_list(value)
        if not paths or not all(map(is_raw_file, paths)):
            return value
        asked = {**options.tokenize, **more}
        return [tokenized_raw(paths, key, options.model, asked, options.max_tokens, folder / key)]

    against = options.against
    if isinstance(against, dict):  # the same files with different options
        if not all(map(is_raw_file, options.paths)):
            raise UsageError(must("against", "be paths, or options for raw files", f"options, and {options.paths[0]}"))
        against = tokenized(options.paths, "against", against)
    elif against is not None:
        against = tokenized(against, "against")
    paths, val = tokenized(options.paths, "paths"), tokenized(options.val, "val")
    if options.tokenize and paths is options.paths:
        raise UsageError(must("tokenize", "be given for raw files alone", options.paths[0]))
    return replace(options, paths=paths, val=val, against=against)


def _show(options: ShowDataOptions, names: list[str]) -> None:
    """Show what the options ask for, under the user's path `names`."""
    documents = open_documents(options.paths)
    requirements = read_requirements(options.require) if options.require else []
    # The packs first: they import torch, which must precede a tokenizer. Data that the trainer refuses has an audit all
    # the same, which ends with the trainer's reason.
    packs, refused, plan = None, None, {}
    if options.max_tokens is not None:
        try:
            packs = open_packs(documents, options)
            if options.shows_audit:
                plan = {"plan": plan_facts(documents, packs, options)}
        except DataError as error:
            if options.pack is not None:
                raise
            refused = error
    if names != options.paths:  # raw files, tokenized into one folder
        documents.paths = (", ".join(names),)

    # Each view adds its part. Documents come last and one by one, because there may be many long ones.
    parts: list[RenderableType] = []
    found: dict[str, Any] = {}
    if options.shows_audit:
        validation = open_documents(as_list(options.val), "val") if options.val else None
        found = redacted({**audit(documents, validation, options.model, options.scan), **plan})
        parts += audit_tables(found)
    decode = None
    if options.against is not None or options.pack is not None:
        tokenizer = tokenizer_of(options.model, documents.model)
        decode = tokenizer and tokenizer.decode
    if options.against is not None:
        other = open_documents(as_list(options.against), "against")
        parts += comparison(documents, other, decode, max(options.documents, 10))
    if packs is not None and options.pack is not None:
        parts += pack_view(packs, options.pack, decode)

    texts = _documents(documents, options) if options.shows_documents else iter(())

    # A requirement that is not met, or packs that the trainer refuses, end with an error below everything else.
    if options.html:
        title = f"verl-ext show {' '.join(names)}"
        write_page(Path(options.html), title, parts, documents=texts)
        print(f"written to {options.html}")
    else:
        print_parts(chain(parts, texts))
    if options.json:
        write_json(Path(options.json), found)
    if lines := list(broken(requirements, found)):
        raise DataError("require is not met: " + "; ".join(lines))
    if refused is not None:
        raise refused


def _documents(documents: ShownDocuments, options: ShowDataOptions) -> Iterator[Text]:
    """Yield the selected documents, each with its record if asked for."""
    tokenizer = tokenizer_of(options.model, documents.model, is_needed=True)
    in_colour, longest = (True, RUN_CELLS_OF_PAGE) if options.html else (has_colours(), RUN_CELLS)
    drawing = Drawing(tokenizer, options.tokens, in_colour, longest)
    finders: dict[str, RecordFinder] = {}
    shown: set[int] = set()
    for row in selected(documents, options, tokenizer.decode):
        unit = range(row, row + 1) if documents.units is None else documents.units.unit_of(row)
        if unit.start in shown:  # another answer to the same prompt
            continue
        shown.add(unit.start)
        content, category = documents.row(row), documents.names.get(int(documents.categories[row]), "")
        path, number = documents.place(row)
        if documents.units is None or not documents.units.answer[row]:
            facts = one_line(f"row {number} of {path}: {category}, {_lengths(documents, row)}")
            yield drawing.document(facts, content)
        else:
            sides = documents.units.answer[unit.start : unit.stop].tolist()
            weight = float(documents.units.weight_of(row))
            place = documents.place(unit.start)[1]
            rows = f"row {place}" if len(unit) == 1 else f"rows {place}..{place + len(unit) - 1}"
            head = one_line(f"{rows} of {path}: {category}" + (f", weight {weight:g}" if weight != 1 else ""))
            names = _SIDES if len(unit) > 1 else _LABELS
            facts_of = [f"{names[side]}: {_lengths(documents, each)}" for side, each in zip(sides, unit, strict=True)]
            yield drawing.unit(head, [documents.row(each) for each in unit], sides, facts_of)
        if options.record:
            if path not in finders:
                finders[path] = RecordFinder(documents.reports[documents.paths.index(path)], options.model)
            yield finders[path].view(content, category)


def _lengths(documents: ShownDocuments, row: int) -> str:
    lengths = f"{documents.lengths[row]:,} tokens, {documents.targets[row]:,} targets"
    if documents.full_lengths[row] > documents.lengths[row]:
        lengths += f", cut from {documents.full_lengths[row]:,}"
    return lengths
