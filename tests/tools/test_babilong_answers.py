"""The rules by which a generated answer is right: the benchmark's, and the one for other tasks."""

import pytest

from verl_ext.data.families.babilong_answers import TASK_LABELS, compare_answers, is_right_answer
from verl_ext.tools.babilong.babi import TASKS

WHERE = "Where is Mary? "


@pytest.mark.parametrize(
    ("output", "right"),
    [
        *(("kitchen", True), (" The KITCHEN", True), ("Mary is in the kitchen. Then she went to the garden.", True)),
        *(("kitchen <context> garden", True), ("kitchen <example> garden", True), ("", False), ("garden", False)),
        *(("kitchen or garden", False), ("It is not said. kitchen", False)),
    ],
)
def test_the_target_must_be_the_only_label_of_the_first_sentence(output: str, right: bool) -> None:
    assert compare_answers(output, "kitchen", WHERE, TASK_LABELS["qa1"]) is right


def test_labels_named_in_the_question_do_not_count_and_names_are_compared_without_case() -> None:
    question = "Where was the apple before the bathroom? "
    assert compare_answers("Before the bathroom it was in the office.", "office", question, TASK_LABELS["qa3"])
    assert not compare_answers("The bathroom", "office", question, TASK_LABELS["qa3"])
    question = "Who did Bill give the apple to? "
    assert compare_answers("bill gave the apple to FRED", "Fred", question, TASK_LABELS["qa5"])
    assert not compare_answers("Fred and Jeff", "Fred", question, TASK_LABELS["qa5"])


def test_every_task_has_labels() -> None:
    assert tuple(TASK_LABELS) == TASKS


# (task, question, target, output, right by the published rule, right for whole words); the published verdicts come
# from BABILong's own metrics.py.
VERDICTS = [
    ("qa6", "Is Mary in the office? ", "no", "No, she is not.", True, True),
    ("qa6", "Is Mary in the office? ", "no", "I do not know", True, False),  # "not" and "know" contain "no"
    ("qa6", "Is Mary in the office? ", "yes", "Yes, now she is", False, True),
    ("qa7", "How many objects is Mary carrying? ", "none", "none", False, True),  # contains "one": never right
    ("qa7", "How many objects is Mary carrying? ", "one", "none", False, False),
    ("qa7", "How many objects is Mary carrying? ", "two", "Two objects.", True, True),
    ("qa8", "What is Mary carrying? ", "apple,milk", "The milk and the apple", True, True),
    ("qa8", "What is Mary carrying? ", "apple,milk", "apple", False, False),
    ("qa8", "What is Mary carrying? ", "apple", "apple, milk", False, False),
    ("qa8", "What is Mary carrying? ", "nothing", "nothing", True, True),
    ("qa10", "Is Bill in the park? ", "maybe", "maybe, I do not know", False, True),
    ("qa10", "Is Bill in the park? ", "maybe", "maybe", True, True),
    ("qa14", "Where was Julie before the school? ", "park", "In the park before the school", True, True),
    ("qa15", "What is gertrude afraid of?", "wolf", "wolf.", True, True),
    ("qa15", "What is gertrude afraid of?", "cat", "cats", True, False),
    ("qa16", "What color is Greg?", "gray", "gray, like a green frog", False, False),
    ("qa19", "How do you go from the kitchen to the garden?", "s,e", "s,e", True, True),
    ("qa19", "How do you go from the kitchen to the garden?", "s,e", "s,e,e", False, False),
    ("qa19", "How do you go from the kitchen to the garden?", "s,e", "south, east", False, False),
    ("qa20", "Why did sumit go to the bedroom?", "tired", "tired, so the bedroom", True, True),
]


@pytest.mark.parametrize(("task", "question", "target", "output", "published", "words"), VERDICTS)
def test_the_published_rule_and_its_quirks_and_the_corrected_rule(task, question, target, output, published, words):
    assert is_right_answer(output, target, question, f"{task}_32k") is published
    assert is_right_answer(output, target, question, f"{task}_32k", words=True) is words


@pytest.mark.parametrize(
    ("output", "target", "right"),
    [
        *(
            (" 3.5", "3.5", True),
            ("3", "3.5", False),
            ("w34", "w3", False),
            ("w3.", "w3", True),
            ("none", "one", False),
        ),
        *(("One\nQuestion: two", "one", True), ("\none", "one", True), ("apple,football", "apple,football", True)),
        *(("apple", "apple,football", False), ("in the U.S.", "in the U.S.", True), ("the one", "one", False)),
        *(("first\nSecond\nthird", "first\nsecond", True), ("one two", "one", False), ("", "one", False)),
    ],
)
def test_other_tasks_take_the_first_line_as_the_answer(output: str, target: str, right: bool) -> None:
    for category in ("stories", "qa21_32k"):
        assert is_right_answer(output, target, WHERE, category) is right


def test_the_task_of_a_category_tells_the_rule() -> None:
    said = "Mary is in the kitchen. Then she went to the garden."
    assert [is_right_answer(said, "kitchen", WHERE, name) for name in ("qa1_32k", "qa1", "qa5_1k", "mine")] == [
        *(True, True, False, False)
    ]
