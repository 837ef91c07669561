"""The tasks of `verl-ext synthesize`, its options and their checks."""

import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from verl_ext.commands.command_line import OutputOptions, as_list, is_names
from verl_ext.endpoint.client import EndpointOptions, SamplingOptions
from verl_ext.options import option
from verl_ext.text.read.sources import FORMATS, local_path
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.synthesis import agentwrite, glm_long, longalign
from verl_ext.tools.synthesis.asking import Work, WriteResult, write_records
from verl_ext.tools.synthesis.encoder import ClassifierOptions, EncoderOptions
from verl_ext.tools.synthesis.estimate import ESTIMATED
from verl_ext.tools.synthesis.joined import write_joined
from verl_ext.tools.synthesis.lengths import FORMS, Writing
from verl_ext.tools.synthesis.overlap import Passages
from verl_ext.tools.synthesis.preferences import PAIRS, write_preferences
from verl_ext.tools.synthesis.prompts import PUBLISHED
from verl_ext.tools.synthesis.records import Settings
from verl_ext.tools.synthesis.scorers import Pairing, ScorerOptions
from verl_ext.tools.synthesis.token_lengths import TokenLengths

REPORT = "report.yaml"  # `tokenize` does not take a file of this name for records


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
    "agentwrite": SynthesisTask(agentwrite.write_long_texts, "prompt", of_documents=False),
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
    prompts: str | None = option(
        None,
        "YAML file with the prompts of the task, or published: the paper's form (longalign); null: built-in, in English"
        " and Chinese",
    )
    text_key: str | None = option(None, "field that holds a record's text; null: text, or prompt for instructions")
    class_field: str | None = option(
        None,
        "glm_long_documents: field with a record's class; only documents of one class are joined; null: its source",
    )
    classifier: ClassifierOptions = option(ClassifierOptions, "glm_long_documents: model that names the classes")
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
    ways: dict[str, Any] = option(
        {}, "glm_long: how often each way of asking is drawn, e.g. {chunk:1,chunks:1,summary:0}; empty: equally often"
    )
    grounded: bool = option(
        False, "glm_long: true: the model judges once more whether its text supports question and answer"
    )
    questions: int = option(
        1, "longalign, glm_long: questions kept of a document, whose tokens data.share_prefixes computes once", least=1
    )
    lengths: list[Any] = option([], "agentwrite: lengths in words, one of which is drawn if an instruction names none")
    min_length_score: float = option(
        80.0, "agentwrite: minimum S_l, 0 to 100, of a text that is kept", least=0, most=100
    )
    select: int | None = option(
        None,
        "agentwrite: a model leaves out instructions that are harmful or made to scrape data, or whose good answer has"
        " at most so many words (LongWriter: 2000); null: none",
        least=1,
    )
    languages: list[str] = option([], "agentwrite: languages of the instructions that are used, of en, zh; empty: all")
    paragraphs: str = option(
        "sequential",
        "agentwrite: sequential: each paragraph continues the text so far | parallel: each is written from the plan"
        " alone, all at once | both: the report compares them, and the records are sequential",
        choices=FORMS,
    )
    word_intervals: list[Any] = option(
        [],
        "agentwrite: edges of intervals of lengths in words, e.g. [2000,4000,6000,8000,10000], over which the lengths"
        " asked for and written are spread evenly",
    )
    max_paragraphs: int = option(50, "agentwrite: maximum number of paragraphs of a plan", least=1)
    scorer: ScorerOptions = option(
        ScorerOptions, "preferences: how answers are scored; agentwrite with paragraphs=both: kind=writing scores both"
    )
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
    estimate: bool = option(
        False,
        f"true: only estimate the requests, tokens and cost of {', '.join(ESTIMATED)}; nothing is asked or written",
    )
    preview: int = option(1, "records to show at the end, shortened", least=0)
    seed: int = option(42, "seed of all draws: items, kinds, questions, lengths")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible without files or server."""
        yield from self._file_problems()
        yield from self._server_problems()
        yield from self._task_problems()
        for key, least in (("intervals", 2), ("lengths", 0), ("word_intervals", 2 if self.word_intervals else 0)):
            numbers = getattr(self, key)
            right = all(type(number) is int and number > 0 for number in numbers) and len(numbers) >= least
            if not right or sorted(set(numbers)) != numbers:
                needed = f"must be a list of {least or 'no'} or more whole numbers, each above the last"
                yield f"{key} {needed}; got {numbers}"

    def _file_problems(self) -> Iterator[str]:
        """Yield a line for each mistake in the names of files."""
        named = {f"sources.{name}": value for name, value in self.sources.items()}
        if self.decontaminate:
            named["decontaminate"] = self.decontaminate
        for key, value in named.items():
            if not is_names(value):
                yield f"{key} must be a path, a glob or a list of them; got {value!r}"
        paths = [local_path(path) for value in named.values() if is_names(value) for path in as_list(value)]
        prompts = None if self.prompts == PUBLISHED else self.prompts
        inputs = self.store, prompts, self.encoder.path, self.scorer.path, *paths
        yield from self.output_problems("a source, the store", *inputs)

    def _server_problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake in the servers and models of the task."""
        task = TASKS[str(self.task)]
        if task.of_prompts:
            yield from self._pair_problems()
        elif not task.joins or self.encoder.path is None:
            yield from self.endpoint.endpoint_problems()
        if task.of_documents:
            yield from self.model.tokenizer_problems()
        if task.joins and self.prompts is not None and not self.classifier.classes:
            yield f"prompts must be null with task={self.task} without classifier.classes; got {self.prompts}"
        yield from self.classifier.class_problems()
        if self.classifier.classes and (not task.joins or self.class_field is not None):
            got = f"got task={self.task}, class_field={self.class_field}"
            yield f"classifier.classes are of task=glm_long_documents without class_field; {got}"
        if self.task == "agentwrite" and self.scorer.kind is not None:
            yield from self.scorer.kind_problems()
            if self.scorer.kind != "writing" or self.paragraphs != "both":
                got = f"got {self.scorer.kind} with paragraphs={self.paragraphs}"
                yield f"scorer.kind must be null or, with paragraphs=both, writing for task=agentwrite; {got}"

    def _task_problems(self) -> Iterator[str]:
        """Yield a line for each option that the task does not have or that contradicts another."""
        if self.estimate and self.task not in ESTIMATED:
            yield f"estimate must be false with task={self.task}; it is of {', '.join(ESTIMATED)}"
        weights = self.ways.values()
        is_numbers = all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights)
        if self.ways and (set(self.ways) - set(glm_long.WAYS) or not is_numbers or not any(weights)):
            must = f"ways must be numbers of at least 0, not all 0, for {', '.join(glm_long.WAYS)}"
            yield f"{must}; got {self.ways}"
        if self.languages and self.task != "agentwrite":
            yield f"languages must be empty with task={self.task}, whose texts may be of any; got {self.languages}"
        if self.word_intervals and self.lengths:
            yield f"lengths must be empty with word_intervals, from which lengths are drawn; got {self.lengths}"

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
    def writing(self) -> Writing:
        """How long texts are written."""
        return Writing(self.paragraphs, tuple(self.word_intervals), self.select)

    @property
    def store_path(self) -> str:
        """The file of answers."""
        return self.store or f"{self.output_dir.rstrip('/')}.answers.sqlite"

    def settings(self, passages: Passages, lengths_of: TokenLengths | None) -> Settings:
        """Return what all items share; lengths_of counts the tokens of documents."""
        return Settings(
            seed=self.seed,
            sampling=self.sampling,
            parse_tries=self.parse_tries,
            passages=passages,
            min_length_score=self.min_length_score,
            max_paragraphs=self.max_paragraphs,
            lengths=self.lengths,
            window=self.window,
            questions=self.questions,
            lengths_of=lengths_of,
            ways=self.ways or dict.fromkeys(glm_long.WAYS, 1),
            grounded=self.grounded,
        )
