"""Encode chat and text records as documents, in each worker process.

record --parse_record--> Chat --ChatRenderer--> RenderedTurns --TextEncoder--> ids, offsets --> Document
                         PlainText ---------------------------> ids, with EOS              --> Document
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from verl_ext.files import fingerprint
from verl_ext.options import DataError, UsageError, one_line
from verl_ext.text.chat.parts import EMPTY_REASONING, KINDS, REASONING
from verl_ext.text.chat.renderer import ChatOptions, ChatRenderer, RenderedTurns
from verl_ext.text.chat.template import prints_date
from verl_ext.text.read.json_records import BadRecord, check_characters, parse_line
from verl_ext.text.read.readers import Chunk, Place, TextFile
from verl_ext.text.records.messages import Chat, PlainText
from verl_ext.text.records.records import Record, category_of, parse_record
from verl_ext.text.tokenizing import tokenizer_facts
from verl_ext.text.tokens.documents import Counts, Document, Documents, Run, concat_documents, cut_to_length, preview_of
from verl_ext.text.tokens.encoders import Encoded, TextEncoder
from verl_ext.text.tokens.tokenizer import load_tokenizer, read_template, stop_tokens

KIND_OF_TARGET = {**{kind: kind for kind in KINDS}, EMPTY_REASONING: REASONING}  # the kinds that the report counts


@dataclass
class _Item:
    """A text of a record; a chat with turns=each has several."""

    number: Place
    category: str
    text: str | TextFile | RenderedTurns
    weight: float | None
    content: Chat | PlainText


@dataclass(frozen=True)
class ShownText:
    """A text of a record, its documents, and (message, prompt at inference) of each learnt assistant turn."""

    text: str
    documents: list[Document]
    prompts: list[tuple[int, str]]


@dataclass
class _Found:
    """The results of a chunk so far."""

    counts: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))  # by category, "" if none is given
    documents: list[Document] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)  # one for each document
    preview: list[list[Run]] = field(default_factory=list)
    bad: list[tuple[Place, str, BadRecord | DataError]] = field(default_factory=list)  # place, category, error


class ChatEncoder:
    """An encoder of chat and text records, with one tokenizer and one set of options."""

    def __init__(
        self, options: ChatOptions, sources: Sequence[str] = (), preview: int = 0, tokenizer: Any = None
    ) -> None:
        """Load the tokenizer. Raises `UsageError` if there is none.

        Args:
            options: the options.
            sources: the names of the chunks' sources, for `category_field`.
            preview: the number of documents of a chunk to decode for a preview.
            tokenizer: the tokenizer; None: that of the options.
        """
        self.options, self.sources, self._preview = options.dated(), sources, preview
        self.tokenizer = load_tokenizer(options.model) if tokenizer is None else tokenizer
        self._encoder = TextEncoder(self.tokenizer, self.options)
        self._is_one_token = cache(lambda text: len(self._encoder.ids(text)) == 1)

    def fingerprint(self) -> str:
        """Return a digest of all that decides a record's documents. Raises `UsageError` if a template cannot be read.

        It covers the options, the tokenizer, the template and the stop tokens, wherever they were read from, and the
        date if the template may print it.
        """
        options = {each.name: getattr(self.options, each.name) for each in fields(ChatOptions) if each.name != "model"}
        if (template := self.options.chat_template) is not None:
            options["chat_template"] = read_template(template, "chat_template")
        if not self.prints_date:
            del options["chat_date"]
        ends = [
            self.tokenizer.bos_token_id,
            self.tokenizer.eos_token_id,
            stop_tokens(self.tokenizer, self.options.model),
        ]
        return fingerprint([tokenizer_facts(self.tokenizer), self.tokenizer.chat_template, ends, options])

    @property
    def prints_date(self) -> bool:
        """Whether the chat template may print today's date."""
        given = self.options.chat_template
        return prints_date(self.tokenizer.chat_template if given is None else read_template(given, "chat_template"))

    def encode(self, chunk: Chunk) -> Documents:
        """Encode a chunk. Raises `DataError` for the first bad record under `on_bad_record=error`."""
        found = _Found()
        items = list(self._items(chunk, found))
        for item, encoded in zip(items, self._encoded(items), strict=True):
            try:
                self._add(item, encoded, chunk.path, found)
            except (BadRecord, DataError) as error:
                found.bad.append((item.number, item.category, error))
        of_source = Counts()
        for counts in found.counts.values():
            ends = counts.end_of_turn.items()
            counts.text_ends.update({end: turns for end, turns in ends if end and not self._is_one_token(end)})
            of_source.add(counts)
        for number, category, bad in sorted(found.bad, key=lambda bad: bad[0]):
            if isinstance(bad, DataError):  # it ends the run, unless an earlier bad record does
                raise bad
            line = f"{chunk.place(number)}: {bad}"
            # The user accepts that on_unprinted=drop leaves out chats, and that truncation loses targets.
            is_asked_for = bad.reason == "unprinted" and self.options.on_unprinted != "error"
            is_asked_for |= bad.reason.startswith("no_target_after")
            if self.options.on_bad_record == "error" and not is_asked_for:
                raise DataError(f"{line} ({bad.reason}; on_bad_record=skip leaves such records out)")
            for counts in (of_source, found.counts[category]):
                counts.add_bad(bad.reason, line)
        documents = concat_documents(found.documents, chunk.category_id, chunk.num_bytes, of_source)
        documents.preview = found.preview
        if "_chats" in vars(self):
            documents.chat_template, documents.end_of_chat = self._chats.jinja, next(reversed(self.ends), None)
        if self.options.category_field:
            documents.category_names, documents.category_counts = found.categories, dict(found.counts)
        return documents

    def shown(self, chunk: Chunk) -> Iterator[ShownText]:
        """Yield the texts of a chunk's records that give documents."""
        items = list(self._items(chunk, _Found()))
        for item, encoded in zip(items, self._encoded(items), strict=True):
            try:
                if isinstance(encoded, Exception):
                    raise encoded
                documents = cut_to_length(
                    self._document(item, encoded), self.options.max_tokens, self.options.over_length, Counter()
                )
            except (BadRecord, DataError):
                continue
            prompts: list[tuple[int, str]] = []
            if isinstance(item.text, RenderedTurns) and isinstance(chat := item.content, Chat):
                prompts = [(turn, self._chats.prompt(chat, turn).text) for turn in item.text.turns]
            text = item.text.text if isinstance(item.text, RenderedTurns) else str(item.text)
            yield ShownText(text, documents, prompts)

    def prompt(self, raw: Any) -> tuple[Chat | None, int, list[int]]:
        """Return (chat, number of its last assistant turn, tokens from which that turn is generated).

        A plain text, without a chat, is gone on with. The tokens begin the document that the record gives, up to what
        the template prints only before an answer. Raises `BadRecord`.
        """
        record = parse_record(raw, self.options.columns, drop_media=self.options.media == "drop")
        if not isinstance(chat := record.content, Chat):
            self._texts(chat)
            (encoded,) = self._encoder.encode([chat.text], add_special_tokens=True)
            if isinstance(encoded, Exception):
                raise encoded
            ids = encoded.ids.tolist()
            while ids and ids[-1] == self.tokenizer.eos_token_id:  # it ends the documents of training
                ids.pop()
            if not ids:
                raise BadRecord("empty", "the text is empty")
            return None, 0, ids
        last = max(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
        if not last:
            raise BadRecord("no_prompt", "nothing stands before the answer")
        text = self._chats.prompt(chat, last)
        check_characters(text.text)
        (encoded,) = self._encoder.encode_chats([text])
        if isinstance(encoded, BadRecord):
            raise encoded
        return chat, last, encoded.ids.tolist()

    @property
    def ends(self) -> list[str]:
        """The texts that end an assistant's turn; none before the first chat."""
        return self._chats.turn_ends if "_chats" in vars(self) else []

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without those that the tokenizer adds at either end."""
        return self._encoder.ids(text)

    def _items(self, chunk: Chunk, found: _Found) -> Iterator[_Item]:
        """Yield the texts of every record; add unusable records to `found.bad`."""
        category_field = self.options.category_field
        for number, raw in chunk.records:
            category = self.sources[chunk.category_id - 1] if category_field else ""
            try:
                raw = parse_line(raw) if isinstance(raw, bytes) else raw
                if category_field:
                    own = category_of(raw, category_field)
                    category = category if own is None else own
                    found.counts[category].uncategorised += own is None
                record = parse_record(raw, self.options.columns, drop_media=self.options.media == "drop")
                texts = self._texts(record.content)
                self._count_fields(record, found.counts[category])
                for text in texts:
                    yield _Item(number, category, text, record.weight, record.content)
            except RecursionError:
                found.bad.append((number, category, BadRecord("malformed_json", "the record is nested too deep")))
            except BadRecord as error:
                found.bad.append((number, category, error))
            found.counts[category].records += 1

    def _texts(self, content: Chat | PlainText) -> Sequence[str | TextFile | RenderedTurns]:
        texts: list[str | TextFile | RenderedTurns]
        texts = [*self._chats.render(content)] if isinstance(content, Chat) else [content.text]
        for text in texts:
            if not isinstance(text, TextFile):
                check_characters(text if isinstance(text, str) else text.text)
        return texts

    @cached_property
    def _chats(self) -> ChatRenderer:
        """The renderer, made for the first chat because plain texts need no chat template."""
        return ChatRenderer(self.tokenizer, self._encoder.special, self.options)

    def _count_fields(self, record: Record, counts: Counts) -> None:
        """Count the fields that nothing reads; one that the template gets counts if the template does not name it."""
        counts.text_calls += record.text_calls
        arguments = record.content.template_kwargs if isinstance(record.content, Chat) else {}
        if not (record.unused or record.message_fields or record.dropped or arguments):
            return
        category = self.options.category_field or ""
        unused = Counter(one_line(name) for name in record.unused if name not in (category, category.partition(".")[0]))
        unused.update(one_line(name) for name in arguments if name not in self._chats.template_words)
        for name, messages in record.message_fields.items():
            if name not in self._chats.template_words:
                unused[one_line(f"messages.{name}")] += messages
        counts.unused_fields.update(unused)
        counts.dropped_media.update(record.dropped)

    def _encoded(self, items: list[_Item]) -> list[Any]:
        """Encode every text; return an `Encoded` or an error for each."""
        chats = [item.text for item in items if isinstance(item.text, RenderedTurns)]
        plain = [item.text for item in items if not isinstance(item.text, RenderedTurns)]
        of_chats = iter(self._encoder.encode_chats(chats))
        of_plain = iter(self._encoder.encode(plain, add_special_tokens=True))
        return [next(of_chats) if isinstance(item.text, RenderedTurns) else next(of_plain) for item in items]

    def _add(self, item: _Item, encoded: Encoded | Exception, path: str, found: _Found) -> None:
        """Add a text's documents, cut if they are too long, and their counts. Raises `BadRecord`."""
        if isinstance(encoded, Exception):
            raise encoded
        document, counts = self._document(item, encoded), found.counts[item.category]
        counts.add_special_tokens(encoded.special_tokens)
        if isinstance(chat := item.text, RenderedTurns):
            counts.end_of_turn.update(chat.ends)
            counts.border_tokens += document.border_tokens
            counts.unprinted.update(chat.unprinted)
            if len(chat.learnt) < len(chat.parts):
                counts.context_parts.update(part.kind for part in chat.parts if not part.weight)
            counts.dropped_reasoning += chat.dropped_reasoning
            counts.dropped_blocks += chat.dropped_blocks
            counts.closed_again += chat.closed_again
        try:
            pieces = cut_to_length(document, self.options.max_tokens, self.options.over_length, counts.over_length)
        except DataError as error:
            raise DataError(f"{path}:{item.number}: {error}") from error
        counts.add_documents((len(p.input_ids) for p in pieces), sum(int(p.loss_mask.sum()) for p in pieces))
        for piece in pieces:
            for kind, tokens in piece.tokens_by_kind() if piece.parts else ():
                counts.target_kinds[kind] += tokens
            found.documents.append(piece)
            found.categories.append(item.category)
            if len(found.preview) < self._preview:
                decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
                found.preview.append(preview_of(piece.input_ids, piece.loss_mask, decode))

    def _document(self, item: _Item, encoded: Encoded) -> Document:
        """Make a document from a text's tokens, mask and weights; a plain text ends with EOS."""
        ids, weights, border_tokens = encoded.ids, None, 0
        parts: list[tuple[int, str]] = []
        if isinstance(chat := item.text, RenderedTurns):
            mask, border_tokens = self._encoder.mask(encoded, chat.text, chat.spans)
            learnt = chat.learnt
            firsts = self._encoder.first_tokens(encoded, chat.text, [part.start for part in learnt])
            parts = [(first, KIND_OF_TARGET[part.kind]) for first, part in zip(firsts, learnt, strict=True)]
            if any(part.weight != 1 for part in learnt):
                weights = np.ones(len(ids), np.float64)
                for part, run in zip(learnt, pairwise([*firsts, len(ids)]), strict=True):
                    weights[slice(*run)] = part.weight  # also sets the context after it, which the next line resets
                weights[mask == 0] = 1
        else:
            eos = self.tokenizer.eos_token_id
            if eos is None:
                name = self.options.model.tokenizer
                raise UsageError(f"the tokenizer of {name} must have an eos_token for text records")
            ids = ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))
            mask = np.ones(len(ids), dtype=np.int8)
        mask[:1] = 0
        if not mask.any():
            raise BadRecord("no_target", "no token is left to learn after the first")
        if item.weight is not None:
            weights = item.weight * (np.ones(len(ids), np.float64) if weights is None else weights)
        weights = None if weights is None else weights.astype(np.float32)
        return Document(ids, mask, weights, parts=parts, border_tokens=border_tokens)
