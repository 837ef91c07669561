r"""Locate the assistant's turns in a rendered chat.

The whole chat is rendered, and its text is tokenized. A second rendering with marks around the words of the messages
(marks.py; brackets below) shows which message each part of the text belongs to:

    text      <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think></think>hello<|im_end|>\n
    marked    <|im_start|>user\n[hi]<|im_end|>\n<|im_start|>assistant\n<think></think>[hello]<|im_end|>\n
    prompt    <|im_start|>user\n[hi]<|im_end|>\n<|im_start|>assistant\n
    target                                                           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

A target begins where the text after the preceding words first differs from the prompt at inference. That prompt is the
messages before the turn with the generation prompt or, if the template has none, the text up to a plain answer's first
word. The head of a tool call, which the model must write, is therefore learnt. A target ends with the end of the turn
(`ChatTemplate.turn_ends`), after any closers of tool calls. Words of other messages inside a turn, such as tool
results, split the target. If a template marks the generated text itself (`{% generation %}`), its marks limit the
targets.

A run is a sequence of words of one message, with no other words between. Templates may print a message in several runs:

    messages    0 user: hi      1 assistant: calls look_up("a"), content "ok"      2 tool: "b"
    marked      user [hi]   assistant [look_up] [a]   tool [b]   assistant [ok]
    runs        0           1                         2          1 (the last run of message 1)
"""

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from verl_ext.text.chat.marks import (
    WAYS,
    Marks,
    Place,
    WordKind,
    length_but_space,
    strings_in,
    without_calls,
    without_results,
)
from verl_ext.text.chat.parts import RenderedChat, Target, with_parts
from verl_ext.text.chat.stand_ins import StandIns
from verl_ext.text.chat.template import ChatTemplate, joined_spans, longest_prefix_in
from verl_ext.text.chat.unprinted import EMPTY_TURN, labels_of_unprinted
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat, Message


class _Prompt(NamedTuple):
    """A text from the last words before a turn; the turn's header begins at `header`."""

    text: str
    header: int


class _Closing(NamedTuple):
    """The length of what closes a turn, and whether that closes it without what follows."""

    length: int
    is_whole: bool


def locate(template: ChatTemplate, chat: Chat) -> RenderedChat:
    """Render a chat and find its targets.

    Raises `BadRecord` with the reason `template_error` if the template refuses the chat, and with `template_mismatch`
    if a turn cannot be found in the text.
    """
    return TurnSearch(template, *template.with_arguments_as_printed(chat)).result()


class TurnSearch:
    """A chat, its rendered text, and the places of its words.

    Between words, the text is only compared with other text of the template. Words themselves are read where a prompt
    may end inside them (`continuations`), and where marks lie in their middle; `with_parts` reads them for their parts.
    """

    def __init__(self, template: ChatTemplate, chat: Chat, text: str) -> None:
        """Mark the words. Raises `BadRecord` if every way changes the text."""
        self.template, self.chat, self.text = template, chat, text
        # What is left of prompts at places where words begin; the target of words that begin with it begins behind it.
        self.continuations: list[tuple[int, str]] = []
        # What was found for turns, by what frames them.
        self._prompts: dict[Any, dict[Any, list[_Prompt]]] = {}
        self._closings: dict[Any, _Closing] = {}
        self._trimmed: dict[Any, bool] = {}
        self._closers: dict[Any, bool] = {}
        stand_ins = StandIns([text, *strings_in([chat.messages, chat.tools, template.arguments])])
        for way in WAYS:
            self.marks = Marks(chat, way, template, stand_ins)
            rendering = self.marks.render(self.marks.messages)
            if rendering is not None and rendering.text == text:
                self.places = rendering.places
                return
        why = "the chat template changes with what messages say in a way that hides where they are in its text"
        raise BadRecord("template_mismatch", why)

    def result(self) -> RenderedChat:
        """Return targets with parts. Raises `BadRecord` if a turn is not found."""
        called = {place.words.message for place in self.places if place.words.kind is WordKind.CALLS}
        unfound = {i for i in self.chat.targets if self._prints_unfound(i, without_calls, i in called)}
        return with_parts(self.turns(), self.chat, self.places, self.template, unfound)

    def turns(self) -> RenderedChat:
        """Return targets without parts. Raises `BadRecord` if a turn is not found."""
        return self._generation_blocks() if self.template.marks_generation else self._turns()

    def _turns(self) -> RenderedChat:
        places, targets, names = self.places, [], self.template.facts.names
        unprinted = labels_of_unprinted(self.text, self.chat, self.marks, places, names)
        runs = [[*run] for _, run in groupby(range(len(places)), key=lambda number: places[number].words.run)]
        # A template may print the tools at the end of the chat, after its last message. They begin no turn.
        newest = max((place.words.message for place in places), default=0)
        last_run = {places[run[0]].words.run: run for run in runs}
        for run in runs:
            first, last = run[0], run[-1]
            index, is_result = places[first].words.run
            if index in self.chat.targets and not is_result:
                start = self._start(first, index)
                after = places[last + 1] if last + 1 < len(places) else None
                limit = after.first if after else len(self.text)
                is_last = after is None or (after.words.message < 0 and index == newest)
                stop, closed_by = self._end(places[last], limit, index, is_last)
                for end, begin, token in self._stops_inside(places[first : last + 1]):
                    targets.append(Target(start, end, index, token))
                    start = begin
                targets.append(Target(start, stop, index, closed_by if last_run[index, False] is run else None))
        spoken = {words.message for words in self.marks.words if words.is_said(names)}
        for index in self.chat.targets:
            if self._prints_unfound(index, without_results, any(place.words.run == (index, True) for place in places)):
                raise _mismatch(index, "prints a tool's result whose place in the text cannot be found")
            if (index, False) not in last_run and index not in spoken:
                target = self._empty_turn(index)
                targets += [target] if target else []
                unprinted += [] if target else [EMPTY_TURN]
        targets.sort(key=lambda target: target.start)
        previous = 0
        for target in targets:
            if not previous <= target.start < target.stop:
                raise _mismatch(target.message, "is not where its content is")
            previous = target.stop
        return RenderedChat(self.text, tuple(targets), tuple(unprinted))

    def _prints_unfound(self, index: int, without: Callable[[Message], Message], is_found: bool) -> bool:
        """Return whether a turn prints what `without` takes from it, at a place that is not known."""
        messages = self.chat.messages
        if is_found or (less := without(messages[index])) == messages[index]:
            return False
        changed = [*messages[:index], less, *messages[index + 1 :]]
        return self.template.try_render(changed, self.chat.tools) != self.text

    def _stops_inside(self, places: list[Place]) -> Iterator[tuple[int, int, str]]:
        """Find borders inside a message printed as two turns, content and calls.

        Yields the end of the stop token, the end of the header after it, and the token.
        """
        for place, after in pairwise(places):
            gap = self.text[place.last : after.first]
            if (stop := self.template.stop_pattern.search(gap)) is None:
                continue
            rest = gap[stop.end() :].lstrip()
            if length := self.template.header_at_start_of(rest):
                yield place.last + stop.end(), after.first - len(rest) + length, stop[0]

    def _start(self, place: int, index: int) -> int:
        """Return the start of message `index`'s target, at `self.places[place]`."""
        first = self.places[place].first
        before = self.places[place - 1] if place else None
        begin = before.last if before else 0
        gap = self.text[begin:first]
        if length := self._prompt_length(before, index, gap, any_space=True):
            # Some templates have no generation prompt after an assistant's turn or a tool's result, but print a header.
            at = begin + length
            return at + self.template.header_at_start_of(self.text[at:first])
        length, at = longest_prefix_in(self.template.header, gap)
        if 0 < self.template.header_length <= length:
            # A token can only reach into words of which the first mark lies inside.
            reach = first if first < self.places[place].last else first + 128
            return begin + self.template.token_edge(self.text[begin:reach], at + length)
        if self.places[place].words.is_call and gap.strip():
            raise _mismatch(index, "begins with a tool call whose beginning cannot be found")
        words = self.places[place].words.text
        own = words[: len(words) - len(words.lstrip())]
        return first - len(own) if gap.endswith(own) else first

    def _prompt_length(self, before: Place | None, index: int, gap: str, any_space: bool) -> int:
        """Return the length of the prompt of message `index` in the text, or 0.

        gap: the text up to the next words. any_space: whether white space of the prompt may differ.
        """
        begin = before.last if before else 0
        lengths = [0]
        for prompt in self._prompts_before(before, index):
            if len(prompt.text) > len(gap) and prompt.text.startswith(gap):
                self.continuations.append((begin + len(gap), prompt.text[len(gap) :]))
            if self.text.startswith(prompt.text, begin):  # words may begin inside the prompt, with their own <think>
                lengths.append(len(prompt.text))
            else:
                length = length_but_space(prompt.text, gap) if any_space else 0
                lengths.append(length or self._departure(prompt, gap))
        return max(lengths)

    def _departure(self, prompt: _Prompt, gap: str) -> int:
        """Return where a gap departs from a prompt inside its header; 0 if it does so before.

        A template may print the part before differently at a chat's end. Of a tag that the gap has in place of another
        one, nothing is given.
        """
        common = prompt.text[: self.template.common_prefix(prompt.text, gap)]
        tokens = [match.end() for match in self.template.special.finditer(common)]
        length = max([len(common.rstrip("<[|")), *tokens])
        return length if common[prompt.header : length].strip() else 0

    def _prompts_before(self, before: Place | None, index: int) -> list[_Prompt]:
        """Return the prompts that the model may get for message `index`.

        They begin at the end of the last words before it; there are none if the template refuses the chat up to there.
        """
        since = before.words.message if before else 0
        count = max(index, since + 1 if before else 0)
        between = self.chat.messages[max(since, 0) : count]
        kinds = tuple(self.marks.framing_key(message, number > 0) for number, message in enumerate(between))
        # White space, or the second half of the words, lies between the mark and the prompt.
        rest = before and (before.words.space_after if before.reaches_end else before.words.text)
        known = self._prompts.setdefault((before and before.words.label, rest, kinds, not since), {})
        # The message of these words may have values without marks, which the template prints after them.
        values = tuple(self.marks.unmarked_fields(between[0])) if before and between else ()
        if known and values not in known:
            others, prompts = next(iter(known.items()))
            differing = [value for name, value in others if value and (name, value) not in values]
            if not any(value in prompt.text for value in differing for prompt in prompts):
                return prompts
        if values not in known:
            known[values] = self._new_prompts(before, count)
        return known[values]

    def _new_prompts(self, before: Place | None, count: int) -> list[_Prompt]:
        """Render `count` messages with the generation prompt, or up to an answer."""
        own, messages = self.template.generation_prompt, self.marks.messages[:count]
        answer = {"role": "assistant", "content": self.marks.answer}
        prompts: list[_Prompt] = []
        for chat in [messages] if own else [[*messages, answer], messages]:
            rendering = self.marks.render(chat, generation=bool(own))
            if rendering is None:
                continue
            last = rendering.places[-1] if rendering.places else None
            if (last and last.number) != (before and before.number):
                continue
            if prompt := rendering.text[last.last if last else 0 :]:
                header = 0 if rendering.is_answered else len(prompt.removesuffix(own))
                prompts.append(_Prompt(prompt, header))
        return prompts

    def _end(self, place: Place, limit: int, index: int, is_last: bool) -> tuple[int, str]:
        """Return a target's end before `limit`, and what ends its turn."""
        begin = place.last
        if not place.reaches_end:
            if not (length := place.rest_in(self.text)):
                raise _mismatch(index, "is changed by the chat template")
            begin += length
        tail = self.text[begin:limit]
        found = self.template.end_pattern.search(tail)
        if found and not tail[: found.start()].strip():
            return begin + found.end(), found[0]
        closed, is_whole = self._closed(place, index, tail, is_last)
        is_behind = found is not None and is_whole and found.end() > closed
        if found and not (is_behind and self._has_visible_text(tail[closed : found.start()])):
            return begin + found.end(), found[0]
        if (opener := self.template.opener) and (at := tail.find(opener, 0, closed)) >= 0:
            closed = at  # what is printed alike after every turn may be the head of another one
        end = len(tail[:closed].rstrip())
        if not end:
            own = place.words.space_after
            return begin + (len(own) if own and tail.startswith(own) and not self._is_trimmed(place) else 0), ""
        token = self.template.last_special_token(tail[:end])
        return begin + end, "" if token and place.words.is_call and self._closes_a_call(token, index) else token

    def _closes_a_call(self, token: str, index: int) -> bool:
        """Return whether a token ends each call of a turn, and not the turn: of two calls, both have it."""
        turn, before = self.chat.messages[index], self.chat.messages[:index]
        key = token, *self.marks.framing_key(turn)
        if key not in self._closers:
            turns = turn, {**turn, "tool_calls": 2 * (turn.get("tool_calls") or [])}
            texts = [self.template.try_render([*before, calls], self.chat.tools) for calls in turns]
            self._closers[key] = texts[0] is not None and (texts[1] or "").count(token) > texts[0].count(token)
        return self._closers[key]

    def _is_trimmed(self, place: Place) -> bool:
        """Tell whether the template trims white space after a turn's content."""
        *before, turn = self.chat.messages[: place.words.message + 1]
        if (kind := self.marks.framing_key(turn)) not in self._trimmed:
            turns = turn, {**turn, place.words.field or "content": place.words.text.rstrip()}
            texts = [self.template.try_render([*before, last], self.chat.tools) for last in turns]
            if None in texts:
                return False
            self._trimmed[kind] = texts[0] == texts[1]
        return self._trimmed[kind]

    def _has_visible_text(self, text: str) -> bool:
        """Return whether text remains without special tokens and white space."""
        return bool(self.template.special.sub("", text).strip())

    def _closed(self, place: Place, index: int, tail: str, is_last: bool) -> _Closing:
        """Return the part of `tail`, the text after a turn's last words, that a chat's last turn has too.

        Tails that differ only before their first special token, by numbers in a call, are closed alike.
        """
        messages = [*self.marks.messages[:index], without_results(self.marks.messages[index])]
        if is_last:
            # A chat's closing text is not printed if a turn follows. If no turn can follow, all of the tail counts.
            follows = [[*messages, {"role": role, "content": self.marks.answer}] for role in ("user", "tool")]
            closing = self._first_tail(follows, place) if self._has_visible_text(tail) else None
            return _Closing(len(tail) if closing is None else self.template.common_prefix(closing, tail), True)
        token = self.template.special.search(tail)
        begin = token.start() if token else 0
        key = (self.marks.framing_key(self.chat.messages[index]), tail[begin:])
        if key not in self._closings:
            user = next((m for m in self.marks.messages if m["role"] == "user"), None)
            closing = self._first_tail([[user, messages[-1]] if user else messages[-1:], messages], place)
            length = self.template.common_prefix(closing or "", tail)
            is_whole = closing is not None and (
                length == len(closing) or self.template.end_pattern.search(tail[:length]) is not None
            )
            if length < begin:
                return _Closing(length, is_whole)
            self._closings[key] = _Closing(length - begin, is_whole)
        closed = self._closings[key]
        return closed._replace(length=closed.length + begin)

    def _first_tail(self, chats: list[list[Message]], place: Place) -> str | None:
        """Return the text after a place's words in the first fitting chat."""
        for messages in chats:
            text, places, _ = self.marks.render(messages) or ("", [], False)
            same = next((number for number, other in enumerate(places) if other.number == place.number), None)
            if same is not None:
                stop = places[same + 1].first if same + 1 < len(places) else len(text)
                return text[places[same].last + (0 if place.reaches_end else places[same].rest_in(text)) : stop]
        return None

    def _empty_turn(self, index: int) -> Target | None:
        """Return a wordless turn's target: the text that ends it."""
        places = [place for place in self.places if place.words.message < index]
        before = places[-1] if places else None
        begin = before.last if before else 0
        after = min((place.first for place in self.places if place.first >= begin), default=len(self.text))
        if not (length := self._prompt_length(before, index, self.text[begin:after], any_space=False)):
            return None
        begin += length
        found = self.template.end_pattern.search(self.text[begin:after])
        if found is None or self._has_visible_text(self.text[begin : begin + found.start()]):
            return None
        return Target(begin, begin + found.end(), index, found[0])

    def _generation_blocks(self) -> RenderedChat:
        """Return the targets of a template that marks the generated text.

        They are the parts of turns in its blocks. A block may contain more than the assistant generates, such as a
        header or the document's end. It may also lack the end of the turn.
        """
        blocks, turns, targets = joined_spans(self.template.generation_blocks(self.chat)), self._turns(), []
        for target in turns.targets:
            inside = [block for block in blocks if target.start < block[1] and block[0] < target.stop]
            if not inside:
                continue
            begin, end = inside[0][0], inside[-1][1]
            if self.text[target.start : begin].strip():
                target = target._replace(start=begin)
            if end < target.stop and self.text[end : target.stop].strip() != target.closed_by:
                target = target._replace(stop=end, closed_by=target.closed_by and "")
            targets.append(target)
        return turns._replace(targets=tuple(targets))


def _mismatch(index: int, what: str) -> BadRecord:
    return BadRecord("template_mismatch", f"assistant turn (message {index + 1}) {what}")
