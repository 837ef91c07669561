"""Count a text's words, score its length, and tell its language.

Words and lengths follow LongBench-Write (LongWriter, evaluation/eval_length.py; arXiv 2408.07055, section 3.2).
"""

import re

_CHINESE, _ENGLISH = re.compile("[\u4e00-\u9fff]"), re.compile(r"\b[a-zA-Z]+\b")
_KANA = re.compile("[\u3040-\u30ff]")
_EXAMINED = 20_000  # characters of a text that decide on its language


def count_words(text: str) -> int:
    """Return the number of Chinese characters and of words of ASCII letters.

    As published, digits, kana, hangul and Cyrillic do not count, "don't" counts as 2, and "GPT4" does not count. Nor
    does a word directly between Chinese characters, because no word border separates it from them.
    """
    return len(_CHINESE.findall(text)) + len(_ENGLISH.findall(text))


def length_score(asked: float, written: float) -> float:
    """Return the score S_l of a text's length, from 0 to 100.

    S_l = 100 · max(0, 1 − (y/x − 1)/3) for y > x, else 100 · max(0, 1 − (x/y − 1)/2), for x requested and y written
    words. It is 0 from y = 4x on, down to y = x/3, and for y = 0, for which the published code divides by zero.
    """
    if written == 0:
        return 0.0
    excess = (written / asked - 1) / 3 if written > asked else (asked / written - 1) / 2
    return 100 * max(0.0, 1 - excess)


def language_of(text: str) -> str:
    """Return "zh" for a Chinese text, else "en".

    A Chinese text has no kana, and over one Chinese character per four ASCII letters.
    """
    start = text[:_EXAMINED]
    letters = sum(character.isascii() and character.isalpha() for character in start)
    return "zh" if len(_CHINESE.findall(start)) > letters / 4 and not _KANA.search(start) else "en"
