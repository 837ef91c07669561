"""Plans of long texts, and paragraphs that are written by them, in the forms in which models write both."""

import re
from collections.abc import Sequence

from verl_ext.tools.endpoint.answer import Unparsable

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
