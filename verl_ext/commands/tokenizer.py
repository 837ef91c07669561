"""Which tokenizer a command uses, and loading it."""

import os
import re
from dataclasses import dataclass
from typing import Any, Optional

from verl_ext.commands.errors import UsageError, first_line

# What load_tokenizer imports, seconds long: for worker processes to have beforehand.
TOKENIZER_MODULE = "transformers.models.auto.tokenization_auto"


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

    def problems(self) -> list[str]:
        """One line where there is no such folder and no name on the Hub."""
        key = "model.tokenizer_path" if self.tokenizer_path else "model.path"
        path = self.tokenizer_path or self.path
        if not path:
            return ["model.path must name a model or tokenizer folder; got nothing"]
        hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)
        if not os.path.isdir(path) and not hub_name:
            return [f"{key} must be a folder that exists; got {path}"]
        return []


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of `model.tokenizer_path` or `model.path`; `UsageError` where none can be loaded."""
    # The processes are the parallelism; threads inside each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer  # here, because importing it takes seconds

    path = model.tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # files that are no tokenizer fail in many ways
        raise UsageError(f"model.path must hold a tokenizer; got {path}: {first_line(error)}") from error
    if not len(tokenizer):  # what transformers makes of a folder without a tokenizer's files
        raise UsageError(f"model.path must hold a tokenizer; got {path}, which has none")
    tokenizer.model_max_length = int(1e30)  # lengths are the command's business: no warning per text
    return tokenizer
