"""Where the tokenizer comes from, and what a trained one is like."""

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from verl_ext.config.nearest import show
from verl_ext.init_model.chat_template import CHATML, CHATML_TOKENS

BYTES = 256  # tokens that a byte-level tokenizer has beside special ones and merges


# Optional[...] and not `| None`: OmegaConf's structured configs read the annotations.
@dataclass
class TokenizerConfig:
    """A tokenizer to copy (`path`), or text to train one on (`train_on`) and its settings."""

    path: Optional[str] = None  # noqa: UP045
    train_on: Any = field(default_factory=list)
    text_key: str = "text"
    vocab_size: int = 6400
    bos_token: Optional[str] = "<|im_start|>"  # noqa: UP045
    eos_token: Optional[str] = "<|im_end|>"  # noqa: UP045
    pad_token: Optional[str] = "<|endoftext|>"  # noqa: UP045
    special_tokens: list[str] = field(default_factory=list)
    chat_template: Optional[str] = CHATML  # noqa: UP045

    def train_patterns(self) -> list[str]:
        """Paths and globs of the text to train on."""
        values = [self.train_on] if isinstance(self.train_on, str) else self.train_on
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []

    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once, in the order of their ids: pad, bos, ChatML's, eos, `special_tokens`."""
        chatml = CHATML_TOKENS if self.chat_template == CHATML else ()
        tokens = [self.pad_token, self.bos_token, *chatml, self.eos_token, *self.special_tokens]
        return list(dict.fromkeys(token for token in tokens if token))

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without loading a tokenizer or opening a text."""
        values = [self.train_on] if isinstance(self.train_on, str) else self.train_on
        if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
            return [f"tokenizer.train_on must be a path, a glob or a list of them; got {show(self.train_on)}"]
        if bool(self.path) == bool(values):
            got = f"{self.path} and {values}" if values else "neither"
            return [f"exactly one of tokenizer.path and tokenizer.train_on must be given; got {got}"]
        return self._path_problems(self.path) if self.path else self._training_problems()

    def _path_problems(self, path: str) -> list[str]:
        problems = []
        if not os.path.isdir(path) and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
            problems.append(f"tokenizer.path must be a folder that exists; got {path}")
        defaults = TokenizerConfig()
        for setting in fields(self)[2:]:
            if (value := getattr(self, setting.name)) != getattr(defaults, setting.name):
                must = f"tokenizer.{setting.name} must be left out with tokenizer.path, which is copied as it is"
                problems.append(f"{must}; got {show(value)}")
        return problems

    def _training_problems(self) -> list[str]:
        problems = []
        for name in ("bos_token", "eos_token", "pad_token"):
            if getattr(self, name) == "":
                problems.append(f"tokenizer.{name} must be a text or null; got ''")
        if not all(self.special_tokens):
            problems.append(f"tokenizer.special_tokens must be texts; got {self.special_tokens}")
        least = BYTES + len(self.all_special_tokens())
        if self.vocab_size < least:
            what = f"{least}, the {BYTES} bytes and the special tokens"
            problems.append(f"tokenizer.vocab_size must be at least {what}; got {self.vocab_size}")
        if self.chat_template not in (None, CHATML) and not os.path.isfile(str(self.chat_template)):
            must = f"tokenizer.chat_template must be {CHATML}, a file that exists, or null"
            problems.append(f"{must}; got {show(self.chat_template)}")
        return problems
