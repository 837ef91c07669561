"""What a run will ask and cost, estimated from its items before anything is asked.

The tokens of documents are counted. Assumed are answers of ANSWER tokens, prompts of PROMPT tokens beside the text, and
TOKENS_A_WORD tokens of a written word, in paragraphs of PARAGRAPH words.
"""

import math
from collections.abc import Iterator

from verl_ext.tools.endpoint.answer import Usage
from verl_ext.tools.endpoint.spending import Price
from verl_ext.tools.synthesis.items import SourceItem
from verl_ext.tools.synthesis.lengths import AskedLengths, Writing, asked_range, mentions_length
from verl_ext.tools.synthesis.records import Settings

ANSWER, PROMPT, TOKENS_A_WORD, PARAGRAPH = 400, 150, 1.4, 500
ESTIMATED = ("longalign", "glm_long", "agentwrite")  # tasks


def requests_of(task: str, item: SourceItem, settings: Settings, writing: Writing) -> Iterator[tuple[float, Usage]]:
    """Yield groups of requests about an item: how many, and the usage of each."""
    if task == "longalign":  # the document stands in each request, and is cached after the first
        yield 1, Usage(item.tokens + PROMPT, 0, ANSWER // 2)
        yield min(settings.questions, 5), Usage(item.tokens + PROMPT, item.tokens, ANSWER)
    elif task == "glm_long":
        yield from _of_ways(item, settings)
    else:
        yield from _of_text(item, settings, writing)


def _of_ways(item: SourceItem, settings: Settings) -> Iterator[tuple[float, Usage]]:
    total, read = sum(settings.way_weights.values()), min(settings.window, item.tokens)
    for way, weight in settings.way_weights.items():
        times = settings.questions * weight / total
        if way != "summary":
            yield times, Usage(read + PROMPT, 0, ANSWER)
        else:  # a document is summarized once
            times, parts = min(times, 1.0), math.ceil(item.tokens / settings.window)
            read = parts * ANSWER if parts > 1 else item.tokens
            yield times * (parts if parts > 1 else 0), Usage(item.tokens // parts + PROMPT, 0, ANSWER)
            yield times, Usage(read + PROMPT, 0, ANSWER)
        if settings.grounded:
            yield times, Usage(read + PROMPT + ANSWER, 0, ANSWER // 4)


def _of_text(item: SourceItem, settings: Settings, writing: Writing) -> Iterator[tuple[float, Usage]]:
    instruction = round(len(item.text.split()) * TOKENS_A_WORD)
    asked = asked_range(item.text)
    if asked is not None:
        words = sum(asked) / 2
    elif mentions_length(item.text) or not (settings.lengths or writing.edges):
        return  # it is left out
    elif writing.edges:
        words = AskedLengths(settings.seed, writing.edges).drawn(item.text)
    else:
        words = sum(settings.lengths) / len(settings.lengths)
    if writing.least_words is not None:
        yield 1, Usage(instruction + 2 * PROMPT, 0, 20)
    paragraphs = max(round(words / PARAGRAPH), 1)
    plan, text = 30 * paragraphs, round(words * TOKENS_A_WORD)
    yield 1, Usage(instruction + PROMPT, 0, plan)
    for form in ("sequential", "parallel") if writing.form == "both" else (writing.form,):
        before = text * (paragraphs - 1) // (2 * paragraphs) if form == "sequential" else 0  # of the text so far
        yield paragraphs, Usage(instruction + PROMPT + plan + before, 0, text // paragraphs)


def estimate_line(number: float, usage: Usage, price: Price | None) -> str:
    """Return a line about so many requests and their total usage."""
    prompt, cached, output = usage.as_tuple()
    cost = f", cost {price.of(usage):,.2f}" if price is not None else ""
    tokens = f"{prompt:,} prompt tokens ({cached:,} of them a second time), {output:,} written"
    return f"estimate: about {number:,.0f} requests, {tokens}{cost}; nothing was asked"


def estimated(task: str, items: Iterator[SourceItem], settings: Settings, writing: Writing) -> tuple[float, Usage]:
    """Return the requests about all items, and their usage."""
    requests, totals = 0.0, [0.0, 0.0, 0.0]
    for item in items:
        for number, usage in requests_of(task, item, settings, writing):
            requests += number
            totals = [total + number * tokens for total, tokens in zip(totals, usage.as_tuple(), strict=True)]
    return requests, Usage(*map(round, totals))
