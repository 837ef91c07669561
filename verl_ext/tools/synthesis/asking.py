"""The making of records: concurrent requests, records in items' order."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl_ext.endpoint.client import Client, EndpointOptions
from verl_ext.endpoint.spending import Price, QuestionProgress, read_price, spent
from verl_ext.endpoint.store import Store
from verl_ext.files import json_lines
from verl_ext.tools.synthesis.corpus import Corpus, Intervals
from verl_ext.tools.synthesis.encoder import EncoderOptions
from verl_ext.tools.synthesis.items import SourceItem
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings

if TYPE_CHECKING:
    from verl_ext.tools.synthesis.preferences import Pairing

AHEAD = 4  # items that are in progress for each concurrent request

Make = Callable[[SourceItem, Client, dict[str, PromptTexts], Settings], Coroutine[Any, Any, Result]]
Opener = Callable[[Store], AbstractAsyncContextManager[list[tuple[Client, Price | None]]]]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Work:
    """The inputs of a run, and the file that it writes."""

    corpus: Corpus
    total: int
    prompts: dict[str, PromptTexts]
    settings: Settings
    endpoint: EndpointOptions
    encoder: EncoderOptions
    intervals: Intervals | None
    store_path: str
    path: Path
    pairing: "Pairing | None" = None  # of preferences


@dataclass
class WriteResult:
    """The outcomes of the items of a run.

    outcomes: the number of items by outcome. without: the items without a record, with reasons. lengths: the rows of
    the table of lengths as numbers; if empty, the report shows those of the corpus. cost: a line about the requests.
    records: the number of records. lost: the questions without a record by outcome, if items have several.
    notes: further lines. facts: further entries of the report.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    without: list[dict[str, str]] = field(default_factory=list)
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    cost: str = ""
    records: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, item: SourceItem, outcome: str, reason: str, records: int = 0) -> None:
        """Count an item and its records, and list it if it has none."""
        self.outcomes[outcome] += 1
        self.records += records
        if not records:
            self.without.append({"item": item.name, "outcome": outcome, "reason": reason})


async def write_records(make: Make, work: Work, beside: Opener | None = None) -> WriteResult:
    """Write the records that `make` makes of the items, in their order.

    beside: opens further clients, whose requests count too. Without a server in `work`, `make` gets no client.
    """
    result = WriteResult()
    free = asyncio.Semaphore(work.endpoint.concurrency)
    with Store(work.store_path) as store:
        async with AsyncExitStack() as stack:
            client: Any = None
            asked: list[tuple[Client, Price | None]] = []
            if work.endpoint.base_url:
                client = await stack.enter_async_context(Client(work.endpoint, store))
                asked.append((client, read_price(work.endpoint)))
            if beside is not None:
                asked += await stack.enter_async_context(beside(store))

            async def made_of(item: SourceItem) -> Result:
                async with free:  # an item's requests follow each other, while the server still caches its document
                    return await make(item, client, work.prompts, work.settings)

            begun = ((item, made_of(item)) for item in work.corpus.items())
            with (
                open(work.path, "w", encoding="utf-8") as file,
                QuestionProgress(asked, work.total, "records") as bar,
            ):
                async with aclosing(in_order(begun, AHEAD * work.endpoint.concurrency)) as results:
                    async for item, made in results:
                        result.add(item, made.outcome, made.reason, len(made.records))
                        result.lost.update(made.lost)
                        file.writelines(json_lines(made.records))
                        bar.item_done()
            result.cost = "\n".join(spent(*each) for each in asked)
    return result


async def in_order(
    begun: Iterator[tuple[SourceItem, Coroutine[Any, Any, ResultT]]], ahead: int
) -> AsyncGenerator[tuple[SourceItem, ResultT], None]:
    """Yield coroutines' results in order; up to `ahead` run."""
    running: deque[tuple[SourceItem, asyncio.Task[ResultT]]] = deque()
    try:
        for item, coroutine in begun:
            running.append((item, asyncio.ensure_future(coroutine)))
            await asyncio.sleep(0)  # requests are sent while documents are read
            if len(running) >= ahead:
                item, task = running.popleft()
                yield item, await task
        while running:
            item, task = running.popleft()
            yield item, await task
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
