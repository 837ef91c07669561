"""The options that all tasks of `verl-ext synthesize` share, and more for tasks about documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_ext.commands.command_line import OutputOptions, as_list, is_names
from verl_ext.options import must, option
from verl_ext.text.read.sources import FORMATS, local_path
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.endpoint.client import EndpointOptions, SamplingOptions
from verl_ext.tools.synthesis.prompts import PUBLISHED

REPORT = "report.yaml"  # `tokenize` does not take a file of this name for records


@dataclass(frozen=True)
class SynthesizeOptions(OutputOptions):
    """The options of every task."""

    marker: ClassVar[str] = REPORT

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

    def problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake visible without files or server."""
        named = {f"sources.{name}": value for name, value in self.sources.items()}
        if self.decontaminate:
            named["decontaminate"] = self.decontaminate
        for key, value in named.items():
            if not is_names(value):
                yield must(key, "be a path, a glob or a list of them", value)
        paths = [local_path(path) for value in named.values() if is_names(value) for path in as_list(value)]
        prompts = None if self.prompts == PUBLISHED else self.prompts
        models = (getattr(node, "path", None) for node in vars(self).values())
        yield from self.output_problems("a source, the store", self.store, prompts, *models, *paths)
        yield from self.task_problems()

    def task_problems(self) -> Iterable[str | None]:
        """Return a line for each mistake in the options of the task and its servers."""
        return self.endpoint.endpoint_problems()

    @property
    def servers(self) -> list[EndpointOptions]:
        """The servers that are asked."""
        return [self.endpoint] if self.endpoint.base_url else []

    @property
    def store_path(self) -> str:
        """The file of answers."""
        return self.store or f"{self.output_dir.rstrip('/')}.answers.sqlite"

    @property
    def loads_model(self) -> bool:
        """Whether a model on this machine embeds documents or scores answers."""
        return False


@dataclass(frozen=True)
class DocumentOptions(SynthesizeOptions):
    """The options of tasks about documents."""

    model: ModelOptions = option(ModelOptions, "the tokenizer of the model to be trained, which counts tokens")
    intervals: list[Any] = option(
        [8192, 16384, 32768, 65536], "edges of the length intervals of documents, in tokens; of joined ones, if joined"
    )
    over_length: str = option(
        "drop",
        "a document with more tokens than the last of `intervals`: drop: left out | truncate: its start is used",
        choices=("drop", "truncate"),
    )

    def task_problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake in the server, the tokenizer and the intervals."""
        yield from super().task_problems()
        yield from self.model.tokenizer_problems()
        yield ascending_problem("intervals", self.intervals, 2)


def ascending_problem(key: str, numbers: list[Any], least: int) -> str | None:
    """Return a line unless an option holds `least` or more whole numbers, each above the last."""
    right = all(type(number) is int and number > 0 for number in numbers) and len(numbers) >= least
    if right and sorted(set(numbers)) == numbers:
        return None
    return must(key, f"be a list of {least or 'no'} or more whole numbers, each above the last", numbers)
