"""When an answer that a model generated is right. Pure Python.

qa1 to qa5    the benchmark's rule (BABILong, `compare_answers`): the target and no other label of the task
others        the answer's text is the target's (`is_same_text`): their labels are not known
"""

from collections.abc import Iterable

PLACE_LABELS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
TASK_LABELS: dict[str, tuple[str, ...]] = {
    "qa1": PLACE_LABELS,
    "qa2": PLACE_LABELS,
    "qa3": PLACE_LABELS,
    "qa4": PLACE_LABELS,
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
}
# Where a model that goes on with an example of its own has ended its answer.
_ENDS = (".", "<context>", "<example>")


def compare_answers(output: str, target: str, question: str, labels: Iterable[str]) -> bool:
    """Whether `target` is the only label in the output's first sentence, those named in the question aside.

    Letter case does not count. Labels are looked for as substrings, as the benchmark does, so that "the kitchen" and
    "kitchens" both name the kitchen.
    """
    said = output.lower()
    for end in _ENDS:
        said = said.split(end)[0]
    asked = question.lower()
    named = {label for label in map(str.lower, labels) if label in said and label not in asked}
    return named == {target.lower()}


def is_same_text(output: str, target: str) -> bool:
    """Whether the output's first line is the target; case, white space at the ends and a last full stop aside.

    Of a target of several lines, as many lines are compared. Anything said after it on the line makes it wrong.
    """
    wanted = target.strip().lower()
    said = "\n".join(output.strip().lower().split("\n")[: wanted.count("\n") + 1]).strip()
    return wanted in (said, said.removesuffix(".").rstrip())


def is_right_answer(output: str, target: str, question: str, category: str) -> bool:
    """Whether `output` answers a sample of `category`, whose task is what stands before its first "_"."""
    labels = TASK_LABELS.get(category.partition("_")[0])
    return is_same_text(output, target) if labels is None else compare_answers(output, target, question, labels)
