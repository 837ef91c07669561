"""Models of transformers in a folder, which answer in place of a server."""

import os
from typing import Any

from verl_ext.options import UsageError, first_line, must


def load_model(kind: str, folder: str | os.PathLike[str], key: str, needed: str, given: object) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a folder, on the GPU if there is one.

    kind: the class of transformers that loads the model. key, given: the option that must hold what is needed, and its
    value. Raises UsageError if transformers cannot load them.
    """
    import torch
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = getattr(transformers, kind).from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        got = f"{given}: {first_line(error)}"
        raise UsageError(must(key, f"hold {needed} that transformers loads", got)) from error
    return tokenizer, model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
