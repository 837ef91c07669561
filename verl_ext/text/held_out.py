"""Hold records out for validation, and leave out repeated ones.

    record    {"messages": [user, assistant]}     {"text": …}      {"input_ids": […]}
    words     the roles and contents              the text         the ids
    key       64 bits of their hash; below val_share · 2^64, or among the N lowest different ones: held out

The key follows from the record's words alone, so that other records, their order and the number of workers move no
record under a share. It leaves out what a template may not print (thoughts, calls, tools, other fields): records that
become equal documents are on the same side.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.text.records.content import Content
from verl_ext.text.records.reasoning import REASONING_TAGS
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Documents
from verl_ext.text.tokens.hashes import mix_bits, position_factors, token_hashes

KEYS = 1 << 64  # the number of different keys
_RECENT = 1 << 20  # keys in a set, before they become an array of 8 bytes each


def content_key(content: Content, system: str | None = None, by_turn: bool = False) -> int:
    """Return the key of a record's words.

    A preference counts by its prompt. system: the default system prompt, which does not count. by_turn: a chat gives a
    document for each learnt turn, and counts up to the first one, as chats may begin alike.
    """
    if not content.chats:
        return hashed_key([content.text])
    chat, words = content.chats[0], list[str]()
    count = chat.shared or (min(chat.targets) + 1 if by_turn else len(chat.messages))
    for number, message in enumerate(chat.messages[:count]):
        role, text = message["role"], message["content"]
        if role == "assistant":  # templates leave out the thoughts of earlier turns
            for _, closer in REASONING_TAGS:
                text = text.rpartition(closer)[2]
        if number or role != "system" or text != system:
            words += [role, text.strip()]
    return hashed_key(["\0".join(words)])


def hashed_key(parts: Iterable[str | bytes]) -> int:
    """Return the key of a text or bytes in parts."""
    found = blake2b(digest_size=8)
    for part in parts:
        found.update(part.encode(errors="surrogatepass") if isinstance(part, str) else part)
    return int.from_bytes(found.digest(), "little")


class RecordChoice:
    """The division of records into training and validation, without repeated ones.

    limit: records whose key is below it are held out. deduplicate: whether a record with the tokens of an earlier one
    is left out, on whichever side that is.
    """

    def __init__(self, limit: int = 0, deduplicate: bool = False) -> None:
        self._limit, self._deduplicate = limit, deduplicate
        # Hashes of records that came before; all but the last take 8 bytes.
        self._old, self._recent = np.zeros(0, np.uint64), set[int]()

    def split(self, documents: Documents) -> tuple[Documents, Documents]:
        """Return a chunk's documents for training, and those held out."""
        facts = documents.records
        assert facts is not None, "the encoder has told the records apart"
        is_kept = np.ones(len(facts.keys), bool)
        if self._deduplicate and len(facts.owners):
            # A record that gives no document repeats none.
            places, firsts = np.unique(facts.owners, return_index=True)
            is_kept[places] = self._are_new(_record_hashes(documents, places, firsts))
            for place in np.flatnonzero(~is_kept).tolist():
                category, own = facts.counts[place]
                facts.counts[place] = category, Counts(records=1, duplicates=1, uncategorised=own.uncategorised)
        is_held = facts.keys < self._limit
        train, held = (documents.only(side, (side & is_kept)[facts.owners]) for side in (~is_held, is_held))
        return train, held

    def _are_new(self, hashes: NDArray[np.uint64]) -> list[bool]:
        """Return whether each hash is new; from now on it is not."""
        at = np.searchsorted(self._old, hashes)
        is_old: Any = np.zeros(len(hashes), bool)
        if len(self._old):
            is_old = self._old[np.minimum(at, len(self._old) - 1)] == hashes
        found = []
        for number, old in zip(hashes.tolist(), is_old.tolist(), strict=True):
            found.append(not old and number not in self._recent)
            self._recent.add(number)
        if len(self._recent) > _RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._old, self._recent = np.union1d(self._old, recent), set()
        return found


def _record_hashes(documents: Documents, places: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of each record: its documents in order, their sides."""
    hashes = token_hashes(documents.input_ids, documents.starts, documents.lengths)
    if documents.units is not None:
        sides = documents.units["answer"]  # 0 of a document that is not an answer, also in a chunk without any
        hashes = np.where(sides == 0, hashes, mix_bits(hashes + sides.astype(np.uint64)))
    counts = np.diff(np.append(firsts, len(hashes)))
    position = np.arange(len(hashes)) - np.repeat(firsts, counts)
    return np.add.reduceat(hashes * position_factors(int(counts.max()))[position], firsts)
