"""Which tokenizer a command uses, loading it, and what tells one that is not there."""

import os
import re
from dataclasses import dataclass
from typing import Any, Optional

from verl_ext.commands.errors import UsageError, first_line

# What load_tokenizer imports, seconds long: for worker processes to have beforehand.
TOKENIZER_MODULE = "transformers.models.auto.tokenization_auto"
# Added tokens of no text, such as <think>, which not every tokenizer marks as special.
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)


# Optional[...] and not `| None`: OmegaConf's structured configs read the annotations.
@dataclass
class ModelConfig:
    """Where the tokenizer comes from."""

    path: Optional[str] = None  # noqa: UP045
    tokenizer_path: Optional[str] = None  # noqa: UP045
    trust_remote_code: bool = False

    @property
    def tokenizer(self) -> str:
        """The folder or Hub name that the tokenizer is loaded from."""
        path = self.tokenizer_path or self.path
        assert path is not None, "problems() is empty"
        return path

    @property
    def tokenizer_key(self) -> str:
        """The dotted key that names it."""
        return "model.tokenizer_path" if self.tokenizer_path else "model.path"

    def problems(self) -> list[str]:
        """One line where there is no such folder and no name on the Hub."""
        path = self.tokenizer_path or self.path
        if not path:
            return ["model.path must name a model or tokenizer folder; got nothing"]
        hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)
        if not os.path.isdir(path) and not hub_name:
            return [f"{self.tokenizer_key} must be a folder that exists; got {path}"]
        return []


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of `model.tokenizer_path` or `model.path`; `UsageError` where none can be loaded."""
    # The processes are the parallelism; threads inside each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = read_tokenizer(model.tokenizer, model.tokenizer_key, trust_remote_code=model.trust_remote_code)
    tokenizer.model_max_length = int(1e30)  # lengths are the command's business: no warning per text
    return tokenizer


def read_tokenizer(path: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """transformers' tokenizer of a folder or Hub name; `UsageError` that names `key` where there is none."""
    from transformers import AutoTokenizer  # here, because importing it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # files that are no tokenizer fail in many ways
        raise UsageError(f"{key} must hold a tokenizer; got {path}: {first_line(error)}") from error
    check_tokenizer(tokenizer, path, key)
    return tokenizer


def check_tokenizer(tokenizer: Any, path: str, key: str = "model.path") -> None:
    """Refuse what transformers makes of a folder without a tokenizer's vocabulary: special tokens, none of text.

    Which ones depends on the model type of its config.json: one <|endoftext|> for a Qwen3. Raises `UsageError`.
    """
    vocabulary = tokenizer.get_vocab()
    without_text = _tokens_without_text(tokenizer)
    if any(_is_text(token) for token in vocabulary if token not in without_text):
        return
    tokens = sorted(map(str, vocabulary))
    shown = ", ".join(tokens[:5]) + (", …" if len(tokens) > 5 else "")
    found = f"which has none: only tokens that are no text, {shown}" if tokens else "which has none"
    raise UsageError(f"{key} must hold a tokenizer; got {path}, {found}")


def _tokens_without_text(tokenizer: Any) -> set[str]:
    """Special tokens, and added ones that look like them."""
    try:
        added = tokenizer.added_tokens_decoder.values()
    except (AttributeError, NotImplementedError):  # mistral-common's tokenizers have no added tokens
        added = []
    marks = {str(token) for token in added if token.special or _MARKER.fullmatch(str(token))}
    return marks | set(tokenizer.all_special_tokens)


def _is_text(token: Any) -> bool:
    """Whether a token is more than white space, or sentencepiece's sign for it. Those of some tokenizers are bytes."""
    return not isinstance(token, str) or bool(token.strip().strip("▁"))
