"""A task of `verl-ext synthesize`: what it reads, what it asks, and the records that it makes of the answers.

    sources ──► items ──► chosen ones ──► questions about each ──► answers ──► its records
                (read)    (corpus.py)     (make, over `ask`)                   in the order of the items

A task is a class of options and a subclass of :class:`SynthesisTask`, in a file of its own.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from verl_ext.commands.command_line import as_list
from verl_ext.files import json_lines
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokens.tokenizer import load_tokenizer
from verl_ext.tools.endpoint.answer import DONE, Answer, Usage
from verl_ext.tools.endpoint.client import Client, EndpointOptions
from verl_ext.tools.endpoint.spending import QuestionProgress
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.synthesis.corpus import Corpus, Intervals, Lengths
from verl_ext.tools.synthesis.items import SourceItem, item_of, read_items
from verl_ext.tools.synthesis.options import SynthesizeOptions
from verl_ext.tools.synthesis.overlap import NearDuplicates, Passages, benchmark_texts
from verl_ext.tools.synthesis.prompts import PromptTexts, load_prompts
from verl_ext.tools.synthesis.replies import refused_in_words
from verl_ext.tools.synthesis.report import Outcomes, Result
from verl_ext.tools.synthesis.token_lengths import TokenLengths

AHEAD = 4  # items that are in progress for each concurrent request
MadeT = TypeVar("MadeT")


class NoRecord(Exception):
    """The outcome of a question or a filter after which an item, or one of its questions, has no record."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


async def attempted(made: Coroutine[Any, Any, Result]) -> Result:
    """Return a result, also of steps that end with `NoRecord`."""
    try:
        return await made
    except NoRecord as end:
        return Result(end.outcome, reason=end.reason)


def usable(answer: Answer, stage: str) -> Answer:
    """Return a finished answer; raise NoRecord for any other."""
    if not answer.is_done:
        raise NoRecord(answer.outcome, f"{stage}: {answer.reason}")
    return answer


class SynthesisTask:
    """A run of a task. Raises UsageError for a mistake in its prompts, prices or files.

    Attributes:
        name: the task's name, which names its prompts and its file of records too.
        options_class: the class of its options.
        item_key: the field of a text if `text_key` is null.
        lengths: the lengths of items; None: they are not counted.
        clients: the clients of the servers that are open, by the prefixes of their options.
        outcomes: what the report says of the items and the requests.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[SynthesizeOptions]]
    item_key: ClassVar[str] = "prompt"
    lengths: Lengths | None = None
    store: Store

    def __init__(self, options: Any) -> None:
        # Mistakes in files end the run before documents are read and requests are paid for.
        self.options = options
        self.prompts = load_prompts(options.prompts, self.name) if self.has_prompts else {}
        for endpoint in options.servers:
            endpoint.read_price()
        self.passages = Passages(benchmark_texts(options.decontaminate))
        self.clients: dict[str, Client] = {}
        self.outcomes = Outcomes()

    @property
    def has_prompts(self) -> bool:
        """Whether the task asks by prompts of its own."""
        return True

    @property
    def text_key(self) -> str:
        """The field that holds a record's text."""
        return self.options.text_key or self.item_key

    def choose(self) -> int:
        """Choose the items that are asked about; return their number.

        They are drawn by interval of length, without copies and passages of benchmarks.
        """
        options = self.options
        files = find_source_files({name: as_list(value) for name, value in options.sources.items()})
        skip_bad = options.on_bad_record == "skip"
        self.corpus = Corpus(partial(read_items, files, list(options.sources), self.read, skip_bad), self.lengths)
        near = None if options.near_duplicates is None else NearDuplicates(options.near_duplicates)
        return self.corpus.choose(options.records, options.seed, near, self.passages)

    def read(self, record: Mapping[str, Any], name: str, source: str) -> SourceItem | None:
        """Return the item in a record, or None if its language is not wanted; raise BadRecord."""
        return item_of(record, record.get(self.text_key), self.text_key, name, source)

    def requests(self, item: SourceItem) -> Iterator[tuple[float, Usage]]:
        """Yield what an estimate says of an item: groups of requests, as their number and the usage of each."""
        raise NotImplementedError

    async def make(self, item: SourceItem) -> Result:
        """Return an item's records; raise NoRecord if it has none."""
        raise NotImplementedError

    def take(self, result: Result) -> Result:
        """Return the result that is written. This is called in the order of the items."""
        return result

    def finish(self) -> None:
        """Add the task's own facts to the report."""

    async def write(self, path: Path) -> None:
        """Write the records of all items to a file, in the order of the items."""
        free = asyncio.Semaphore(self.options.endpoint.concurrency)

        async def made_of(item: SourceItem) -> Result:
            async with free:  # an item's requests follow each other, while the server still caches its document
                return await attempted(self.make(item))

        # Records are written while later items are asked about, so the file is the same in every run.
        async with self.opened():
            with open(path, "w", encoding="utf-8") as file:
                async with aclosing(self.each(made_of, "records")) as results:
                    async for item, made in results:
                        result = self.take(made)
                        self.outcomes.add(item, result)
                        file.writelines(json_lines(result.records))
        self.finish()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the store and all servers before the first request, so that a missing one costs nothing."""
        with Store(self.options.store_path) as self.store:
            async with AsyncExitStack() as stack:
                for endpoint in self.options.servers:
                    self.clients[endpoint.prefix] = await stack.enter_async_context(Client(endpoint, self.store))
                yield
                self.outcomes.add_spending(list(self.clients.values()))

    async def each(
        self, made_of: Callable[[SourceItem], Coroutine[Any, Any, MadeT]], description: str
    ) -> AsyncGenerator[tuple[SourceItem, MadeT], None]:
        """Yield the chosen items with what is made of them, in their order, under a progress bar."""
        ahead = AHEAD * self.options.endpoint.concurrency
        running: deque[tuple[SourceItem, asyncio.Task[MadeT]]] = deque()
        with QuestionProgress(list(self.clients.values()), self.corpus.total, description) as bar:
            try:
                for item in self.corpus.items():
                    running.append((item, asyncio.ensure_future(made_of(item))))
                    await asyncio.sleep(0)  # requests are sent while documents are read
                    if len(running) >= ahead:
                        first, made = running.popleft()
                        yield first, await made
                        bar.item_done()
                while running:
                    first, made = running.popleft()
                    yield first, await made
                    bar.item_done()
            finally:
                for _, made in running:
                    made.cancel()
                await asyncio.gather(*(made for _, made in running), return_exceptions=True)

    async def answer(
        self,
        item: SourceItem,
        stage: str,
        content: str,
        parse: Callable[[str], Any] | None = None,
        server: EndpointOptions | None = None,
    ) -> Answer:
        """Return the answer to a question about an item; a refusal in words is refused.

        parse: as in :meth:`Client.ask`. server: the one that is asked; None: that of `endpoint`.
        """
        options, message = self.options, {"role": "user", "content": content}
        tries = 1 if parse is None else options.parse_tries
        client = self.clients[(server or options.endpoint).prefix]
        answer = await client.ask(item.name, stage, [message], options.sampling, parse, tries)
        return refused_in_words(answer) if parse is None else answer

    async def ask(
        self, item: SourceItem, stage: str, content: str, parse: Callable[[str], Any] | None = None
    ) -> Answer:
        """Return the finished answer to a question about an item; raise NoRecord without one."""
        return usable(await self.answer(item, stage, content, parse), stage)

    def check_passages(self, text: str, holder: str) -> None:
        """Raise NoRecord if a text holds a passage of `decontaminate`."""
        if self.passages.found_in(text):
            raise NoRecord("contaminated", f"{holder} holds a passage of decontaminate")

    def record_of(
        self,
        item: SourceItem,
        category: str,
        question: str,
        answer: str,
        prompts: PromptTexts,
        answers: Sequence[Answer],
        facts: Mapping[str, Any],
    ) -> Result:
        """Return the record of a question and its answer, with provenance."""
        usage = reduce(add, (each.usage for each in answers), Usage())
        provenance = {
            "item": item.name,
            "source": item.source,
            **facts,
            "prompts": prompts.version,
            "models": sorted({each.model for each in answers}),
            "seeds": [each.seed for each in answers],
            "usage": dict(zip(("prompt_tokens", "cached_tokens", "completion_tokens"), usage.as_tuple(), strict=True)),
        }
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Result(DONE, [{"messages": messages, "category": category, "provenance": provenance}])


class DocumentTask(SynthesisTask):
    """A task about documents, whose lengths are counted in the tokens of the model to be trained."""

    item_key = "text"
    lengths: Lengths

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.tokens = TokenLengths(load_tokenizer(options.model))
        shorten = self.tokens.shortened if options.over_length == "truncate" else None
        self.lengths = Lengths(Intervals(tuple(options.intervals)), self.tokens.count, shorten)
