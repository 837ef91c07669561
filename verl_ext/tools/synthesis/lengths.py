"""The length that a writing instruction asks for, and the score of a text's length."""

import re
from collections.abc import Iterator

from verl_ext.tools.word_count import length_score

LEAST_WORDS = 100  # a smaller number before "words" or 字 is not taken for the length of a long text
_LARGE = {"k": 1000, "hundred": 100, "thousand": 1000, "million": 1_000_000}
_HAN = "零〇一二两三四五六七八九十百千万"
_ENGLISH = r"\d[\d,]*(?:\.\d+)?"
_SCALED = re.compile(rf"({_ENGLISH})\s*({'|'.join(_LARGE)})\b", re.IGNORECASE)
_CHINESE = rf"[\d,.]*[\d{_HAN}]+"
# What may stand between a number and "words": 2,000+ words, 1500 (1500) words, 2000 English words.
_BETWEEN = r"[\s+-]*(?:\([^)]*\)[\s-]*)?(?:or (?:so|more)\s+)?(?:(?:english|chinese|written|total|plain)\s+)?"
_ASKED = re.compile(
    rf"(?P<before>{_ENGLISH}){_BETWEEN}words?\b"
    rf"|(?:word\s*(?:count|limit)|number of words)\W*(?:is|of|should be|about|around|at least)?\W*(?P<after>{_ENGLISH})"
    rf"|(?P<han>{_CHINESE})\s*(?:多|余|左右|以上|以内)?\s*个?(?:英文|中文)?(?:汉?字(?!数|路)|单词)"
    rf"|字数\W*(?:为|是|约|大约|要求|不少于|在)*\W*(?P<count>{_CHINESE})",
    re.IGNORECASE,
)
_NUMBER_BEFORE = rf"[\d{_HAN}]\s*(?:words?|字|个字)?\s*"
_RANGE = re.compile(
    rf"{_NUMBER_BEFORE}(?:-|–|—|~|～|〜|、|/|,|\b(?:up to|to|or|and)\b|至|到|或者?|和)\s*$", re.IGNORECASE
)
# The least number of a range, before its greatest one: 2000-3000 words, between 2000 and 3000 words, 2000到3000字.
_LOW = re.compile(
    rf"(?:\bbetween\s+(?P<between>{_ENGLISH})\s*(?:words?)?\s+and"
    rf"|(?P<low>{_ENGLISH}|{_CHINESE})\s*(?:words?|个?字)?\s*(?:-|–|—|~|～|〜|\b(?:up\s+)?to\b|至|到))\s*$",
    re.IGNORECASE,
)
_VAGUE = re.compile(r"(?:[几数]|\b(?:few|several|some|many|couple of)\s*)$", re.IGNORECASE)  # 几千字, a few thousand
# The length of a part: each 200 words, 每段200字, 200 words each.
_PART_BEFORE = re.compile(r"(?:\b(?:each|every|per)\b\W*(?:\w+\W+){0,4}|每[^，。,.；;]{0,6})$", re.IGNORECASE)
_PART_AFTER = re.compile(
    r"\s*(?:each\b|apiece|per\b|every\b|an? (?:day|page|paragraph|chapter|section)\b|(?:一|每)[段章节页])"
)
_PART_OF_A_NUMBER = re.compile(r"\b(?:half(?:\s+an?)?|quarter\s+of(?:\s+an?)?)\s*$", re.IGNORECASE)  # half a million
_YEAR = re.compile(r"\byear\s*$", re.IGNORECASE)
_QUANTITY = r"(?:\d[\d,.]*\b|\b(?:hundreds|thousands|dozens?|few|several|half)\b)"
_UNIT = r"\b(?:words?|length|characters?|letters|pages?|tokens?)\b"
_MENTIONED = re.compile(
    rf"{_QUANTITY}\W*(?:\w+\W+){{0,3}}{_UNIT}|{_UNIT}\W*(?:\w+\W+){{0,3}}{_QUANTITY}"
    rf"|[\d十百千万]\s*(?:多|余|来|左右|以上|以内)?\s*个?(?:英文|中文)?(?:汉?字(?!路)|单词|词|页)"
    rf"|(?:字数|篇幅|长度)[^，。；;]{{0,8}}[\d{_HAN}]",
    re.IGNORECASE,
)


def _with_digits(instruction: str) -> str:
    """Return an instruction whose English numbers are digits: 2.5k, two thousand, fifteen hundred."""
    from text_to_num import alpha2digit  # of the extra synth, as the client of servers, which --help does not need

    text = re.sub(r"-(?=words?\b)", " ", instruction)
    text = _SCALED.sub(lambda match: str(round(_number(match[1]) * _LARGE[match[2].lower()])), text)
    # By sentence, because its time grows with the square of a text's length.
    return re.sub(r"[^.\n]+", lambda sentence: alpha2digit(sentence[0], "en", threshold=0), text)


def _lengths(instruction: str) -> Iterator[tuple[int | None, str, str]]:
    """Yield each length in an instruction: its number, None if it is not one, and the words before and after it."""
    instruction = _with_digits(instruction)
    for match in _ASKED.finditer(instruction):
        start = min(match.start(group) for group in match.re.groupindex if match[group] is not None)
        yield _value(match), instruction[:start], instruction[match.end() :]


def asked_words(instruction: str) -> int | None:
    """Return the one number of words asked for, or None.

    A least or a greatest number counts as the number; a range, and the length of each part, do not.
    """
    numbers = set()
    for number, before, after in _lengths(instruction):
        others = (pattern.search(before) for pattern in (_RANGE, _VAGUE, _PART_OF_A_NUMBER, _PART_BEFORE))
        if number is None or any(others) or _PART_AFTER.match(after):
            return None
        if number >= LEAST_WORDS and not _YEAR.search(before):
            numbers.add(number)
    return numbers.pop() if len(numbers) == 1 else None


def asked_range(instruction: str) -> tuple[int, int] | None:
    """Return the least and the greatest number of words asked for, or None.

    One number is both. Several lengths, and the length of each part, are None.
    """
    if (words := asked_words(instruction)) is not None:
        return words, words
    ranges, numbers = set(), set()
    for high, before, after in _lengths(instruction):
        low = _LOW.search(before)
        beginning = before[: low.start()] if low else before
        if high is None or _VAGUE.search(before) or _PART_BEFORE.search(beginning) or _PART_AFTER.match(after):
            return None
        if low is None:
            numbers.add(high)
            continue
        least = _chinese(low["between"] or low["low"])
        # 2-3k, two to three thousand, 两到三千: the unit is the greatest number's.
        units = (1, 10, 100, 1000, 10_000) if least is not None and least < LEAST_WORDS <= high else (1,)
        scaled = [least * unit for unit in units if least is not None and high / 10 <= least * unit < high]
        if not scaled:
            return None
        ranges.add((scaled[-1], high))
    if len(ranges) != 1:
        return None
    ((low_end, high_end),) = ranges
    return (low_end, high_end) if numbers <= {low_end} and low_end >= LEAST_WORDS else None


def range_score(asked: tuple[int, int], words: float) -> float:
    """Return the score S_l of a length: 100 within the range, else that of its nearer end."""
    return length_score(min(max(words, asked[0]), asked[1]), words)


def mentions_length(instruction: str) -> bool:
    """Tell whether an instruction mentions a length, even an unread one."""
    text = _with_digits(instruction)
    return bool(_ASKED.search(text) or _MENTIONED.search(text))


def _value(match: re.Match[str]) -> int | None:
    return next(_chinese(value) for value in match.groups() if value is not None)


def _number(digits: str) -> float:
    return float(digits.replace(",", ""))


def _chinese(text: str) -> int | None:
    """Return the value of digits or of a Chinese number; None for a range (两三千)."""
    from cn2an import cn2an  # of the extra synth

    try:
        return round(cn2an(text.replace(",", "").rstrip("."), "smart"))
    except (KeyError, ValueError):  # cn2an's of a malformed number
        return None
