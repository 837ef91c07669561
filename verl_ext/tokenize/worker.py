"""Chunks of records tokenised: the part that runs in every worker process."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl_ext.commands.errors import DataError, UsageError
from verl_ext.commands.tokenizer import load_tokenizer
from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.chat_spans import ChatTemplate
from verl_ext.tokenize.chunks import Chunk, TextFile, parse_line
from verl_ext.tokenize.config import TokenizeConfig
from verl_ext.tokenize.over_length import Document, fit
from verl_ext.tokenize.records import Chat, PlainText, parse_record
from verl_ext.tokenize.special_tokens import ChatText
from verl_ext.tokenize.tally import Tally
from verl_ext.tokenize.target_mask import mask_from_offsets, mask_from_prefixes
from verl_ext.tokenize.text_encoder import Encoded, TextEncoder


@dataclass
class ChunkResult:
    """input_ids[ΣT] int32, loss_mask[ΣT] int8, lengths[D] int32 and, where a record gave one, weights[D] float32."""

    category_id: int
    num_bytes: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    tally: Tally

    @property
    def records(self) -> int:
        """Records read."""
        return self.tally.records

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return self.tally.tokens


@dataclass
class _Prepared:
    number: int
    text: str | TextFile | ChatText
    weight: float | None


@dataclass
class _Bad:
    number: int
    reason: str
    message: str


@dataclass
class _Outcome:
    documents: list[Document] = field(default_factory=list)
    bad: list[_Bad] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


class ChunkTokenizer:
    """Turns chunks into token arrays with one tokenizer and one configuration."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.encoder = TextEncoder(self.tokenizer, config.special_tokens_in_text)
        self._template: ChatTemplate | None = None

    def tokenise(self, chunk: Chunk) -> ChunkResult:
        """Tokenise a chunk; `DataError` for the first bad record under `on_bad_record=error`."""
        outcome = _Outcome(tally=Tally(records=len(chunk.records)))
        prepared = list(self._prepared(chunk, outcome))
        for item, ids, mask in self._encoded(prepared, outcome):
            self._keep(Document(ids, mask, item.weight), item, chunk.path, outcome)
        for bad in sorted(outcome.bad, key=lambda bad: bad.number):
            line = f"{chunk.place(bad.number)}: {bad.message}"
            # A target lost to truncation follows from the policy asked for, not from bad data: counted, never fatal.
            if self.config.on_bad_record == "error" and not bad.reason.startswith("no_target_after"):
                raise DataError(f"{line} ({bad.reason}; on_bad_record=skip leaves such records out)")
            outcome.tally.add_bad(bad.reason, line)
        return _result(chunk, outcome)

    def _prepared(self, chunk: Chunk, outcome: _Outcome) -> Iterator[_Prepared]:
        for number, raw in chunk.records:
            try:
                record = parse_record(parse_line(raw) if isinstance(raw, bytes) else raw)
                yield _Prepared(number, self._text(record.content, chunk.place(number)), record.weight)
            except BadRecord as error:
                outcome.bad.append(_Bad(number, error.reason, str(error)))

    def _text(self, content: Chat | PlainText, place: str) -> str | TextFile | ChatText:
        if isinstance(content, Chat):
            if self.config.last_turn_only:
                content.keep_last_target()
            if not content.targets:
                raise BadRecord("no_target", "the last assistant turn is no target")
            template = self._chat_template(place)
            chat = self.encoder.special.chat_text(template, content, self.config.special_tokens_in_text)
            if not chat.spans:
                raise BadRecord("no_target", "the chat template marks no assistant turn")
            _check_characters(chat.text)
            return chat
        if isinstance(content.text, str):
            _check_characters(content.text)
        return content.text

    def _chat_template(self, place: str) -> ChatTemplate:
        if self._template is None:
            template = _template_text(self.config.chat_template)
            if template is None and not self.tokenizer.chat_template:
                path = self.config.model.tokenizer
                raise UsageError(
                    f"chat_template must be given for chat records such as {place}: the tokenizer of {path} has none"
                )
            self._template = ChatTemplate(self.tokenizer, template, self.config.apply_chat_template_kwargs)
        return self._template

    def _encoded(
        self, prepared: list[_Prepared], outcome: _Outcome
    ) -> Iterator[tuple[_Prepared, np.ndarray, np.ndarray]]:
        """The tokens and mask of every text, in order."""
        chats = iter(self.encoder.encode_chats([item.text for item in prepared if isinstance(item.text, ChatText)]))
        plain = [item.text for item in prepared if not isinstance(item.text, ChatText)]
        texts = iter(self.encoder.encode(plain, add_special_tokens=True))
        for item in prepared:
            encoded = next(chats) if isinstance(item.text, ChatText) else next(texts)
            try:
                if not isinstance(encoded, Encoded):
                    raise encoded
                ids, mask = self._with_mask(encoded, item.text)
                if not mask.any():
                    raise BadRecord("no_target", "no token is left to learn after the first")
            except BadRecord as error:
                outcome.bad.append(_Bad(item.number, error.reason, str(error)))
                continue
            outcome.tally.add_special_tokens(encoded.special_tokens)
            yield item, ids, mask

    def _with_mask(self, encoded: Encoded, text: str | TextFile | ChatText) -> tuple[np.ndarray, np.ndarray]:
        """A document's tokens and int8 mask; a plain text ends with EOS."""
        if not isinstance(text, ChatText):
            ids = self._with_eos(encoded.ids)
            mask = np.ones(len(ids), dtype=np.int8)
        elif encoded.offsets is not None:
            ids, mask = encoded.ids, mask_from_offsets(text.text, encoded.offsets, text.spans)
        else:
            ids = encoded.ids
            mask = mask_from_prefixes(ids.tolist(), text.text, text.spans, self._chat_ids)
        mask[:1] = 0
        return ids, mask

    def _chat_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UsageError(f"the tokenizer of {self.config.model.tokenizer} must have an eos_token for text records")
        return ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))

    def _keep(self, document: Document, item: _Prepared, path: str, outcome: _Outcome) -> None:
        try:
            pieces = fit(document, self.config.max_tokens, self.config.over_length, outcome.tally.over_length)
        except BadRecord as error:
            outcome.bad.append(_Bad(item.number, error.reason, str(error)))
            return
        except DataError as error:
            raise DataError(f"{path}:{item.number}: {error}") from error
        for piece in pieces:
            outcome.documents.append(piece)
            outcome.tally.add_document(len(piece.input_ids), int(piece.loss_mask.sum()))


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord("invalid_text", "the text has half a surrogate pair, which is no character") from error


def _result(chunk: Chunk, outcome: _Outcome) -> ChunkResult:
    documents = outcome.documents
    weighted = any(document.weight is not None for document in documents)
    weights = [1.0 if document.weight is None else document.weight for document in documents]
    return ChunkResult(
        category_id=chunk.category_id,
        num_bytes=chunk.num_bytes,
        input_ids=np.concatenate([d.input_ids for d in documents]) if documents else np.empty(0, np.int32),
        loss_mask=np.concatenate([d.loss_mask for d in documents]) if documents else np.empty(0, np.int8),
        lengths=np.array([len(d.input_ids) for d in documents], dtype=np.int32),
        weights=np.array(weights, dtype=np.float32) if weighted else None,
        tally=outcome.tally,
    )


def _template_text(chat_template: str | None) -> str | None:
    """The override: the file of that name, or the text itself."""
    if chat_template is None or "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"chat_template must be a Jinja template or a file that exists; got {chat_template}"
        ) from error
