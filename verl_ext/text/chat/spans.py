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

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from verl_ext.text.chat.marks import (
    TOOLS,
    WAYS,
    MarkedPlace,
    Marks,
    WordKind,
    framing_key,
    length_but_space,
    unmarked_fields,
)
from verl_ext.text.chat.parts import RenderedChat, Target, with_borders
from verl_ext.text.chat.template import ChatTemplate, joined_spans, longest_prefix_in
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat, Message
from verl_ext.text.records.tool_calls import functions_called

EMPTY_TURN, REASONING_IN_CONTENT = "empty turn", "reasoning in content"  # unprinted, beside the labels of words
_ANSWER = "Zq7a"  # marks the start of a plain answer
_PLAIN_ANSWER = {"role": "assistant", "content": f"{_ANSWER}ok"}
# A text before a turn, from the last words before it on, and the length of its part before the turn's header.
_Prompt = tuple[str, int]


def locate(template: ChatTemplate, chat: Chat) -> RenderedChat:
    """Render a chat and find its targets.

    Raises `BadRecord` with the reason `template_error` if the template refuses the chat, and with `template_mismatch`
    if a turn cannot be found in the text.
    """
    return TurnSearch(template, *template.with_arguments_as_printed(chat)).result()


class TurnSearch:
    """A chat, its rendered text, and the places of its words.

    Between words, the text is only compared with other text of the template. Words themselves are read in three cases:
    where a prompt ends inside them (`continuations`), where they hold </think>, and where marks lie in their middle.

    continuations: the texts with which a turn's words would go on with a prompt, and its target begin after them.
    """

    def __init__(self, template: ChatTemplate, chat: Chat, text: str) -> None:
        """Mark the words. Raises `BadRecord` if every way changes the text."""
        self.template, self.chat, self.text = template, chat, text
        self.continuations: set[str] = set()
        self._prompts: dict[tuple[Any, ...], tuple[list[_Prompt], list[Message]]] = {}
        self._closings: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self._trimmed: dict[tuple[Any, ...], bool] = {}
        for way in WAYS:
            self.marks = Marks(chat, way)
            marked = template.try_render(self.marks.messages, self.marks.tools)
            found, self.places = self.marks.places(marked) if marked is not None else (None, [])
            if found == text:
                return
        hidden = "changes with what messages say in a way that hides where they are in its text"
        raise BadRecord("template_mismatch", f"the chat template {hidden}")

    def result(self) -> RenderedChat:
        """Return targets with parts. Raises `BadRecord` if a turn is not found."""
        rendered = self._generation_blocks() if self.template.marks_generation else self._turns()
        return with_borders(rendered, self.chat, self.places, self.template.special)

    def _turns(self) -> RenderedChat:
        unprinted, targets = self._unprinted(), []
        places = self.places
        runs = [[*run] for _, run in groupby(range(len(places)), key=lambda number: places[number].words.message)]
        # The last message in the text. A template may print the tools after it, at the end of the chat. Those words are
        # no next turn, with which the end of the newest message's turn would be compared.
        newest = max((place.words.message for place in places), default=0)
        last_run = {places[run[0]].words.message: run for run in runs}
        for run in runs:
            first, last = run[0], run[-1]
            index = places[first].words.message
            if index in self.chat.targets:
                start = self._start(first, index)
                after = places[last + 1] if last + 1 < len(places) else None
                limit = after.first if after else len(self.text)
                is_last = after is None or (after.words.message == TOOLS and index == newest)
                stop, closed_by = self._end(places[last], limit, index, is_last)
                for end, begin, token in self._stops_inside(places[first : last + 1]):
                    targets.append(Target(start, end, index, token))
                    start = begin
                targets.append(Target(start, stop, index, closed_by if last_run[index] is run else None))
        spoken = {words.message for words in self.marks.words}
        for index in self.chat.targets:
            if index not in spoken and (target := self._empty_turn(index)) is not None:
                targets.append(target)
            elif index not in spoken:
                unprinted.append(EMPTY_TURN)
        targets.sort(key=lambda target: target.start)
        previous = 0
        for target in targets:
            if not previous <= target.start < target.stop:
                raise _mismatch(target.message, "is not where its content is")
            previous = target.stop
        return RenderedChat(self.text, tuple(targets), tuple(unprinted))

    def _stops_inside(self, places: list[MarkedPlace]) -> Iterator[tuple[int, int, str]]:
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

    def _unprinted(self) -> list[str]:
        """Return the labels of words missing from the text, each once."""
        printed, learnt = {place.number for place in self.places}, self.chat.targets
        labels = {
            words.label
            for number, words in enumerate(self.marks.words)
            if number not in printed
            and words.text.strip()
            # Templates omit the reasoning of earlier turns on purpose, so it is only missing in a turn to be learnt.
            and (words.kind is not WordKind.REASONING or words.message in learnt)
        }
        if self.marks.way == "around_but_names":
            names = (call.get("name") for call in functions_called(self.chat.messages))
            if any(isinstance(name, str) and name not in self.text for name in names):
                labels.add(WordKind.CALLS.value)
        for number, place in enumerate(self.places):  # some templates remove reasoning from content
            if place.words.message in learnt and "</think>" in place.words.text:
                before, _, thought = place.words.text.split("</think>")[0].rpartition("<think>")
                begin = self.places[number - 1].last if number else 0
                for words, label in ((before, place.words.label), (thought, REASONING_IN_CONTENT)):
                    if words.strip() and self.text.find(words.strip(), begin, place.last) < 0:
                        labels.add(label)
        return sorted(labels)

    def _start(self, place: int, index: int) -> int:
        """Return the start of message `index`'s target, at `self.places[place]`."""
        first = self.places[place].first
        before = self.places[place - 1] if place else None
        begin = before.last if before else 0
        gap = self.text[begin:first]
        starts = [0]
        for prompt, before_header in self._prompts_before(before, index):
            if self._goes_on_with(prompt, begin):  # the words may begin inside the prompt, with their own <think>
                starts.append(len(prompt))
            elif length := length_but_space(prompt, gap):
                starts.append(length)
            else:
                length = self.template.common_prefix(prompt, gap)
                # Otherwise they differ before the header: a template may print that part differently at a chat's end.
                starts.append(length if prompt[before_header:length].strip() else 0)
        if max(starts):
            # Some templates have no generation prompt after an assistant's turn or a tool's result, but print a header.
            at = begin + max(starts)
            return at + self.template.header_at_start_of(self.text[at:first])
        length, at = longest_prefix_in(self.template.header, gap)
        if 0 < self.template.header_length <= length:
            # A token can only reach into words of which the first mark lies inside.
            reach = first if first < self.places[place].last else first + 128
            return begin + self.template.token_edge(self.text[begin:reach], at + length)
        if self.places[place].words.kind is WordKind.CALLS and gap.strip():
            raise _mismatch(index, "begins with a tool call whose beginning cannot be found")
        words = self.places[place].words.text
        own = words[: len(words) - len(words.lstrip())]
        return first - len(own) if gap.endswith(own) else first

    @cached_property
    def _starts_of_words(self) -> list[int]:
        return [*(place.first for place in self.places if place.words.text.strip()), len(self.text)]

    def _goes_on_with(self, prompt: str, begin: int) -> bool:
        """Return whether the text at `begin`, next words included, continues a prompt."""
        after = bisect_left(self._starts_of_words, begin)
        gap = self.text[begin : self._starts_of_words[after]]
        if len(gap) < len(prompt) and prompt.startswith(gap):
            self.continuations.add(prompt[len(gap) :])
        return self.text.startswith(prompt, begin)

    def _prompts_before(self, before: MarkedPlace | None, index: int) -> list[_Prompt]:
        """Return the prompts that the model may get for message `index`.

        They begin at the end of the last words before it; there are none if the template refuses the chat up to there.
        """
        since = before.words.message if before else 0
        count = max(index, since + 1 if before else 0)
        between = self.chat.messages[max(since, 0) : count]
        kinds = tuple(framing_key(message, number > 0) for number, message in enumerate(between))
        # White space, or the second half of the words, lies between the mark and the prompt.
        rest = before and (before.words.space_after if before.reaches_end else before.words.text)
        key = before and before.words.label, rest, kinds, not since
        if key not in self._prompts:
            self._prompts[key] = self._new_prompts(before, count), between[:1]
        prompts, known = self._prompts[key]
        if before is None or not between:
            return prompts
        # The message of these words may have other fields, such as an id, which the template prints after them. Its own
        # values are put in place of those of the message that the prompts were rendered with.
        values = dict(unmarked_fields(between[0]))
        others = {
            old: values.get(name, "") for name, old in unmarked_fields(known[0]) if old and old != values.get(name)
        }
        if not any(old in prompt for prompt, _ in prompts for old in others):
            return prompts
        for prompt, before_header in prompts:
            for old, new in others.items():
                before_header += prompt[:before_header].count(old) * (len(new) - len(old))
                prompt = prompt.replace(old, new)
            if self._goes_on_with(prompt, before.last):
                return [(prompt, before_header)]
        exact = *key, *values.items()
        if exact not in self._prompts:
            self._prompts[exact] = self._new_prompts(before, count), between[:1]
        return self._prompts[exact][0]

    def _new_prompts(self, before: MarkedPlace | None, count: int) -> list[_Prompt]:
        """Render `count` messages with the generation prompt, or up to an answer."""
        own, messages = self.template.generation_prompt, self.marks.messages[:count]
        prompts: list[_Prompt] = []
        for chat in [messages] if own else [[*messages, _PLAIN_ANSWER], messages]:
            marked = self.template.try_render(chat, self.marks.tools, generation=bool(own)) or ""
            has_answer = chat[-1:] == [_PLAIN_ANSWER] and _ANSWER in marked
            text, places = self.marks.places(marked.split(_ANSWER)[0] if has_answer else marked)
            if [place.number for place in places[-1:]] != ([before.number] if before else []):
                continue
            if prompt := text[places[-1].last if places else 0 :]:
                prompts.append((prompt, 0 if has_answer else len(prompt.removesuffix(own))))
        return prompts

    def _end(self, place: MarkedPlace, limit: int, index: int, is_last: bool) -> tuple[int, str]:
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
        if found and (
            not is_whole or found.end() <= closed or not self._has_visible_text(tail[closed : found.start()])
        ):
            return begin + found.end(), found[0]
        end = len(tail[:closed].rstrip())
        if not end:
            own = place.words.space_after
            return begin + (len(own) if own and tail.startswith(own) and not self._is_trimmed(place) else 0), ""
        return begin + end, self.template.last_special_token(tail[:end])

    def _is_trimmed(self, place: MarkedPlace) -> bool:
        """Tell whether the template trims white space after a turn's content."""
        *before, turn = self.chat.messages[: place.words.message + 1]
        if (kind := framing_key(turn)) not in self._trimmed:
            turns = turn, {**turn, "content": place.words.text.rstrip()}
            texts = [self.template.try_render([*before, last], self.chat.tools) for last in turns]
            if None in texts:
                return False
            self._trimmed[kind] = texts[0] == texts[1]
        return self._trimmed[kind]

    def _has_visible_text(self, text: str) -> bool:
        """Return whether text remains without special tokens and white space."""
        return bool(self.template.special.sub("", text).strip())

    def _closed(self, place: MarkedPlace, index: int, tail: str, is_last: bool) -> tuple[int, bool]:
        """Return the length of `tail` that a chat's last turn has too.

        `tail` is the text after a turn's last words. The second value tells whether that part alone closes a turn.
        Tails that differ only before their first special token, by numbers in a call, are closed alike.
        """
        messages = self.marks.messages[: index + 1]
        if is_last:
            # A chat's closing text is not printed if a turn follows. If no turn can follow, all of the tail counts.
            follows = [[*messages, {"role": role, "content": _ANSWER}] for role in ("user", "tool")]
            closing = self._first_tail(follows, place) if self._has_visible_text(tail) else None
            return len(tail) if closing is None else self.template.common_prefix(closing, tail), True
        token = self.template.special.search(tail)
        begin = token.start() if token else 0
        key = (framing_key(self.chat.messages[index]), tail[begin:])
        if key not in self._closings:
            user = next((m for m in self.marks.messages if m["role"] == "user"), None)
            closing = self._first_tail([[user, messages[-1]] if user else messages[-1:], messages], place)
            length = self.template.common_prefix(closing or "", tail)
            is_whole = closing is not None and (
                length == len(closing) or self.template.end_pattern.search(tail[:length]) is not None
            )
            if length < begin:
                return length, is_whole
            self._closings[key] = length - begin, is_whole
        closed, is_whole = self._closings[key]
        return closed + begin, is_whole

    def _first_tail(self, chats: list[list[Message]], place: MarkedPlace) -> str | None:
        """Return the text after a place's words in the first fitting chat."""
        for messages in chats:
            if (marked := self.template.try_render(messages, self.marks.tools)) is None:
                continue
            text, places = self.marks.places(marked.split(_ANSWER)[0])
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
        prompts = [text for text, _ in self._prompts_before(before, index) if self._goes_on_with(text, begin)]
        if not prompts:
            return None
        begin += max(map(len, prompts))
        after = min((place.first for place in self.places if place.first >= begin), default=len(self.text))
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
