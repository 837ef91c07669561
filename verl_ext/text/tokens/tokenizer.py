"""Load and check tokenizers, their stop tokens and the templates of options."""

import hashlib
import json
import os
import re
import sys
import unicodedata
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.options import Options, UsageError, first_line, must, option, reason_of
from verl_ext.text.tokens.new_tokens import NEW_SPECIAL_TOKENS, NEW_TOKENS, add_tokens

# The modules that load_tokenizer may import; the one with torch takes seconds.
_WITH_TORCH, _WITHOUT_TORCH = "transformers.models.auto.tokenization_auto", "verl_ext.text.tokens.torchless_tokenizers"
_tokenizer_module = _WITH_TORCH
_NEAR = 5  # names of templates that an error lists
LONGEST_TEMPLATE = 1 << 20  # bytes of a chat template; the longest published ones have about 30,000
# Added tokens that stand for no text, such as <think>. Not every tokenizer flags them as special.
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)
TRUSTED = "model.trust_remote_code=true runs Python code that comes with the model or tokenizer"


@dataclass(frozen=True)
class ModelOptions(Options):
    """The tokenizer's source, if any; `tokenizer_problems` checks it."""

    prefix: ClassVar[str] = "model"

    path: str | None = option(None, "model or tokenizer: a folder, or a name on the Hub")
    tokenizer_path: str | None = option(None, "the tokenizer, if it is not in model.path")
    trust_remote_code: bool = option(False, "true: run Python code that comes with the tokenizer")
    new_tokens: list[str] = option([], NEW_TOKENS)
    new_special_tokens: list[str] = option([], NEW_SPECIAL_TOKENS)

    @property
    def tokenizer(self) -> str:
        """The folder or Hub name from which the tokenizer is loaded."""
        return self.tokenizer_path or self.path or ""

    @property
    def tokenizer_key(self) -> str:
        """The dotted config key that names the tokenizer."""
        return "model.tokenizer_path" if self.tokenizer_path else "model.path"

    def tokenizer_problems(self) -> list[str]:
        """Return a line if the tokenizer is neither a folder nor a Hub name."""
        if not self.tokenizer:
            return [must("model.path", "name a model or tokenizer folder", "nothing")]
        return tokenizer_path_problems(self.tokenizer, self.tokenizer_key)


def tokenizer_path_problems(path: str, key: str) -> list[str]:
    """Return a line if a path is neither a folder nor a Hub name."""
    if os.path.isdir(path) or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        return []
    return [must(key, "be a folder that exists", path)]


def read_template(template: str, key: str, folder: str | None = None) -> str:
    """Return a chat template from its text, its name in a folder, or its file's path.

    folder: the value of `chat_templates`. Raises `UsageError`, which names `key`, if the file is missing, too large or
    not text.
    """
    if "{" in template or "\n" in template:
        return template
    path = template if folder is None else _named_template(template, key, folder)
    needed = "be a Jinja template"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(must(key, f"{needed} or a file with one", f"{path}, which is not a regular file"))
        if (size := os.path.getsize(path)) > LONGEST_TEMPLATE:
            raise UsageError(must(key, f"{needed} of at most {LONGEST_TEMPLATE:,} bytes", f"{path} of {size:,} bytes"))
        return Path(path).read_text(encoding="utf-8")
    except UsageError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(must(key, "be UTF-8", f"{path}, whose byte {error.start + 1} is not")) from error
    except (OSError, ValueError) as error:
        why = reason_of(error) if isinstance(error, OSError) else first_line(error)
        if folder is None and re.fullmatch(r"[\w-]+", path):
            why += "; chat_templates=FOLDER would find NAME.jinja there"
        raise UsageError(must(key, f"{needed} or a file that exists", f"{path[:200]}: {why}")) from error


def _named_template(name: str, key: str, folder: str) -> str:
    """Return the path of a folder's NAME.jinja, or of a file of this name anywhere."""
    package, _, below = folder.partition(":")
    found = Path(folder).expanduser()
    if not found.is_dir() and package.isidentifier() and (spec := find_spec(package)) is not None:
        found = Path((spec.submodule_search_locations or [""])[0], below)  # without an import of the package
    files = {file.stem: str(file) for file in sorted(found.glob("*.jinja"))}
    if not files:
        needed = "be a folder with NAME.jinja files, or package:folder of an installed package"
        raise UsageError(must("chat_templates", needed, folder))
    if name in files or os.path.isfile(name):
        return files.get(name, name)
    near = ", ".join(get_close_matches(name, files, n=_NEAR, cutoff=0.4)) or ", ".join(list(files)[:_NEAR])
    needed = f"be one of the {len(files)} names in chat_templates={folder}"
    raise UsageError(must(key, needed, f"{name} (nearest: {near})"))


def check_template(template: str, named: str, key: str) -> None:
    """Raise `UsageError` with the line of a syntax error in `named`."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template  # importing it takes seconds

    try:
        render_jinja_template([[{"role": "user", "content": "hello"}]], chat_template=template)
    except TemplateSyntaxError as error:
        line = f"line {error.lineno}: {error.message}"
        raise UsageError(must(key, "be a Jinja template", f"{named}, {line}")) from error
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return  # the template may need fields that this chat lacks


def leave_out_torch(model: ModelOptions) -> None:
    """Load tokenizers without torch in this process and its workers.

    This has no effect if transformers is already imported or if the tokenizer's own code may need torch. Call it only
    in a command's process, because transformers has no models afterwards.
    """
    global _tokenizer_module
    if "transformers" not in sys.modules and not model.trust_remote_code:
        _tokenizer_module = _WITHOUT_TORCH


def tokenizer_module() -> str:
    """Return `read_tokenizer`'s module, preloaded by workers as it takes seconds."""
    return _tokenizer_module


def load_tokenizer(model: ModelOptions) -> Any:
    """Return the tokenizer of `model.tokenizer_path` or `model.path`. Raises `UsageError`."""
    # The workers already run in parallel, so threads inside each of them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = read_tokenizer(model.tokenizer, model.tokenizer_key, trust_remote_code=model.trust_remote_code)
    check_round_trip(tokenizer, model.tokenizer, model.tokenizer_key)
    add_tokens(tokenizer, model.new_tokens, model.new_special_tokens, model.tokenizer)
    tokenizer.model_max_length = int(1e30)  # avoids a warning for each long text; the command bounds lengths
    return tokenizer


def read_tokenizer(path: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """Load a folder's or Hub name's tokenizer. Raises `UsageError` with `key`."""
    import_module(_tokenizer_module)  # takes seconds
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # files that are not a tokenizer's fail in many ways
        raise UsageError(must(key, "hold a tokenizer", f"{path}: {first_line(error)}")) from error
    check_tokenizer(tokenizer, path, key)
    return tokenizer


def check_round_trip(tokenizer: Any, path: str, key: str = "model.path") -> None:
    """Raise `UsageError` if a tokenizer silently drops spaces or letters.

    transformers builds such a tokenizer if config.json is missing and tokenizer_config.json names another class than
    that of tokenizer.json. For DeepSeek-V3's folder, it is a Llama tokenizer that drops spaces and Chinese.
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
    """Raise `UsageError` if a tokenizer's vocabulary has only special tokens.

    transformers builds such a tokenizer for a folder without tokenizer files.
    """
    vocabulary = tokenizer.get_vocab()
    try:
        added = tokenizer.added_tokens_decoder.values()
    except (AttributeError, NotImplementedError):  # mistral-common's tokenizers have no added tokens
        added = []
    marks = {str(token) for token in added if token.special or _MARKER.fullmatch(str(token))}
    marks |= set(tokenizer.all_special_tokens)
    # Text is more than white space or sentencepiece's sign for it. The tokens of some tokenizers are bytes.
    if any(not isinstance(t, str) or t.strip().strip("▁") for t in vocabulary if t not in marks):
        return
    tokens = sorted(map(str, vocabulary))
    shown = ", ".join(tokens[:5]) + (", …" if len(tokens) > 5 else "")
    found = f"which has none: only tokens that are not text, {shown}" if tokens else "which has none"
    raise UsageError(must(key, "hold a tokenizer", f"{path}, {found}"))


def tokenizer_facts(tokenizer: Any) -> list[Any]:
    """Return what decides how a tokenizer splits text, not calls' state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        serialised = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # left there by the last call
            serialised.pop(state, None)
        model = json.dumps(serialised)
    else:
        model = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
        file = getattr(tokenizer, "vocab_file", None)
        if file and os.path.isfile(file):
            model += hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return [
        type(tokenizer).__name__,
        hashlib.sha256(model.encode()).hexdigest(),
        bool(getattr(tokenizer, "split_special_tokens", False)),
    ]


def stop_tokens(tokenizer: Any, model: ModelOptions) -> list[str]:
    """Read the tokens that stop generation from the model's generation_config.json, if any."""
    from transformers.utils import cached_file  # heavy, and needed in worker processes only

    if not model.tokenizer:
        return []
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
