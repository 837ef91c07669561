"""AgentWrite: planned long texts (LongWriter, arXiv 2408.07055, section 3).

    instruction                               →  plan: a paragraph's main point and words on each line
    instruction, plan, text so far, its line  →  the next paragraph, and so on

The instruction states the requested length. A text is kept if its length is near that, by default if S_l is 80 or more:
ModelScope reports that the 666 of 6,000 records that pass this filter do as well as all (arXiv 2410.10210).
"""

import re
from collections.abc import Sequence

from verl_ext.endpoint.answer import UNPARSABLE, Answer, Unparsable
from verl_ext.endpoint.client import Client
from verl_ext.text.word_count import count_words, language_of, length_score
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.lengths import SMALL_NUMBER, asked_words, mentions_length
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings, question_and_answer, refused_in_words

_NUMBER = rf"(?:\d+|{SMALL_NUMBER}|[一二三四五六七八九十百]+)"
_NAME = rf"(?:(?:paragraph|section|part|段落)\s*{_NUMBER}|第\s*{_NUMBER}\s*(?:段落|段|部分))"
_POINT, _COUNT = r"(?:main\s+points?|要点|主要内容)\W*[:：]", r"(?:word\s+count|字数)\W*[:：]?"
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


async def write_by_plan(
    item: SourceItem, client: Client, prompts: dict[str, PromptTexts], settings: Settings
) -> Result:
    """Return an instruction's record, or the reason why it has none."""
    # Without exactly one length there is nothing to measure a text by, so one is drawn or the item is left out.
    own = prompts[language_of(item.text)]
    instruction, words = item.text, asked_words(item.text)
    if words is None:
        if not settings.lengths or mentions_length(instruction):
            return Result("no_length", reason="the instruction must ask for exactly one number of words")
        words = settings.lengths[drawn(settings.seed, item.name, "length") % len(settings.lengths)]
        instruction = own.filled("with_length", instruction=instruction, words=str(words))

    def messages(name: str, **values: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": own.filled(name, instruction=instruction, **values)}]

    # The plan decides before its paragraphs are paid for: a wrong length or number of them ends here.
    answers: list[Answer] = [
        await client.ask(item.name, "plan", messages("plan"), settings.sampling, parse_plan, settings.parse_tries)
    ]
    if not answers[0].is_done:
        return Result.from_answer("plan", answers[0])
    steps = answers[0].parsed
    if len(steps) > settings.max_paragraphs:
        got = f"the plan has {len(steps)} paragraphs, more than max_paragraphs={settings.max_paragraphs}"
        return Result("plan_too_long", reason=got)
    if (score := length_score(words, planned := planned_words(steps))) < settings.min_length_score:
        got = f"the plan has {planned:,.0f} words where {words:,} are asked for: S_l {score:.1f}"
        return Result("length_score", reason=got)  # before its paragraphs are paid for
    # Paragraphs are asked for one after the other, because each continues the text so far.
    paragraphs: list[str] = []
    for number, step in enumerate(steps, start=1):
        asked = messages("write", plan="\n".join(steps), text="\n\n".join(paragraphs), step=step)
        answers.append(refused_in_words(await client.ask(item.name, f"write/{number}", asked, settings.sampling)))
        if not answers[-1].is_done:
            return Result.from_answer(f"paragraph {number} of {len(steps)}", answers[-1])
        if not (paragraph := cleaned_paragraph(answers[-1].text)):
            return Result(UNPARSABLE, reason=f"paragraph {number} of {len(steps)} is empty")
        paragraphs.append(paragraph)
    # The finished text is measured again, because models keep to a plan's lengths only roughly.
    text = "\n\n".join(paragraphs)
    score = length_score(words, written := count_words(text))
    if score < settings.min_length_score:
        return Result("length_score", reason=f"{written:,} words where {words:,} were asked for: S_l {score:.1f}")
    if settings.passages.found_in(text):
        return Result("contaminated", reason="the text holds a passage of decontaminate")
    facts = {"words_asked": words, "words_written": written, "length_score": round(score, 1), "paragraphs": len(steps)}
    return question_and_answer(item, "agentwrite", instruction, text, own, answers, facts)
