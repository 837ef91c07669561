"""Read records of preferred and rejected answers, or of labelled ones.

    chosen + rejected                 with a prompt beside them, or each a whole chat
    messages + rejected_response      ms-swift: the chosen answer is what follows the last user message
    prompt + answers [{answer, rank}] several answers, the lowest rank or the highest score first
    kto_tag                           beside an ordinary chat: whether its last answer is desirable

An answer is a text, a message, or a list of messages (turns.py); `rejected` may be a list of answers. Texts of
Anthropic's form are turns: as a prompt, and as answers without one or with one that they repeat.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, short_text
from verl_ext.text.records.content import Content
from verl_ext.text.records.fields import LABEL, Fields, chat_of
from verl_ext.text.records.messages import Message, as_flag
from verl_ext.text.records.preference import PREFERRED, REJECTED, Preference, answer_after, preference_of
from verl_ext.text.records.shapes import Shape
from verl_ext.text.records.turns import (
    AS_WORDS,
    CHATS,
    SPEAKERS,
    answer_turns,
    decoded_messages,
    hh_turns,
    is_whole_chat,
    json_turns,
    normal_turns,
    read_prompt,
    repeats,
    role_of,
)

_PROMPTS = ("prompt", "instruction", "question", "messages", "conversations", "input")
_SCORES = ("score_chosen", "score_rejected")
_ANSWERS = ("completion", "answer", "response", "content")  # the field of a ranked answer that holds it
_YES = {"true": True, "1": True, "false": False, "0": False}  # of a CSV file


def _pairs(fields: Fields, chosen: str, rejected: str) -> Preference:
    """Read a preferred answer and others, below a prompt or as chats."""
    name, value = _prompt_beside(fields)
    prompt, given = decoded_messages(
        fields, value, {chosen: fields.take(chosen), **_listed(fields.take(rejected), rejected)}
    )
    # Texts of turns are whole chats, unless they answer a prompt that they do not repeat.
    chats = [hh_turns(answer) for answer in given.values()]
    if all(chats) and (value is None or hh_turns(value) or repeats(value, chats[0], fields)):
        given = dict(zip(given, chats, strict=True))
    answers = {where: answer_turns(answer, where) for where, answer in given.items()}
    kinds = {where: is_whole_chat(turns) for where, turns in answers.items()}
    if len(set(kinds.values())) > 1:
        alone = next(where for where, whole in kinds.items() if not whole)
        chat = next(where for where, whole in kinds.items() if whole)
        raise BadRecord("different_prompts", f"{chat} is a whole chat and {alone} an answer alone; both must be one")
    if kinds[chosen]:
        _take_repeated(fields, answers[chosen])
        return _preference(fields, answers)
    before = _before(fields, name, prompt, answers[chosen])
    return _preference(fields, {where: [*before, *turns] for where, turns in answers.items()})


def _swift(fields: Fields, rejected: str, messages: str) -> Preference:
    """Read a chat, and other turns after its last user message."""
    is_json = isinstance(fields.values[messages], str)
    chat = fields.messages(messages)
    last = max((at for at, message in enumerate(chat) if role_of(message) == "user"), default=-1)
    others = _listed(fields.take(rejected), rejected)
    # What the chosen answer says is never decoded_messages, so that the same form in the others is their words too.
    if isinstance(chat[-1], dict) and json_turns(chat[-1].get("content")):
        fields.readings.add(AS_WORDS)
    else:
        others = decoded_messages(fields, None if is_json else chat[: last + 1], others)[1]
    turns = {where: answer_turns(answer, where) for where, answer in others.items()}
    whole = {where: other if is_whole_chat(other) else [*chat[: last + 1], *other] for where, other in turns.items()}
    return _preference(fields, {messages: chat, **whole})


def _ranked(fields: Fields, name: str, prompt: str) -> Preference:
    """Read answers by rank or score, without those tied with the best."""
    given = fields.messages(name, "a list of answers")
    is_scored = all(_score(item.get("rank")) is None for item in given)
    key, sign = ("score", -1) if is_scored else ("rank", 1)
    values = [_score(item.get(key)) for item in given]
    if None in values:
        got = short_text(given[values.index(None)].get(key))
        raise BadRecord("bad_rank", must(f"the {key} of every answer in {name}", "be finite", got))
    ranks = [sign * value for value in values if value is not None]
    order = sorted(range(len(given)), key=ranks.__getitem__)
    best = given[order[0]][key]
    below = [place for place in order if ranks[place] != ranks[order[0]]]
    if not below:
        raise BadRecord("same_rank", f"no answer of {name} has another {key} than the best, {short_text(best)}")
    answers = {}
    for place in (order[0], *below):
        where = f"answer {place + 1} of {name}"
        field = next((field for field in _ANSWERS if given[place].get(field) is not None), None)
        if field is None:
            raise BadRecord("no_target", f"{where} has none of {', '.join(_ANSWERS)}")
        answers[where] = given[place][field]
    asked, value = (prompt, fields.values[prompt]) if prompt == "context" else _prompt_beside(fields)
    value, answers = decoded_messages(fields, value, answers)
    before = _before(fields, asked, value)
    chats = {where: [*before, *answer_turns(answer, where)] for where, answer in answers.items()}
    scores = [_score(given[place].get("score")) for place in (order[0], *below)]
    return _preference(fields, chats, scores, tied=len(order) - len(below) - 1)


def labelled(fields: Fields, content: Content) -> Preference:
    """Return a chat with a label of its last answer. Raises `BadRecord` for other content."""
    label = fields.take(LABEL)
    label = as_flag(_YES.get(label.lower(), label) if isinstance(label, str) else label, LABEL, "bad_label")
    if (chat := content.chat) is None:
        got = "several answers" if content.chats else "a text"
        raise BadRecord("unknown_shape", must(LABEL, "stand beside a prompt with its answer", got))
    last = max((at for at, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
    return Preference((answer_after(chat, last + 1, "the record"),), (PREFERRED if label else REJECTED,))


def _preference(
    fields: Fields, chats: Mapping[str, list[Any]], scores: Sequence[float | None] = (), tied: int = 0
) -> Preference:
    """Return the preference for the first of whole chats, with their scores."""
    read = {}
    for name, turns in chats.items():
        try:
            read[name] = chat_of(turns, fields)
        except BadRecord as bad:
            raise BadRecord(bad.reason, f"{name}: {bad}") from bad
    given = [_score(fields.values.get(name)) for name in _SCORES]
    if not scores and len(chats) == 2 and None not in given:
        for name in _SCORES:
            fields.take(name)
        scores = given
    known = [score for score in scores if score is not None]
    return preference_of(read, known if len(known) == len(chats) else None, tied)


def _prompt_beside(fields: Fields) -> tuple[str | None, Any]:
    """Return the first field that may be the prompt and is not blank, and its value."""
    names = (name for name in _PROMPTS if str(fields.values.get(name, "")).strip())
    return (name := next(names, None)), None if name is None else fields.values[name]


def _before(fields: Fields, name: str | None, value: Any, chosen: list[Message] | None = None) -> list[Any]:
    """Return the turns before the answers, without a copy of the chosen.

    Raises `BadRecord` if the record has none, or they end with another answer.
    """
    if name is None:
        needed = "must be whole chats, or have a prompt beside them: no beginning is taken over characters"
        got = f"the record has none of {', '.join(_PROMPTS)} with a text"
        raise BadRecord("no_prompt", f"the answers {needed}; {got}")
    turns = read_prompt(fields, name, value)
    if role_of(turns[-1]) in SPEAKERS and chosen:
        is_copy = normal_turns(turns[-len(chosen) :], fields) == normal_turns(chosen, fields)
        turns = turns[: -len(chosen)] if is_copy else turns
    if turns and role_of(turns[-1]) in SPEAKERS:
        raise BadRecord("ambiguous", f"{name} must end before the answers; it ends with another assistant turn")
    return turns


def _take_repeated(fields: Fields, chat: list[Any]) -> None:
    """Read the fields that repeat whole chats or their prompt."""
    for name in _PROMPTS:
        value = fields.values.get(name)
        if repeats(value, chat, fields):
            fields.take(name)
        elif name == "prompt" and isinstance(value, (str, list)) and value:
            hint = "; columns={prompt: null} reads the chats alone"
            raise BadRecord("different_prompts", f"the answers are whole chats that do not begin with prompt{hint}")


def _listed(value: Any, name: str) -> dict[str, Any]:
    """Return one answer or several, by what errors call each."""
    if not (isinstance(value, list) and value and all(isinstance(each, (str, list)) for each in value)):
        return {name: value}
    return {f"answer {number} of {name}": each for number, each in enumerate(value, start=1)}


def _score(value: Any) -> float | None:
    """Return a number, or that in a cell of a CSV file; else None."""
    try:
        score = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return score if math.isfinite(score) else None


def _is_ranked(value: Any) -> bool:
    """Return whether a value is a list of answers of which some are ranked or scored."""
    is_list = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    return is_list and any(not {"rank", "score"}.isdisjoint(item) for item in value)


PREFERENCES = (
    Shape(
        (("chosen", "chosen_response"), ("rejected", "rejected_response")),
        _pairs,
        optional=(*_PROMPTS, *_SCORES),
        comes_first=True,
        own=("chosen", "chosen_response", "rejected"),
        accepts=lambda value: isinstance(value, (str, list, dict)),
    ),
    Shape(
        (_OTHERS := ("rejected_response", "rejected_messages"), CHATS),
        _swift,
        comes_first=True,
        own=_OTHERS,
        accepts=lambda value: isinstance(value, (str, list, dict)),
    ),
    Shape(
        (_RANKED := ("completions", "answers"), ("prompt", "instruction", "question", *CHATS, "context")),
        _ranked,
        optional=("input",),
        comes_first=True,
        own=_RANKED,
        accepts=_is_ranked,
    ),
)
