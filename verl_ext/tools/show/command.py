"""The command `verl-ext show`, which shows an audit of data, documents, packs and the curves of runs.

Words without `=` are paths or FLAGS: `verl-ext show data/train longest tokens`.
"""

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from verl_ext.checkpoint.layout import RUN
from verl_ext.commands.command_line import as_list, command, read_options
from verl_ext.commands.raw_data import is_raw, tokenized_raw
from verl_ext.files import working_in, write_json
from verl_ext.redaction import redacted
from verl_ext.text.tokenizer import ModelOptions, load_tokenizer
from verl_ext.tools.page import write_page
from verl_ext.tools.plan_lines import plan_lines
from verl_ext.tools.show.answers import answers_view
from verl_ext.tools.show.audit import audit
from verl_ext.tools.show.audit_tables import audit_tables
from verl_ext.tools.show.compare import comparison
from verl_ext.tools.show.data import Documents, Row, open_documents
from verl_ext.tools.show.document import RUN_CELLS, RUN_CELLS_OF_PAGE, cells_of, document_text, tokens_text
from verl_ext.tools.show.packs import pack_view, packs_of_data, packs_of_run, read_run, step_view
from verl_ext.tools.show.plan import PackOptions, plan_facts
from verl_ext.tools.show.record import RecordFinder
from verl_ext.tools.show.require import broken, read_requirements
from verl_ext.tools.show.run_page import write_run_page
from verl_ext.tools.show.run_tables import run_tables
from verl_ext.tools.show.runs import is_plan, is_run, open_run, read_plan, read_spike
from verl_ext.tools.show.select import SelectOptions, selected
from verl_ext.trainer.report_lines import report_lines
from verl_ext.values import DataError, UsageError, one_line, option, options_of

FLAGS = ("longest", "shortest", "no_target", "cut", "tokens", "record", "answers", "follow")
_PACKING = tuple(options_of(PackOptions))
_VERBATIM = ("matches", "require")  # not parsed by Hydra, because they may contain its special characters
REFRESH_SECONDS = 5  # of follow=true
WIDTH = 100  # columns of output to a file or a pipe


@dataclass(frozen=True)
class ShowOptions(SelectOptions, PackOptions):
    """Show data, runs or plans. DATA is tokenized folders, Megatron corpora or raw files; RUN is the folder of a run.

    DATA alone shows the audit: documents, tokens and targets by category, and common mistakes with row numbers. A
    selection (row=7, longest, category=NAME …) shows documents with their targets; pack=K shows one pack of max_tokens;
    against=OTHER shows the differences between two sets. RUN shows curves; step=S shows the packs of one of its steps.
    The folder of a plan (verl-ext plan) shows its numbers again.
    """

    paths: list[str] = option([], "DATA or RUN: a list of paths; words without `=` are paths too", required=True)
    model: ModelOptions = option(ModelOptions, "the tokenizer; by default that of report.json")
    val: Any = option(None, "validation data, which is searched for training documents")
    scan: bool | None = option(None, "tokens that the audit reads; true: all; false: none; null: up to 100 million")
    require: str | None = option(None, "bounds on findings, e.g. no_target=0,duplicates<0.1%; exit code 1 if one fails")
    tokenize: Any = option({}, "for raw DATA: options of verl-ext tokenize, e.g. {turns: each, chat_template: FILE}")
    record: bool = option(False, "true: show a document's record, rendered text and prompts of inference too")
    tokens: bool = option(False, "true: show documents token by token, with ids")
    pack: int | None = option(None, "number of the pack to show, of max_tokens tokens", least=0)
    against: Any = option(None, "other DATA of the same records, or other options for raw DATA: show differing rows")
    step: int | None = option(None, "for a run: show this step's packs and its documents in spikes.jsonl", least=0)
    rank: int | None = option(None, "with step: show the documents in this data-parallel rank's packs", least=0)
    answers: bool = option(False, "true: show the answers of a run's evaluation, also of one step or category")
    follow: bool = option(False, "true: refresh the curves of runs until the runs have ended")
    html: str | None = option(None, "file for an HTML page in place of the terminal")
    json: str | None = option(None, "file for the numbers as JSON")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake that is visible without opening the data."""
        yield from SelectOptions.problems(self)
        yield from PackOptions.problems(self)
        if self.model.tokenizer:
            yield from self.model.tokenizer_problems()
        if self.pack is not None and self.max_tokens is None:
            yield "max_tokens is required with pack; got null"
        if self.step == 0 and not self.answers:
            yield "step must be at least 1 without answers; got 0"
        if self.answers and not any(map(is_run, self.paths)):
            yield f"answers must be of a run; got {', '.join(self.paths)}"
        if self.rank is not None and self.step is None:
            yield "step is required with rank; got null"


def run(options: ShowOptions) -> str:
    """Show the data, runs or plans on the terminal."""
    given = {name: getattr(options.model, name) for name in ("path", "tokenizer_path")}
    here = {name: os.path.abspath(path) for name, path in given.items() if path and os.path.isdir(path)}
    options = replace(options, model=replace(options.model, **here))
    if options.follow or any(map(is_run, options.paths)):  # a run that begins has no files yet
        _show_runs(options)
        return ""
    if any(map(is_plan, options.paths)):
        _show_plans(options)
        return ""
    if options.against is not None:
        _refuse_unread(options, "against", "documents", "tokenize")
    elif options.pack is not None:
        _refuse_unread(options, "pack", *_PACKING, "tokenize")
    elif options.selects:
        _refuse_unread(options, "a selection", *options_of(SelectOptions), "record", "tokens", "html", "tokenize")
    else:
        _refuse_unread(options, "the audit", *_PACKING, "val", "scan", "require", "html", "json", "tokenize")
    with TemporaryDirectory(prefix="verl-ext-show-") as folder:
        _show_data(_tokenized(options, Path(folder)), options.paths)
    return ""


def _tokenized(options: ShowOptions, folder: Path) -> ShowOptions:
    """Tokenize raw files into folders below `folder`; return the options with these folders."""

    def tokenized(value: Any, key: str, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        paths = as_list(value)
        if not paths or not all(map(is_raw, paths)):
            return value
        given = {**options.tokenize, **more}
        return [tokenized_raw(paths, key, options.model, given, options.max_tokens, folder / key)]

    against = options.against
    if isinstance(against, dict):  # the same files with different options
        if not all(map(is_raw, options.paths)):
            raise UsageError(f"against must be paths, or options for raw files; got options, and {options.paths[0]}")
        against = tokenized(options.paths, "against", against)
    elif against is not None:
        against = tokenized(against, "against")
    paths, val = tokenized(options.paths, "paths"), tokenized(options.val, "val")
    if options.tokenize and paths is options.paths:
        raise UsageError(f"tokenize must be given for raw files alone; got {options.paths[0]}")
    return replace(options, paths=paths, val=val, against=against)


def _show_data(options: ShowOptions, given: list[str]) -> None:
    documents = open_documents(options.paths)
    if given != options.paths:  # raw files, tokenized into one folder
        documents.paths = (", ".join(given),)
    if options.against is not None:
        other = open_documents(as_list(options.against), "against")
        tokenizer = _tokenizer(options, documents.tokenizer)
        _print(comparison(documents, other, tokenizer and tokenizer.decode, max(options.documents, 10)))
    elif options.pack is not None:
        tokenizer = _tokenizer(options, documents.tokenizer)
        _print(pack_view(packs_of_data(options.paths, options), options.pack, tokenizer and tokenizer.decode))
    elif options.selects:
        _show_documents(documents, options)
    else:
        _show_audit(documents, options)


def _refuse_unread(options: ShowOptions, view: str, *read: str) -> None:
    """Raise UsageError for options that `view` ignores; it reads `read` and its own option."""
    if unread := sorted(options.changed().keys() - {"paths", "model", view, *read}):
        raise UsageError(f"{view} must be given without options that it does not read; got {', '.join(unread)}")


def _tokenizer(options: ShowOptions, named: str | None, is_needed: bool = False) -> Any:
    """Return the tokenizer of the options, else that of the data; None if neither names one.

    is_needed: raise UsageError instead of returning None.
    """
    path = options.model.tokenizer or named
    if is_needed and not path:
        raise UsageError("model.path must name the tokenizer of the data, whose report.json names none; got null")
    return None if not path else load_tokenizer(replace(options.model, path=path, tokenizer_path=None))


def _show_documents(documents: Documents, options: ShowOptions) -> None:
    tokenizer = _tokenizer(options, documents.tokenizer, is_needed=True)
    console, shown = _console(), []
    finders: dict[str, RecordFinder] = {}
    for row in selected(documents, options, tokenizer.decode):
        path, number = documents.place(row)
        category = documents.names.get(int(documents.categories[row]), "")
        lengths = f"{documents.lengths[row]:,} tokens, {documents.targets[row]:,} targets"
        if documents.full_lengths[row] > documents.lengths[row]:
            lengths += f", cut from {documents.full_lengths[row]:,}"
        facts = one_line(f"row {number} of {path}: {category}, {lengths}")
        read = documents.row(row)
        if options.html:
            shown.append(_document(facts, read, tokenizer, options.tokens, True, RUN_CELLS_OF_PAGE))
        else:
            _show_document(console, facts, read, tokenizer, options.tokens)
        if options.record:
            if path not in finders:
                finders[path] = RecordFinder(documents.reports[documents.paths.index(path)], options.model)
            view = finders[path].view(read, category)
            shown.append(view)
            if not options.html:
                console.print(view, soft_wrap=True)
    if options.html:
        write_page(Path(options.html), _title(options.paths), [], documents=shown)
        print(f"written to {options.html}")


def _show_document(console: Console, facts: str, row: Row, tokenizer: Any, by_token: bool) -> None:
    in_colour = bool(console.is_terminal and console.color_system and not console.no_color)
    console.print(_document(facts, row, tokenizer, by_token, in_colour), soft_wrap=not by_token)


def _document(facts: str, row: Row, tokenizer: Any, by_token: bool, in_colour: bool, longest: int = RUN_CELLS) -> Text:
    """Return a document below its line of facts."""
    cells = cells_of(row, tokenizer)
    text = tokens_text(cells) if by_token else document_text(cells, in_colour, longest)
    return Text().append(f"{facts}\n", "bold").append_text(text)


def _show_audit(documents: Documents, options: ShowOptions) -> None:
    requirements = read_requirements(options.require) if options.require else []
    validation = open_documents(as_list(options.val), "val") if options.val else None
    # The plan first: it needs the lengths alone, and refuses at once what the trainer refuses.
    plan = None if options.max_tokens is None else plan_facts(documents, options, options.paths)
    found = audit(documents, validation, options.model, options.scan)
    if plan is not None:
        found["plan"] = plan
    found = redacted(found)
    if options.json:
        write_json(Path(options.json), found)
    if options.html:
        write_page(Path(options.html), _title(options.paths), audit_tables(found))
        print(f"written to {options.html}")
    else:
        _print(audit_tables(found))
    if lines := list(broken(requirements, found)):
        raise DataError("require is not met: " + "; ".join(lines))


def _show_runs(options: ShowOptions) -> None:
    if options.answers:
        _refuse_unread(options, "answers", "step", "category")
        for path in options.paths:
            _print(answers_view(path, options.step, options.category))
        return
    if options.step is not None:
        _refuse_unread(options, "step", "rank", "tokens", "documents")
        _show_step(options, options.step)
        return
    if options.follow:
        _refuse_unread(options, "follow")
        _follow(options)
        return
    _refuse_unread(options, "a run", "html", "json")
    runs = [open_run(path) for path in options.paths]
    if options.json:
        curves = [{"run": str(run.path), "curves": {n: asdict(c) for n, c in run.curves.items()}} for run in runs]
        write_json(Path(options.json), redacted(curves))
    if options.html:
        write_run_page(Path(options.html), _title(options.paths), runs)
        print(f"written to {options.html}")
        return
    _print(run_tables(runs, _console().width))


def _title(paths: Sequence[str]) -> str:
    return f"verl-ext show {' '.join(map(str, paths))}"


def _follow(options: ShowOptions) -> None:
    """Refresh the curves until every run has reached its last step, or no process writes in its folder any more."""
    console = _console()
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                runs = [open_run(path) for path in options.paths]
            except (UsageError, DataError) as error:  # before the first step there are no metrics
                live.update(Text(f"waiting: {one_line(str(error))}"), refresh=True)
            else:
                live.update(Group(*run_tables(runs, console.width)), refresh=True)
                if not any(run.is_alive and run.step != run.facts.get("total_steps") for run in runs):
                    return
            time.sleep(REFRESH_SECONDS)


def _show_plans(options: ShowOptions) -> None:
    _refuse_unread(options, "a plan", "json")
    reports = {path: read_plan(path) for path in options.paths}
    console = _console()
    for path, report in reports.items():
        try:
            lines = [*report_lines(report), *plan_lines(report.get("memory", {}))]
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} must hold a plan of this version; its report lacks {error}") from error
        console.print(Text("\n".join([one_line(f"plan {path}"), *lines])), soft_wrap=True)
    if options.json:
        write_json(Path(options.json), reports)


def _show_step(options: ShowOptions, step: int) -> None:
    """Show a step's packs, the documents of a rank's packs, and the step's entry in spikes.jsonl."""
    if len(options.paths) > 1:
        raise UsageError(f"step must be of one run; got {', '.join(options.paths)}")
    path = Path(options.paths[0])
    folder = path if path.is_dir() else path.parent
    if (spike := read_spike(folder, step)) is not None:
        _show_spike(spike, options)
        if not (folder / RUN).is_file():
            return
    facts = read_run(folder)
    with working_in(facts.get("working_folder")):
        dataset, plan, cost = packs_of_run(facts)  # first: a tokenizer is loaded without torch, which this needs
        tokenizer = _tokenizer(options, ModelOptions.read(facts["config"]["model"]).tokenizer)
        _print(step_view(dataset, plan, cost, facts, step))
        if options.rank is not None:
            ranks = facts["data_parallel_size"]
            if options.rank >= ranks:
                raise UsageError(f"rank must be below {ranks}, the data-parallel ranks of the run; got {options.rank}")
            for pack in plan.rank_packs(step - 1, options.rank, ranks):
                if pack is not None:
                    _print(pack_view(dataset, pack, tokenizer and tokenizer.decode))


def _show_spike(spike: dict[str, Any], options: ShowOptions) -> None:
    """Show up to `documents` documents of a spike, the worst first."""
    console = _console()
    losses = f"loss {spike['loss']}, reference {spike['reference']}"
    console.print(Text(one_line(f"step {spike['step']}: {spike['reason']}, {losses}"), "bold"))
    for place in spike["documents"][: options.documents]:
        documents = open_documents([place["folder"]])
        whole = documents.row(place["row"])
        part = slice(place["start"], place["start"] + place["tokens"])
        row = Row(whole.input_ids[part], whole.loss_mask[part], None if whole.weights is None else whole.weights[part])
        where = f"row {place['row']} of {place['folder']}"
        facts = f"{where}: {place['category']}, pack {place['pack']}, loss {place['loss']}"
        tokenizer = _tokenizer(options, documents.tokenizer, is_needed=True)
        _show_document(console, one_line(facts), row, tokenizer, options.tokens)


def _console() -> Console:
    """Return the console; a file or pipe gets lines of COLUMNS or WIDTH columns without control characters."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH, highlight=False)


def _print(parts: Iterable[RenderableType]) -> None:
    console = _console()
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part)


def _read(arguments: Sequence[str]) -> ShowOptions:
    """Parse the words; existing paths, and words without `=` that are not flags, are paths."""
    paths: list[str] = []
    words: list[str] = []
    verbatim: dict[str, str] = {}
    for word in arguments:
        key, sign, value = word.partition("=")
        if os.path.exists(word) or (not sign and word not in FLAGS):
            paths.append(word)
        elif key in _VERBATIM:
            verbatim[key] = value
        else:
            words.append(word if sign else f"{word}=true")
    return read_options(ShowOptions, words, **verbatim, **({"paths": paths} if paths else {}))


main = command("show", ShowOptions, run, example="DATA [max_tokens=131072 ranks=8]", read=_read)
