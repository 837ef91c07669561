"""`verl-ext show run`: curves, an evaluation's answers, a step's packs."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from verl_ext.checkpoint.curves import read_facts
from verl_ext.checkpoint.layout import RUN
from verl_ext.files import working_in, write_json
from verl_ext.options import DataError, Options, UsageError, must, one_line, option, spell
from verl_ext.redaction import redacted
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.show.answers import answers_view
from verl_ext.tools.show.document import Drawing
from verl_ext.tools.show.documents import Row, open_documents, tokenizer_of
from verl_ext.tools.show.figures import write_picture, write_run_page
from verl_ext.tools.show.packs import pack_view, step_view
from verl_ext.tools.show.run_tables import run_tables
from verl_ext.tools.show.runs import open_run, read_spike, run_folder
from verl_ext.tools.show.terminal import has_colours, print_parts, terminal

REFRESH_SECONDS = 5  # of follow=true
_NEEDS = {"metric": "svg", "category": "answers", "rank": "step", "tokens": "step", "documents": "step"}


@dataclass(frozen=True)
class ShowRunOptions(Options):
    """Show RUN, a run's folder or metrics file: progress, curves, config.

    answers shows the answers of an evaluation; step=S shows the packs of a step and its documents in spikes.jsonl.
    Several runs are shown beside each other.
    """

    paths: list[str] = option([], "RUN: a list of paths; words without `=` are paths too", required=True)
    answers: bool = option(False, "true: show the answers of the evaluation, by default of the last step that has any")
    category: str | None = option(None, "with answers: only answers of this category")
    step: int | None = option(None, "show this step's packs and its documents in spikes.jsonl, or its answers", least=0)
    rank: int | None = option(None, "with step: show the documents in this data-parallel rank's packs", least=0)
    documents: int = option(1, "with step: number of its documents in spikes.jsonl to show", least=1)
    tokens: bool = option(False, "with step: show those documents token by token, with ids")
    follow: bool = option(False, "true: refresh the curves until the runs have ended")
    model: ModelOptions = option(ModelOptions, "the tokenizer; by default that of the run or of its data")
    html: str | None = option(None, "file for an HTML page in place of the terminal")
    json: str | None = option(None, "file for the curves as JSON")
    svg: str | None = option(None, "file for one picture: a curve of every category, in place of the terminal")
    metric: str = option("loss", "with svg: the metric of each category, such as perplexity or reward_accuracy")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible without the run."""
        changed = self.changed()
        if self.model.tokenizer:
            yield from self.model.tokenizer_problems()
        for name, needed in _NEEDS.items():
            if name in changed and needed not in changed:
                yield f"{needed} is required with {name}; got {spell(getattr(self, needed))}"
            if name in changed and needed == "step" and self.answers:
                yield must("answers", f"be false with {name}, which is of a step's packs", True)
        if self.step == 0 and not self.answers:
            yield must("step", "be at least 1 without answers", 0)
        if self.step is not None and not self.answers and len(self.paths) > 1:
            yield must("step", "be given for one run alone", ", ".join(self.paths))


def show_runs(options: ShowRunOptions) -> str:
    """Show the runs on the terminal or as a page."""
    if options.follow:
        _follow(options)
    parts: Iterator[RenderableType] | None = None
    if options.answers:
        parts = (part for path in options.paths for part in answers_view(path, options.step, options.category))
    elif options.step is not None:
        parts = _step_parts(options, options.step)
    runs = (
        [open_run(path) for path in options.paths]
        if options.html or options.json or options.svg or parts is None
        else []
    )
    if options.json:
        curves = [{"run": str(run.path), "curves": {n: asdict(c) for n, c in run.curves.items()}} for run in runs]
        write_json(Path(options.json), redacted(curves))
    if options.svg:
        write_picture(Path(options.svg), runs, options.metric)
        print(f"written to {options.svg}")
    if options.html:
        write_run_page(Path(options.html), f"verl-ext show {' '.join(options.paths)}", runs, parts or ())
        print(f"written to {options.html}")
    elif parts is not None:
        print_parts(parts)
    elif not options.follow and not options.svg:
        print_parts(run_tables(runs, terminal().width))
    return ""


def _follow(options: ShowRunOptions) -> None:
    """Refresh the curves until every run ends or has no process."""
    console = terminal()
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


def _step_parts(options: ShowRunOptions, step: int) -> Iterator[RenderableType]:
    """Yield a step's spike documents, packs, and the rank's documents."""
    folder = run_folder(options.paths[0])
    if (spike := read_spike(folder, step)) is not None:
        yield from _spike_parts(spike, options)
        if not (folder / RUN).is_file():
            return
    facts = read_facts(folder / RUN)
    if not facts.keys() >= {"config", "plan", "cost"}:
        raise UsageError(f"{folder} must hold the {RUN} of a training run, with config, plan and cost; it does not")
    from verl_ext.trainer.inputs import reopened  # imports torch and verl

    with working_in(facts.get("working_folder")):
        try:
            train_set, plan, cost = reopened(facts)
        except KeyError as error:
            raise DataError(f"{folder / RUN} must be of a run of this version; its config lacks {error}") from error
        except ValueError as error:
            raise DataError("; ".join(str(error).splitlines())) from error
        tokenizer = tokenizer_of(options.model, ModelOptions.read(facts["config"]["model"]))
        yield from step_view(train_set, plan, cost, facts, step)
        ranks = facts["data_parallel_size"]
        if options.rank is not None and options.rank >= ranks:
            raise UsageError(must("rank", f"be below {ranks}, the data-parallel ranks of the run", options.rank))
        for pack in () if options.rank is None else plan.rank_packs(step - 1, options.rank, ranks):
            if pack is not None:
                yield from pack_view(train_set, pack, tokenizer and tokenizer.decode)


def _spike_parts(spike: Mapping[str, Any], options: ShowRunOptions) -> Iterator[RenderableType]:
    """Yield a spike's loss, and its worst `documents` documents."""
    losses = f"loss {spike['loss']}, reference {spike['reference']}"
    yield Text(one_line(f"step {spike['step']}: {spike['reason']}, {losses}"), "bold")
    in_colour = bool(options.html) or has_colours()
    for place in spike["documents"][: options.documents]:
        documents = open_documents([place["folder"]])
        whole = documents.row(place["row"])
        part = slice(place["start"], place["start"] + place["tokens"])
        row = Row(whole.input_ids[part], whole.loss_mask[part], None if whole.weights is None else whole.weights[part])
        where = f"row {place['row']} of {place['folder']}"
        facts = f"{where}: {place['category']}, pack {place['pack']}, loss {place['loss']}"
        tokenizer = tokenizer_of(options.model, documents.model, is_needed=True)
        yield Drawing(tokenizer, options.tokens, in_colour).document(one_line(facts), row)
