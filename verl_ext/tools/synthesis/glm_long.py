"""GLM-Long's instructions about documents longer than the model's context.

One of three ways is drawn for a document (Zhipu AI, "GLM Long: Scaling Pre-trained Model Contexts to Millions", 2024):

    chunk     one stretch as long as the window                       →  a question and its answer
    chunks    stretches from all over the text, a window in total     →  a question over several of them, and its answer
    summary   summaries of all parts of a window's length, summarized
              again while they are longer than a window together      →  the answer to an instruction to summarize

The record asks the same question about the whole document.
"""

import re
from collections.abc import Mapping
from itertools import accumulate

from verl_ext.tools.endpoint.answer import UNPARSABLE, Answer, Unparsable
from verl_ext.tools.endpoint.client import Client
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings, json_in, question_and_answer, refused_in_words
from verl_ext.tools.synthesis.token_lengths import TokenLengths
from verl_ext.tools.word_count import language_of

WAYS = ("chunk", "chunks", "summary")
_SUPPORTED = re.compile(r"(?:supported|有依据)[\s*_\"']*[:：][\s*_\"']*(yes|no|是|否)", re.IGNORECASE)
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


async def ask_of_parts(item: SourceItem, client: Client, prompts: dict[str, PromptTexts], settings: Settings) -> Result:
    """Return a document's records, or the reason why it has none."""
    own, results, has_summary = prompts[language_of(item.text)], [], False
    for number in range(settings.questions):
        # A question after the first has a draw and requests of its own; a document is summarized once.
        again = "" if number == 0 else f"/{number + 1}"
        way = drawn_way(settings.way_weights, drawn(settings.seed, item.name, f"way{again}"))
        if way == "summary" and has_summary:
            continue
        has_summary |= way == "summary"
        results.append(await _ask(item, client, own, settings, way, again))
    return Result.joined(results)


def drawn_way(weights: Mapping[str, float], number: int) -> str:
    """Return the way that a 64-bit number draws, in proportion to the weights."""
    ways = [way for way in WAYS if weights.get(way)]
    if len({weights[way] for way in ways}) == 1:
        return ways[number % len(ways)]
    place, ends = number / 2**64, list(accumulate(weights[way] for way in ways))
    return next(way for way, end in zip(ways, ends, strict=True) if place < end / ends[-1])


def parse_verdict(text: str) -> bool:
    """Return whether a last word of the form `Supported: yes` says so; raise Unparsable without one."""
    found = _SUPPORTED.findall(text)
    if not found:
        raise Unparsable("the answer has no line of the form `Supported: yes`")
    return found[-1].lower() in ("yes", "是")


async def _grounded(
    item: SourceItem, client: Client, own: PromptTexts, settings: Settings, stage: str, **parts: str
) -> tuple[Result | None, list[Answer]]:
    """Judge a question and its answer by the text that the model had; return why they are left out, if they are."""
    if not settings.grounded:
        return None, []
    message = {"role": "user", "content": own.filled("grounded", **parts)}
    verdict = await client.ask(item.name, stage, [message], settings.sampling, parse_verdict, settings.parse_tries)
    if not verdict.is_done:
        return Result.from_answer(stage, verdict), []
    if not verdict.parsed:
        return Result("ungrounded", reason="the model says that the text does not support the answer"), []
    return None, [verdict]


async def _ask(item: SourceItem, client: Client, own: PromptTexts, settings: Settings, way: str, again: str) -> Result:
    if way == "summary":
        return await _summary(item, client, own, settings)
    assert settings.lengths_of is not None
    number = 1
    if way == "chunks":
        number = min(max(STRETCHES, len(item.documents)), MOST_STRETCHES)
    characters = stretches(item, number, settings.window // number, settings.seed, settings.lengths_of, again)
    text = "\n\n----------\n\n".join(item.text[begin:end] for begin, end in characters)
    tasks = own.below("tasks")
    task = tasks[drawn(settings.seed, item.name, f"task{again}") % len(tasks)]
    name = "question" if way == "chunk" else "questions_over_parts"
    content = own.filled(name, text=text, task=own.texts[f"tasks.{task}"])
    asked = [{"role": "user", "content": content}]
    answer = await client.ask(item.name, f"{way}{again}", asked, settings.sampling, parse_pair, settings.parse_tries)
    if not answer.is_done:
        return Result.from_answer(way, answer)
    question, reply = answer.parsed
    if not (answer := refused_in_words(answer, reply)).is_done:
        return Result.from_answer(way, answer)
    if settings.passages.found_in(f"{question}\n{reply}"):
        return Result("contaminated", reason="the question or its answer holds a passage of decontaminate")
    left_out, verdicts = await _grounded(
        item, client, own, settings, f"grounded{again}", text=text, question=question, answer=reply
    )
    if left_out is not None:
        return left_out
    facts = {"task": task, "spans": [[0, len(item.text)]], "stretches": [list(span) for span in characters]}
    content = f"{item.text}\n\n{question}"
    return question_and_answer(item, f"glm_long_{way}", content, reply, own, [answer, *verdicts], facts)


async def _summary(item: SourceItem, client: Client, own: PromptTexts, settings: Settings) -> Result:
    """Return the record of a summary, read window by window."""
    assert settings.lengths_of is not None
    count, answers, text, level = settings.lengths_of, list[Answer](), item.text, 0
    # Summaries may again be longer than a window, so levels are added until the model can read them at once.
    while (tokens := count.count(text)) > settings.window:
        level += 1
        starts = range(0, tokens, settings.window)
        spans = count.characters(text, [(start, min(start + settings.window, tokens)) for start in starts])
        summaries = []
        for number, (begin, end) in enumerate(spans, start=1):
            asked = [{"role": "user", "content": own.filled("part", text=text[begin:end])}]
            part = await client.ask(item.name, f"part/{level}/{number}", asked, settings.sampling)
            answers.append(refused_in_words(part))
            if not answers[-1].is_done:
                return Result.from_answer(f"part {number} of {len(spans)}", answers[-1])
            summaries.append(answers[-1].text)
        text = "\n\n".join(summaries)
        if count.count(text) >= tokens:
            return Result(UNPARSABLE, reason="the summaries of the parts are as long as the parts")
    # The record asks about the whole document, although the model has read only the summaries.
    names = own.below("summaries")
    name = names[drawn(settings.seed, item.name, "task") % len(names)]
    instruction = own.texts[f"summaries.{name}"]
    asked = [{"role": "user", "content": own.filled("whole", text=text, instruction=instruction)}]
    answers.append(refused_in_words(await client.ask(item.name, "whole", asked, settings.sampling)))
    if not answers[-1].is_done:
        return Result.from_answer("whole", answers[-1])
    if settings.passages.found_in(answers[-1].text):
        return Result("contaminated", reason="the summary holds a passage of decontaminate")
    left_out, verdicts = await _grounded(
        item, client, own, settings, "grounded/whole", text=text, question=instruction, answer=answers[-1].text
    )
    if left_out is not None:
        return left_out
    reply, answers = answers[-1].text, [*answers, *verdicts]
    facts = {"task": name, "levels": level, "spans": [[0, len(item.text)]]}
    content = f"{item.text}\n\n{instruction}"
    return question_and_answer(item, "glm_long_summary", content, reply, own, answers, facts)
