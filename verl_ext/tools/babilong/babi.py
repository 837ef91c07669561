"""A reader of bAbI v1.2's files; every question becomes a sample.

    1 Mary moved to the bathroom.
    2 John went to the hallway.
    3 Where is Mary? <TAB>bathroom<TAB>1        the answer, and the numbers of the facts that support it

A line with number 1 starts a story. A question depends on the facts before it; earlier questions are not facts.
"""

import re
from pathlib import Path
from typing import NamedTuple

from verl_ext.options import UsageError, reason_of

TASKS = tuple(f"qa{number}" for number in range(1, 21))
SPLITS = ("train", "valid", "test")
_LINE = re.compile(r"(\d{1,9}) (\s*\S[^\t]*)(?:\t([^\t]*[^\t\s])(?:\t[\d ]*)?)?\s*")


class Sample(NamedTuple):
    """A question, its answer, and the facts of the story before it."""

    facts: list[str]
    question: str
    answer: str


def read_samples(folder: str, task: str, split: str) -> list[Sample]:
    """Return a file's questions; raise UsageError if missing or malformed."""
    patterns = f"{task}_*_{split}.txt", f"{task}_{split}.txt"
    files = sorted(path for pattern in patterns for path in Path(folder).glob(pattern))
    if len(files) != 1:
        got = ", ".join(path.name for path in files) or "none"
        raise UsageError(f"stories must hold one file {' or '.join(patterns)}; {folder} has {got}")
    samples: list[Sample] = []
    facts: list[str] = []
    last = 0
    for number, line in enumerate(utf8_text(files[0], "stories").split("\n"), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match and match[1] == "1":
            facts, last = [], 0
        if not match or int(match[1]) != last + 1 or (match[3] and not facts):
            raise UsageError(
                "stories must have lines 'NUMBER FACT' and, after a fact, 'NUMBER QUESTION<tab>ANSWER<tab>FACTS',"
                f" numbered from 1 in every story; line {number} of {files[0]} is {line.strip()[:80]!r}"
            )
        last += 1
        if match[3]:
            samples.append(Sample(facts.copy(), match[2], match[3].strip()))
        else:
            facts.append(match[2].strip())
    if not samples:
        raise UsageError(f"stories must hold questions with answers; {files[0]} has none")
    return samples


def utf8_text(file: Path, key: str) -> str:
    """Return a file's text; raise UsageError, which names the option `key`."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{key} must be UTF-8 text; {file} is not at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"{key} must be readable; {file}: {reason_of(error)}") from error
