"""What a cache of tokenised BABILong samples is of: files, tokenizer and options, as one digest."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.data.babilong_files import BABILongFile
from verl_ext.data.babilong_options import BABILongOptions

FORMAT = 1  # to be raised when the same input is written as something else


def fingerprint(files: Sequence[BABILongFile], tokenizer: Any, options: BABILongOptions) -> str:
    """32 hex digits of everything that the tokens, categories and counts follow from.

    A file counts by its real path, size and time of change.
    """
    statuses = [os.stat(file.path) for file in files]
    facts = [
        FORMAT,
        [
            [os.path.realpath(file.path), file.category, status.st_size, status.st_mtime_ns]
            for file, status in zip(files, statuses, strict=True)
        ],
        tokenizer_facts(tokenizer),
        [options.max_length, options.answer_reserve_tokens, options.truncate],
        tokenizer.eos_token_id if options.append_eos else None,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def tokenizer_facts(tokenizer: Any) -> list[Any]:
    """What decides how a tokenizer splits text, and nothing that a call changes."""
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
    digest = hashlib.sha256(model.encode()).hexdigest()
    return [type(tokenizer).__name__, digest, bool(getattr(tokenizer, "split_special_tokens", False))]
