"""Encode texts as ids, long ones in pieces; mask spans of characters.

A long text is tokenized in windows. Only the tokens before a cut in each window are kept, so that memory grows with the
ids alone and not with the text:

    window 1   t t t t t t t|t t t        kept up to the cut, at least `overlap` characters before the window's end
    window 2                 t t t t t t t t|t t
                             ^ the same tokens as window 1 has there

A cut must meet two conditions. (1) It lies between two of the tokenizer's own words (pre-tokens), across which no model
merges. For a BPE without pre-tokens, it lies before a space, and no token of the vocabulary has a space after another
character. (2) The rest of the window gives the same tokens alone as after the text before it. The ids are then those of
the whole text, if no rule of the tokenizer looks further than `overlap` characters. If a tokenizer offers no such
place, a text is tokenized as one piece of at most `longest` characters.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers

from verl_ext.options import DataError
from verl_ext.text.chat.renderer import RenderedTurns
from verl_ext.text.chat.special_tokens import SpecialTokens, as_plain_text
from verl_ext.text.chat.template import Span
from verl_ext.text.prefixes import Prefixes, mask_from_prefixes
from verl_ext.text.read.bad_record import BadRecord, RecordOptions, readable_value
from verl_ext.text.records.content import PlainText

TRIES = 16  # places tried for a cut before a window is doubled
NO_SIZE = -(1 << 40)  # bytes of a token that no text becomes; with it, the sizes never sum to a text's bytes
SPACE = "▁"  # sentencepiece's sign for a space in its vocabularies


class Windows(NamedTuple):
    """The sizes in characters of the pieces of a long text."""

    size: int = 1 << 18  # tokenized at once, in about 50 MB of memory
    overlap: int = 1 << 12  # at least so many of a window lie after its cut
    longest: int = 1 << 25  # the maximum of a text that cannot be cut, in about 6 GB


class TokenCharacters(Sequence[Span]):
    """The characters of each token of a text, ascending.

    begins, ends: int64[T], counted from `origin` before the text's first character.
    """

    def __init__(self, begins: NDArray[np.int64], ends: NDArray[np.int64], origin: int = 0) -> None:
        self._begins, self._ends, self._origin = begins, ends, origin

    @classmethod
    def from_spans(cls, spans: Any) -> "TokenCharacters":
        """Read spans int64[T, 2] as tokenizers give them."""
        begins, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
        # Some tokenizers leave a token's leading space out of its characters. The gap then belongs to the token.
        return cls(np.append(begins[:1], np.minimum(begins[1:], ends[:-1])), ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, token: Any) -> Any:
        return self._begins.item(token) - self._origin, self._ends.item(token) - self._origin  # or IndexError

    def first_after(self, character: int) -> int:
        """Return the first token that ends after a character; T if none."""
        return int(self._ends.searchsorted(character + self._origin, "right"))

    def first_from(self, character: int) -> int:
        """Return the first token that begins from a character on, or T."""
        return int(self._begins.searchsorted(character + self._origin))


class _Encoding(TokenCharacters):
    """An encoding's characters, looked up singly because a list takes longer."""

    def __init__(self, encoding: Any) -> None:
        self._encoding, self._tokens = encoding, range(len(encoding))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, token: Any) -> Any:
        begin, end = self._encoding.token_to_chars(self._tokens[token])
        return (min(begin, self._encoding.token_to_chars(token - 1)[1]) if token > 0 else begin), end

    def first_after(self, character: int) -> int:
        return bisect_right(self._tokens, character, key=lambda token: self._encoding.token_to_chars(token)[1])

    def first_from(self, character: int) -> int:
        return bisect_left(self._tokens, character, key=lambda token: self[token][0])


def mask_from_offsets(text: str, offsets: TokenCharacters, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """Return mask[T] int8, 1 in a span, and the border tokens.

    A border token, which also holds text from outside a span, belongs to the span, because the template's last
    characters before a turn, and the first ones after it, may be merged with the turn's words.
    """
    mask = np.zeros(len(offsets), dtype=np.int8)
    across = 0
    for start, end in spans:
        first, stop = offsets.first_after(start), offsets.first_from(end)
        if first >= stop:
            raise BadRecord("template_mismatch", f"no token lies in the assistant's turn at character {start}")
        mask[first:stop] = 1
        begin, last = offsets[first][0], offsets[stop - 1][1]
        if begin < start or end < last:
            across += bool(text[begin:start].strip()) + bool(text[end:last].strip())
    return mask, across


@dataclass
class Encoded:
    """A text's ids int32[T], a chat's characters, the encoded names' number."""

    ids: NDArray[np.int32]
    offsets: TokenCharacters | None = None
    special_tokens: int = 0


class TextEncoder:
    """A tokenizer with a rule for names of special tokens in data."""

    def __init__(
        self,
        tokenizer: Any,
        options: RecordOptions,
        windows: Windows = Windows(),  # noqa: B008 (it is immutable)
    ) -> None:
        self.tokenizer = tokenizer
        self.on_found = options.special_tokens_in_text
        self.special = SpecialTokens(tokenizer, options.key("special_tokens_in_text"))
        self._windows = windows
        self._split = as_plain_text(tokenizer) if self.on_found != "keep" else {}

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids; names of special tokens become these tokens."""
        return self._call(self.tokenizer, [text])["input_ids"][0]

    def encode(
        self, texts: Sequence[PlainText | BadRecord], add_special_tokens: bool = False
    ) -> list[Encoded | BadRecord | DataError]:
        """Return each text's tokens or error (unusable text, unreadable file).

        texts: an unusable record's error may stand for its text. add_special_tokens: add the tokens that the tokenizer
        puts at either end of a text.
        """
        encoded: list[Any] = [None] * len(texts)
        short: dict[int, int] = {}  # number of names of special tokens, by the text's number
        for number, given in enumerate(texts):
            try:
                text: PlainText = readable_value(given)
                if text.is_longer(self._windows.size):
                    encoded[number] = self._long(text, add_special_tokens)
                else:
                    short[number] = self._count(text.text)
            except (BadRecord, DataError) as error:
                encoded[number] = error
        if not short:
            return encoded
        call = {"add_special_tokens": add_special_tokens, **self._split}
        out = self._call(self.tokenizer, [readable_value(texts[number]).text for number in short], **call)
        for at, (number, count) in enumerate(short.items()):
            ids = np.asarray(out["input_ids"][at], dtype=np.int32)
            try:
                self._check(ids, out.encodings[at].special_tokens_mask if add_special_tokens and self._split else None)
                encoded[number] = Encoded(ids, None, count)
            except BadRecord as error:
                encoded[number] = error
        return encoded

    def encode_chats(self, chats: Sequence[RenderedTurns]) -> list[Encoded | BadRecord]:
        """Return the tokens of each chat; a fast tokenizer's have characters."""
        is_short = [chat.disguised is None and len(chat.text) <= self._windows.size for chat in chats]
        short = self._short([chat.text for chat, it_is in zip(chats, is_short, strict=True) if it_is])
        return [next(short) if it_is else self._chat(chat) for chat, it_is in zip(chats, is_short, strict=True)]

    def mask(self, encoded: Encoded, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
        """Return mask[T] int8 of a chat's text, and its border tokens."""
        if encoded.offsets is None:
            return mask_from_prefixes(encoded.ids.tolist(), text, spans, self.ids), 0
        return mask_from_offsets(text, encoded.offsets, spans)

    def first_tokens(self, encoded: Encoded, text: str, characters: Sequence[int]) -> list[int]:
        """Return the first token from each of these ascending characters on."""
        if encoded.offsets is not None:
            return [encoded.offsets.first_after(character) for character in characters]
        prefixes = Prefixes(encoded.ids.tolist(), text, self.ids)
        return [prefixes.about(character) for character in characters]

    def _short(self, texts: list[str]) -> Iterator[Encoded]:
        """Yield the tokens of short texts.

        A fast tokenizer's backend is called directly, because transformers turns everything into lists. If tokens are
        bytes of the text, their characters are computed from their sizes, and the tokenizer need not track them.
        """
        if not texts:
            return
        if not self.tokenizer.is_fast:
            yield from (Encoded(np.asarray(self.ids(text), np.int32)) for text in texts)
            return
        self._call(self.tokenizer, [""])  # sets truncation, padding and special tokens like a call without options
        backend, sizes = self.tokenizer.backend_tokenizer, self._bytes_of_tokens
        if sizes is None:
            for encoding in backend.encode_batch(texts, add_special_tokens=False):
                yield Encoded(np.array(encoding.ids, np.int32), _Encoding(encoding))
            return
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int32)
        ends = np.cumsum(taken := sizes[ids])  # in bytes of all texts
        begins = ends - taken
        stop = byte = 0
        for text, length in zip(texts, map(len, encodings), strict=True):
            own = slice(stop, stop := stop + length)
            origin, byte = byte, int(ends[stop - 1]) if stop else 0
            data = b"" if text.isascii() else text.encode()
            if byte - origin != (len(data) or len(text)) or not self._is_normal(text):
                if not data:  # a normalizer, or a special token that swallows spaces, will change other texts too
                    self._bytes_of_tokens = None
                yield Encoded(ids[own], _Encoding(backend.encode(text, add_special_tokens=False)))
            elif not data:
                yield Encoded(ids[own], TokenCharacters(begins[own], ends[own], origin))
            else:
                character = np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80) - 1  # of each byte
                characters = character[begins[own] - origin], character[ends[own] - origin - 1] + 1
                yield Encoded(ids[own], TokenCharacters(*characters))

    @cached_property
    def _bytes_of_tokens(self) -> NDArray[np.int64] | None:
        """Each token's bytes of text, int64[ids]; None unless byte-level without added spaces."""
        backend = self.tokenizer.backend_tokenizer
        if not isinstance(backend.decoder, decoders.ByteLevel):
            return None
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        sizes = np.zeros(max(vocabulary.values(), default=-1) + 1, np.int64)
        for token, number in vocabulary.items():
            # Text never becomes a token with characters outside the alphabet.
            is_text = number in added or alphabet.issuperset(token)
            sizes[number] = (len(token.encode()) if number in added else len(token)) if is_text else NO_SIZE
        # A space before a text may offset one that a special token swallows: the sum is right, the places are not.
        has_prefix = sizes[backend.encode("a", add_special_tokens=False).ids].sum() != 1
        return None if has_prefix else sizes

    def _is_normal(self, text: str) -> bool:
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        if normalizer is None or (text.isascii() and isinstance(normalizer, (normalizers.NFC, normalizers.NFKC))):
            return True
        return normalizer.normalize_str(text) == text

    def _chat(self, chat: RenderedTurns) -> Encoded | BadRecord:
        """Encode a long chat, or one with names of special tokens."""
        tokenizer, text, call = self.tokenizer, chat.text, {}
        if chat.disguised is not None:
            tokenizer, text, call = self.special.renamed_tokenizer, chat.disguised, self._split
        try:
            pieces = self._pieces(tokenizer, PlainText(text).blocks(self._windows.size), True, **call)
            ids, spans = map(np.concatenate, zip(*pieces, strict=True))
            if chat.disguised is not None:
                self.special.check_ids(ids)
                ids = self.special.real_ids[ids]
        except BadRecord as error:
            return error
        return Encoded(ids, TokenCharacters.from_spans(spans) if self.tokenizer.is_fast else None, chat.special_tokens)

    def _count(self, text: str) -> int:
        """Count the names of special tokens in a text. Raises `BadRecord`."""
        found = [] if self.on_found == "keep" else self.special.found(text)
        if found and self.on_found == "error":
            raise self.special.refused(found[0][0])
        if found and not self.tokenizer.is_fast:
            raise self.special.refused(found[0][0], "and only a fast tokenizer can encode it as text")
        return len(found)

    def _check(self, ids: NDArray[np.int32], added: Sequence[int] | None) -> None:
        """Raise `BadRecord` if text became special tokens, not counting `added` ones."""
        if self._split:
            self.special.check_ids(ids if added is None else ids[np.asarray(added) == 0])

    def _long(self, text: PlainText, add_special_tokens: bool) -> Encoded:
        special_tokens, beginning = 0, ""  # the text after its leading white space; empty for a blank text

        def blocks() -> Iterator[str]:
            nonlocal special_tokens, beginning
            kept, before = max(self.special.longest - 1, 0), ""
            for block in text.blocks(self._windows.size):
                beginning = beginning or block.strip()[:1000]
                # A name may lie across the border of two blocks. Names inside `before` are already counted.
                special_tokens += self._count(before + block) - self._count(before)
                before = (before + block)[-kept:] if kept else ""
                yield block

        is_fast = self.tokenizer.is_fast
        call = self._split if is_fast else {"add_special_tokens": add_special_tokens}
        pieces = [ids for ids, _ in self._pieces(self.tokenizer, blocks(), False, **call)]
        if not beginning:
            raise BadRecord("empty", "the text is empty")
        ids = np.concatenate(pieces)
        del pieces
        self._check(ids, None)
        if add_special_tokens and is_fast:
            # The tokenizer adds the same tokens around the beginning alone.
            out = self._call(self.tokenizer, [beginning], add_special_tokens=True, **self._split)
            around, is_added = np.asarray(out["input_ids"][0], np.int32), out.encodings[0].special_tokens_mask
            own = np.flatnonzero(np.asarray(is_added) == 0)
            before, after = (around[: own[0]], around[own[-1] + 1 :]) if len(own) else (around, around[:0])
            ids = np.concatenate([before, ids, after])
        return Encoded(ids, None, special_tokens)

    def _pieces(
        self, tokenizer: Any, blocks: Iterable[str], offsets: bool, **call: Any
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Yield (ids[t], offsets[t, 2] or [0, 2]) of a text's pieces."""
        blocks, text, begun, is_read = iter(blocks), "", 0, False
        size = self._windows.size if tokenizer.is_fast else self._windows.longest
        while True:
            while len(text) <= size and not is_read:
                is_read = (part := next(blocks, None)) is None
                text += part or ""
            is_last = is_read and len(text) <= size
            window = text if is_last else text[:size]
            if not is_last and size >= self._windows.longest:
                raise BadRecord(
                    "too_long",
                    f"a text of more than {self._windows.longest:,} characters must have places where it can be cut,"
                    " between words (pre-tokens) of a fast tokenizer; it has none",
                )
            out = self._call(tokenizer, [window], **call)
            if not tokenizer.is_fast:
                yield np.asarray(out["input_ids"][0], np.int32), np.empty((0, 2), np.int64)
                return
            encoding = out.encodings[0]
            cut = (len(encoding), len(text)) if is_last else self._cut(tokenizer, encoding, window, offsets, call)
            if cut is None:
                size *= 2
                continue
            tokens, at = cut
            places = np.asarray(encoding.offsets[:tokens] if offsets else [], np.int64).reshape(-1, 2)
            yield np.asarray(encoding.ids[:tokens], np.int32), places + begun
            if is_last:
                return
            text, begun, size = text[at:], begun + at, self._windows.size

    def _cut(
        self, tokenizer: Any, encoding: Any, window: str, offsets: bool, call: dict[str, Any]
    ) -> tuple[int, int] | None:
        """Return the tokens before a window's last safe cut, and its character."""
        ids, tries = encoding.ids, 0
        ends = [end for _, end in encoding.offsets] if offsets else []
        latest = len(window) - self._windows.overlap
        after = bisect_right(range(len(ids)), latest, key=lambda token: encoding.token_to_chars(token)[0])
        for token in range(min(after, len(ids) - 1), 0, -1):
            if not self._is_border(tokenizer, encoding, ids, token):
                continue
            # White space between two words may belong to either or neither, or be equivalent to a text's own prefix.
            end, start = encoding.token_to_chars(token - 1)[1], encoding.token_to_chars(token)[0]
            for at in sorted({end, start, start + window[start].isspace()} - {0}):
                rest = self._call(tokenizer, [window[at:]], **call).encodings[0]
                if rest.ids == ids[token:] and (not offsets or [end + at for _, end in rest.offsets] == ends[token:]):
                    return token, at
            if (tries := tries + 1) == TRIES:
                return None
        return None

    def _is_border(self, tokenizer: Any, encoding: Any, ids: list[int], token: int) -> bool:
        """Return whether no merge can join a token with the one before."""
        if encoding.token_to_word(token) != encoding.token_to_word(token - 1):
            return True
        if not self._no_token_spans_a_space:
            return False
        before, here = tokenizer.convert_ids_to_tokens(ids[token - 1 : token + 1])
        return here.startswith(SPACE) and not before.endswith(SPACE)

    @cached_property
    def _no_token_spans_a_space(self) -> bool:
        """Whether a BPE's tokens have sentencepiece's space only at their start."""
        if not isinstance(self.tokenizer.backend_tokenizer.model, models.BPE):
            return False
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        spans = re.compile(f"[^{SPACE}]{SPACE}").search
        return not any(spans(token) for token in self.tokenizer.get_vocab() if token not in added)

    def _call(self, tokenizer: Any, texts: Sequence[Any], *, add_special_tokens: bool = False, **call: Any) -> Any:
        call |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return tokenizer(list(texts), add_special_tokens=add_special_tokens, **call)
