"""Judge answers to BABILong questions by the published or a corrected rule.

The published rule (BABILong, `compare_answers`) looks for the task's labels as substrings of the first sentence. Thus
"kitchens" names the kitchen. However, "none" of qa7 also names "one" and is never right, and "I do not know" says "no".
"""

import re
from collections.abc import Iterable

PLACE_LABELS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
TRUTH_LABELS = ("no", "yes")
TASK_LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACE_LABELS),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
    "qa6": TRUTH_LABELS,
    "qa7": ("none", "one", "three", "two"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa9": TRUTH_LABELS,
    "qa10": ("maybe", *TRUTH_LABELS),
    **dict.fromkeys(("qa11", "qa12", "qa13"), PLACE_LABELS),
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa17": TRUTH_LABELS,
    "qa18": TRUTH_LABELS,
    "qa19": ("e,e", "e,n", "e,s", "n,e", "n,n", "n,w", "s,e", "s,s", "s,w", "w,n", "w,s", "w,w"),
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}
CATEGORY = re.compile(r"(?P<task>qa\d+)_(?P<length>\d+[km]?)", re.IGNORECASE)  # the name of qa1/32k.json
_ENDS = (".", "<context>", "<example>")  # ends of an answer, after which a model may add an example of its own


def category_fields(name: str) -> dict[str, str]:
    """Return the task and the length in a category's name, or {}."""
    found = CATEGORY.fullmatch(name)
    return {} if found is None else found.groupdict()


def compare_answers(output: str, target: str, question: str, labels: Iterable[str], *, words: bool = False) -> bool:
    """Return whether the output's first sentence names the target alone.

    The question's labels do not count, nor does letter case. The labels of a target of several ("apple,milk" of qa8)
    may come in any order. The published rule looks for substrings; with `words`, the corrected one for whole words.
    """
    said, asked = output.lower(), question.lower()
    for end in _ENDS:
        said = said.split(end)[0]

    def is_in(label: str, text: str) -> bool:
        return bool(re.search(rf"\b{re.escape(label)}\b", text)) if words else label in text

    named = {label for label in map(str.lower, labels) if is_in(label, said) and not is_in(label, asked)}
    wanted = target.lower()
    targets = wanted.split(",") if "," in wanted and len(wanted) > 3 else [wanted]  # 3: "s,e" of qa19 is one label
    return named.issuperset(targets) and len(named) == len(targets)


def is_same_text(output: str, target: str) -> bool:
    """Return whether the output's first line equals the target.

    Case, outer white space and a full stop do not count. For a target of several lines, as many lines are compared.
    Further words on the last line make the answer wrong.
    """
    wanted = target.strip().lower()
    said = "\n".join(output.strip().lower().split("\n")[: wanted.count("\n") + 1]).strip()
    return wanted in (said, said.removesuffix(".").rstrip())


def is_right_answer(output: str, target: str, question: str, category: str, *, words: bool = False) -> bool:
    """Return whether `output` answers a sample of `category`.

    The task is its part before the first "_". Without a known task, and so labels, answers are compared as texts.
    """
    labels = TASK_LABELS.get(category.partition("_")[0])
    if labels is None:
        return is_same_text(output, target)
    return compare_answers(output, target, question, labels, words=words)
