"""What a cache of tokenised BABILong samples is of: files, tokenizer and options, as one digest."""

from collections.abc import Sequence
from typing import Any

from verl_ext.data.babilong_files import BABILongFile
from verl_ext.data.babilong_options import BABILongOptions
from verl_ext.data.fingerprint import digest, file_facts, tokenizer_facts

FORMAT = 3  # to be raised when the same input is written as something else


def fingerprint(files: Sequence[BABILongFile], tokenizer: Any, options: BABILongOptions) -> str:
    """32 hex digits of everything that the tokens, categories and counts follow from.

    A file counts by its real path, size and time of change.
    """
    return digest(
        [
            FORMAT,
            file_facts(file.path for file in files),
            [file.category for file in files],
            tokenizer_facts(tokenizer),
            [options.max_length, options.answer_reserve_tokens, options.truncate],
            tokenizer.eos_token_id if options.append_eos else None,
        ]
    )
