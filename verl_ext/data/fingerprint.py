"""What tokenised files follow from, as one digest: the parts that every cache shares."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_ext.tokenize.remote_files import is_url, remote_facts


def digest(facts: Any) -> str:
    """32 hex digits of plain JSON values."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """[real path, size, time of change] of each file, and of the files of each folder; of a URL what its host
    tells. No content is read."""
    facts: list[list[Any]] = []
    for path in paths:
        if is_url(path):
            facts.append(remote_facts(path))
        elif os.path.isdir(path):
            facts += file_facts(sorted(entry.path for entry in os.scandir(path) if entry.is_file()))
        else:
            status = os.stat(path)
            facts.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    return facts


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
    return [
        type(tokenizer).__name__,
        hashlib.sha256(model.encode()).hexdigest(),
        bool(getattr(tokenizer, "split_special_tokens", False)),
    ]
