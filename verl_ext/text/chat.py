"""Chat and text records turned into documents: the options, and the encoder that each worker process holds.

record --parse_record--> Chat --ChatRenderer--> ChatText, with spans --TextEncoder--> ids, offsets --> Document
                         PlainText ---------------------------------> ids, with EOS              --> Document
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import numpy as np

from verl_ext.files import fingerprint
from verl_ext.packing import OVER_LENGTH_POLICIES
from verl_ext.text.chat_proof import ProvenChats
from verl_ext.text.chat_template import ChatTemplate, Span
from verl_ext.text.documents import Counts, Document, Documents, Run, fit, joined, preview_of
from verl_ext.text.encoders import Encoded, TextEncoder
from verl_ext.text.json_records import BadRecord, RecordOptions, check_characters, parse_line
from verl_ext.text.messages import Chat, PlainText
from verl_ext.text.readers import Chunk, Place, TextFile
from verl_ext.text.records import Record, category_of, column_problems, parse_record
from verl_ext.text.special_tokens import ChatText, SpecialTokens
from verl_ext.text.tokenized import tokenizer_facts
from verl_ext.text.tokenizer import ModelOptions, check_template, load_tokenizer, read_template
from verl_ext.values import DataError, UsageError, first_line, one_line, option

# The arguments of `apply_chat_template` that are set here.
RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


@dataclass(frozen=True)
class ChatOptions(RecordOptions):
    """The options that turn chat and text records into documents."""

    model: ModelOptions = option(ModelOptions, "the tokenizer")
    chat_template: str | None = option(None, "a Jinja template, or a file with one; null: the tokenizer's own")
    apply_chat_template_kwargs: dict[str, Any] = option({}, "passed to the template, e.g. {enable_thinking: false}")
    end_of_turn: str | None = option(
        None, "text that ends an assistant's turn, a target too; null: found from template and stop tokens"
    )
    turns: str = option(
        "all",
        "assistant turns that are targets: all | last | each: one document per turn, the chat up to it",
        choices=("all", "last", "each"),
    )
    on_unprinted: str = option(
        "warn",
        "chats that the template prints in part: warn: used as printed, and counted | drop | error: bad records",
        choices=("error", "warn", "drop"),
    )
    last_turn_only: bool = option(False, "true: the same as turns=last")
    columns: dict[str, Any] = option(
        {}, "{known field: the records' name for it}, a.b for a nested one; null: the field is not read"
    )
    category_field: str | None = option(
        None, "field whose value is the record's category; a record without it has its source's name"
    )
    media: str = option(
        "error",
        "images, audio, video in records: error: a bad record | drop: the text is kept, the rest counted",
        choices=("error", "drop"),
    )
    max_tokens: int | None = option(None, "most tokens of a document; null: any length", least=2)
    over_length: str = option("error", "what to do with longer documents", choices=OVER_LENGTH_POLICIES)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake that can be seen without opening a source."""
        yield from self.model.tokenizer_problems()
        yield from column_problems(self.columns)
        if self.category_field == "":
            yield "category_field must name a field of the records, or be null; got ''"
        if self.last_turn_only and self.turns == "each":
            yield "last_turn_only must not be set beside turns; got true beside turns=each"
        if self.end_of_turn == "":
            yield "end_of_turn must be a text that ends a turn, or null; got ''"
        for name in RESERVED_TEMPLATE_KWARGS.intersection(self.apply_chat_template_kwargs):
            yield f"apply_chat_template_kwargs must not set {name}, which this command sets itself"
        if self.chat_template is not None:
            try:
                read_template(self.chat_template, "chat_template")
            except UsageError as error:
                yield str(error)


class ChatRenderer:
    """A renderer of chats to texts with targets, with one template, `turns`, `on_unprinted` and `end_of_turn`."""

    def __init__(self, tokenizer: Any, special: SpecialTokens, options: ChatOptions) -> None:
        """Read the template. Raises `UsageError` if there is none, or it cannot be used."""
        template = given = options.chat_template
        if given is not None:
            template = read_template(given, "chat_template")
            check_template(template, "one" if template == given else given, "chat_template")
        elif not tokenizer.chat_template:
            raise UsageError(
                f"chat_template must be given for chat records: the tokenizer of {options.model.tokenizer} has none"
            )
        self._special, self._options = special, options
        stops = _stop_tokens(tokenizer, options.model)
        self._chats = ProvenChats(
            ChatTemplate(tokenizer, template, options.apply_chat_template_kwargs, options.end_of_turn, stops)
        )

    @cached_property
    def template_words(self) -> set[str]:
        """The names in the template."""
        return set(re.findall(r"\w+", self._chats.template.source))

    def texts(self, chat: Chat) -> list[ChatText]:
        """Render a chat, or with `turns=each` every turn to be learnt. Raises `BadRecord`.

        Words that are not printed, and that `on_unprinted` accepts, are noted with the first text that lacks them.
        """
        on_found = self._options.special_tokens_in_text
        texts = [self._special.chat_text(self._chats, part, on_found) for part in self._parts(chat)]
        unprinted: set[str] = set()
        for rendered in (text.rendered for text in texts):
            left_out = rendered.unprinted
            rendered.unprinted = [kind for kind in left_out if kind not in unprinted]
            unprinted.update(left_out)
        learnt = [text for text in texts if text.rendered.targets]
        if unprinted and (self._options.on_unprinted != "warn" or not learnt):
            message = f"the chat template leaves out: {', '.join(sorted(unprinted))}"
            if self._options.on_unprinted != "warn":
                raise BadRecord("unprinted", message)
            raise BadRecord("no_target", f"there is nothing to learn: {message}")
        if not learnt:
            raise BadRecord("no_target", "the chat template marks no assistant turn")
        return learnt

    def _parts(self, chat: Chat) -> list[Chat]:
        if self._options.turns == "each":
            return [Chat(chat.messages[: i + 1], {i: weight}, chat.tools) for i, weight in chat.targets.items()]
        if self._options.turns == "last" or self._options.last_turn_only:
            chat.keep_last_target()
            if not chat.targets:
                raise BadRecord("no_target", "the last assistant turn is no target")
        return [chat]


def _stop_tokens(tokenizer: Any, model: ModelOptions) -> list[str]:
    """Read the tokens that stop generation from the model's generation_config.json, if there is one."""
    from transformers.utils import cached_file  # heavy, and needed in worker processes only

    path = cached_file(
        model.path or model.tokenizer,
        "generation_config.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            ids = json.load(file).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} must be a generation config in JSON: {first_line(error)}") from error
    ids = ids if isinstance(ids, list) else [ids]
    return [token for token in tokenizer.convert_ids_to_tokens([i for i in ids if isinstance(i, int)]) if token]


@dataclass
class _Item:
    """A text of a record, of which a chat with turns=each has several."""

    number: Place
    category: str | None
    text: str | TextFile | ChatText
    weight: float | None


@dataclass
class _Found:
    """The results of a chunk so far."""

    counts: Counts
    by_category: dict[str, Counts] = field(default_factory=dict)
    documents: list[Document] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)  # of the documents, if records give theirs
    preview: list[list[Run]] = field(default_factory=list)
    bad: list[tuple[Place, str | None, BadRecord]] = field(default_factory=list)  # place, category, error

    def counts_of(self, category: str | None) -> list[Counts]:
        """Return the counts of a record's source, and of its category if records give it."""
        return [self.counts, *([self.by_category.setdefault(category, Counts())] if category is not None else [])]


class ChatEncoder:
    """An encoder of chat and text records, with one tokenizer and one set of options."""

    def __init__(self, options: ChatOptions, sources: Sequence[str] = (), preview: int = 0) -> None:
        """Load the tokenizer. Raises `UsageError` if there is none.

        Args:
            options: the options.
            sources: the names of the chunks' sources, for `category_field`.
            preview: the number of documents of a chunk that are decoded.
        """
        self.options, self._sources, self._preview = options, sources, preview
        self.tokenizer = load_tokenizer(options.model)
        self._encoder = TextEncoder(self.tokenizer, options)
        self._is_one_token = cache(lambda text: len(self._encoder.ids(text)) == 1)

    def fingerprint(self) -> str:
        """Digest everything that decides a record's documents. Raises `UsageError` if a template cannot be read.

        That is the options, the tokenizer, the template and the stop tokens, wherever they were read from.
        """
        options = {each.name: getattr(self.options, each.name) for each in fields(ChatOptions) if each.name != "model"}
        if (template := self.options.chat_template) is not None:
            options["chat_template"] = read_template(template, "chat_template")
        ends = [
            self.tokenizer.bos_token_id,
            self.tokenizer.eos_token_id,
            _stop_tokens(self.tokenizer, self.options.model),
        ]
        return fingerprint(
            [tokenizer_facts(self.tokenizer), self.tokenizer.chat_template, ends, options, self._preview]
        )

    def encode(self, chunk: Chunk) -> Documents:
        """Encode a chunk. Raises `DataError` for the first bad record under `on_bad_record=error`."""
        found = _Found(Counts(records=len(chunk.records)))
        items = list(self._items(chunk, found))
        failed: tuple[Any, DataError] | None = None
        for item, encoded in zip(items, self._encoded(items), strict=True):
            try:
                self._add(item, encoded, chunk.path, found)
            except BadRecord as error:
                found.bad.append((item.number, item.category, error))
            except DataError as error:  # it ends the run, unless an earlier bad record does
                failed = item.number, error
                break
        for number, category, bad in sorted(found.bad, key=lambda bad: bad[0]):
            if failed and failed[0] < number:
                break
            line = f"{chunk.place(number)}: {bad}"
            # Chats that on_unprinted=drop leaves out, and targets lost to truncation, are what the user asked for.
            is_asked_for = bad.reason == "unprinted" and self.options.on_unprinted != "error"
            is_asked_for |= bad.reason.startswith("no_target_after")
            if self.options.on_bad_record == "error" and not is_asked_for:
                raise DataError(f"{line} ({bad.reason}; on_bad_record=skip leaves such records out)")
            for counts in found.counts_of(category):
                counts.add_bad(bad.reason, line)
        if failed:
            raise failed[1]
        for counts in (found.counts, *found.by_category.values()):
            ends = counts.end_of_turn.items()
            counts.text_ends.update({end: turns for end, turns in ends if end and not self._is_one_token(end)})
        documents = joined(found.documents, chunk.category_id, chunk.num_bytes, found.counts)
        documents.preview = found.preview
        if found.by_category:
            documents.category_names, documents.category_counts = found.categories, found.by_category
        return documents

    def _items(self, chunk: Chunk, found: _Found) -> Iterator[_Item]:
        """Yield the texts of every record; add unusable records to `found.bad`."""
        category_field = self.options.category_field
        for number, raw in chunk.records:
            category = self._sources[chunk.category_id - 1] if category_field else None
            try:
                raw = parse_line(raw) if isinstance(raw, bytes) else raw
                if category_field:
                    own = category_of(raw, category_field)
                    found.counts.uncategorised += own is None
                    category = category if own is None else own
                record = parse_record(raw, self.options.columns, drop_media=self.options.media == "drop")
                texts = self._texts(record.content)
                self._count_fields(record, found.counts_of(category))
                for text in texts:
                    yield _Item(number, category, text, record.weight)
            except RecursionError:
                found.bad.append((number, category, BadRecord("malformed_json", "the record is nested too deep")))
            except BadRecord as error:
                found.bad.append((number, category, error))
            for counts in found.counts_of(category)[1:]:
                counts.records += 1

    def _texts(self, content: Chat | PlainText) -> Sequence[str | TextFile | ChatText]:
        texts: list[str | TextFile | ChatText]
        texts = [*self._chats.texts(content)] if isinstance(content, Chat) else [content.text]
        for text in texts:
            if not isinstance(text, TextFile):
                check_characters(text if isinstance(text, str) else text.text)
        return texts

    @cached_property
    def _chats(self) -> ChatRenderer:
        """The renderer, made for the first chat: plain texts need no chat template."""
        return ChatRenderer(self.tokenizer, self._encoder.special, self.options)

    def _count_fields(self, record: Record, counts: list[Counts]) -> None:
        """Count the fields that nothing reads; a message's field counts if the template does not name it."""
        if not (record.unused or record.message_fields or record.dropped):
            return
        category = self.options.category_field or ""
        unused = Counter(one_line(name) for name in record.unused if name not in (category, category.partition(".")[0]))
        for name, messages in record.message_fields.items():
            if name not in self._chats.template_words:
                unused[one_line(f"messages.{name}")] += messages
        for each in counts:
            each.unused_fields.update(unused)
            each.dropped_media.update(record.dropped)

    def _encoded(self, items: list[_Item]) -> list[Any]:
        """Encode every text; return `Encoded` or the error for each."""
        chats = [item.text for item in items if isinstance(item.text, ChatText)]
        plain = [item.text for item in items if not isinstance(item.text, ChatText)]
        of_chats = iter(self._encoder.encode_chats(chats))
        of_plain = iter(self._encoder.encode(plain, add_special_tokens=True))
        return [next(of_chats) if isinstance(item.text, ChatText) else next(of_plain) for item in items]

    def _add(self, item: _Item, encoded: Encoded | Exception, path: str, found: _Found) -> None:
        """Add a text's documents, cut if they are too long, and their counts. Raises `BadRecord`."""
        if isinstance(encoded, Exception):
            raise encoded
        document, over_length = self._document(item, encoded), Counter[str]()
        for counts in found.counts_of(item.category):
            counts.add_special_tokens(encoded.special_tokens)
            if isinstance(chat := item.text, ChatText):
                counts.end_of_turn.update(t.closed_by for t in chat.rendered.targets if t.closed_by is not None)
                counts.unprinted.update(chat.rendered.unprinted)
                counts.border_tokens += chat.border_tokens
        try:
            pieces = fit(document, self.options.max_tokens, self.options.over_length, over_length)
        except DataError as error:
            raise DataError(f"{path}:{item.number}: {error}") from error
        for counts in found.counts_of(item.category):
            counts.over_length.update(over_length)
            counts.add_documents((len(p.input_ids) for p in pieces), sum(int(p.loss_mask.sum()) for p in pieces))
        for piece in pieces:
            found.documents.append(piece)
            if item.category is not None:
                found.categories.append(item.category)
            if len(found.preview) < self._preview:
                found.preview.append(preview_of(piece.input_ids, piece.loss_mask, self._decode))

    def _document(self, item: _Item, encoded: Encoded) -> Document:
        """Make a document of a text's tokens, mask and weights; a plain text ends with EOS."""
        ids = encoded.ids
        if isinstance(item.text, ChatText):
            mask, item.text.border_tokens = self._encoder.mask(encoded, item.text.text, item.text.rendered.spans)
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
        return Document(ids, mask, self._weights(encoded, item, len(ids)))

    def _weights(self, encoded: Encoded, item: _Item, tokens: int) -> np.ndarray | None:
        """Return weights[T] float32, the record's weight times that of a token's turn; None if neither is given."""
        spans: dict[float, list[Span]] = {}
        text = item.text.text if isinstance(item.text, ChatText) else ""
        for target in item.text.rendered.targets if isinstance(item.text, ChatText) else []:
            if target.weight != 1:
                spans.setdefault(target.weight, []).append(target.span)
        if item.weight is None and not spans:
            return None
        weights = np.full(tokens, 1.0 if item.weight is None else item.weight, np.float64)
        for weight, of_weight in spans.items():
            weights[self._encoder.mask(encoded, text, of_weight)[0] == 1] *= weight
        return weights.astype(np.float32)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
