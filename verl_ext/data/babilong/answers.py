"""The benchmark's rule for a right answer (BABILong, `compare_answers`). Pure Python."""

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
