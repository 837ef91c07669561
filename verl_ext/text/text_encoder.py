"""Encode texts as ids, and mask spans of characters."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders, normalizers, pre_tokenizers

from verl_ext.options import DataError
from verl_ext.text.chat.renderer import RenderedTurns
from verl_ext.text.chat.special_tokens import SpecialTokens, as_plain_text
from verl_ext.text.chat.template import Span
from verl_ext.text.prefixes import Prefixes, mask_from_prefixes
from verl_ext.text.read.bad_record import BadRecord, RecordOptions
from verl_ext.text.records.content import PlainText

NO_SIZE = -(1 << 40)  # bytes of a token that no text becomes; with it, the sizes never sum to a text's bytes


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

    def __init__(self, tokenizer: Any, options: RecordOptions) -> None:
        self.tokenizer = tokenizer
        self.on_found = options.special_tokens_in_text
        self.special = SpecialTokens(tokenizer, options.key("special_tokens_in_text"))
        self._split = as_plain_text(tokenizer) if self.on_found != "keep" else {}

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids; names of special tokens become these tokens."""
        return self._call(self.tokenizer, [text])["input_ids"][0]

    def encode(
        self, texts: Sequence[PlainText | BadRecord | DataError], add_special_tokens: bool = False
    ) -> list[Encoded | BadRecord | DataError]:
        """Return each text's tokens or error; the error of an unusable record may stand for its text.

        add_special_tokens: add the tokens that the tokenizer puts at either end of a text.
        """
        encoded: list[Any] = [*texts]
        names: dict[int, int] = {}  # how many names of special tokens a text has, by the text's number
        for number, text in enumerate(texts):
            if isinstance(text, Exception):
                continue
            try:
                names[number] = self._count(text.text)
            except BadRecord as error:
                encoded[number] = error
        if not names:
            return encoded
        call = {"add_special_tokens": add_special_tokens, **self._split}
        out = self._call(self.tokenizer, [encoded[number].text for number in names], **call)
        for at, (number, count) in enumerate(names.items()):
            ids = np.asarray(out["input_ids"][at], dtype=np.int32)
            try:
                self._check(ids, out.encodings[at].special_tokens_mask if add_special_tokens and self._split else None)
                encoded[number] = Encoded(ids, None, count)
            except BadRecord as error:
                encoded[number] = error
        return encoded

    def encode_chats(self, chats: Sequence[RenderedTurns]) -> list[Encoded | BadRecord]:
        """Return the tokens of each chat; a fast tokenizer's have characters."""
        plain = self._plain([chat.text for chat in chats if chat.disguised is None])
        return [next(plain) if chat.disguised is None else self._disguised(chat) for chat in chats]

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

    def _plain(self, texts: list[str]) -> Iterator[Encoded]:
        """Yield the tokens of chats' texts as they are.

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

    def _disguised(self, chat: RenderedTurns) -> Encoded | BadRecord:
        """Encode a chat with names of special tokens, which the renamed tokenizer reads as text."""
        out = self._call(self.special.renamed_tokenizer, [chat.disguised], **self._split)
        ids = np.asarray(out["input_ids"][0], np.int32)
        try:
            self.special.check_ids(ids)
        except BadRecord as error:
            return error
        offsets = TokenCharacters.from_spans(out.encodings[0].offsets) if self.tokenizer.is_fast else None
        return Encoded(self.special.real_ids[ids], offsets, chat.special_tokens)

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

    def _call(self, tokenizer: Any, texts: Sequence[Any], *, add_special_tokens: bool = False, **call: Any) -> Any:
        call |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return tokenizer(list(texts), add_special_tokens=add_special_tokens, **call)
