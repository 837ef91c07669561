"""The items of a run, and the random numbers for each.

Random numbers follow from the seed and the name of the item. So the choice of items and the questions about them
depend neither on the order nor on the number of concurrent requests.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl_ext.options import DataError, must
from verl_ext.text.read.bad_record import BadRecord, check_characters
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.records.messages import ROLES, MessageReader
from verl_ext.tools.synthesis.asked_prompts import AskedPrompt
from verl_ext.tools.word_count import language_of

CHATS = ("conversation", "conversations", "messages")  # fields that hold a chat, as in WildChat and ShareGPT


@dataclass(frozen=True)
class SourceItem:
    """A document or an instruction.

    Attributes:
        tokens: the length of the text, 0 if not counted.
        kind: its class or source.
        documents: the characters of each document that a joined text consists of; none for one document.
        prompt: the prompt that several answers are asked for; its words are the text.
    """

    name: str
    source: str
    text: str
    tokens: int = 0
    kind: str = ""
    documents: Sequence[tuple[int, int]] = ()
    prompt: AskedPrompt | None = None


# Makes the item of a name and a source of a record; None: of another language than those that are used.
Read = Callable[[Mapping[str, Any], str, str], SourceItem | None]


def drawn(seed: int, *facts: str) -> int:
    """Return a 64-bit number from the seed and the facts."""
    digest = blake2b("\0".join((str(seed), *facts)).encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def read_items(
    files: Iterable[SourceFile], sources: Sequence[str], read: Read, skip_bad: bool, left_out: Counter[str]
) -> Iterator[SourceItem]:
    """Yield the items of the files in order; `left_out` counts bad records and other languages.

    Raises `DataError` at the first bad record unless `skip_bad`.
    """
    times: Counter[str] = Counter()
    for file in files:
        source = sources[file.category_id - 1]
        name = f"{source}/{Path(file.path).name}"
        times[name] += 1
        if times[name] > 1:  # folders may move and are not in the name, so files in two folders can have one name
            name = f"{name}#{times[name]}"
        for chunk in read_chunks(file):
            for place, raw in chunk.records:
                number = place[len(file.path) + 1 :] or 1  # a text file's only record has no number
                try:
                    item = read(read_record(raw), f"{name}:{number}", source)
                except BadRecord as error:
                    if not skip_bad:
                        raise DataError(f"{place}: {error}") from error
                    left_out[error.reason] += 1
                    continue
                if item is None:
                    left_out["other_language"] += 1
                else:
                    yield item


def item_of(record: Mapping[str, Any], text: Any, key: str, name: str, source: str) -> SourceItem:
    """Return the item of a text in a record; raise BadRecord if it is not a text.

    key: the option's field, for the message.
    """
    if not isinstance(text, str) or not text.strip():
        got = "nothing" if text is None or text == "" else type(text).__name__
        raise BadRecord("no_text", must(f"text_key={key}", "name a field with a text", got))
    check_characters(f"{text}\0{source}")
    return SourceItem(name, source, text.strip(), kind=source, documents=_documents(record, text))


def first_request(record: Mapping[str, Any]) -> str | None:
    """Return the first user's turn of a chat (WildChat, ShareGPT, messages); None without a chat."""
    turns = next((value for name in CHATS if isinstance(value := record.get(name), list) and value), None)
    if turns is None:
        return None
    for turn in turns:
        role = (turn.get("role") or turn.get("from")) if isinstance(turn, Mapping) else None
        if isinstance(role, str) and ROLES.get(role.lower()) == "user":
            return MessageReader().turns([turn])[0].message["content"]
    raise BadRecord("no_prompt", must("the chat", "have a user's message", "none"))


def language_in(record: Mapping[str, Any], text: str) -> str:
    """Return the language of an instruction: that of the record's field, else en, zh or other."""
    named = record.get("language")
    if isinstance(named, str) and named:
        return {"english": "en", "chinese": "zh"}.get(named.lower(), named.lower())
    if language_of(text) == "zh":
        return "zh"
    letters = sum(character.isalpha() for character in text)
    return "en" if letters and sum(c.isascii() and c.isalpha() for c in text) > 0.9 * letters else "other"


def _documents(record: Mapping[str, Any], text: str) -> list[tuple[int, int]]:
    """Return a joined text's document places in `text.strip()`, from its `provenance`."""
    provenance = record.get("provenance")
    documents = provenance.get("documents") if isinstance(provenance, Mapping) else None
    left_out, end = len(text) - len(text.lstrip()), len(text.strip())
    try:
        spans = [tuple(int(place) - left_out for place in document["span"]) for document in documents or ()]
        return [(max(first, 0), min(last, end)) for first, last in spans if max(first, 0) < min(last, end)]
    except (LookupError, TypeError, ValueError):  # another program's provenance
        return []
