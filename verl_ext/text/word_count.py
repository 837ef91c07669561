"""The length of a text in words, and how near it comes to the length that was asked for.

Both as LongBench-Write measures them (LongWriter, evaluation/eval_length.py; arXiv 2408.07055, section 3.2).
"""

import re

_CHINESE, _ENGLISH = re.compile("[\u4e00-\u9fff]"), re.compile(r"\b[a-zA-Z]+\b")


def count_words(text: str) -> int:
    """Return the number of Chinese characters and of words of ASCII letters.

    As published: digits, kana, hangul and Cyrillic count nothing, "don't" counts 2, "GPT4" nothing, and so does a word
    that stands directly between Chinese characters, since there is no border between it and them.
    """
    return len(_CHINESE.findall(text)) + len(_ENGLISH.findall(text))


def length_score(asked: float, written: float) -> float:
    """Return S_l, 0 to 100: 100 for the length asked for; 0 from 4 times of it, down to a third of it, and for nothing.

    S_l = 100 · max(0, 1 − (y/x − 1)/3) for y > x, else 100 · max(0, 1 − (x/y − 1)/2), with x words asked for and y
    written. The published code divides by zero for y = 0.
    """
    if written == 0:
        return 0.0
    excess = (written / asked - 1) / 3 if written > asked else (asked / written - 1) / 2
    return 100 * max(0.0, 1 - excess)
