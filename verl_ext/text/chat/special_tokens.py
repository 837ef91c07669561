r"""Encode the names of special tokens in data, such as <|im_end|>, as text.

Web pages and users' messages may hold such names. A plain text is tokenized with transformers' `split_special_tokens`,
which does not split tokens that the tokenizer does not flag as special, such as Qwen3's <think>. In a chat, the special
tokens that the template writes must stay special tokens:

    message      hello <|im_end|> you
    hidden       hello XXXXXXXXXX you                                  X, Y, Z: private-use characters, one per token
    rendered     <|im_start|>user\nhello XXXXXXXXXX you<|im_end|>\n     its special tokens are the template's
    disguised    YYYYYYYYYYYYuser\nhello <|im_end|> youZZZZZZZZZZ\n     for a copy of the tokenizer that has Y and Z
                                                                     as added tokens, and splits <|im_end|>

A stand-in is as long as the name that it replaces, so that spans and offsets are those of the text itself.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken

from verl_ext.text.chat.parts import Part, RenderedChat
from verl_ext.text.chat.template import Span, any_of, joined_spans
from verl_ext.text.records.bad_record import BadRecord
from verl_ext.text.records.messages import Chat

_HIDDEN, _DISGUISED = 0x100000, 0xF0000  # first private-use characters of Unicode's planes 16 and 15
_STAND_INS = re.compile("[\U000f0000-\U0010ffff]")


def as_plain_text(tokenizer: Any) -> dict[str, bool]:
    """Return the argument with which a tokenizer reads the names of special tokens as text.

    A slow tokenizer gets none, because it would also split added tokens that are not special.
    """
    return {"split_special_tokens": True} if getattr(tokenizer, "is_fast", False) else {}


@dataclass
class ChatText:
    """A rendered chat; border_tokens, dropped_reasoning and dropped_blocks are as in `Counts`."""

    rendered: RenderedChat
    parts: list[Part] = field(default_factory=list)  # the parts of its targets, in order, with their weights
    learnt: list[Part] = field(default_factory=list)  # the parts whose weight is not 0
    disguised: str | None = None  # for `SpecialTokens.renamed_tokenizer`, if messages hold names of special tokens
    special_tokens: int = 0  # the number of these names
    unprinted: list[str] = field(default_factory=list)  # in the record's first text: kinds of words that its texts lack
    border_tokens: int = 0
    dropped_reasoning: int = 0
    dropped_blocks: int = 0

    @property
    def text(self) -> str:
        """The text of the chat."""
        return self.rendered.text

    @property
    def spans(self) -> list[Span]:
        """The characters that are learnt, with touching spans joined."""
        return joined_spans((part.start, part.stop) for part in self.learnt)


class Renderer(Protocol):
    """A renderer of chats, with or without their targets."""

    def located(self, chat: Chat) -> RenderedChat:
        """Render a chat."""

    def text(self, chat: Chat) -> str:
        """Render a chat without targets."""


class SpecialTokens:
    """The tokens that a tokenizer flags as special, and its BOS and EOS."""

    def __init__(self, tokenizer: Any, key: str) -> None:
        """Read a tokenizer's special tokens; errors name the config key `key`."""
        self.tokenizer, self._key = tokenizer, key
        try:
            added: Mapping[int, AddedToken] = tokenizer.added_tokens_decoder
        except (AttributeError, NotImplementedError):  # mistral-common's tokenizers read all text as text
            added = {}
        special = {str(token): token for token in added.values() if token.special}
        for name in (tokenizer.bos_token, tokenizer.eos_token) if added else ():
            if name:
                special.setdefault(name, AddedToken(name, normalized=False))
        self._added = {name: special[name] for name in sorted(special, key=len, reverse=True) if name}
        self._pattern = any_of(self._added)
        # The tokens that no text may become: all but the unknown token, unless that also begins or ends documents.
        control = [
            name
            for name in self._added
            if name != tokenizer.unk_token or name in (tokenizer.bos_token, tokenizer.eos_token)
        ]
        self._ids = np.array([tokenizer.convert_tokens_to_ids(name) for name in control], dtype=np.int64)
        # Stand-ins in messages, and the names of the template's own tokens in the copy of the tokenizer.
        self._hidden = _stand_ins(self._added, _HIDDEN)
        self._hidden_pattern = any_of(self._hidden.values())
        self._disguises = _stand_ins(self._added, _DISGUISED)

    @property
    def longest(self) -> int:
        """The length of the longest name."""
        return max(map(len, self._added), default=0)

    def found(self, text: str) -> list[re.Match[str]]:
        """Find the names of special tokens in a text."""
        return list(self._pattern.finditer(text))

    def refused(self, name: str, why: str = "") -> BadRecord:
        """Return the error for a record that holds the special token `name`."""
        found = f"the text holds the special token {name}{f', {why}' if why else ''}"
        return BadRecord("special_token", f"{found}; {self._key}=keep takes it for the token itself")

    def check_ids(self, ids: NDArray[np.integer]) -> None:
        """Raise `BadRecord` if the ids of a text include a special token, which the tokenizer could not split."""
        if (control := np.isin(ids, self._ids)).any():
            name = self.tokenizer.convert_ids_to_tokens(int(ids[control][0]))
            raise self.refused(name, "and this tokenizer cannot encode it as text")

    def chat_text(self, chats: Renderer, chat: Chat, on_found: str) -> ChatText:
        """Render a chat; `on_found` is the option special_tokens_in_text.

        Raises `BadRecord` under `error` if a rendered message holds the name of a special token, and under `encode` if
        its place in the rendered text cannot be found or the tokenizer is not a fast one.
        """
        if on_found == "keep":
            return ChatText(chats.located(chat))
        strings = strings_of(chat)
        if not self._match_normalized and not self._pattern.search("\0".join(strings)):
            return ChatText(chats.located(chat))  # almost always, so that this check is the only cost
        first = next((found[0][0] for text in strings if (found := self.found(text))), None)
        if any(_STAND_INS.search(text) for text in strings):
            if first is not None:
                raise self.refused(first, "beside private-use characters, which encoding it as text needs")
            return ChatText(chats.located(chat))
        names = ("messages", "tools", "argument_texts")
        rendered = chats.located(replace(chat, **{name: self._hide(getattr(chat, name)) for name in names}))
        hidden = rendered.text
        count = len(self._hidden_pattern.findall(hidden))
        text = rendered.text = self._shown(hidden)
        if first is not None and text != chats.text(chat):
            raise self.refused(first, "and the chat template changes it, so that its place cannot be found")
        if first is not None and count and on_found == "error":
            raise self.refused(first)
        if not self.tokenizer.is_fast:
            if first is not None and count:
                raise self.refused(first, "and only a fast tokenizer can encode it as text")
            return ChatText(rendered)
        disguised = self._pattern.sub(lambda match: self._disguises[match[0]], hidden)
        return ChatText(rendered, disguised=self._shown(disguised), special_tokens=count)

    @cached_property
    def _match_normalized(self) -> bool:
        """Whether special tokens match normalized text, so that other characters may become their names."""
        normalizer = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "normalizer", None)
        return normalizer is not None and any(token.normalized for token in self._added.values())

    def _hide(self, value: Any) -> Any:
        """Replace special tokens in strings by stand-ins, except in roles, which templates compare."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._hidden[match[0]], value)
        if isinstance(value, list):
            return [self._hide(item) for item in value]
        if isinstance(value, dict):
            return {self._hide(key): item if key == "role" else self._hide(item) for key, item in value.items()}
        return value

    def _shown(self, text: str) -> str:
        names = {stand_in: name for name, stand_in in self._hidden.items()}
        return self._hidden_pattern.sub(lambda match: names[match[0]], text)

    @cached_property
    def renamed_tokenizer(self) -> Any:
        """A copy of the tokenizer that also has the disguises as tokens, with other ids; see `real_ids`."""
        renamed = deepcopy(self.tokenizer)
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        renamed.add_tokens(
            [
                AddedToken(self._disguises[name], special=False, **{flag: getattr(token, flag) for flag in flags})
                for name, token in self._added.items()
            ]
        )
        return renamed

    @cached_property
    def real_ids(self) -> NDArray[np.int32]:
        """The tokenizer's own id for each id of the renamed tokenizer, int32."""
        renamed = self.renamed_tokenizer
        real = np.arange(1 + max(renamed.get_vocab().values()), dtype=np.int32)
        for name, disguise in self._disguises.items():
            real[renamed.convert_tokens_to_ids(disguise)] = self.tokenizer.convert_tokens_to_ids(name)
        return real


def _stand_ins(names: Mapping[str, AddedToken], first: int) -> dict[str, str]:
    return {name: chr(first + number) * len(name) for number, name in enumerate(names)}


def strings_of(chat: Chat) -> list[str]:
    """Collect every string in a chat's messages and tools, keys included."""
    found: list[str] = []
    rest: list[Any] = [*chat.messages, *(chat.tools or [])]
    for value in rest:  # the loop appends to this list
        if isinstance(value, dict):
            found += map(str, value)
            for item in value.values():
                (found if isinstance(item, str) else rest).append(item)
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str):
            found.append(value)
    return found
