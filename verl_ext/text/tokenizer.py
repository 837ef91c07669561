"""The tokenizer of a command, loaded and checked; chat templates as options give them."""

import os
import re
import sys
import unicodedata
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.values import Options, UsageError, first_line, option, reason_of

# The modules that load_tokenizer may import; with torch that takes seconds.
_WITH_TORCH, _WITHOUT_TORCH = "transformers.models.auto.tokenization_auto", "verl_ext.text.torchless_tokenizers"
_tokenizer_module = _WITH_TORCH
LONGEST_TEMPLATE = 1 << 20  # bytes of a chat template; the longest published have some 30,000
# Added tokens that stand for no text, such as <think>; not every tokenizer marks them as special.
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)
TRUSTED = "model.trust_remote_code=true runs Python code that comes with the model or tokenizer"


@dataclass(frozen=True)
class ModelOptions(Options):
    """The source of the tokenizer. The defaults name none: a command asks for `tokenizer_problems` itself."""

    prefix: ClassVar[str] = "model"

    path: str | None = option(None, "model or tokenizer: a folder, or a name on the Hub")
    tokenizer_path: str | None = option(None, "the tokenizer, if it is not in model.path")
    trust_remote_code: bool = option(False, "true: run Python code that comes with the tokenizer")

    @property
    def tokenizer(self) -> str:
        """The folder or Hub name from which the tokenizer is loaded."""
        return self.tokenizer_path or self.path or ""

    @property
    def tokenizer_key(self) -> str:
        """The dotted key that names it."""
        return "model.tokenizer_path" if self.tokenizer_path else "model.path"

    def tokenizer_problems(self) -> list[str]:
        """Return one line if there is no such folder and it is no name on the Hub."""
        if not self.tokenizer:
            return ["model.path must name a model or tokenizer folder; got nothing"]
        return path_problems(self.tokenizer, self.tokenizer_key)


def path_problems(path: str, key: str) -> list[str]:
    """Return one line if a tokenizer's path is neither a folder nor a name on the Hub."""
    if os.path.isdir(path) or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        return []
    return [f"{key} must be a folder that exists; got {path}"]


def read_template(template: str, key: str) -> str:
    """Return a chat template that is given as its text or as its file's path.

    Raises `UsageError` that names `key` for a file that is missing, too large or no text.
    """
    if "{" in template or "\n" in template:
        return template
    path, needed = template, f"{key} must be a Jinja template"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(f"{needed} or a file with one; got {path}, which is no regular file")
        if (size := os.path.getsize(path)) > LONGEST_TEMPLATE:
            raise UsageError(f"{needed} of at most {LONGEST_TEMPLATE:,} bytes; got {path} of {size:,} bytes")
        return Path(path).read_text(encoding="utf-8")
    except UsageError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(f"{key} must be UTF-8; got {path}, whose byte {error.start + 1} is not") from error
    except (OSError, ValueError) as error:
        why = reason_of(error) if isinstance(error, OSError) else first_line(error)
        raise UsageError(f"{needed} or a file that exists; got {path[:200]}: {why}") from error


def check_template(template: str, named: str, key: str) -> None:
    """Raise `UsageError` with the line in which a chat template is not Jinja; `named`: the option's value."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template  # importing it takes seconds

    try:
        render_jinja_template([[{"role": "user", "content": "hello"}]], chat_template=template)
    except TemplateSyntaxError as error:
        line = f"line {error.lineno}: {error.message}"
        raise UsageError(f"{key} must be a Jinja template; got {named}, {line}") from error
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return  # a template is a program of its own, which may want what this chat does not have


def leave_out_torch(model: ModelOptions) -> None:
    """Load tokenizers without torch in this process and its workers.

    Not if transformers is loaded already, or if the tokenizer's own code may need torch. Only for the process of a
    command: transformers has no models afterwards.
    """
    global _tokenizer_module
    if "transformers" not in sys.modules and not model.trust_remote_code:
        _tokenizer_module = _WITHOUT_TORCH


def tokenizer_module() -> str:
    """Return the module that load_tokenizer imports, which takes seconds: worker processes preload it."""
    return _tokenizer_module


def load_tokenizer(model: ModelOptions) -> Any:
    """Return the tokenizer of `model.tokenizer_path` or `model.path`. Raises `UsageError` if none can be loaded."""
    # Processes work in parallel; threads inside each of them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = read_tokenizer(model.tokenizer, model.tokenizer_key, trust_remote_code=model.trust_remote_code)
    check_round_trip(tokenizer, model.tokenizer, model.tokenizer_key)
    tokenizer.model_max_length = int(1e30)  # no warning for each long text: the command bounds lengths
    return tokenizer


def read_tokenizer(path: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder or Hub name. Raises `UsageError` that names `key` if there is none."""
    import_module(_tokenizer_module)  # takes seconds
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # files that are no tokenizer fail in many ways
        raise UsageError(f"{key} must hold a tokenizer; got {path}: {first_line(error)}") from error
    check_tokenizer(tokenizer, path, key)
    return tokenizer


def check_round_trip(tokenizer: Any, path: str, key: str = "model.path") -> None:
    """Refuse a tokenizer that silently drops spaces or letters. Raises `UsageError`.

    transformers builds one if tokenizer_config.json names another class than that of tokenizer.json and config.json is
    missing: for DeepSeek-V3's folder a Llama tokenizer without spaces and Chinese.
    """
    for text in ("one two", "你好"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            continue
        back = unicodedata.normalize("NFKC", tokenizer.decode(ids)).casefold()
        letters = "".join(character for character in back if character.isalpha())
        loses_spaces = " " in text and len(ids) > 1 and back.strip() == "onetwo"
        if loses_spaces or any(letter not in letters for letter in text if letter.isalpha()):
            raise UsageError(
                f"{key} must hold a tokenizer that keeps text; got {path}, whose {type(tokenizer).__name__} makes"
                f" {back!r} of {text!r}. Add the model's config.json where it is missing, or name the class in"
                ' tokenizer_config.json: "tokenizer_class": "PreTrainedTokenizerFast" takes tokenizer.json as it is'
            )


def check_tokenizer(tokenizer: Any, path: str, key: str = "model.path") -> None:
    """Refuse a vocabulary of special tokens only, which transformers makes for a folder without a tokenizer's files.

    Raises `UsageError`.
    """
    vocabulary = tokenizer.get_vocab()
    try:
        added = tokenizer.added_tokens_decoder.values()
    except (AttributeError, NotImplementedError):  # mistral-common's tokenizers have no added tokens
        added = []
    marks = {str(token) for token in added if token.special or _MARKER.fullmatch(str(token))}
    marks |= set(tokenizer.all_special_tokens)
    # Text is more than white space, or sentencepiece's sign for it; tokens of some tokenizers are bytes.
    if any(not isinstance(t, str) or t.strip().strip("▁") for t in vocabulary if t not in marks):
        return
    tokens = sorted(map(str, vocabulary))
    shown = ", ".join(tokens[:5]) + (", …" if len(tokens) > 5 else "")
    found = f"which has none: only tokens that are no text, {shown}" if tokens else "which has none"
    raise UsageError(f"{key} must hold a tokenizer; got {path}, {found}")
