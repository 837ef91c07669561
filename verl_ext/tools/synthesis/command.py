"""The command `verl-ext synthesize`: choose items, ask, write records."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_ext.commands.command_line import as_list, command
from verl_ext.files import OutputFolder
from verl_ext.options import DataError, choice_problem, options_of, refuse
from verl_ext.redaction import redacted
from verl_ext.tables import aligned
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokens.tokenizer import load_tokenizer
from verl_ext.tools.endpoint.answer import DONE, OUTCOMES
from verl_ext.tools.endpoint.spending import read_price
from verl_ext.tools.synthesis.asking import Work, WriteResult, preview_line
from verl_ext.tools.synthesis.corpus import Corpus, Intervals
from verl_ext.tools.synthesis.estimate import estimate_line, estimated
from verl_ext.tools.synthesis.items import ItemFields
from verl_ext.tools.synthesis.lengths import Writing
from verl_ext.tools.synthesis.options import (
    REPORT,
    TASKS,
    AgentWriteOptions,
    DocumentOptions,
    JoinOptions,
    SynthesizeOptions,
    taken,
)
from verl_ext.tools.synthesis.overlap import NearDuplicates, Passages, benchmark_texts
from verl_ext.tools.synthesis.prompts import load_prompts
from verl_ext.tools.synthesis.records import Settings
from verl_ext.tools.synthesis.token_lengths import TokenLengths

SUBCOMMANDS = TASKS
NOT_REPORTED = ("preview", "output_dir", "overwrite", "store")


def synthesize(options: SynthesizeOptions) -> str:
    """Make the records; return closing tables; raise UsageError or DataError."""
    # Mistakes in files end the run before documents are read and requests are paid for.
    has_prompts = not isinstance(options, JoinOptions) or options.classifier.classes
    prompts = load_prompts(options.prompts, options.task) if has_prompts else {}
    for endpoint in options.servers:
        if endpoint.base_url:
            read_price(endpoint)
    passages = Passages(benchmark_texts(options.decontaminate))

    # Items are chosen before any is asked about: by interval of length, without copies and benchmark passages.
    count = TokenLengths(load_tokenizer(options.model)) if isinstance(options, DocumentOptions) else None
    corpus = _corpus(options, count)
    near = None if options.near_duplicates is None else NearDuplicates(options.near_duplicates)
    total = corpus.choose(options.records, options.seed, near, passages)
    if not total:
        left_out = _listed(corpus.left_out) or "nothing was there"
        key = options.text_key or options.item_key
        raise DataError(f"sources must hold something to ask about, in its field {key}; left out: {left_out}")
    settings = taken(Settings, options, passages=passages, lengths_of=count)
    if getattr(options, "estimate", False):
        requests = estimated(options.task, corpus.items(), settings, getattr(options, "writing", Writing()))
        return "\n".join([f"items: {total:,}", estimate_line(*requests, read_price(options.endpoint))])

    # The folder appears only if enough items have records; the answers in the store outlive a run that fails.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        work = Work(
            corpus,
            total,
            prompts,
            settings,
            options.endpoint,
            options.store_path,
            folder.path / f"{options.task}.jsonl",
            options,
        )
        result = asyncio.run(options.write(work))
        _check_outcomes(result.outcomes, result.without, options)
        report = _report(options, corpus, result)
        (folder.path / REPORT).write_text(yaml.safe_dump(report, allow_unicode=True, sort_keys=False), "utf-8")
        with open(work.path, encoding="utf-8") as file:
            shown = [preview_line(line) for line in islice(file, options.preview)]
        folder.publish()
    return "\n".join(
        [*_closing_lines(options, report["lengths"], corpus, result, shown), f"written to {options.output_dir}"]
    )


def _corpus(options: SynthesizeOptions, count: TokenLengths | None) -> Corpus:
    """Return the items of the sources, with what decides on their lengths."""
    files = find_source_files({name: as_list(value) for name, value in options.sources.items()})
    truncate: bool = False
    lengths: Any = None
    if isinstance(options, DocumentOptions) and count is not None:
        # The intervals of joined documents are those of the results: any document up to the longest may be a part.
        edges = (1, options.intervals[-1]) if isinstance(options, JoinOptions) else tuple(options.intervals)
        truncate, lengths = options.over_length == "truncate", (Intervals(edges), count)
    elif isinstance(options, AgentWriteOptions):
        lengths = options.writing.counted(options.seed)
    fields = taken(ItemFields, options, text_key=options.text_key or options.item_key)
    skip_bad = options.on_bad_record == "skip"
    return Corpus(files, list(options.sources), fields, skip_bad, lengths, truncate)


def _report(options: SynthesizeOptions, corpus: Corpus, result: WriteResult) -> dict[str, Any]:
    """Return the content of report.yaml."""
    drawn = {n: {"found": corpus.available[n], "drawn": len(own)} for n, own in corpus.chosen.items()}
    return {
        "task": options.task,
        "options": redacted({name: value for name, value in asdict(options).items() if name not in NOT_REPORTED}),
        "lengths": result.lengths or drawn,
        "left_out": dict(corpus.left_out),
        "outcomes": dict(result.outcomes),
        "records": result.records,
        **({"questions_without_record": dict(result.lost)} if _has_questions(options) else {}),
        "without_record": result.without,
        **result.facts,
    }


def _closing_lines(
    options: SynthesizeOptions,
    lengths: Mapping[str, Mapping[str, int]],
    corpus: Corpus,
    result: WriteResult,
    shown: Sequence[str],
) -> list[str]:
    """Return what is printed at the end: tables, counts, a preview, the cost."""
    rows = [{"length": name, **{key: f"{count:,}" for key, count in row.items()}} for name, row in lengths.items()]
    lost = f"; questions without a record: {_listed(result.lost)}" if result.lost else ""
    return [
        aligned(rows, ["length"]),
        f"left out: {_listed(corpus.left_out) or 'none'}",
        f"items: {_listed(result.outcomes)}"
        + (f"; {result.records:,} records{lost}" if _has_questions(options) else ""),
        *result.notes,
        *shown,
        *([result.cost] if result.cost else []),
    ]


def _check_outcomes(outcomes: Counter[str], without: Sequence[dict[str, str]], options: SynthesizeOptions) -> None:
    """Raise `DataError` for too many failed items, or no record."""
    failed = Counter({name: outcomes[name] for name in OUTCOMES if name != DONE})
    kept = f"nothing was written; the answers are kept in {options.store_path}"
    first = "; ".join(f"{each['item']}: {each['outcome']}: {each['reason']}" for each in without[:3])
    if failed.total() > options.max_failed_share * outcomes.total():
        share = f"{failed.total():,} of {outcomes.total():,} items are without an answer to use ({_listed(failed)})"
        raise DataError(f"{share}, max_failed_share is {options.max_failed_share}: {kept}. {first}")
    if not outcomes[DONE]:
        raise DataError(f"no item has a record ({_listed(outcomes)}): {kept}. {first}")


def _has_questions(options: SynthesizeOptions) -> bool:
    return getattr(options, "questions", 1) > 1


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)


def main(arguments: Sequence[str]) -> int:
    """Run the task that the first word names, or task=NAME."""
    named = [word for word in arguments if word.startswith("task=")]
    name, words = named[-1].removeprefix("task=") if named else "", [word for word in arguments if word not in named]
    if words and not named and "=" not in words[0] and words[0] not in ("-h", "--help"):
        name, *words = words
    if not name:
        print("usage: verl-ext synthesize TASK [key=value …]\n")
        print("\n".join(f"  {task:<18}  {(kind.__doc__ or '').partition(chr(10))[0]}" for task, kind in TASKS.items()))
        print("\nverl-ext synthesize TASK --help lists the options of a task.")
        return 0 if {"-h", "--help"} & {*arguments} else 2
    try:
        refuse([choice_problem("task", name, TASKS), *_of_other_tasks(name, words)])
    except ValueError as error:
        print(f"error: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    example = "'sources={NAME:FILES}' output_dir=DIR endpoint.base_url=http://localhost:8000/v1 endpoint.model=NAME"
    run = command(f"synthesize {name}", TASKS[name], synthesize, example, loads_models=lambda each: each.loads_model)
    return run(words or ["--help"])


def _of_other_tasks(name: str, words: Sequence[str]) -> Iterator[str]:
    """Yield a line for each option that only other tasks have."""
    for word in words:
        key = word.partition("=")[0].partition(".")[0]
        having = [task for task, kind in TASKS.items() if key in options_of(kind)]
        if having and name not in having and name in TASKS:
            yield f"{key} is an option of {', '.join(having)}; got {word} with {name}"
