"""Samples: exact token counts with several kinds of tokenizer, order and place of the facts, independence."""

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.lib.babilong_data import ANY_FACT, replay
from tests.lib.babilong_tokenizers import CORPUS, byte_level, words
from tests.lib.errors import refused
from verl_ext.data.families.babilong_answers import TASK_LABELS
from verl_ext.options import UsageError
from verl_ext.tools.babilong.babi import Sample
from verl_ext.tools.babilong.samples import (
    MIN_TOKENS,
    Background,
    SampleMaker,
    TokenCounter,
    cut_to,
    filler_sentences,
    folder_background,
    size_tokens,
    split_sentences,
    target_tokens,
)
from verl_ext.tools.babilong.stories import ACTORS, GIVERS, OBJECTS, PLACES, TASKS, StoryOptions


def metaspace_with_bos() -> PreTrainedTokenizerFast:
    """Like Llama's tokenizer: it adds a space before the first word, and a BOS token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def merging_across_joins() -> PreTrainedTokenizerFast:
    """A tokenizer that splits nowhere: its tokens span words and the joins of sentences."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator([" ".join(CORPUS[:30])], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    kind.__name__: kind for kind in (byte_level, metaspace_with_bos, merging_across_joins, words)
}


@cache
def equipment(kind: str = "byte_level") -> tuple[TokenCounter, Background]:
    counter = TokenCounter(KINDS[kind]())
    return counter, Background(filler_sentences(1500), counter, is_prose=False)


def maker(task: str, size: str, kind: str = "byte_level", **options: Any) -> SampleMaker:
    counter, background = equipment(kind)
    return SampleMaker(task, size, counter, background, **{"seed": 0, **options})


def facts_in(text: str) -> list[str]:
    return [match[0] for match in ANY_FACT.finditer(text)]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("task", TASKS)
def test_input_has_exactly_the_tokens_of_the_size_and_its_facts_give_the_target(task: str, kind: str) -> None:
    made = maker(task, "2k", kind)
    tokenizer = made.counter.tokenizer
    for number in range(12):
        sample = made.sample(number)
        assert len(tokenizer(sample["input"])["input_ids"]) == 1700
        assert replay(facts_in(sample["input"]), sample["question"]) == sample["target"]


@settings(max_examples=30, deadline=None)
@example(kind="merging_across_joins", tokens=272, seed=72, number=0)
@given(
    kind=st.sampled_from(list(KINDS)), tokens=st.integers(120, 900), seed=st.integers(0, 99), number=st.integers(0, 9)
)
def test_any_number_of_tokens_is_hit_exactly(kind: str, tokens: int, seed: int, number: int) -> None:
    made = maker("qa1", str(tokens), kind, reserve_tokens=0, seed=seed, story=StoryOptions(questions=2))
    assert made.counter.count(made.sample(number)["input"]) == tokens


def test_a_tokenizer_that_cannot_give_the_count_ends_with_an_error() -> None:
    class EvenCounts:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[0] * (2 * len(text.split())) for text in texts]}

    counter = TokenCounter(EvenCounts())
    background = Background(filler_sentences(200), counter, is_prose=False)
    with refused("301 tokens", "task qa1, size 301, sample 0", error=UsageError):
        SampleMaker("qa1", "301", counter, background, seed=0, reserve_tokens=0).sample(0)
    even = SampleMaker("qa1", "300", counter, background, seed=0, reserve_tokens=0).sample(0)
    assert counter.count(even["input"]) == 300


@pytest.mark.parametrize("task", TASKS)
def test_0k_is_the_facts_alone_one_sample_per_question_without_earlier_questions(task: str) -> None:
    made = maker(task, "0k")
    samples = [made.sample(number) for number in range(10)]
    for number, sample in enumerate(samples):
        assert " ".join(facts_in(sample["input"])) == sample["input"]
        assert "?" not in sample["input"]
        if task != "qa4" and number % 5:
            assert sample["input"].startswith(samples[number - 1]["input"])  # the story continues
    assert not samples[5]["input"].startswith(samples[0]["input"])


@pytest.mark.parametrize("size", ["0k", "2k"])
@pytest.mark.parametrize("task", [task for task in TASKS if task != "qa4"])
def test_several_questions_about_a_text_are_neighbouring_samples(task: str, size: str) -> None:
    made = maker(task, size, story=StoryOptions(questions=2, questions_per_text=3))
    samples = [made.sample(number) for number in range(36)]
    for number in range(0, 36, 3):
        texts, questions, _ = zip(*(sample.values() for sample in samples[number : number + 3]), strict=True)
        assert len(set(texts)) == 1
        assert len(set(questions)) == 3
    assert len({sample["input"] for sample in samples}) == 12
    for sample in samples:
        assert replay(facts_in(sample["input"]), sample["question"]) == sample["target"]


def test_facts_keep_their_order_and_lie_anywhere() -> None:
    made = maker("qa2", "4k")
    firsts = []
    for number in range(0, 40, 5):
        facts, question, answer = made.story_part(number)
        sample = made.sample(number)
        assert (facts_in(sample["input"]), sample["question"], sample["target"]) == (facts, question, answer)
        firsts.append(sample["input"].index(facts[0]) / len(sample["input"]))
    assert max(firsts) - min(firsts) > 0.05


@pytest.mark.parametrize(("within", "first", "end"), [(0.25, 0, 925), ([1000, 2000], 1000, 2000), (1, 0, 3700)])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace_with_bos"])
def test_facts_lie_within_the_tokens_asked_for(within: Any, first: int, end: int, kind: str) -> None:
    made = maker("qa1", "4k", kind, facts_within=within)
    for number in range(10):
        text = made.sample(number)["input"]
        encoded = made.counter.tokenizer(text, return_offsets_mapping=True)
        assert len(encoded["input_ids"]) == 3700
        spans = [match.span() for match in ANY_FACT.finditer(text)]
        inside = [
            n for n, (a, b) in enumerate(encoded["offset_mapping"]) if a < b and any(s < b and a < e for s, e in spans)
        ]
        assert first <= min(inside) <= max(inside) < end


def test_a_share_of_the_sample_holds_its_first_word_where_that_needs_fewer_tokens_than_another() -> None:
    made = maker("qa2", "1k", facts_within=0.5)
    assert made.counter.overhead < 0
    assert any(made.sample(number)["input"].startswith(made.story_part(number).facts[0]) for number in range(10))


def test_a_sample_follows_from_seed_task_size_and_number_alone() -> None:
    made = maker("qa3", "1k")
    assert made.sample(7) == maker("qa3", "1k").sample(7)
    few, many = made.sample(2), [maker("qa3", "1k").sample(n) for n in range(20)]
    assert few == many[2]
    assert len({sample["input"] for sample in many}) == 20
    assert maker("qa3", "1k", seed=1).sample(7) != made.sample(7)
    # None has more facts than the benchmark takes, or the user allows.
    assert all(len(facts_in(maker("qa3", "400").sample(n)["input"])) <= 100 // 8 - 1 for n in range(0, 10, 5))
    made = maker("qa2", "0k", story=StoryOptions(max_facts=6))
    assert all(len(facts_in(made.sample(n)["input"])) <= 6 for n in range(0, 20, 5))


def test_a_size_without_room_for_the_facts_is_refused() -> None:
    with refused("sizes", "question 5 of a qa1 story", "needs 10", "size 340", error=UsageError):
        maker("qa1", "340").sample(4)
    with refused("story.max_facts", "1 facts in 690 tokens", error=UsageError):
        maker("qa2", "1k", story=StoryOptions(max_facts=1)).sample(0)
    with refused("facts_within", "3 tokens", "size 1k", error=UsageError):
        maker("qa1", "1k", facts_within=[10, 13]).sample(0)
    with refused("facts_within", "background", error=UsageError):
        maker("qa4", "1k", "words", facts_within=[1, 16]).sample(0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_facts_that_leave_room_for_hardly_a_sentence_are_hit_exactly(kind: str) -> None:
    story = StoryOptions(questions=3, max_facts=1000)
    for number in range(9):
        facts = maker("qa3", "0k", kind, story=story).sample(number)["input"]
        size = equipment(kind)[0].count(facts) + MIN_TOKENS + number
        made = maker("qa3", str(size), kind, reserve_tokens=0, story=story)
        assert made.counter.count(made.sample(number)["input"]) == size


def test_work_grows_with_the_length_and_not_with_its_square() -> None:
    class Measured:
        characters = 0

        def __init__(self) -> None:
            self.tokenizer = byte_level()

        def __call__(self, texts: list[str], **options: Any) -> Any:
            self.characters += sum(map(len, texts))
            return self.tokenizer(texts, **options)

    tokenizer = Measured()
    counter = TokenCounter(tokenizer)
    background = Background(filler_sentences(3000), counter, is_prose=False)
    work = []
    for tokens in (10_000, 80_000):
        tokenizer.characters = 0
        made = SampleMaker("qa1", str(tokens), counter, background, seed=0)
        lengths = [len(made.sample(number)["input"]) for number in range(3)]
        work.append(tokenizer.characters / sum(lengths))
    assert max(work) < 2.5


def test_filler_never_names_what_stories_are_about_and_is_long_and_varied() -> None:
    sentences = filler_sentences(5000)
    text = " ".join(sentences).lower()
    names = [*ACTORS, *GIVERS, *PLACES, *OBJECTS, "north", "south", "east of", "west of"]
    assert [name for name in names if name.lower() in text] == []
    labels = {label.lower() for labels in TASK_LABELS.values() for label in labels}
    assert labels & set(re.findall(r"[a-z]+", text)) == set()
    assert min(len(sentence.split()) for sentence in sentences) >= 15
    assert len(set(sentences)) > 4950
    assert filler_sentences(10) == sentences[:10]
    _, background = equipment()  # in another order in every sample, without repetitions
    walks = [background.walk(random.Random(seed), 5000) for seed in range(5)]
    assert all(len(set(walk)) == len(walk) for walk in walks)
    assert len({int(walk[1] - walk[0]) for walk in walks}) == 5


def test_prose_of_a_folder_is_used_side_by_side(tmp_path: Path) -> None:
    counter, _ = equipment("words")
    for name in ("b", "a"):
        sentences = [f"{name} {number} one two three four five six seven eight." for number in range(40)]
        (tmp_path / f"{name}.txt").write_text("Too short. " + "\n".join(sentences) + "\n\nThe end\n", encoding="utf-8")
    (tmp_path / "no.md").write_text("Not this one.")
    background = folder_background(str(tmp_path), counter)
    assert background.sentences[0].startswith("a 0 ")
    assert background.sentences[-1].startswith("b 39 ")
    assert background.tokens.tolist() == [10] * 80
    walk = background.walk(random.Random(0), 200)
    assert set(np.diff(walk) % 80) == {1}
    sample = SampleMaker("qa1", "400", counter, background, seed=0).sample(0)
    assert len(sample["input"].split()) == 100


def test_a_folder_smaller_than_a_sample_is_repeated_only_after_all_of_it_was_used(tmp_path: Path) -> None:
    counter, _ = equipment("words")
    sentences = [f"Number{n} one two three four five six seven eight nine." for n in range(25)]
    (tmp_path / "a.txt").write_text(" ".join(sentences), encoding="utf-8")
    background = folder_background(str(tmp_path), counter)
    text = SampleMaker("qa1", "1k", counter, background, seed=3).sample(0)["input"]
    numbers = re.findall(r"Number\d+", text)
    laps = [numbers[start : start + 23] for start in range(0, len(numbers), 23)]  # without the file's first and last
    assert len(text.split()) == 700
    assert len(laps) == 3
    assert all(len(set(lap)) == len(lap) and set(lap) <= set(laps[0]) for lap in laps)


def test_questions_of_a_file_are_each_one_sample_of_those_whose_facts_fit() -> None:
    counter, background = equipment()
    questions = [Sample([f"Fact {n} of {size}." for n in range(size)], f"{size}? ", "one") for size in range(1, 40)]
    made = {
        size: SampleMaker("qa7", size, counter, background, seed=0, reserve_tokens=0, questions=questions)
        for size in ("0k", "200")
    }
    assert sorted(made["0k"].sample(n)["question"] for n in range(39)) == sorted(each.question for each in questions)
    with refused("samples", "qa7's file", error=UsageError) as raised:
        made["200"].sample(39)
    (fitting,) = map(int, re.findall(r"at most (\d+),", str(raised.value)))
    samples = [made["200"].sample(number) for number in range(fitting)]
    assert {counter.count(sample["input"]) for sample in samples} == {200}
    asked = [int(sample["question"].split("?")[0]) for sample in samples]
    assert 5 < len(set(asked)) == fitting
    assert max(asked) <= 200 // 8 - 1
    assert asked != sorted(asked)


def test_texts_are_split_after_sentences_and_at_empty_lines() -> None:
    text = 'One\ntwo. "Three?"  Four! Heading\n\nFive 3.5 six。七八。'
    assert split_sentences(text) == ["One two.", '"Three?"', "Four!", "Heading", "Five 3.5 six。", "七八。"]


@settings(max_examples=50, deadline=None)
@given(number=st.integers(0, 99), tokens=st.integers(1, 40))
def test_a_cut_sentence_is_a_start_with_exactly_the_tokens(number: int, tokens: int) -> None:
    counter, background = equipment()
    sentence = background.sentences[number]
    if (piece := cut_to(sentence, tokens, counter)) is not None:
        assert sentence.startswith(piece)
        assert int(counter.in_context([piece])[0]) == tokens
    assert cut_to(sentence, int(background.tokens[number]), counter) == sentence
    assert background.tokens[number] >= MIN_TOKENS


@pytest.mark.parametrize(
    ("label", "tokens"), [("0k", 0), ("1k", 1000), ("32k", 32_000), ("1M", 1_000_000), (4096, 4096)]
)
def test_sizes_are_labels_or_numbers(label: object, tokens: int) -> None:
    assert (size_tokens(label), target_tokens(label, 300)) == (tokens, tokens - 300 if tokens else 0)


@pytest.mark.parametrize("label", ["k", "1K", "-1", "1.5k", "32 k", True, None])
def test_other_sizes_are_none(label: object) -> None:
    assert size_tokens(label) is None
