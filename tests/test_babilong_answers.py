"""When a generated answer is right: the benchmark's rule, and the rule for other tasks."""

import pytest

from verl_ext.commands.babilong.stories import TASKS
from verl_ext.data.babilong import TASK_LABELS, compare_answers, is_right_answer

WHERE = "Where is Mary? "


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("kitchen", True),
        (" The KITCHEN", True),
        ("Mary is in the kitchen. Then she went to the garden.", True),
        ("kitchen <context> garden", True),
        ("kitchen <example> garden", True),
        ("", False),
        ("garden", False),
        ("kitchen or garden", False),
        ("It is not said. kitchen", False),
    ],
)
def test_the_target_must_be_the_only_label_of_the_first_sentence(output: str, right: bool) -> None:
    assert compare_answers(output, "kitchen", WHERE, TASK_LABELS["qa1"]) is right


def test_labels_named_in_the_question_do_not_count() -> None:
    question = "Where was the apple before the bathroom? "
    assert compare_answers("Before the bathroom it was in the office.", "office", question, TASK_LABELS["qa3"])
    assert not compare_answers("The bathroom", "office", question, TASK_LABELS["qa3"])


def test_names_of_qa5_are_compared_without_case() -> None:
    question = "Who did Bill give the apple to? "
    assert compare_answers("bill gave the apple to FRED", "Fred", question, TASK_LABELS["qa5"])
    assert not compare_answers("Fred and Jeff", "Fred", question, TASK_LABELS["qa5"])


def test_every_task_has_labels() -> None:
    assert tuple(TASK_LABELS) == TASKS


@pytest.mark.parametrize(
    ("output", "target", "right"),
    [
        (" 3.5", "3.5", True),
        ("3", "3.5", False),
        ("w34", "w3", False),
        ("w3.", "w3", True),
        ("none", "one", False),
        ("One\nQuestion: two", "one", True),
        ("\none", "one", True),
        ("apple,football", "apple,football", True),
        ("apple", "apple,football", False),
        ("in the U.S.", "in the U.S.", True),
        ("first\nSecond\nthird", "first\nsecond", True),
        ("the one", "one", False),
        ("one two", "one", False),
        ("", "one", False),
    ],
)
def test_other_tasks_take_the_first_line_as_the_answer(output: str, target: str, right: bool) -> None:
    for category in ("stories", "qa7_32k", "qa10_1k"):
        assert is_right_answer(output, target, WHERE, category) is right


def test_the_task_of_a_category_tells_the_rule() -> None:
    said = "Mary is in the kitchen. Then she went to the garden."
    assert [is_right_answer(said, "kitchen", WHERE, name) for name in ("qa1_32k", "qa1", "qa5_1k", "mine")] == [
        *(True, True, False, False)
    ]
