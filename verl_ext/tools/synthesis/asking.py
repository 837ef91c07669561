"""The making of records: concurrent requests, records in items' order."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from verl_ext.files import json_lines
from verl_ext.options import one_line
from verl_ext.tables import aligned
from verl_ext.tools.endpoint.answer import OUTCOMES, Usage
from verl_ext.tools.endpoint.client import Client, EndpointOptions
from verl_ext.tools.endpoint.spending import Price, QuestionProgress, read_price, spent
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.synthesis.corpus import Corpus
from verl_ext.tools.synthesis.items import SourceItem
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings

SHOWN = 100  # characters of a preview's prompt and answer
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
    store_path: str
    path: Path
    options: Any  # those of the task


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


async def write_records(
    make: Make, work: Work, beside: Opener | None = None, then: Callable[[Result], Result] | None = None
) -> WriteResult:
    """Write the records that `make` makes of the items, in their order.

    beside: opens further clients, whose requests count too. then: changes a result, in the order of the items. Without
    a server in `work`, `make` gets no client.
    """
    result = WriteResult()
    free = asyncio.Semaphore(work.endpoint.concurrency)
    with Store(work.store_path) as store:
        async with AsyncExitStack() as stack:
            # Open every server before the first request, so that a missing one costs nothing.
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

            # Write in the order of the items, while later ones are asked about: the file is the same in every run.
            begun = ((item, made_of(item)) for item in work.corpus.items())
            with open(work.path, "w", encoding="utf-8") as file, QuestionProgress(asked, work.total, "records") as bar:
                async with aclosing(in_order(begun, AHEAD * work.endpoint.concurrency)) as results:
                    async for item, made in results:
                        made = made if then is None else then(made)
                        result.add(item, made.outcome, made.reason, len(made.records))
                        result.lost.update(made.lost)
                        file.writelines(json_lines(made.records))
                        bar.item_done()
            result.cost = "\n".join(spent(*each) for each in asked)
            count_spending(result, asked)
    return result


def count_spending(result: WriteResult, asked: Sequence[tuple[Client, Price | None]]) -> None:
    """Add requests and outcomes by stage, and what items without a record have cost, to the report."""
    stages: dict[str, dict[str, int]] = {}
    columns = ("requests", *OUTCOMES)
    for client, _ in asked:
        for (stage, outcome), count in client.outcomes.items():
            stages.setdefault(stage, dict.fromkeys(columns, 0))[outcome] += count
        for stage, count in client.asked.items():
            stages.setdefault(stage, dict.fromkeys(columns, 0))["requests"] += count
    names = [name for name in columns if any(row[name] for row in stages.values())]
    result.facts["stages"] = {stage: {name: row[name] for name in names} for stage, row in stages.items()}
    dropped: dict[str, dict[str, float]] = {}
    for entry in result.without:
        row = dropped.setdefault(entry["outcome"], {"items": 0, "tokens": 0})
        row["items"] += 1
        for client, price in asked:
            usage = client.usage_of.get(entry["item"], Usage())
            row["tokens"] += usage.prompt_tokens + usage.completion_tokens
            if price is not None:
                row["cost"] = round(row.get("cost", 0.0) + price.of(usage), 6)
    # The most expensive reason first: it is where a better prompt or filter saves most.
    dearest = sorted(dropped.items(), key=lambda each: (-each[1].get("cost", 0.0), -each[1]["tokens"], each[0]))
    result.facts["spent_without_record"] = dict(dearest)
    if stages:
        rows = [{"stage": stage, **{n: f"{row[n]:,}" for n in names}} for stage, row in stages.items()]
        result.notes.append(aligned(rows, ["stage"]))
    if any(row["tokens"] for row in dropped.values()):
        forms = {"items": ",.0f", "tokens": ",.0f", "cost": ",.6g"}
        lost = [
            {"without record": name, **{key: format(value, forms[key]) for key, value in row.items()}}
            for name, row in dearest
        ]
        result.notes.append(aligned(lost, ["without record"]))


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


def preview_line(line: str) -> str:
    """Return a record in a line: the end of its prompt and the start of its answer, or the start of its text."""
    record = json.loads(line)
    messages = record.get("messages") or [*record.get("prompt", []), *record.get("chosen", [])]
    texts = [message["content"] for message in messages if isinstance(message, dict)] or [str(record.get("text", ""))]
    parts = [f"… {one_line(texts[-2][-SHOWN:])} → "] if len(texts) > 1 else []
    return f"record ({record.get('category', '')}): {''.join(parts)}{one_line(texts[-1][:SHOWN])} …"
