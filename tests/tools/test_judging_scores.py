"""The scores of judged answers equal those of the benchmarks' own code, on rows made by hand."""

import json
import re
from statistics import fmean, stdev

import numpy as np
import pytest

from tests.lib.errors import refused
from verl_ext.options import DataError
from verl_ext.tools.endpoint.answer import Unparsable
from verl_ext.tools.endpoint.quality import DIMENSIONS, read_quality
from verl_ext.tools.judging.chat import ChatBenchOptions, LongBenchChat
from verl_ext.tools.judging.figures import figure, figures, seed_figure
from verl_ext.tools.judging.recall import Needle, NeedleOptions
from verl_ext.tools.judging.writing import LongBenchWrite, LongWriteRuler
from verl_ext.tools.word_count import count_words, length_score

SCORES = dict(zip(DIMENSIONS, (5, 4, 3, 2, 1, 5), strict=True))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"Analysis": "good", **SCORES}),
        "```json\n" + json.dumps({"Analysis": "good", **SCORES}, indent=2) + "\n```",
        "Here you are:\n```\n" + json.dumps(SCORES) + "\n```\nThat is all.",
        json.dumps({"Analysis": "one\ntwo", **SCORES}).replace("\\n", "\n"),
        "Analysis first. " + json.dumps({name: str(score) for name, score in SCORES.items()}),
    ],
)
def test_a_verdict_is_read_in_the_forms_that_judges_give_it(text):
    assert read_quality(text) == SCORES


@pytest.mark.parametrize(
    "text",
    [
        *("", "no scores", json.dumps({**SCORES, "Clarity": 6}), json.dumps({**SCORES, "Clarity": None})),
        json.dumps(dict.fromkeys(DIMENSIONS[1:], 3)),
        json.dumps({"Analysis": "x"})[:-1],
    ],
)
def test_a_verdict_that_lacks_a_dimension_cannot_be_read(text):
    with pytest.raises(Unparsable):
        read_quality(text)


def _write_cases(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_longbench_write_scores_as_longwriter_and_as_evalscope_where_a_verdict_is_missing(tmp_path):
    rows = [
        {"prompt": "a story of 100 words", "type": "Story", "length": 100},
        {"prompt": "an essay", "type": "Essay", "length": 600},
        {"prompt": "a poem", "type": "Story", "length": 3000},
    ]
    path = _write_cases(tmp_path / "cases.jsonl", rows)
    task = LongBenchWrite(path)
    answers = ["word " * 100, "word " * 300, "word " * 9000]
    verdicts = [dict.fromkeys(DIMENSIONS, 4.0), None, {**dict.fromkeys(DIMENSIONS, 2.0), "Clarity": 5.0}]
    cases = list(task.cases())
    scores = [task.scores(c, a, [v]) for c, a, v in zip(cases, answers, verdicts, strict=True)]
    found = figures([(task.groups(case), score) for case, score in zip(cases, scores, strict=True)])

    def total(per_item):  # LongWriter's eval_quality.py: the mean over items for each dimension, then over dimensions
        return np.mean([(np.mean([item[name] for item in per_item]) - 1) * 25 for name in DIMENSIONS])

    assert found["all"]["S_l"].mean == pytest.approx(np.mean([100, 50, 100 * (1 - 2 / 3)]))
    assert found["all"]["S_q"].mean == pytest.approx(total([v for v in verdicts if v]))
    assert found["all"]["S_q"].cases == 2
    imputed = total([verdict or dict.fromkeys(DIMENSIONS, 3) for verdict in verdicts])
    assert found["all"]["S_q_imputed"].mean == pytest.approx(imputed)
    assert found["all"]["Clarity"].mean == pytest.approx((4.5 - 1) * 25)
    lengths = {f"length {interval}" for interval in ("0-500", "500-2000", "2000-4000")}
    assert {group for group in found if group.startswith("length")} == lengths
    assert found["type Story"]["S_l"].cases == 2
    published = task.published(cases[1], answers[1])
    assert published == {**rows[1], "response_length": 300, "response": answers[1]}


def test_the_ruler_gives_words_over_those_required_and_asks_no_judge(tmp_path):
    path = _write_cases(tmp_path / "ruler.jsonl", [{"prompt": "p", "type": "t", "length": 1000}])
    task = LongWriteRuler(path)
    (case,) = task.cases()
    assert task.questions(case, "word") == []
    assert task.scores(case, "word " * 250, []) == {"words": 250, "share": 0.25, "S_l": 0.0}


@pytest.fixture
def chat_files(tmp_path):
    cases = [{"idx": i, "prompt": f"doc {i} " * 50, "query": f"why {i}?", "answer": f"because {i}"} for i in (1, 2)]
    shots = [[{"answer": f"shot {i}{k}", "score": k + 1} for k in range(3)] for i in (1, 2)]
    for name, value in (("cases", cases), ("shots", shots)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return str(tmp_path / "cases.json"), str(tmp_path / "shots.json")


def test_the_chat_judge_sees_question_reference_and_its_own_shots_but_no_document(chat_files):
    task = LongBenchChat(chat_files[0], ChatBenchOptions(shots=chat_files[1]))
    (_, second) = task.cases()
    ((system, user),) = task.questions(second, "an answer with $QUESTION$ in it")
    assert system["role"] == "system"
    assert "doc 2" not in user["content"]
    for part in ("why 2?", "because 2", "an answer with $QUESTION$ in it"):
        assert user["content"].count(part) == 1
    assert re.findall(r"shot \d+", user["content"]) == ["shot 20", "shot 21", "shot 22"]
    assert re.findall(r"\[\[(\d)\]\]", user["content"])[1:] == ["1", "2", "3"]  # the first is the task's example


def test_shuffled_shots_keep_their_ratings_and_differ_between_two_ratings(chat_files):
    task = LongBenchChat(chat_files[0], ChatBenchOptions(shots=chat_files[1], shuffle_shots=True, ratings=8))
    first = next(iter(task.cases()))
    orders = [
        tuple(re.findall(r"shot 1(\d)\n\[Answer ends\]\n\nRating: \[\[(\d)\]\]", request[1]["content"]))
        for request in task.questions(first, "x")
    ]
    assert all(sorted(order) == [("0", "1"), ("1", "2"), ("2", "3")] for order in orders)
    assert len(set(orders)) > 1
    assert task.questions(first, "x") == task.questions(first, "x")


@pytest.mark.parametrize(
    ("text", "rating"), [("[[7]]", 7), ("It beats the shot of [[3]], so [[8]].", 8), ("[[rating: 6.5]]", 6.5)]
)
def test_a_rating_is_the_first_number_of_the_last_brackets(text, rating):
    assert LongBenchChat("").verdict(text) == rating


@pytest.mark.parametrize("text", ["7", "[[0]]", "[[11]]", "[[none]]", ""])
def test_a_text_without_a_rating_from_1_to_10_cannot_be_read(text):
    with pytest.raises(Unparsable):
        LongBenchChat("").verdict(text)


def test_two_ratings_count_with_their_mean_one_that_is_missing_with_none_and_a_long_prompt_loses_its_middle(chat_files):
    task = LongBenchChat(chat_files[0], ChatBenchOptions(shots=chat_files[1], max_prompt_tokens=10), Words())
    case = next(iter(task.cases()))
    assert case.prompt.split() == ["doc", "1"] * 5
    assert task.scores(case, "x", [7, 8]) == {"rating": 7.5, "rating_spread": 1}
    assert task.scores(case, "x", [7, None]) == {"rating": None}


def test_a_figure_over_seeds_has_the_interval_of_students_t():
    less = [7.1 - 6.8, 6.4 - 6.0, 8.0 - 7.9]
    half = 4.3027 * stdev(less) / 3**0.5  # Student's t of two degrees of freedom
    figure = seed_figure(less)
    assert (figure.mean, figure.low, figure.high) == pytest.approx(
        (fmean(less), fmean(less) - half, fmean(less) + half), 1e-3
    )
    assert (seed_figure([3.0]).low, seed_figure([3.0]).cases) == (None, 1)
    for seeds, quantile in ((2, 12.7062), (5, 2.7764), (11, 2.2281), (30, 2.0452)):
        values = [0.0] * (seeds - 1) + [1.0]
        assert seed_figure(values).high - fmean(values) == pytest.approx(quantile * stdev(values) / seeds**0.5, 1e-3)


def test_shots_that_do_not_fit_the_cases_are_refused(chat_files, tmp_path):
    (tmp_path / "few.json").write_text(json.dumps([[{"answer": "a", "score": 1}] * 3]))
    task = LongBenchChat(chat_files[0], ChatBenchOptions(shots=str(tmp_path / "few.json")))
    with refused("chat.shots", "idx 2", tmp_path / "few.json", error=DataError):
        list(task.cases())


class Words:
    """A tokenizer of words and the spaces before them."""

    is_fast = True

    def __call__(self, text, add_special_tokens=False, return_offsets_mapping=True):
        return {"offset_mapping": [word.span() for word in re.finditer(r"\s*\S+", text)]}


@pytest.mark.parametrize(("depth", "sentences"), [(0, 0), (50, 5), (100, 10)])
def test_a_needle_stands_between_sentences_at_its_depth(tmp_path, depth, sentences):
    text = " ".join(f"This is sentence number {i}." for i in range(10))
    (tmp_path / "hay.txt").write_text(text)
    options = NeedleOptions("The key is blue.", "Which key?", expected=["blue"], lengths=[54], depths=[depth])
    (case,) = Needle(str(tmp_path), options, Words()).cases()
    document, question = case.prompt.split("\n\n")
    assert question == "Which key?"
    assert document.split("The key is blue.")[0].count("sentence") == sentences
    assert document.replace("The key is blue.", "").split() == text.split()
    assert Needle("", options).scores(case, "It is BLUE.", []) == {"found": 1.0}
    with refused("cases", "needle.lengths=1000", error=DataError):  # the texts are too short
        list(Needle(str(tmp_path), NeedleOptions(lengths=[1000]), Words()).cases())


def test_the_interval_holds_the_mean_and_narrows_with_more_cases():
    rng = np.random.default_rng(0)
    few, many = (figure(list(rng.random(n))) for n in (10, 1000))
    for found in (few, many):
        assert found.low < found.mean < found.high
    assert many.high - many.low == pytest.approx(2 * 1.96 * np.sqrt(1 / 12 / 1000), rel=0.1)
    assert many.high - many.low < few.high - few.low
    assert figure([3.0]).low is None


@pytest.mark.parametrize("text", ["{", '{"prompt": 1}', "[]", '{"prompt": "p", "type": "t"}'])
def test_a_file_that_is_not_the_benchmarks_is_refused(tmp_path, text):
    (tmp_path / "cases.jsonl").write_text(text)
    with refused("cases", error=DataError):
        list(LongBenchWrite(str(tmp_path / "cases.jsonl")).cases())


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
