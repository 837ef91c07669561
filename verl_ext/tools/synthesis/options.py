"""The tasks of `verl-ext synthesize`, the options of each, and their checks."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

from verl_ext.commands.command_line import OutputOptions, as_list, is_names
from verl_ext.options import must, option, spell
from verl_ext.text.read.sources import FORMATS, local_path
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.endpoint.client import EndpointOptions, SamplingOptions
from verl_ext.tools.synthesis import agentwrite, glm_long, longalign
from verl_ext.tools.synthesis.asking import write_records
from verl_ext.tools.synthesis.encoder import ClassifierOptions, EncoderOptions
from verl_ext.tools.synthesis.joined import write_joined
from verl_ext.tools.synthesis.lengths import FORMS, Writing
from verl_ext.tools.synthesis.preferences import PAIRS, write_preferences
from verl_ext.tools.synthesis.prompts import PUBLISHED
from verl_ext.tools.synthesis.scorers import Pairing, ScorerOptions

REPORT = "report.yaml"  # `tokenize` does not take a file of this name for records
TakenT = TypeVar("TakenT")


@dataclass(frozen=True)
class SynthesizeOptions(OutputOptions):
    """The options of every task.

    task: its name. write: the function that makes the records. item_key: the field of a text if `text_key` is null.
    is_prompt, is_instruction: as in :class:`ItemFields`.
    """

    marker: ClassVar[str] = REPORT
    task: ClassVar[str]
    write: ClassVar[Any]
    item_key: ClassVar[str] = "prompt"
    is_prompt: ClassVar[bool] = False
    is_instruction: ClassVar[bool] = False

    sources: dict[str, Any] = option({}, f"name: file, folder, glob or list of them; {FORMATS}", required=True)
    endpoint: EndpointOptions = option(EndpointOptions, "server that receives the requests")
    sampling: SamplingOptions = option(SamplingOptions, "sampling options of the requests")
    store: str | None = option(None, "file of answers, which runs can share; null: OUTPUT_DIR.answers.sqlite")
    prompts: str | None = option(
        None,
        "YAML file with the prompts of the task, or published: the paper's form (longalign); null: built-in, in English"
        " and Chinese",
    )
    text_key: str | None = option(None, "field that holds a record's text; null: text, or prompt for instructions")
    records: int | None = option(
        None, "documents or instructions to draw, equally many documents per interval; null: all", least=1
    )
    near_duplicates: float | None = option(
        0.8, "similarity from which a text is left out as a copy of an earlier one; null: no search", above=0, most=1
    )
    decontaminate: list[Any] = option([], "benchmark files; no record may hold 13 words in a row of them")
    on_bad_record: str = option(
        "error", "bad record: error: ends the run | skip: left out, counted by reason", choices=("error", "skip")
    )
    parse_tries: int = option(3, "maximum number of requests for an answer that arrives in a wrong form", least=1)
    max_failed_share: float = option(
        0.1, "share of items without a usable answer (refused, cut, failed, …) above which nothing is written", least=0
    )
    preview: int = option(1, "records to show at the end, shortened", least=0)
    seed: int = option(42, "seed of all draws: items, kinds, questions, lengths")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible without files or server."""
        yield from self._file_problems()
        yield from self.task_problems()
        for key, least in (("intervals", 2), ("lengths", 0), ("word_intervals", 0)):
            numbers = getattr(self, key, None)
            if numbers is None:
                continue
            least = 2 if numbers and key == "word_intervals" else least
            right = all(type(number) is int and number > 0 for number in numbers) and len(numbers) >= least
            if not right or sorted(set(numbers)) != numbers:
                yield must(key, f"be a list of {least or 'no'} or more whole numbers, each above the last", numbers)

    def _file_problems(self) -> Iterator[str]:
        """Yield a line for each mistake in the names of files."""
        named = {f"sources.{name}": value for name, value in self.sources.items()}
        if self.decontaminate:
            named["decontaminate"] = self.decontaminate
        for key, value in named.items():
            if not is_names(value):
                yield must(key, "be a path, a glob or a list of them", value)
        paths = [local_path(path) for value in named.values() if is_names(value) for path in as_list(value)]
        prompts = None if self.prompts == PUBLISHED else self.prompts
        models = (getattr(node, "path", None) for node in vars(self).values())
        inputs = self.store, prompts, *models, *paths
        yield from self.output_problems("a source, the store", *inputs)

    def task_problems(self) -> Iterable[str | None]:
        """Return a line for each mistake in the options of the task and its servers."""
        return self.endpoint.endpoint_problems()

    @property
    def servers(self) -> list[EndpointOptions]:
        """The servers that may be asked."""
        nodes = [getattr(node, "endpoint", node) for node in vars(self).values()]
        return [node for node in nodes if isinstance(node, EndpointOptions)]

    @property
    def store_path(self) -> str:
        """The file of answers."""
        return self.store or f"{self.output_dir.rstrip('/')}.answers.sqlite"

    @property
    def loads_model(self) -> bool:
        """Whether a model on this machine embeds documents or scores answers."""
        encoder, scorer = getattr(self, "encoder", None), getattr(self, "scorer", None)
        return bool(encoder and encoder.path) or bool(scorer and scorer.kind == "reward")


@dataclass(frozen=True)
class DocumentOptions(SynthesizeOptions):
    """The options of tasks about documents."""

    item_key: ClassVar[str] = "text"

    model: ModelOptions = option(ModelOptions, "the tokenizer of the model to be trained, which counts tokens")
    intervals: list[Any] = option(
        [8192, 16384, 32768, 65536], "edges of the length intervals of documents, in tokens; of joined ones, if joined"
    )
    over_length: str = option(
        "drop",
        "a document with more tokens than the last of `intervals`: drop: left out | truncate: its start is used",
        choices=("drop", "truncate"),
    )

    def task_problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake in the server and the tokenizer."""
        yield from self.endpoint.endpoint_problems()
        yield from self.model.tokenizer_problems()


@dataclass(frozen=True)
class LongAlignOptions(DocumentOptions):
    """Five questions about a document, and the answers to one of them or several."""

    task: ClassVar[str] = "longalign"
    write: ClassVar[Any] = staticmethod(partial(write_records, longalign.ask_of_document))

    questions: int = option(1, "questions kept of a document, whose tokens data.share_prefixes computes once", least=1)
    estimate: bool = option(False, "true: only estimate the requests, tokens and cost; nothing is asked or written")


@dataclass(frozen=True)
class GLMLongOptions(DocumentOptions):
    """Questions about, and summaries of, documents longer than the model's context."""

    task: ClassVar[str] = "glm_long"
    write: ClassVar[Any] = staticmethod(partial(write_records, glm_long.ask_of_parts))

    window: int = option(
        12288, "tokens of a document in a request; the model's context needs room for the answer too", least=64
    )
    ways: dict[str, Any] = option(
        {}, "how often each way of asking is drawn, e.g. {chunk:1,chunks:1,summary:0}; empty: equally often"
    )
    grounded: bool = option(False, "true: the model judges once more whether its text supports question and answer")
    questions: int = option(1, "questions kept of a document, whose tokens data.share_prefixes computes once", least=1)
    estimate: bool = option(False, "true: only estimate the requests, tokens and cost; nothing is asked or written")

    def task_problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake in the ways of asking too."""
        yield from super().task_problems()
        weights = self.ways.values()
        is_numbers = all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights)
        if self.ways and (set(self.ways) - set(glm_long.WAYS) or not is_numbers or not any(weights)):
            yield must("ways", f"be numbers of at least 0, not all 0, for {', '.join(glm_long.WAYS)}", self.ways)

    @property
    def way_weights(self) -> dict[str, float]:
        """How often each way of asking is drawn."""
        return self.ways or dict.fromkeys(glm_long.WAYS, 1.0)


@dataclass(frozen=True)
class JoinOptions(DocumentOptions):
    """Long documents, each joined of similar ones."""

    task: ClassVar[str] = "glm_long_documents"
    write: ClassVar[Any] = staticmethod(write_joined)

    class_field: str | None = option(
        None, "field with a record's class; only documents of one class are joined; null: its source"
    )
    classifier: ClassifierOptions = option(ClassifierOptions, "model that names the classes")
    encoder: EncoderOptions = option(EncoderOptions, "encoder that embeds documents")

    def task_problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake in the encoder, the classes and their servers."""
        if self.encoder.path is None:
            yield from self.endpoint.endpoint_problems()
        yield from self.model.tokenizer_problems()
        if self.prompts is not None and not self.classifier.classes:
            yield must("prompts", "be null without classifier.classes", self.prompts)
        yield from self.classifier.class_problems()
        if self.classifier.classes and self.class_field is not None:
            yield must("class_field", "be null with classifier.classes", self.class_field)


@dataclass(frozen=True)
class AgentWriteOptions(SynthesizeOptions):
    """Long texts, planned and written paragraph by paragraph."""

    task: ClassVar[str] = "agentwrite"
    write: ClassVar[Any] = staticmethod(agentwrite.write_long_texts)
    is_instruction: ClassVar[bool] = True

    lengths: list[Any] = option([], "lengths in words, one of which is drawn if an instruction names none")
    min_length_score: float = option(80.0, "minimum S_l, 0 to 100, of a text that is kept", least=0, most=100)
    select: int | None = option(
        None,
        "a model leaves out instructions that are harmful or made to scrape data, or whose good answer has"
        " at most so many words (LongWriter: 2000); null: none",
        least=1,
    )
    languages: list[str] = option([], "languages of the instructions that are used, of en, zh; empty: all")
    paragraphs: str = option(
        "sequential",
        "sequential: each paragraph continues the text so far | parallel: each is written from the plan"
        " alone, all at once | both: the report compares them, and the records are sequential",
        choices=FORMS,
    )
    word_intervals: list[Any] = option(
        [],
        "edges of intervals of lengths in words, e.g. [2000,4000,6000,8000,10000], over which the lengths"
        " asked for and written are spread evenly",
    )
    max_paragraphs: int = option(50, "maximum number of paragraphs of a plan", least=1)
    scorer: ScorerOptions = option(ScorerOptions, "with paragraphs=both: kind=writing scores both")
    estimate: bool = option(False, "true: only estimate the requests, tokens and cost; nothing is asked or written")

    def task_problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake in the server, the lengths and the scorer."""
        yield from self.endpoint.endpoint_problems()
        if self.scorer.kind is not None:
            yield from self.scorer.kind_problems()
            if self.scorer.kind != "writing" or self.paragraphs != "both":
                got = f"{self.scorer.kind} with paragraphs={self.paragraphs}"
                yield must("scorer.kind", "be null or, with paragraphs=both, writing", got)
        if self.word_intervals and self.lengths:
            yield must("lengths", "be empty with word_intervals, from which lengths are drawn", self.lengths)

    @property
    def writing(self) -> Writing:
        """How long texts are written."""
        return Writing(self.paragraphs, tuple(self.word_intervals), self.select)


@dataclass(frozen=True)
class AnswerPairOptions(SynthesizeOptions):
    """Several answers to each prompt, scored, the best against others."""

    task: ClassVar[str] = "preferences"
    write: ClassVar[Any] = staticmethod(write_preferences)
    is_prompt: ClassVar[bool] = True

    scorer: ScorerOptions = option(ScorerOptions, "how answers are scored")
    answers: int = option(4, "answers to ask for, of each prompt", least=1)
    pair: str = option(
        "best_worst",
        "best_worst | best_random: against one of the others, drawn | all: against every other | best: no"
        " pair, but a chat with the best answer",
        choices=PAIRS,
    )
    min_gap: float = option(0.0, "least difference of the scores of a pair, above 0", least=0)
    min_scored: int = option(2, "least different answers with a score, of each prompt", least=1)
    keep_given: bool = option(False, "true: the answer in a record's messages is scored too")
    question_key: str | None = option(
        None, "field with the question alone, which the scorer sees; null: the prompt without provenance.spans"
    )

    def task_problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake in the answers, their scores and pairs."""
        yield from self.scorer.kind_problems()
        is_given = self.scorer.kind == "given"
        if not is_given:
            yield from self.endpoint.endpoint_problems()
        elif self.endpoint.base_url:
            needed = "be null with scorer.kind=given, which asks for no answer"
            yield must("endpoint.base_url", needed, self.endpoint.base_url)
        if self.prompts is not None and self.scorer.kind != "judge":
            got = f"{self.prompts} with {spell(self.scorer.kind)}"
            yield must("prompts", "be null unless scorer.kind=judge, whose request it holds", got)
        if is_given and self.keep_given:
            yield must("keep_given", "be false with scorer.kind=given, which scores no answer", True)
        candidates = self.answers + self.keep_given
        least = 1 if self.pair == "best" else 2
        if not is_given and candidates < least:
            yield must("answers", f"be at least {least} with pair={self.pair}", self.answers)
        if self.min_scored < least:
            yield must("min_scored", f"be at least {least} with pair={self.pair}", self.min_scored)
        if not is_given and self.min_scored > candidates >= least:
            yield must("min_scored", f"be at most the {candidates} answers of a prompt", self.min_scored)
        if not is_given and self.answers > 1 and self.sampling.temperature == 0:
            yield must("sampling.temperature", f"be above 0 for {self.answers} different answers", 0)

    @property
    def pairing(self) -> Pairing:
        """How many answers are asked for, and how they are paired."""
        return taken(Pairing, self)


def taken(cls: type[TakenT], options: SynthesizeOptions, **more: Any) -> TakenT:
    """Return a dataclass whose fields are the task's options of the same names, and `more`."""
    own = {field.name: getattr(options, field.name) for field in fields(cls) if hasattr(options, field.name)}  # type: ignore[arg-type]
    return cls(**{**own, **more})


TASKS: dict[str, type[SynthesizeOptions]] = {
    cls.task: cls for cls in (LongAlignOptions, GLMLongOptions, JoinOptions, AgentWriteOptions, AnswerPairOptions)
}
