"""The benchmark's rule for a right answer."""

import pytest

from verl_ext.data.babilong.answers import TASK_LABELS, compare_answers
from verl_ext.data.babilong.stories import TASKS

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
