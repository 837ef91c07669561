"""A preference: one prompt, and answers of which the first is preferred.

    prompt     user  q                      the leading messages that all answers' chats have in common
    chosen     user  q   assistant  good
    rejected   user  q   assistant  bad     the turns after the common messages are the targets

The common beginning is taken over messages, never over characters, so that no word is divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.content import Content, Render
from verl_ext.text.records.messages import Chat

PREFERRED, REJECTED = 1, -1


@dataclass(frozen=True)
class Preference(Content):
    """The answers to a prompt, as whole chats.

    answers: the preferred answer and those that it is preferred to, or one answer with a label. sides: PREFERRED or
    REJECTED for each; an answer alone is desirable or undesirable. scores: of each answer, if the record has them.
    tied: the answers left out because they are ranked like the preferred one.
    """

    answers: tuple[Chat, ...]
    sides: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    tied: int = 0

    @property
    def preference(self) -> "Preference":
        """The preference itself."""
        return self

    @property
    def chats(self) -> Sequence[Chat]:
        """The answers, as whole chats."""
        return self.answers

    def texts(self, render: Render) -> Sequence[Sequence[Any]]:
        """Return one text of each answer, as one group."""
        texts = [render(answer) for answer in self.answers]
        if any(len(of_answer) > 1 for of_answer in texts):
            needed = "be all or last for answers of several assistant turns, which are one document"
            raise BadRecord("several_turns", must("turns", needed, "each"))
        return [[text for (text,) in texts]]

    def with_least_gap(self, gap: float) -> "Preference":
        """Return the preference without answers whose score is too near the best.

        Raises `BadRecord` if no other answer is left, or the record has no scores.
        """
        if len(self.answers) == 1:
            return self
        if self.scores is None:
            needed = "min_score_gap needs a number in score_chosen and score_rejected, or a score of each answer"
            raise BadRecord("no_score", f"{needed}; the record has none")
        best = self.scores[0]
        kept = [0, *(place for place, score in enumerate(self.scores) if place and best - score >= gap)]
        if len(kept) == 1:
            raise BadRecord(
                "small_gap", f"the scores {best:g} and {max(self.scores[1:]):g} differ by less than {gap:g}"
            )
        return replace(
            self,
            answers=tuple(self.answers[place] for place in kept),
            sides=tuple(self.sides[place] for place in kept),
            scores=tuple(self.scores[place] for place in kept),
        )


def preference_of(chats: Mapping[str, Chat], scores: Sequence[float] | None = None, tied: int = 0) -> Preference:
    """Return the preference for the first of chats over the others.

    Its targets follow the messages that all chats have. chats: {what errors call the answer: its whole chat}.

    Raises `BadRecord` if an answer equals the preferred one or one begins like the other, if the answers have different
    prompts, or if one has no target.
    """
    named = list(chats.items())
    first_name, first = named[0]
    shared = _common(list(chats.values()))
    for name, chat in named[1:]:
        if min(len(chat.messages), len(first.messages)) == _common([first, chat]):
            what = "equal" if len(chat.messages) == len(first.messages) else "the beginning of one another"
            raise BadRecord("same_answers", f"{first_name} and {name} are {what}: nothing is preferred")
        if chat.tools != first.tools:
            raise BadRecord("different_prompts", f"{first_name} and {name} have different tools")
    for name, chat in named:
        if (role := chat.messages[shared]["role"]) != "assistant":
            got = f"message {shared + 1}, the first that differs, is of the {role} in {name}"
            raise BadRecord("different_prompts", f"the answers must follow the same messages; {got}")
    sides = (PREFERRED, *[REJECTED] * (len(named) - 1))
    answers = tuple(answer_after(chat, shared, name) for name, chat in named)
    return Preference(answers, sides, None if scores is None else tuple(scores), tied)


def answer_after(chat: Chat, shared: int, name: str) -> Chat:
    """Return a chat whose prompt is its first messages; raise without it or targets."""
    if not any(message["content"].strip() for message in chat.messages[:shared]):
        raise BadRecord("no_prompt", f"nothing stands before the answer in {name}")
    targets = {at: weight for at, weight in chat.targets.items() if at >= shared}
    if not targets:
        raise BadRecord("no_target", f"{name} has no assistant turn to learn from")
    return replace(chat, targets=targets, shared=shared)


def _common(chats: Sequence[Chat]) -> int:
    """Return the number of leading messages that all chats have."""
    messages = zip(*(chat.messages for chat in chats), strict=False)
    return sum(1 for _ in takewhile(lambda own: all(message == own[0] for message in own[1:]), messages))
