"""The command `verl-ext synthesize`: choose items, ask, write records."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_ext.commands.command_line import as_list, command
from verl_ext.endpoint.answer import DONE, OUTCOMES
from verl_ext.endpoint.spending import read_price
from verl_ext.files import OutputFolder
from verl_ext.options import DataError
from verl_ext.redaction import redacted
from verl_ext.tables import aligned
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokens.tokenizer import load_tokenizer
from verl_ext.tools.synthesis.asking import Work, WriteResult, preview_line
from verl_ext.tools.synthesis.corpus import Corpus, Intervals
from verl_ext.tools.synthesis.estimate import estimate_line, estimated
from verl_ext.tools.synthesis.items import ItemFields
from verl_ext.tools.synthesis.options import REPORT, TASKS, SynthesizeOptions
from verl_ext.tools.synthesis.overlap import NearDuplicates, Passages, benchmark_texts
from verl_ext.tools.synthesis.prompts import load_prompts
from verl_ext.tools.synthesis.token_lengths import TokenLengths

NOT_REPORTED = ("preview", "output_dir", "overwrite", "store")


def synthesize(options: SynthesizeOptions) -> str:
    """Make the records; return closing tables; raise UsageError or DataError."""
    # Mistakes in files end the run before documents are read and requests are paid for.
    task = TASKS[str(options.task)]
    prompts = {} if task.joins and not options.classifier.classes else load_prompts(options.prompts, str(options.task))
    for endpoint in (options.endpoint, options.scorer.endpoint, options.classifier.endpoint):
        if endpoint.base_url:
            read_price(endpoint)
    passages = Passages(benchmark_texts(options.decontaminate))

    # Items are chosen before any is asked about: by interval of length, without copies and benchmark passages.
    count = TokenLengths(load_tokenizer(options.model)) if task.of_documents else None
    corpus = _corpus(options, count)
    near = None if options.near_duplicates is None else NearDuplicates(options.near_duplicates)
    total = corpus.choose(options.records, options.seed, near, passages)
    if not total:
        left_out = _listed(corpus.left_out) or "nothing was there"
        key = options.text_key or task.text_key
        raise DataError(f"sources must hold something to ask about, in its field {key}; left out: {left_out}")
    settings = options.settings(passages, count)
    if options.estimate:
        requests = estimated(str(options.task), corpus.items(), settings, options.writing)
        return "\n".join([f"items: {total:,}", estimate_line(*requests, read_price(options.endpoint))])

    # The folder appears only if enough items have records; the answers in the store outlive a run that fails.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        work = Work(
            corpus,
            total,
            prompts,
            settings,
            options.endpoint,
            options.encoder,
            Intervals(tuple(options.intervals)),
            options.store_path,
            folder.path / f"{options.task}.jsonl",
            options.pairing,
            options.writing,
            options.classifier,
        )
        result = asyncio.run(task.write(work))
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
    task = TASKS[str(options.task)]
    files = find_source_files({name: as_list(value) for name, value in options.sources.items()})
    # The intervals of joined documents are those of the results: any document up to the longest may be a part.
    edges = (1, options.intervals[-1]) if task.joins else tuple(options.intervals)
    lengths = (Intervals(edges), count) if count is not None else options.writing.counted(options.seed)
    fields = ItemFields(
        options.text_key or task.text_key,
        options.class_field,
        is_prompt=task.of_prompts,
        question_key=options.question_key,
        is_instruction=not task.of_documents and not task.of_prompts,
        languages=options.languages,
    )
    skip_bad, truncate = options.on_bad_record == "skip", options.over_length == "truncate"
    return Corpus(files, list(options.sources), fields, skip_bad, lengths, truncate)


def _report(options: SynthesizeOptions, corpus: Corpus, result: WriteResult) -> dict[str, Any]:
    """Return the content of report.yaml."""
    drawn = {n: {"found": corpus.available[n], "drawn": len(own)} for n, own in corpus.chosen.items()}
    return {
        "options": redacted({name: value for name, value in asdict(options).items() if name not in NOT_REPORTED}),
        "lengths": result.lengths or drawn,
        "left_out": dict(corpus.left_out),
        "outcomes": dict(result.outcomes),
        "records": result.records,
        **({"questions_without_record": dict(result.lost)} if options.questions > 1 else {}),
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
        f"items: {_listed(result.outcomes)}" + (f"; {result.records:,} records{lost}" if options.questions > 1 else ""),
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


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)


main = command(
    "synthesize",
    SynthesizeOptions,
    synthesize,
    example="task=longalign 'sources={books:books/}' output_dir=DIR model.path=TOKENIZER"
    " endpoint.base_url=http://localhost:8000/v1 endpoint.model=NAME",
    loads_models=lambda options: options.loads_model,
)
