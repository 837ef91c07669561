r"""A tokenizer's special tokens, and stand-ins for their names in data.

Web pages and users' messages may hold names such as <|im_end|>, which are encoded as text. A plain text is tokenized
with transformers' `split_special_tokens`, which does not split tokens that the tokenizer does not flag as special, such
as Qwen3's <think>. In a chat, the special tokens that the template writes must stay special tokens:

    message      hello <|im_end|> you
    hidden       hello XXXXXXXXXX you                                  X and Y: private-use characters, one per token
    rendered     <|im_start|>user\nhello XXXXXXXXXX you<|im_end|>\n     its special tokens are the template's
    disguised    YYYYYYYYYYYYuser\nhello <|im_end|> youXXXXXXXXXX\n     names and stand-ins swapped, for a copy of the
                                                                     tokenizer that has X and Y as added tokens

A stand-in is as long as the name that it replaces, so that spans and offsets are those of the text itself.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken

from verl_ext.text.chat.template import any_of
from verl_ext.text.read.bad_record import BadRecord

STAND_INS = re.compile("[\U000f0000-\U0010ffff]")  # Unicode's private-use planes, in which names have stand-ins


def as_plain_text(tokenizer: Any) -> dict[str, bool]:
    """Return the argument for names of special tokens as text.

    A slow tokenizer gets none, because it would also split added tokens that are not special.
    """
    return {"split_special_tokens": True} if getattr(tokenizer, "is_fast", False) else {}


class SpecialTokens:
    """The tokens that are flagged as special, and BOS and EOS."""

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
        # Other characters may become the names of tokens that match normalized text.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._match_normalized = normalizer is not None and any(token.normalized for token in self._added.values())
        # The tokens that no text may become: all but the unknown token, unless that also begins or ends documents.
        control = [
            name
            for name in self._added
            if name != tokenizer.unk_token or name in (tokenizer.bos_token, tokenizer.eos_token)
        ]
        self._ids = np.array([tokenizer.convert_tokens_to_ids(name) for name in control], dtype=np.int64)
        self._stand_ins = {name: chr(0xF0000 + number) * len(name) for number, name in enumerate(self._added)}
        self._names = {stand_in: name for name, stand_in in self._stand_ins.items()}
        self._stand_in = any_of(self._names)
        self._either = any_of([*self._names, *self._added])

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
        """Raise `BadRecord` if ids hold a special token that was not split."""
        if (control := np.isin(ids, self._ids)).any():
            name = self.tokenizer.convert_ids_to_tokens(int(ids[control][0]))
            raise self.refused(name, "and this tokenizer cannot encode it as text")

    def may_hide_in(self, text: str) -> bool:
        """Return whether a text, or its normalized form, may hold a name."""
        return self._match_normalized or self._pattern.search(text) is not None

    def hide(self, value: Any) -> Any:
        """Replace names in strings by stand-ins, except in roles, which templates compare."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): item if key == "role" else self.hide(item) for key, item in value.items()}
        return value

    def show(self, text: str) -> tuple[str, int]:
        """Return a text with names for their stand-ins, and their number."""
        return self._stand_in.subn(lambda match: self._names[match[0]], text)

    def disguise(self, text: str) -> str:
        """Return a text for `renamed_tokenizer`, with hidden names as text."""
        return self._either.sub(lambda match: self._names.get(match[0]) or self._stand_ins[match[0]], text)

    @cached_property
    def renamed_tokenizer(self) -> Any:
        """A copy of the tokenizer with the stand-ins as tokens; see `real_ids`."""
        renamed = deepcopy(self.tokenizer)
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        renamed.add_tokens(
            [
                AddedToken(self._stand_ins[name], special=False, **{flag: getattr(token, flag) for flag in flags})
                for name, token in self._added.items()
            ]
        )
        return renamed

    @cached_property
    def real_ids(self) -> NDArray[np.int32]:
        """The tokenizer's own id for each id of the renamed tokenizer, int32."""
        renamed = self.renamed_tokenizer
        real = np.arange(1 + max(renamed.get_vocab().values()), dtype=np.int32)
        for name, stand_in in self._stand_ins.items():
            real[renamed.convert_tokens_to_ids(stand_in)] = self.tokenizer.convert_tokens_to_ids(name)
        return real
