"""Word counts and length scores equal those of LongBench-Write."""

import pytest

from verl_ext.synthesis.agentwrite import asked_words
from verl_ext.text.word_count import count_words, length_score


@pytest.mark.parametrize(
    ("text", "count"),
    [("two words", 2), ("don't", 2), ("GPT4 is 42", 1), ("两个字", 3), ("用Python写", 2), ("かな", 0), ("", 0)],
)
def test_words_are_counted_as_published(text, count):
    assert count_words(text) == count


@pytest.mark.parametrize(
    ("asked", "written", "score"),
    [(1000, 1000, 100), (1000, 2000, 200 / 3), (1000, 500, 50), (1000, 4000, 0), (900, 300, 0), (1000, 0, 0)],
)
def test_the_length_score_is_the_published_formula(asked, written, score):
    assert length_score(asked, written) == pytest.approx(score)


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("Write a 2,000-word essay", 2000),
        ("Write 2000 words", 2000),
        ("写一篇3000字的文章", 3000),
        ("写一篇两千五百字的文章", 2500),
        ("写一篇1.5万字的小说", 15000),
        ("写一篇五千字左右的文章", 5000),
        ("2000-3000 words", None),
        ("2000到3000字", None),
        ("1000 words on tides, 2000 words on ships", None),
        ("Explain these 5 words", None),
        ("十字路口", None),
        ("Write on tides", None),
    ],
)
def test_an_instruction_asks_for_exactly_one_length(instruction, words):
    assert asked_words(instruction) == words
