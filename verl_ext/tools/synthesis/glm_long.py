"""GLM-Long's instructions about documents longer than the model's context.

One of three ways is drawn for a document (Zhipu AI, "GLM Long: Scaling Pre-trained Model Contexts to Millions", 2024):

    chunk     one stretch as long as the window                       →  a question and its answer
    chunks    stretches from all over the text, a window in total     →  a question over several of them, and its answer
    summary   summaries of all parts of a window's length, summarized
              again while they are longer than a window together      →  the answer to an instruction to summarize

The record asks the same question about the whole document.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from verl_ext.options import must, option
from verl_ext.tools.endpoint.answer import UNPARSABLE, Answer, Unparsable, Usage
from verl_ext.tools.synthesis.estimate import ANSWER, PROMPT
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.options import DocumentOptions, SynthesizeOptions
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.replies import json_in, refused_in_words, yes_or_no
from verl_ext.tools.synthesis.report import Result
from verl_ext.tools.synthesis.task import DocumentTask, NoRecord, attempted, usable
from verl_ext.tools.synthesis.token_lengths import TokenLengths
from verl_ext.tools.word_count import language_of

WAYS = ("chunk", "chunks", "summary")
STRETCHES = 4  # stretches of a text, for a question over several of them
MOST_STRETCHES = 16  # of a text that consists of more documents than STRETCHES
_PAIR = re.compile(  # Question: … Answer: …, on one line or several; ### Question 1; Q: … A: …; 问：… 答：…
    r"^[\s*#>_\-]*(?P<name>Question|Q|问题|问)\s*\d*[\s*_]*(?:[:：]|\n)[\s*_]*(?P<question>.+?)"
    r"(?:\n[\s*#>_\-]*(?:Answer|A|答案|回答|答)|(?:[\s*_]+|(?<=[?？。]))(?:Answer|答案|回答))"
    r"\s*\d*[ \t*_]*(?:[:：]|\n)[\s*_]*(?P<answer>.+?)"
    r"(?=\n[\s*#>_\-]*(?P=name)\s*\d*[\s*_]*(?:[:：]|\n)|\Z)",  # a second pair is left out
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)


def parse_pair(text: str) -> tuple[str, str]:
    """Parse the first question and answer, or raise Unparsable.

    The text has the form `Question: … Answer: …`, or is JSON.
    """
    given = json_in(text)
    given = given[0] if isinstance(given, list) and given else given
    if isinstance(given, dict):
        given = {str(name).lower(): value for name, value in given.items()}
        pair = [given.get("question", given.get("问题")), given.get("answer", given.get("答案"))]
    else:
        found = _PAIR.search(text)
        pair = [found["question"], found["answer"]] if found else [None, None]
    question, answer = (each.strip().strip("*").strip() if isinstance(each, str) else "" for each in pair)
    if not question or not answer:
        raise Unparsable("the answer is not of the form `Question: …`, `Answer: …`")
    return question, answer


def stretches(
    item: SourceItem, number: int, size: int, seed: int, lengths: TokenLengths, again: str = ""
) -> list[tuple[int, int]]:
    """Return `number` spans of characters, of at most `size` tokens, spread evenly.

    The start of each is drawn within its part of the text. If the text consists of several documents, the stretches are
    shared among them, or each is of another one. again: the name of a further draw.
    """
    documents = lengths.tokens(item.text, item.documents) or [(0, item.tokens)]
    spans = []
    for place in range(number):
        if len(documents) >= number:
            begin, stop = documents[place * len(documents) // number]
            part, parts = 0, 1
        else:  # document d has the stretches d·number/D up to (d+1)·number/D
            which = ((place + 1) * len(documents) - 1) // number
            first, end = (-(-each * number // len(documents)) for each in (which, which + 1))
            begin, stop = documents[which]
            part, parts = place - first, end - first
        begin, stop = (begin + (stop - begin) * each // parts for each in (part, part + 1))
        start = begin + drawn(seed, item.name, f"start{again}", str(place)) % max(stop - begin - size + 1, 1)
        spans.append((start, min(start + size, stop)))
    return lengths.characters(item.text, spans)


def drawn_way(weights: Mapping[str, float], number: int) -> str:
    """Return the way that a 64-bit number draws, in proportion to the weights."""
    ways = [way for way in WAYS if weights.get(way)]
    if len({weights[way] for way in ways}) == 1:
        return ways[number % len(ways)]
    place, ends = number / 2**64, list(accumulate(weights[way] for way in ways))
    return next(way for way, end in zip(ways, ends, strict=True) if place < end / ends[-1])


def parse_verdict(text: str) -> bool:
    """Return whether a last word of the form `Supported: yes` says so; raise Unparsable without one."""
    found = yes_or_no("supported|有依据", text)
    if not found:
        raise Unparsable("the answer has no line of the form `Supported: yes`")
    return found[-1]


@dataclass(frozen=True)
class GLMLongOptions(DocumentOptions):
    """Questions about, and summaries of, documents longer than the model's context."""

    window: int = option(
        12288, "tokens of a document in a request; the model's context needs room for the answer too", least=64
    )
    ways: dict[str, Any] = option(
        {}, "how often each way of asking is drawn, e.g. {chunk:1,chunks:1,summary:0}; empty: equally often"
    )
    grounded: bool = option(False, "true: the model judges once more whether its text supports question and answer")
    questions: int = option(1, "questions kept of a document, whose tokens data.share_prefixes computes once", least=1)
    estimate: bool = option(False, "true: only estimate the requests, tokens and cost; nothing is asked or written")

    def task_problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake in the ways of asking too."""
        yield from super().task_problems()
        weights = self.ways.values()
        is_numbers = all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights)
        if self.ways and (set(self.ways) - set(WAYS) or not is_numbers or not any(weights)):
            yield must("ways", f"be numbers of at least 0, not all 0, for {', '.join(WAYS)}", self.ways)

    @property
    def way_weights(self) -> dict[str, float]:
        """How often each way of asking is drawn."""
        return self.ways or dict.fromkeys(WAYS, 1.0)


class GLMLong(DocumentTask):
    """Questions about documents, asked over as much of each as the model can read at once."""

    name: ClassVar[str] = "glm_long"
    options_class: ClassVar[type[SynthesizeOptions]] = GLMLongOptions
    options: GLMLongOptions

    def requests(self, item: SourceItem) -> Iterator[tuple[float, Usage]]:
        """Yield the requests of each way, as often as it is drawn."""
        options = self.options
        total, read = sum(options.way_weights.values()), min(options.window, item.tokens)
        for way, weight in options.way_weights.items():
            times = options.questions * weight / total
            if way != "summary":
                yield times, Usage(read + PROMPT, 0, ANSWER)
            else:  # a document is summarized once
                times, parts = min(times, 1.0), math.ceil(item.tokens / options.window)
                read = parts * ANSWER if parts > 1 else item.tokens
                yield times * (parts if parts > 1 else 0), Usage(item.tokens // parts + PROMPT, 0, ANSWER)
                yield times, Usage(read + PROMPT, 0, ANSWER)
            if options.grounded:
                yield times, Usage(read + PROMPT + ANSWER, 0, ANSWER // 4)

    async def make(self, item: SourceItem) -> Result:
        """Return a document's records, or the reason why it has none."""
        options, results, has_summary = self.options, [], False
        for number in range(options.questions):
            # A question after the first has a draw and requests of its own; a document is summarized once.
            again = "" if number == 0 else f"/{number + 1}"
            way = drawn_way(options.way_weights, drawn(options.seed, item.name, f"way{again}"))
            if way != "summary":
                results.append(await attempted(self._asked(item, way, again)))
            elif not has_summary:
                results.append(await attempted(self._summarized(item)))
                has_summary = True
        return Result.joined(results)

    async def _asked(self, item: SourceItem, way: str, again: str) -> Result:
        """Return the record of a question over one stretch or several."""
        options, own = self.options, self.prompts[language_of(item.text)]
        number = 1 if way == "chunk" else min(max(STRETCHES, len(item.documents)), MOST_STRETCHES)
        places = stretches(item, number, options.window // number, options.seed, self.tokens, again)
        text = "\n\n----------\n\n".join(item.text[begin:end] for begin, end in places)
        tasks = own.below("tasks")
        task = tasks[drawn(options.seed, item.name, f"task{again}") % len(tasks)]
        name = "question" if way == "chunk" else "questions_over_parts"
        content = own.filled(name, text=text, task=own.texts[f"tasks.{task}"])
        answer = usable(await self.answer(item, f"{way}{again}", content, parse_pair), way)
        question, reply = answer.parsed
        usable(refused_in_words(answer, reply), way)
        self.check_passages(f"{question}\n{reply}", "the question or its answer")
        judged = await self._grounded(item, own, f"grounded{again}", text=text, question=question, answer=reply)
        facts = {"document_tokens": item.tokens, "task": task, "spans": [[0, len(item.text)]]}
        facts["stretches"] = [list(span) for span in places]
        content = f"{item.text}\n\n{question}"
        return self.record_of(item, f"glm_long_{way}", content, reply, own, [answer, *judged], facts)

    async def _summarized(self, item: SourceItem) -> Result:
        """Return the record of a summary, read window by window."""
        own, window = self.prompts[language_of(item.text)], self.options.window
        answers, text, level = list[Answer](), item.text, 0
        # Summaries may again be longer than a window, so levels are added until the model can read them at once.
        while (tokens := self.tokens.count(text)) > window:
            level += 1
            starts = range(0, tokens, window)
            spans = self.tokens.characters(text, [(start, min(start + window, tokens)) for start in starts])
            summaries = []
            for number, (begin, end) in enumerate(spans, start=1):
                part = await self.answer(item, f"part/{level}/{number}", own.filled("part", text=text[begin:end]))
                answers.append(usable(part, f"part {number} of {len(spans)}"))
                summaries.append(part.text)
            text = "\n\n".join(summaries)
            if self.tokens.count(text) >= tokens:
                raise NoRecord(UNPARSABLE, "the summaries of the parts are as long as the parts")
        # The record asks about the whole document, although the model has read only the summaries.
        names = own.below("summaries")
        name = names[drawn(self.options.seed, item.name, "task") % len(names)]
        instruction = own.texts[f"summaries.{name}"]
        answer = await self.ask(item, "whole", own.filled("whole", text=text, instruction=instruction))
        self.check_passages(answer.text, "the summary")
        parts = {"text": text, "question": instruction, "answer": answer.text}
        judged = await self._grounded(item, own, "grounded/whole", **parts)
        facts = {"document_tokens": item.tokens, "task": name, "levels": level, "spans": [[0, len(item.text)]]}
        content, answers = f"{item.text}\n\n{instruction}", [*answers, answer, *judged]
        return self.record_of(item, "glm_long_summary", content, answer.text, own, answers, facts)

    async def _grounded(self, item: SourceItem, own: PromptTexts, stage: str, **parts: str) -> list[Answer]:
        """Judge an answer by the text that the model had; raise NoRecord if that does not support it."""
        if not self.options.grounded:
            return []
        verdict = await self.ask(item, stage, own.filled("grounded", **parts), parse_verdict)
        if not verdict.parsed:
            raise NoRecord("ungrounded", "the model says that the text does not support the answer")
        return [verdict]
