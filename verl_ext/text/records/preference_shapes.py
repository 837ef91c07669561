"""Read records of preferred and rejected answers, or of labelled ones.

    chosen + rejected                 with a prompt beside them, or each a whole chat
    messages + rejected_response      ms-swift: the chosen answer is what follows the last user message
    prompt + answers [{answer, rank}] several answers, the lowest rank or the highest score first
    kto_tag                           beside an ordinary chat: whether its last answer is desirable

An answer is a text, a message, or a list of messages (also as JSON, in a table's cell); `rejected` may be a list of
answers. Texts of Anthropic's form are turns: as a prompt, and as answers without one or with one that they repeat.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.text.read.bad_record import BadRecord, short_text
from verl_ext.text.read.json_records import parse_json
from verl_ext.text.records.messages import ROLES, Chat, Message, MessageReader, PlainText, as_flag
from verl_ext.text.records.preference import PREFERRED, REJECTED, Content, Preference, answer_after, preference_of
from verl_ext.text.records.shapes import LABEL, Fields, Shape, chat_of, question_turns, with_input

_PROMPTS = ("prompt", "instruction", "question", "messages", "conversations", "input")
_SCORES = ("score_chosen", "score_rejected")
_ANSWERS = ("completion", "answer", "response", "content")  # the field of a ranked answer that holds it
_HH = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # Anthropic's texts of whole chats
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_YES = {"true": True, "1": True, "false": False, "0": False}  # of a CSV file


def _pairs(fields: Fields, chosen: str, rejected: str) -> Preference:
    """Read a preferred answer and others, below a prompt or as chats."""
    given = {chosen: fields.take(chosen), **_listed(fields.take(rejected), rejected)}
    answers = {name: _answer(value, name) for name, value in given.items()}
    # Texts of turns are whole chats, unless they answer a prompt that they do not repeat.
    chats, beside = [_hh_turns(value) for value in given.values()], map(fields.values.get, _PROMPTS)
    prompt = next((value for value in beside if value and str(value).strip()), None)
    if all(chats) and (prompt is None or _hh_turns(prompt) or _repeats(prompt, chats[0], fields)):
        answers = dict(zip(given, chats, strict=True))
    kinds = {name: _is_whole(turns) for name, turns in answers.items()}
    if len(set(kinds.values())) > 1:
        alone = next(name for name, is_whole in kinds.items() if not is_whole)
        whole = next(name for name, is_whole in kinds.items() if is_whole)
        raise BadRecord("different_prompts", f"{whole} is a whole chat and {alone} an answer alone; both must be one")
    if kinds[chosen]:
        _take_repeated(fields, answers[chosen])
        return _preference(fields, answers)
    prompt = _prompt(fields, answers[chosen])
    return _preference(fields, {name: [*prompt, *turns] for name, turns in answers.items()})


def _swift(fields: Fields, rejected: str, messages: str) -> Preference:
    """Read a chat, and other turns after its last user message."""
    chat = fields.messages(messages)
    last = max((at for at, message in enumerate(chat) if _role(message) == "user"), default=-1)
    others = {name: _answer(value, name) for name, value in _listed(fields.take(rejected), rejected).items()}
    whole = {name: turns if _is_whole(turns) else [*chat[: last + 1], *turns] for name, turns in others.items()}
    return _preference(fields, {messages: chat, **whole})


def _ranked(fields: Fields, name: str, prompt: str) -> Preference:
    """Read answers by rank or score, without those tied with the best."""
    given = fields.messages(name, "a list of answers")
    key = "rank" if all(_number(item.get("rank")) for item in given) else "score"
    sign = 1 if key == "rank" else -1
    values = [_score(item[key]) for item in given]
    if None in values:
        got = short_text(given[values.index(None)][key])
        raise BadRecord("bad_rank", f"the {key} of every answer in {name} must be finite; got {got}")
    ranks = [sign * value for value in values if value is not None]
    order = sorted(range(len(given)), key=ranks.__getitem__)
    best = given[order[0]][key]
    below = [place for place in order if ranks[place] != ranks[order[0]]]
    if not below:
        raise BadRecord("same_rank", f"no answer of {name} has another {key} than the best, {short_text(best)}")
    turns, chats = _prompt(fields, names=(prompt,) if prompt == "context" else _PROMPTS), {}
    for place in (order[0], *below):
        where = f"answer {place + 1} of {name}"
        field = next((field for field in _ANSWERS if given[place].get(field) is not None), None)
        if field is None:
            raise BadRecord("no_target", f"{where} has none of {', '.join(_ANSWERS)}")
        chats[where] = [*turns, *_answer(given[place][field], where)]
    scores = [_score(given[place].get("score")) for place in (order[0], *below)]
    return _preference(fields, chats, scores, tied=len(order) - len(below) - 1)


def labelled(fields: Fields, chat: Content) -> Preference:
    """Return a chat with a label of its last answer."""
    label = fields.take(LABEL)
    label = as_flag(_YES.get(label.lower(), label) if isinstance(label, str) else label, LABEL, "bad_label")
    if not isinstance(chat, Chat):
        got = "a text" if isinstance(chat, PlainText) else "several answers"
        raise BadRecord("unknown_shape", f"{LABEL} must stand beside a prompt with its answer; got {got}")
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


def _prompt(fields: Fields, chosen: list[Message] | None = None, names: Sequence[str] = _PROMPTS) -> list[Any]:
    """Return the turns before the answers, without a copy of the chosen.

    Raises `BadRecord` if the record has none, or they end with another answer.
    """
    name = fields.first(names)
    if name is None:
        needed = "must be whole chats, or have a prompt beside them: no beginning is taken over characters"
        raise BadRecord("no_prompt", f"the answers {needed}; the record has none of {', '.join(names)}")
    if isinstance(fields.values[name], str) and name not in ("messages", "conversations"):
        text = with_input(fields, name) if name == "instruction" else fields.string(name)
        if not (turns := _json_turns(text)):
            first, *more = _hh_turns(text, is_prompt=True) or [{"role": "user", "content": text}]
            turns = [*([first] if name == "context" else question_turns(first["content"], fields)), *more]
    else:
        turns = fields.messages(name, "a text or a list of messages")
    said = ("assistant", "function_call")
    if _role(turns[-1]) in said and chosen and _read(turns[-len(chosen) :], fields) == _read(chosen, fields):
        turns = turns[: -len(chosen)]
    if turns and _role(turns[-1]) in said:
        raise BadRecord("ambiguous", f"{name} must end before the answers; it ends with another assistant turn")
    return turns


def _take_repeated(fields: Fields, chat: list[Any]) -> None:
    """Read the fields that repeat whole chats or their prompt."""
    for name in _PROMPTS:
        value = fields.values.get(name)
        if _repeats(value, chat, fields):
            fields.take(name)
        elif name == "prompt" and isinstance(value, (str, list)) and value:
            hint = "; columns={prompt: null} reads the chats alone"
            raise BadRecord("different_prompts", f"the answers are whole chats that do not begin with prompt{hint}")


def _repeats(value: Any, chat: list[Any], fields: Fields) -> bool:
    """Return whether a chat begins with turns, or a user says a text."""
    if isinstance(value, str) and value.strip():
        read = _read(chat, fields)
        if turns := _json_turns(value) or _hh_turns(value, is_prompt=True):
            return read[: len(turns)] == _read(turns, fields)
        return value.strip() in [message["content"].strip() for message in read if message["role"] == "user"]
    return isinstance(value, list) and chat[: len(value)] == value


def _listed(value: Any, name: str) -> dict[str, Any]:
    """Return one answer or several, by what errors call each."""
    if not (isinstance(value, list) and value and all(isinstance(each, (str, list)) for each in value)):
        return {name: value}
    return {f"answer {number} of {name}": each for number, each in enumerate(value, start=1)}


def _answer(value: Any, name: str) -> list[Message]:
    """Return the turns of an answer: a text, message, or list of messages."""
    if isinstance(value, str):
        return _json_turns(value) or [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        needed = "must be a text, a message or a list of messages"
        raise BadRecord("non_string_content", f"{name} {needed}; got {short_text(value)}")
    if not turns:
        raise BadRecord("empty", f"{name} is empty")
    return turns


def _json_turns(text: str) -> list[Message]:
    """Return the messages whose JSON a text is; [] for words."""
    if not text.lstrip().startswith(("[", "{")):
        return []
    try:
        found = parse_json(text)
    except BadRecord:
        return []
    turns = found if isinstance(found, list) else [found]
    is_chat = all(_role(turn) and not {"content", "value", "tool_calls"}.isdisjoint(turn) for turn in turns)
    return turns if is_chat else []


def _hh_turns(text: Any, is_prompt: bool = False) -> list[Message]:
    """Return the turns of a text that begins with `Human:`, else [].

    is_prompt: the text may end with an empty turn, in which the answer is to stand.
    """
    before, *parts = _HH.split(text) if isinstance(text, str) else ("",)
    if before.strip() or parts[:1] != ["Human"]:
        return []
    heads = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": _HH_ROLES[head], "content": words.strip()} for head, words in heads]
    return turns[:-1] if is_prompt and turns[-1] == {"role": "assistant", "content": ""} else turns


def _read(turns: list[Any], fields: Fields) -> list[Message]:
    """Return messages in the form that templates take."""
    return [turn.message for turn in MessageReader(fields.reader.drop_media).turns(turns)]


def _role(message: Any) -> str | None:
    name = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def _is_whole(turns: list[Message]) -> bool:
    """Return whether turns begin before the assistant's first one."""
    return _role(turns[0]) in ("system", "developer", "user")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _score(value: Any) -> float | None:
    """Return a number, or that in a cell of a CSV file; else None."""
    try:
        score = float(value) if _number(value) or isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        return None
    return score if math.isfinite(score) else None


def _is_ranked(value: Any) -> bool:
    """Return whether a value is a list of ranked or scored answers."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return False
    return any(all(_number(item.get(key)) for item in value) for key in ("rank", "score"))


PREFERENCES = (
    Shape(
        (("chosen", "chosen_response"), ("rejected", "rejected_response")),
        _pairs,
        optional=(*_PROMPTS, *_SCORES),
        comes_first=True,
        accepts=lambda value: isinstance(value, (str, list, dict)),
    ),
    Shape((("rejected_response", "rejected_messages"), ("messages", "conversations")), _swift, comes_first=True),
    Shape(
        (("completions", "answers"), ("prompt", "instruction", "question", "messages", "conversations", "context")),
        _ranked,
        optional=("input",),
        comes_first=True,
        accepts=_is_ranked,
    ),
)
