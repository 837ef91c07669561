"""Word counts and length scores equal those of LongBench-Write."""

import pytest

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
