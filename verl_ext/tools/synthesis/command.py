"""The command `verl-ext synthesize`: choose items, ask, write records."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from verl_ext.commands.command_line import OutputOptions, as_list, command, is_names
from verl_ext.endpoint.answer import DONE, OUTCOMES
from verl_ext.endpoint.client import EndpointOptions, SamplingOptions
from verl_ext.endpoint.spending import read_price
from verl_ext.files import OutputFolder
from verl_ext.options import DataError, option
from verl_ext.redaction import redacted
from verl_ext.tables import aligned
from verl_ext.text.read.readers import TextFile, read_chunks, read_record
from verl_ext.text.read.sources import FORMATS, find_source_files, local_path
from verl_ext.text.records.bad_record import BadRecord
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer
from verl_ext.tools.synthesis import agentwrite, glm_long, longalign
from verl_ext.tools.synthesis.asking import Work, WriteResult, write_records
from verl_ext.tools.synthesis.corpus import Corpus, Intervals
from verl_ext.tools.synthesis.encoder import EncoderOptions
from verl_ext.tools.synthesis.items import ItemFields
from verl_ext.tools.synthesis.joined import write_joined
from verl_ext.tools.synthesis.overlap import NearDuplicates, Passages
from verl_ext.tools.synthesis.preferences import PAIRS, Pairing, write_preferences
from verl_ext.tools.synthesis.prompts import load_prompts
from verl_ext.tools.synthesis.records import Settings
from verl_ext.tools.synthesis.scorers import ScorerOptions
from verl_ext.tools.synthesis.token_lengths import TokenLengths

REPORT = "report.yaml"  # `tokenize` does not take a file of this name for records
NOT_REPORTED = ("output_dir", "overwrite", "store")


@dataclass(frozen=True)
class SynthesisTask:
    """A way to make records, from documents or from instructions."""

    write: Callable[[Work], Coroutine[Any, Any, WriteResult]]
    text_key: str
    of_documents: bool
    joins: bool = False
    of_prompts: bool = False


TASKS = {
    "longalign": SynthesisTask(partial(write_records, longalign.ask_of_document), "text", of_documents=True),
    "glm_long": SynthesisTask(partial(write_records, glm_long.ask_of_parts), "text", of_documents=True),
    "glm_long_documents": SynthesisTask(write_joined, "text", of_documents=True, joins=True),
    "agentwrite": SynthesisTask(partial(write_records, agentwrite.write_by_plan), "prompt", of_documents=False),
    "preferences": SynthesisTask(write_preferences, "prompt", of_documents=False, of_prompts=True),
}


@dataclass(frozen=True)
class SynthesizeOptions(OutputOptions):
    """Long instruction data from an OpenAI-compatible server, for `verl-ext tokenize`.

    task=longalign asks for five questions about a document and for the answers to one of them or several; task=glm_long
    makes questions about, and summaries of, documents longer than the model's context; task=glm_long_documents joins
    similar documents into long ones; task=agentwrite plans and writes a long text paragraph by paragraph;
    task=preferences scores several answers to each prompt and sets the best against others. `store` keeps every
    answer, so the same command continues a run that stopped, and no answer is paid for twice.
    """

    marker: ClassVar[str] = REPORT

    task: str | None = option(None, "method that makes the records", choices=tuple(TASKS), required=True)
    sources: dict[str, Any] = option({}, f"name: file, folder, glob or list of them; {FORMATS}", required=True)
    endpoint: EndpointOptions = option(EndpointOptions, "server that receives the requests")
    sampling: SamplingOptions = option(SamplingOptions, "sampling options of the requests")
    model: ModelOptions = option(ModelOptions, "the tokenizer of the model to be trained, which counts tokens")
    store: str | None = option(None, "file of answers, which runs can share; null: OUTPUT_DIR.answers.sqlite")
    prompts: str | None = option(None, "YAML file with the prompts of the task; null: built-in, in English and Chinese")
    text_key: str | None = option(None, "field that holds a record's text; null: text, or prompt for instructions")
    class_field: str | None = option(
        None,
        "glm_long_documents: field with a record's class; only documents of one class are joined; null: its source",
    )
    encoder: EncoderOptions = option(EncoderOptions, "glm_long_documents: encoder that embeds documents")
    records: int | None = option(
        None, "documents or instructions to draw, equally many documents per interval; null: all", least=1
    )
    intervals: list[Any] = option(
        [8192, 16384, 32768, 65536],
        "edges of the length intervals of documents, in tokens; glm_long_documents: of joined documents",
    )
    over_length: str = option(
        "drop",
        "a document with more tokens than the last of `intervals`: drop: left out | truncate: its start is used",
        choices=("drop", "truncate"),
    )
    window: int = option(
        12288,
        "glm_long: tokens of a document in a request; the model's context needs room for the answer too",
        least=64,
    )
    questions: int = option(
        1, "longalign, glm_long: questions kept of a document, whose tokens data.share_prefixes computes once", least=1
    )
    lengths: list[Any] = option([], "agentwrite: lengths in words, one of which is drawn if an instruction names none")
    min_length_score: float = option(
        80.0, "agentwrite: minimum S_l, 0 to 100, of a text that is kept", least=0, most=100
    )
    max_paragraphs: int = option(50, "agentwrite: maximum number of paragraphs of a plan", least=1)
    scorer: ScorerOptions = option(ScorerOptions, "preferences: how answers are scored")
    answers: int = option(4, "preferences: answers to ask for, of each prompt", least=1)
    pair: str = option(
        "best_worst",
        "preferences: best_worst | best_random: against one of the others, drawn | all: against every other | best: no"
        " pair, but a chat with the best answer",
        choices=PAIRS,
    )
    min_gap: float = option(0.0, "preferences: least difference of the scores of a pair, above 0", least=0)
    min_scored: int = option(2, "preferences: least different answers with a score, of each prompt", least=1)
    keep_given: bool = option(False, "preferences: true: the answer in a record's messages is scored too")
    question_key: str | None = option(
        None,
        "preferences: field with the question alone, which the scorer sees; null: the prompt without provenance.spans",
    )
    near_duplicates: float | None = option(
        0.8,
        "similarity from which a text is left out as a copy of an earlier one; null: no search",
        above=0,
        most=1,
    )
    decontaminate: list[Any] = option([], "benchmark files; no record may hold 13 words in a row of them")
    on_bad_record: str = option(
        "error", "bad record: error: ends the run | skip: left out, counted by reason", choices=("error", "skip")
    )
    parse_tries: int = option(3, "maximum number of requests for an answer that arrives in a wrong form", least=1)
    max_failed_share: float = option(
        0.1, "share of items without a usable answer (refused, cut, failed, …) above which nothing is written", least=0
    )
    seed: int = option(42, "seed of all draws: items, kinds, questions, lengths")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible without files or server."""
        task = TASKS[str(self.task)]
        if task.of_prompts:
            yield from self._pair_problems()
        elif not task.joins or self.encoder.path is None:
            yield from self.endpoint.endpoint_problems()
        if task.joins and self.prompts is not None:
            yield f"prompts must be null with task={self.task}, which asks no questions; got {self.prompts}"
        named = {f"sources.{name}": value for name, value in self.sources.items()}
        if self.decontaminate:
            named["decontaminate"] = self.decontaminate
        for key, value in named.items():
            if not is_names(value):
                yield f"{key} must be a path, a glob or a list of them; got {value!r}"
        paths = [local_path(path) for value in named.values() if is_names(value) for path in as_list(value)]
        yield from self.output_problems(
            "a source, the store", self.store, self.prompts, self.encoder.path, self.scorer.path, *paths
        )
        if task.of_documents:
            yield from self.model.tokenizer_problems()
        for key, least in (("intervals", 2), ("lengths", 0)):
            numbers = getattr(self, key)
            right = all(type(number) is int and number > 0 for number in numbers) and len(numbers) >= least
            if not right or sorted(set(numbers)) != numbers:
                needed = f"must be a list of {least or 'no'} or more whole numbers, each above the last"
                yield f"{key} {needed}; got {numbers}"

    def _pair_problems(self) -> Iterable[str]:
        """Yield a line for each mistake in the options of preferences."""
        yield from self.scorer.kind_problems()
        is_given = self.scorer.kind == "given"
        if not is_given:
            yield from self.endpoint.endpoint_problems()
        elif self.endpoint.base_url:
            got = f"got {self.endpoint.base_url}"
            yield f"endpoint.base_url must be null with scorer.kind=given, which asks for no answer; {got}"
        if self.prompts is not None and self.scorer.kind != "judge":
            got = f"got {self.prompts} with {self.scorer.kind}"
            yield f"prompts must be null unless scorer.kind=judge, whose request it holds; {got}"
        if is_given and self.keep_given:
            yield "keep_given must be false with scorer.kind=given, which scores no answer; got true"
        candidates = self.answers + self.keep_given
        least = 1 if self.pair == "best" else 2
        if not is_given and candidates < least:
            yield f"answers must be at least {least} with pair={self.pair}; got {self.answers}"
        if self.min_scored < least:
            yield f"min_scored must be at least {least} with pair={self.pair}; got {self.min_scored}"
        if not is_given and self.min_scored > candidates >= least:
            yield f"min_scored must be at most the {candidates} answers of a prompt; got {self.min_scored}"
        if not is_given and self.answers > 1 and self.sampling.temperature == 0:
            yield f"sampling.temperature must be above 0 for {self.answers} different answers; got 0"

    @property
    def loads_model(self) -> bool:
        """Tell whether a model on this machine embeds documents or scores answers."""
        task = TASKS[str(self.task)]
        return (task.joins and self.encoder.path is not None) or (task.of_prompts and self.scorer.kind == "reward")

    @property
    def pairing(self) -> Pairing:
        """How preferences are made."""
        given = self.answers, self.pair, self.min_gap, self.min_scored, self.keep_given
        return Pairing(*given, self.scorer)

    @property
    def store_path(self) -> str:
        """The file of answers."""
        return self.store or f"{self.output_dir.rstrip('/')}.answers.sqlite"


def synthesize(options: SynthesizeOptions) -> str:
    """Make the records; return closing tables; raise UsageError or DataError."""
    # Mistakes in files end the run before documents are read and requests are paid for.
    task = TASKS[str(options.task)]
    prompts = {} if task.joins else load_prompts(options.prompts, str(options.task))
    for endpoint in (options.endpoint, options.scorer.endpoint):
        if endpoint.base_url:
            read_price(endpoint)
    files = find_source_files({name: as_list(value) for name, value in options.sources.items()})
    passages = Passages(_benchmark_texts(options.decontaminate))

    # Documents are chosen before any is asked about: by interval of length, without copies and benchmark passages.
    lengths, intervals = None, Intervals(tuple(options.intervals))
    if task.of_documents:
        read = Intervals((1, options.intervals[-1])) if task.joins else intervals
        lengths = read, TokenLengths(load_tokenizer(options.model))
    skip_bad, truncate = options.on_bad_record == "skip", options.over_length == "truncate"
    key = options.text_key or task.text_key
    fields = ItemFields(key, options.class_field, task.of_prompts, options.question_key)
    corpus = Corpus(files, list(options.sources), fields, skip_bad, lengths, truncate)
    near = None if options.near_duplicates is None else NearDuplicates(options.near_duplicates)
    total = corpus.choose(options.records, options.seed, near, passages)
    if not total:
        left_out = _listed(corpus.left_out) or "nothing was there"
        raise DataError(f"sources must hold something to ask about, in its field {key}; left out: {left_out}")
    settings = Settings(
        options.seed,
        options.sampling,
        options.parse_tries,
        passages,
        options.min_length_score,
        options.max_paragraphs,
        options.lengths,
        options.window,
        options.questions,
        lengths[1] if lengths else None,
    )

    # The folder appears only if enough items have records; the answers in the store outlive a run that fails.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        work = Work(
            corpus,
            total,
            prompts,
            settings,
            options.endpoint,
            options.encoder,
            intervals,
            options.store_path,
            folder.path / f"{options.task}.jsonl",
            options.pairing,
        )
        result = asyncio.run(task.write(work))
        _check_outcomes(result.outcomes, result.without, options)
        found = {n: {"found": corpus.available[n], "drawn": len(own)} for n, own in corpus.chosen.items()}
        report = {
            "options": redacted({name: value for name, value in asdict(options).items() if name not in NOT_REPORTED}),
            "lengths": result.lengths or found,
            "left_out": dict(corpus.left_out),
            "outcomes": dict(result.outcomes),
            "records": result.records,
            **({"questions_without_record": dict(result.lost)} if options.questions > 1 else {}),
            "without_record": result.without,
            **result.facts,
        }
        (folder.path / REPORT).write_text(yaml.safe_dump(report, allow_unicode=True, sort_keys=False), "utf-8")
        folder.publish()
    rows = [
        {"length": name, **{key: f"{count:,}" for key, count in row.items()}} for name, row in report["lengths"].items()
    ]
    lost = f"; questions without a record: {_listed(result.lost)}" if result.lost else ""
    lines = [
        aligned(rows, ["length"]),
        f"left out: {_listed(corpus.left_out) or 'none'}",
        f"items: {_listed(result.outcomes)}" + (f"; {result.records:,} records{lost}" if options.questions > 1 else ""),
        *result.notes,
        *([result.cost] if result.cost else []),
    ]
    return "\n".join([*lines, f"written to {options.output_dir}"])


def _benchmark_texts(paths: Sequence[str]) -> Iterator[str]:
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
    elif isinstance(value, TextFile):
        yield "".join(value.blocks())
    elif isinstance(value, (list, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(child)


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
