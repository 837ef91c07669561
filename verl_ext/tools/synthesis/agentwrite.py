"""AgentWrite: planned long texts (LongWriter, arXiv 2408.07055, section 3).

    instruction                               →  plan: a paragraph's main point and words on each line
    instruction, plan, text so far, its line  →  the next paragraph, and so on       sequential
    instruction, plan, its line               →  each paragraph, all at once         parallel (Table 2 of the paper)

The instruction states the requested length. A text is kept if its length is near that, by default if S_l is 80 or more:
ModelScope reports that the 666 of 6,000 records that pass this filter do as well as all (arXiv 2410.10210).
"""

import asyncio
import re
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

from verl_ext.tables import aligned
from verl_ext.tools.endpoint.answer import UNPARSABLE, Answer, Unparsable
from verl_ext.tools.endpoint.client import Client
from verl_ext.tools.synthesis.asking import Work, WriteResult, write_records
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.lengths import FORMS, AskedLengths, Writing, asked_range, mentions_length, range_score
from verl_ext.tools.synthesis.overlap import SHINGLE, runs_of_words
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings, question_and_answer, refused_in_words
from verl_ext.tools.synthesis.scorers import Scorer
from verl_ext.tools.word_count import count_words, language_of

# What is asked of an instruction from real logs (LongWriter, 3.2), and the outcome of an answer that leaves it out.
_SELECTED = {"harmful": "harmful|有害", "scraping": "scraping|抓取", "long": "long|长文"}
_LEFT_OUT = {"harmful": ("toxic", True), "scraping": ("scraping", True), "long": ("not_long", False)}
AnswerT = TypeVar("AnswerT")

_ONES = "one|two|three|four|five|six|seven|eight|nine"
_NUMBER = (
    rf"(?:\d+|(?:twen|thir|for|fif)ty(?:[\s-]+(?:{_ONES}))?|(?:thir|four|fif|six|seven|eigh|nine)teen|ten|eleven|twelve"
    rf"|{_ONES}|[一二三四五六七八九十百]+)"
)
_NAME = rf"(?:(?:paragraph|section|part|段落)\s*{_NUMBER}|第\s*{_NUMBER}\s*(?:段落|段|部分))"
_POINT = r"(?:(?:main|key)\s+(?:points?|ideas?)|要点|主要(?:内容|观点)|核心观点|主旨)\W*[:：]"
_COUNT = r"(?:(?:estimated\s+)?word\s*(?:count|limit)|字数(?:要求|限制)?)\W*[:：]?"
_START = r"^[\s*#>_\-•]*(?:\d+\s*[.)、:：]\s*)?[\s*#_\[(（【]*"
_PLAN_LINE = re.compile(
    rf"{_START}{_NAME}\W+{_POINT}\s*(?P<point>.+?)\W+{_COUNT}\W*(?:about|approximately|约|大约)?\s*"
    r"(?P<words>\d[\d,]*)(?:\s*(?:-|–|~|～|to|至|到)\s*(?P<most>\d[\d,]*))?(?:\s*(?:words?\b|字))?[ \t*_\])）】.。]*",
    re.IGNORECASE,
)
_BROKEN_LINE = re.compile(rf"[ \t]*\n[\s*#>_\-•]*(?=(?:{_POINT}|{_COUNT}\s*\W*(?:about|约)?\s*\d))", re.IGNORECASE)
# What models put above a paragraph: the plan's line or part of it, a label, an announcement; below it, its length.
_LENGTH = r"(?:\s*[(（:：–—-]?\s*(?:about|约)?\s*\d[\d,]*\s*(?:words?|字)\s*[)）]?)?"
_CLOSED = r"[ \t]*[*_\])）】]+[ \t]*(?:[:：]|[.\-–—](?!\d))?|\s*(?:[:：]|[.\-–—](?!\d))|[ \t]*(?:\n|$)"
_ANNOUNCED = (
    r"(?:sure|certainly|of course|okay|here(?:['’]s|\s+(?:is|are)))\b[^\n]{0,60}"
    r"\b(?:paragraph|section|part|continuation)\b[^\n]{0,40}|(?:好的|以下|下面|当然)[^\n]{0,30}(?:段|部分|续写)[^\n]{0,20}"
)
_ABOVE = (
    _PLAN_LINE,
    re.compile(rf"{_START}(?:{_NAME}\W+)?(?:{_POINT}|{_COUNT}\s*\W*\d).*(?:\n|$)", re.IGNORECASE),
    re.compile(rf"{_START}{_NAME}{_LENGTH}(?:{_CLOSED})[\s*_]*", re.IGNORECASE),
    re.compile(rf"^\W*(?:{_ANNOUNCED})[:：]\W*(?:\n|$)", re.IGNORECASE),
)
_BELOW = re.compile(rf"\n\W*{_COUNT}\W*(?:about|约)?\s*\d[\d,]*\s*(?:words?|字)?\W*$", re.IGNORECASE)


def parse_plan(text: str) -> list[str]:
    """Return a plan's paragraph lines, without headings; raise Unparsable without any.

    Such a line names a paragraph, its main point and its number of words.
    """
    lines = (line.strip() for line in _BROKEN_LINE.sub(" - ", text).splitlines())
    found = [line for line in lines if _PLAN_LINE.match(line)]
    if not found:
        raise Unparsable("the answer has no line of the form `Paragraph 1 - Main Point: … - Word Count: 400`")
    return found


def parse_selection(text: str) -> dict[str, bool]:
    """Return whether an instruction is harmful, scraping and long; raise Unparsable if one is missing."""
    found = {}
    for name, label in _SELECTED.items():
        match = re.search(rf"(?:{label})[\s*_\"']*[:：][\s*_\"']*(yes|no|是|否|不是)", text, re.IGNORECASE)
        if match is None:
            raise Unparsable(f"the answer has no line of the form `{name.capitalize()}: no`")
        found[name] = match[1].lower() in ("yes", "是")
    return found


def planned_words(steps: Sequence[str]) -> float:
    """Return the sum of planned words; a range counts as middle."""
    total = 0.0
    for match in filter(None, map(_PLAN_LINE.match, steps)):
        numbers = [int(number.replace(",", "")) for number in (match["words"], match["most"]) if number]
        total += sum(numbers) / len(numbers)
    return total


def cleaned_paragraph(text: str) -> str:
    """Return a paragraph without the plan's line, labels and announcements."""
    text, before = text.strip(), None
    while text != before:
        before = text
        for pattern in _ABOVE:
            text = pattern.sub("", text, count=1).strip()
    return _BELOW.sub("", text).strip()


@dataclass
class LongWriter:
    """A writer of the texts of a run, which keeps the figures of its report.

    figures: of each item and form, (words, S_l, share of repeated runs of words, score of the scorer or None).
    """

    writing: Writing
    scorer: Scorer | None = None
    figures: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)

    async def write(
        self, item: SourceItem, client: Client, prompts: dict[str, PromptTexts], settings: Settings
    ) -> Result:
        """Return an instruction's record, or the reason why it has none."""
        # Without a length there is nothing to measure a text by, so one is added or the item is left out.
        own = prompts[language_of(item.text)]
        instruction, asked = item.text, asked_range(item.text)
        if asked is None:
            if mentions_length(instruction) or not (settings.lengths or self.writing.edges):
                return Result("no_length", reason="the instruction must ask for one number of words or one range")
            if self.writing.edges:
                words = AskedLengths(settings.seed, self.writing.edges).drawn(item.text)
            else:
                words = settings.lengths[drawn(settings.seed, item.name, "length") % len(settings.lengths)]
            instruction, asked = own.filled("with_length", instruction=instruction, words=str(words)), (words, words)
        least, selected = self.writing.least_words, list[Answer]()
        if least is not None:
            content = own.filled("select", instruction=item.text, words=str(least))
            message = {"role": "user", "content": content}
            answer = await client.ask(
                item.name, "select", [message], settings.sampling, parse_selection, settings.parse_tries
            )
            if not answer.is_done:
                return Result.from_answer("select", answer)
            for name, (outcome, value) in _LEFT_OUT.items():
                if answer.parsed[name] is value:
                    return Result(outcome, reason=f"the model says {name}: {'yes' if value else 'no'}")
            selected.append(answer)
        # The plan decides before its paragraphs are paid for: a wrong length or number of them ends here.
        message = {"role": "user", "content": own.filled("plan", instruction=instruction)}
        plan = await client.ask(item.name, "plan", [message], settings.sampling, parse_plan, settings.parse_tries)
        if not plan.is_done:
            return Result.from_answer("plan", plan)
        steps, wanted = plan.parsed, spelled_range(asked)
        if len(steps) > settings.max_paragraphs:
            got = f"the plan has {len(steps)} paragraphs, more than max_paragraphs={settings.max_paragraphs}"
            return Result("plan_too_long", reason=got)
        if (score := range_score(asked, planned := planned_words(steps))) < settings.min_length_score:
            got = f"the plan has {planned:,.0f} words where {wanted} are asked for: S_l {score:.1f}"
            return Result("length_score", reason=got)

        forms = FORMS[:2] if self.writing.form == "both" else (self.writing.form,)
        given = item, client, own, settings, instruction, asked, [*selected, plan]
        results = [await self._written(form, *given) for form in forms]
        return results[0]

    async def _written(
        self,
        form: str,
        item: SourceItem,
        client: Client,
        own: PromptTexts,
        settings: Settings,
        instruction: str,
        asked: tuple[int, int],
        answers: Sequence[Answer],
    ) -> Result:
        """Write the paragraphs of the last answer's plan in one form; return the record."""
        steps, answers, paragraphs = answers[-1].parsed, list(answers), list[str]()

        async def paragraph(number: int, text: str | None) -> Answer:
            name, stage = ("write", "write") if text is not None else ("write_alone", "alone")
            values = {"instruction": instruction, "plan": "\n".join(steps), "step": steps[number - 1]}
            message = {"role": "user", "content": own.filled(name, text=text or "", **values)}
            return refused_in_words(await client.ask(item.name, f"{stage}/{number}", [message], settings.sampling))

        # A paragraph that continues the text so far waits for it; those of the plan alone are asked for at once.
        numbers = range(1, len(steps) + 1)
        at_once = await all_of([paragraph(number, None) for number in numbers]) if form == "parallel" else []
        for number in numbers:
            answer = at_once[number - 1] if at_once else await paragraph(number, "\n\n".join(paragraphs))
            if not answer.is_done:
                return Result.from_answer(f"paragraph {number} of {len(steps)}", answer)
            if not (cleaned := cleaned_paragraph(answer.text)):
                return Result(UNPARSABLE, reason=f"paragraph {number} of {len(steps)} is empty")
            answers.append(answer)
            paragraphs.append(cleaned)
        # The finished text is measured again, because models keep to a plan's lengths only roughly.
        text = "\n\n".join(paragraphs)
        score = range_score(asked, written := count_words(text))
        self.figures[item.name, form] = written, score, 100 * repeated_share(paragraphs)
        if self.scorer is not None:
            judged = await self.scorer.score(item.name, [{"role": "user", "content": instruction}], text, {})
            self.figures[item.name, form] += (judged.parsed,) if judged.is_done else ()
        if score < settings.min_length_score:
            wanted = spelled_range(asked)
            return Result("length_score", reason=f"{written:,} words where {wanted} were asked for: S_l {score:.1f}")
        if settings.passages.found_in(text):
            return Result("contaminated", reason="the text holds a passage of decontaminate")
        facts = {
            "words_asked": asked[0] if asked[0] == asked[1] else list(asked),
            "words_written": written,
            "length_score": round(score, 1),
            "paragraphs": len(steps),
        }
        item = replace(item, tokens=0)  # a corpus counts the words asked for
        return question_and_answer(item, "agentwrite", instruction, text, own, answers, facts)

    def report(self) -> dict[str, dict[str, float]]:
        """Return the means of both forms over the items that have a text of each; none of one form."""
        if self.writing.form != "both":
            return {}
        items = [
            name for name, form in sorted(self.figures) if form == "parallel" and (name, "sequential") in self.figures
        ]
        names, report = ("words", "S_l", "repeated", "score"), {}
        for form in FORMS[:2]:
            figures = [self.figures[item, form] for item in items]
            report[form] = {"texts": float(len(items))}
            for place, name in enumerate(names):
                values = [each[place] for each in figures if len(each) > place]
                report[form] |= {name: round(fmean(values), 2)} if values else {}
        return report


def repeated_share(paragraphs: Sequence[str]) -> float:
    """Return the share of runs of 5 words that an earlier paragraph has too."""
    earlier, repeated, total = set[str](), 0, 0
    for paragraph in paragraphs:
        runs = set(runs_of_words(paragraph, SHINGLE))
        repeated, total = repeated + len(runs & earlier), total + len(runs)
        earlier |= runs
    return repeated / total if total else 0.0


def spelled_range(asked: tuple[int, int]) -> str:
    """Return a number or a range of words in words."""
    return f"{asked[0]:,}" if asked[0] == asked[1] else f"{asked[0]:,} to {asked[1]:,}"


async def all_of(coroutines: Sequence[Coroutine[Any, Any, AnswerT]]) -> list[AnswerT]:
    """Return the results of coroutines that run at once; if one raises, the others end."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def write_long_texts(work: Work) -> WriteResult:
    """Write the texts of a run; spread them evenly over lengths if asked to."""
    writing, options = work.options.writing, work.options.scorer
    scorer = Scorer(options, work.settings.parse_tries) if options.kind else None
    writer, written = LongWriter(writing, scorer), Counter[str]()

    def spread(result: Result) -> Result:
        # In the order of the items, an interval takes as many texts as were asked for in it.
        if writing.intervals is None or not result.records:
            return result
        words = result.records[0]["provenance"]["words_written"]
        name = writing.intervals.of(words)
        if name is None or written[name] >= len(work.corpus.chosen[name]):
            outcome = "outside_intervals" if name is None else "interval_full"
            return Result(outcome, reason=f"the text has {words:,} words, word_intervals {list(writing.edges)}")
        written[name] += 1
        return result

    result = await write_records(writer.write, work, None if scorer is None else scorer.opened, spread)
    if writing.intervals is not None:
        chosen, found = work.corpus.chosen, work.corpus.available
        result.lengths = {
            f"{name} words": {"found": found[name], "drawn": len(chosen[name]), "written": written[name]}
            for name in writing.intervals.names
        }
    if forms := writer.report():
        result.facts["forms"] = forms
        rows = [{"form": form, **{name: f"{value:,.6g}" for name, value in row.items()}} for form, row in forms.items()]
        result.notes.append(aligned(rows, ["form"]))
    return result
