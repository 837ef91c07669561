"""The start of a sentence with an exact number of tokens."""

from collections.abc import Callable

from verl_ext.data.babilong.tokens import TokenCounter


def cut_to(sentence: str, tokens: int, counter: TokenCounter) -> str | None:
    """The start of `sentence` that has `tokens` tokens inside a running text; None where no start has.

    After a word where possible, inside one otherwise, as the benchmark cuts its last sentence.
    """
    words = sentence.split(" ")
    whole = _most(len(words), tokens, lambda number: " ".join(words[:number]), counter)
    start = " ".join(words[:whole])
    if whole and int(counter.in_context([start])[0]) == tokens:
        return start
    if whole == len(words):
        return None
    stem, word = (f"{start} " if start else ""), words[whole]
    letters = _most(len(word), tokens, lambda number: stem + word[:number], counter)
    piece = stem + word[:letters]
    return piece if letters and int(counter.in_context([piece])[0]) == tokens else None


def _most(number: int, tokens: int, start: Callable[[int], str], counter: TokenCounter) -> int:
    """The largest n ≤ number for which start(n) has at most `tokens` tokens, by bisection (more text, more tokens)."""
    low, high = 0, number
    while low < high:
        middle = (low + high + 1) // 2
        if int(counter.in_context([start(middle)])[0]) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low
