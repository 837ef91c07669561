"""Name the words of a chat that a template leaves out."""

from collections.abc import Collection, Sequence

from verl_ext.text.chat.marks import NAMES, Marks, Place, WordKind
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.tool_calls import functions_called

EMPTY_TURN, REASONING_IN_CONTENT = "empty turn", "reasoning in content"  # beside the labels of words
_ALWAYS_PRINTED = (WordKind.CONTENT, WordKind.CALLS, WordKind.TOOLS)


def labels_of_unprinted(
    text: str, chat: Chat, marks: Marks, places: Sequence[Place], names: Collection[str]
) -> list[str]:
    """Return the labels of words missing from a chat's text, each once.

    names: the words of the template's source.
    """
    printed, turns = ({place.number for place in places}, {place.words.message for place in places})
    labels = set()
    for number, words in enumerate(marks.words):
        if number in printed or not words.text.strip():
            continue
        is_learnt = words.message in chat.targets
        # Templates omit the reasoning of earlier turns on purpose, so it is only missing in a turn to be learnt. Other
        # fields are read as a template likes, and only missing where nothing of a turn is printed.
        is_missing = words.kind is WordKind.REASONING or (words.message not in turns and words.is_said(names))
        if words.kind in _ALWAYS_PRINTED or (is_learnt and is_missing):
            labels.add(words.label)
    if NAMES in marks.unmarked:
        called = (call.get("name") for call in functions_called(chat.messages))
        if any(isinstance(name, str) and name not in text for name in called):
            labels.add(WordKind.CALLS.value)
    return sorted(labels)


def labels_of_unprinted_thoughts(text: str, chat: Chat, places: Sequence[Place]) -> list[str]:
    """Return the labels of reasoning, and of words before it, that a template removes from a content."""
    labels, begin = set(), 0
    for place in places:
        if place.words.message in chat.targets and "</think>" in place.words.text:
            before, _, thought = place.words.text.split("</think>")[0].rpartition("<think>")
            for said, label in ((before, place.words.label), (thought, REASONING_IN_CONTENT)):
                if said.strip() and text.find(said.strip(), begin, place.last) < 0:
                    labels.add(label)
        begin = place.last if place.words.message >= 0 else begin  # not an argument, which has no place in a frame
    return sorted(labels)
