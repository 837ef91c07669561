"""Encode chat and text records as documents, in each worker process.

One chat from its line of a file to its row. This module calls 2 to 8 in turn, but not 6 for a plain text, which ends
with EOS; none changes what another one made:

    1 read/readers          {"messages": [ …         a line of a Chunk, read in the command's process
    2 read/json_records     {"messages": […]}        the record
    3 records/records       Chat                     by its shape (4 records/shapes) and messages (5 records/messages)
    6 chat/renderer         <|im_start|>user …       RenderedTurns: the text and the parts that are learnt
    7 text_encoder          ids, their characters    Encoded
    8 tokens/documents      ids, loss_mask, weights  Document, and with those of the chunk Documents
    9 arrow_folder          a row of a shard         written in the command's process, in the order of the files
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.cache import fingerprint
from verl_ext.options import DataError, UsageError, must, one_line
from verl_ext.text.chat.jinja_template import prints_date
from verl_ext.text.chat.learnt import closes_again
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.chat.parts import EMPTY_REASONING, KINDS, PROMPT, REASONING
from verl_ext.text.chat.renderer import ChatRenderer, RenderedTurns
from verl_ext.text.encoder import Encoder, Origin
from verl_ext.text.held_out import content_key
from verl_ext.text.read.bad_record import BadRecord, check_characters
from verl_ext.text.read.json_records import parse_line
from verl_ext.text.read.readers import Chunk, read_record
from verl_ext.text.records.content import Content
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.preference import REJECTED, Preference
from verl_ext.text.records.records import Record, category_of, parse_record, read_columns, replaced
from verl_ext.text.text_encoder import Encoded, TextEncoder
from verl_ext.text.tokens.counts import NO_KEY, Counts, Tally
from verl_ext.text.tokens.documents import Document, Documents
from verl_ext.text.tokens.tokenizer import stop_tokens, tokenizer_facts

KIND_OF_TARGET = {
    **{kind: kind for kind in (*KINDS, PROMPT)},
    EMPTY_REASONING: REASONING,
}  # the kinds that the report counts


class _Item(NamedTuple):
    """The texts that become documents together: one, or one for each answer of a preference.

    texts: a `PlainText`, or chats as `RenderedTurns`; the error of a record that cannot be used. record: None for that.
    """

    origin: Origin
    texts: Sequence[Any]
    record: Record | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the texts come from chats."""
        return self.record is not None and bool(self.record.content.chats)


class ShownText(NamedTuple):
    """A record's text, its tokens, and (message, prompt) of learnt turns."""

    text: str
    input_ids: NDArray[np.int32]
    prompts: list[tuple[int, str]]


class ChatEncoder(Encoder):
    """An encoder of chats and texts, with one tokenizer and options.

    sources: the names of the chunks' sources, for `category_field`. tokenizer: None for that of the options.
    """

    options: ChatOptions

    def __init__(self, options: ChatOptions, sources: Sequence[str] = (), tokenizer: Any = None) -> None:
        super().__init__(options.dated(), tokenizer)
        self.sources = sources
        self.columns = read_columns(options.columns, options.category_field)
        self._names = options.message_names

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, self.options)

    @cached_property
    def _chats(self) -> ChatRenderer:
        """The renderer, made for the first chat: texts need no template."""
        return ChatRenderer(self.tokenizer, self._encoder.special, self.options)

    @cached_property
    def _is_one_token(self) -> Any:
        return cache(lambda text: len(self._encoder.ids(text)) == 1)

    def fingerprint(self) -> str:
        """Return a digest of all that decides a record's documents.

        It covers the options, the tokenizer, the template and the stop tokens, wherever they were read from, and the
        date if the template may print it. Raises `UsageError` if a template cannot be read.
        """
        own = {each.name: getattr(self.options, each.name) for each in fields(ChatOptions)}
        own |= {"model": None, "chat_template": self.options.given_template, "chat_templates": None}
        if not self.prints_date:
            del own["chat_date"]
        tokenizer = self.tokenizer
        ends = [tokenizer.bos_token_id, tokenizer.eos_token_id, stop_tokens(tokenizer, self.options.model)]
        return fingerprint([tokenizer_facts(tokenizer), tokenizer.chat_template, ends, own])

    @property
    def prints_date(self) -> bool:
        """Whether the chat template may print today's date."""
        return prints_date(self.options.given_template or self.tokenizer.chat_template)

    def encode(self, chunk: Chunk) -> Documents:
        """Return a chunk's documents, one for each text of its records."""
        tally = Tally(self.by_record)
        items = self._items(chunk, tally)
        encoded = self._encoded(items)
        drafts = ((item.origin, partial(self._documents, item, own)) for item, own in zip(items, encoded, strict=True))
        documents = self.made(chunk, drafts, tally)
        if "_chats" in vars(self):
            documents = replace(documents, chat_template=self._chats.jinja, end_of_chat=next(reversed(self.ends), None))
        return replace(documents, category_counts=tally.by_category() if self.options.category_field else {})

    def failure(self, bad: BadRecord, place: str) -> str | None:
        """Return a bad record's line; None for those that options leave out.

        `on_unprinted=drop` and `min_score_gap` leave out records of their own reasons.
        """
        is_asked_for = bad.reason == "small_gap" or (bad.reason == "unprinted" and self.options.on_unprinted != "error")
        return None if is_asked_for else super().failure(bad, place)

    def shown(self, raw: Any, source: str = "") -> Iterator[ShownText]:
        """Yield a source's record's texts that give documents. Raises `BadRecord` for none."""
        raw = read_record(raw)
        record = self._record(raw, self._category(raw, source))
        contents: Sequence[Content] = record.content.chats or [record.content]
        for content in contents:
            for (text,) in content.texts(self._rendered):
                item = _Item(Origin("", 0, Counts()), [text], record)
                ((encoded,),) = self._encoded([item])
                ids = self._document(record, text, encoded, Counts()).input_ids
                if content.chat is None:
                    yield ShownText(content.text, ids, [])
                else:
                    prompts = [(turn, self._chats.prompt(content.chat, turn).text) for turn in text.turns]
                    yield ShownText(text.text, ids, prompts)

    def prompt(self, raw: Any, category: str = "") -> tuple[Chat | None, int, list[int]]:
        """Return (chat, its last assistant turn, tokens before that turn).

        A plain text, without a chat, is continued; of a preference, the preferred answer counts. The tokens begin
        the document that the record gives, up to what the template prints only before an answer. Raises `BadRecord`,
        also for an answer that is undesirable.
        """
        content = self._record(raw, category).content
        if content.preference is not None and content.preference.sides[0] == REJECTED:
            raise BadRecord("no_target", "the answer is undesirable, and none is expected: leave the record out")
        if content.chats:
            chat = content.chats[0]
            last = max(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
            if not last:
                raise BadRecord("no_prompt", "nothing stands before the answer")
            # The template prints the turns before the answer, with what it puts before an answer alone.
            text = self._chats.prompt(chat, last)
            check_characters(text.text)
            return chat, last, _usable(*self._encoder.encode_chats([text])).ids.tolist()
        (texts,) = content.texts(self._rendered)
        ids = _usable(*self._encoder.encode(texts, add_special_tokens=True)).ids.tolist()
        while ids and ids[-1] == self.tokenizer.eos_token_id:  # it ends the documents of training
            ids.pop()
        if not ids:
            raise BadRecord("empty", "the text is empty")
        return None, 0, ids

    @property
    def ends(self) -> list[str]:
        """The texts that end an assistant's turn; none before the first chat."""
        return self._chats.template.turn_ends if "_chats" in vars(self) else []

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids, without those added at either end."""
        return self._encoder.ids(text)

    def record_key(self, raw: Any, source: int) -> int:
        """Return 64 bits of a hash of a record's words. Raises `BadRecord`."""
        raw = read_record(raw)
        category = self._category(raw, self.sources[source - 1] if self.sources else "")
        return self._key(self._record(raw, category).content, category)

    def _category(self, raw: Any, source: str) -> str:
        return source if (own := self._own_category(raw)) is None else own

    def _own_category(self, raw: Any) -> str | None:
        """Return the category in a record's field, with the texts of `replace` in place."""
        own = category_of(raw, self.options.category_field) if self.options.category_field else None
        return replaced(own, self.options.replace) if own and self.options.replace else own

    def _key(self, content: Content, category: str) -> int:
        return content_key(content, self.options.default_system(category), self.options.turns == "each")

    def _items(self, chunk: Chunk, tally: Tally) -> list[_Item]:
        """Return records' texts or errors; count the records."""
        items: list[_Item] = []
        source = self.sources[chunk.category_id - 1] if self.sources else ""
        for number, (place, raw) in enumerate(chunk.records):
            category, key = source, NO_KEY
            # Category, then content, then texts: a bad record counts for the category that is known by then.
            try:
                raw = parse_line(raw) if isinstance(raw, bytes) else raw
                if self.options.category_field:
                    own = self._own_category(raw)
                    category = category if own is None else own
                    tally.of(category).uncategorised += own is None
                record = self._record(raw, category)
                if self.by_record:
                    key = self._key(record.content, category)
                groups = record.content.texts(self._rendered)
                self._count_fields(record, tally.of(category))
                origin = Origin(place, number, tally.of(category), category)
                items += [_Item(origin, texts, record) for texts in groups]
            except (BadRecord, DataError, RecursionError) as error:
                too_deep = BadRecord("malformed_json", "the record is nested too deep")
                bad = too_deep if isinstance(error, RecursionError) else error
                items.append(_Item(Origin(place, number, tally.of(category), category), [bad]))
            tally.end_record(category, key)
        return items

    def _record(self, raw: Any, category: str) -> Record:
        options = self.options
        system = options.default_system(category)
        read = options.columns, options.media == "drop", self._names, system, options.replace
        record = parse_record(raw, *read, drop_nulls=options.null_fields == "absent")
        preference, gap = record.content.preference, options.min_score_gap
        return record if preference is None or gap is None else record._replace(content=preference.with_least_gap(gap))

    def _rendered(self, chat: Chat) -> Sequence[RenderedTurns]:
        texts = self._chats.render(chat)
        for text in texts:
            check_characters(text.text)
        return texts

    def _count_fields(self, record: Record, counts: Counts) -> None:
        """Count unread fields, also the template's if it does not name them."""
        counts.text_calls += record.text_calls
        counts.default_system += record.has_default
        counts.replaced += record.is_replaced
        counts.readings.update(record.readings)
        if record.weight_field is not None and record.weight is not None:
            counts.loss_weights.count(one_line(record.weight_field), record.weight, record.weight)
        arguments = record.content.chats[0].template_kwargs if record.content.chats else {}
        if not (record.unused or record.message_fields or record.dropped or arguments):
            return
        category = self.options.category_field or ""
        unused = Counter(one_line(name) for name in record.unused if name not in (category, category.partition(".")[0]))
        unused.update(one_line(name) for name in arguments if name not in self._chats.template.facts.names)
        for name, messages in record.message_fields.items():
            if name not in self._chats.template.facts.names:
                unused[one_line(f"messages.{name}")] += messages
        counts.unused_fields.update(unused)
        counts.dropped_media.update(record.dropped)

    def _encoded(self, items: Sequence[_Item]) -> list[list[Any]]:
        """Return an `Encoded` or an error for every text of each item."""
        chats = iter(self._encoder.encode_chats([text for item in items if item.is_chat for text in item.texts]))
        plain = [text for item in items if not item.is_chat for text in item.texts]
        others = iter(self._encoder.encode(plain, add_special_tokens=True))
        return [[next(chats if item.is_chat else others) for _ in item.texts] for item in items]

    def _documents(self, item: _Item, encoded: Sequence[Encoded | Exception]) -> list[Document]:
        """Make an item's documents, all or none; raise `BadRecord` for none."""
        if (record := item.record) is None:
            raise item.texts[0]
        if (preference := record.content.preference) is None:
            return [self._document(record, item.texts[0], encoded[0], item.origin.counts)]
        own = Counts()
        found = [self._document(record, text, each, own) for text, each in zip(item.texts, encoded, strict=True)]
        if any(np.array_equal(found[0].input_ids, other.input_ids) for other in found[1:]):
            raise BadRecord("same_answers", "the preferred answer and another one have the same tokens")
        item.origin.counts.add(own)
        item.origin.counts.preferences.update(_preference_counts(preference, item.texts, found))
        weight = 1.0 if record.weight is None else record.weight
        units = [len(found), *[0] * (len(found) - 1)]
        return [
            document._replace(unit=unit, answer=side, pair_weight=weight)
            for document, unit, side in zip(found, units, preference.sides, strict=True)
        ]

    def _document(self, record: Record, text: Any, encoded: Encoded | Exception, counts: Counts) -> Document:
        """Make a text's document, and count what a chat holds. Raises `BadRecord`."""
        encoded, is_chat = _usable(encoded), bool(record.content.chats)
        ids = encoded.ids if is_chat else self._with_eos(encoded.ids)
        self.check_length(len(ids))
        mask, weights = np.ones(len(ids), np.int8), None
        if is_chat:
            mask, weights, firsts, border_tokens = self._learnt_tokens(text, encoded)
        mask[:1] = 0
        if not np.count_nonzero(mask):
            raise BadRecord("no_target", "no token is left to learn after the first")
        if record.token_weight is not None:
            weights = record.token_weight * (np.ones(len(ids), np.float64) if weights is None else weights)
        if is_chat:  # only a text that gives a document counts
            self._count_chat(text, counts)
            counts.border_tokens += border_tokens
            # If two parts begin at one token, the later one counts.
            for part, (first, stop) in zip(text.learnt, pairwise([*firsts, len(mask)]), strict=True):
                counts.target_kinds[KIND_OF_TARGET[part.kind]] += int(np.count_nonzero(mask[first:stop]))
        own = None if weights is None else weights.astype(np.float32)
        return Document(ids, mask, own, special_tokens=encoded.special_tokens)

    def _with_eos(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a plain text's tokens with an EOS at the end, which the tokenizer may have added."""
        if (eos := self.tokenizer.eos_token_id) is None:
            model, needed = self.options.model, "hold a tokenizer with an eos_token for text records"
            raise UsageError(must(model.tokenizer_key, needed, model.tokenizer))
        return ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))

    def _learnt_tokens(
        self, chat: RenderedTurns, encoded: Encoded
    ) -> tuple[NDArray[np.int8], NDArray[np.float64] | None, list[int], int]:
        """Return a chat's mask, weights or None, first tokens and border tokens."""
        mask, border_tokens = self._encoder.mask(encoded, chat.text, chat.spans)
        learnt, weights = chat.learnt, None
        firsts = self._encoder.first_tokens(encoded, chat.text, [part.start for part in learnt])
        if [part for part in learnt if part.weight != 1]:
            weights = np.ones(len(mask), np.float64)
            for part, run in zip(learnt, pairwise([*firsts, len(mask)]), strict=True):
                weights[slice(*run)] = part.weight  # also sets the context after it, which the next line resets
            weights[mask == 0] = 1
        return mask, weights, firsts, border_tokens

    def _count_chat(self, chat: RenderedTurns, counts: Counts) -> None:
        for end in chat.ends:
            counts.end_of_turn[end] += 1
            if end and not self._is_one_token(end):
                counts.text_ends[end] += 1
        if chat.unprinted:
            counts.unprinted.update(chat.unprinted)
        if len(chat.learnt) < len(chat.parts):
            counts.context_parts.update(part.kind for part in chat.parts if not part.weight)
        counts.dropped_reasoning += chat.dropped_reasoning
        counts.dropped_blocks += chat.dropped_blocks
        counts.closed_again += sum(closes_again(chat.text, part) for part in chat.parts)


def _usable(encoded: Encoded | Exception) -> Encoded:
    if isinstance(encoded, Exception):
        raise encoded
    return encoded


def _preference_counts(
    preference: Preference, chats: Sequence[RenderedTurns], documents: Sequence[Document]
) -> Counter[str]:
    """Count a preference, and its pairs of unequal length, parts, ends or prompts."""
    counts = Counter(units=1, pairs=len(documents) - 1, labels=int(len(documents) == 1), tied=preference.tied)
    lengths = [int(document.loss_mask.sum()) for document in documents]
    prompts = [chat.text[: chat.parts[0].start] for chat in chats]
    thoughts = [{part.kind for part in chat.parts} & {REASONING, EMPTY_REASONING} for chat in chats]
    has_end = [any(chat.ends[-1:]) for chat in chats]
    for place in range(1, len(documents)):
        counts["chosen_longer"] += lengths[0] > lengths[place]
        counts["rejected_longer"] += lengths[0] < lengths[place]
        counts["unequal_parts"] += thoughts[0] != thoughts[place]
        counts["unequal_ends"] += has_end[0] != has_end[place]
        # One may go on with what the template prints before that answer alone.
        counts["unequal_prompts"] += not any(a.startswith(b) for a, b in permutations((prompts[0], prompts[place])))
        scores = preference.scores
        counts["scores_reversed"] += scores is not None and scores[0] < scores[place]
    return +counts
