"""Documents longer than `max_tokens`: dropped, truncated or split, and counted.

`truncate` keeps the first `max_tokens` tokens; a document that this costs its last target is counted. `split` keeps
every token, in pieces of at most `max_tokens`; a piece's first token is no target, and a piece without any target is
kept and counted.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from verl_ext.commands.errors import DataError
from verl_ext.tokenize.bad_record import BadRecord


@dataclass
class Document:
    """input_ids[T] int32, loss_mask[T] int8 of one document, and weights[T] float32 where a target has one."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    weights: np.ndarray | None = None

    def part(self, start: int, stop: int) -> "Document":
        """Tokens start..stop as a document of its own: its first token is no target."""
        mask = self.loss_mask[start:stop].copy()
        mask[:1] = 0
        weights = None if self.weights is None else self.weights[start:stop]
        return Document(self.input_ids[start:stop], mask, weights)


def fit(document: Document, max_tokens: int | None, policy: str, counts: Counter[str]) -> list[Document]:
    """The documents of at most `max_tokens` tokens that `document` becomes; what happened is added to `counts`.

    Raises `DataError` under the policy `error`, `BadRecord` where no target is left.
    """
    tokens = len(document.input_ids)
    if max_tokens is None or tokens <= max_tokens:
        return [document]
    if policy == "error":
        raise DataError(
            f"a document must have at most max_tokens={max_tokens} tokens, or over_length=drop|truncate|split be given;"
            f" got {tokens}"
        )
    if policy == "drop":
        counts.update(dropped_documents=1, dropped_tokens=tokens)
        return []
    if policy == "truncate":
        pieces = [document.part(0, max_tokens)]
    else:
        pieces = [document.part(start, start + max_tokens) for start in range(0, tokens, max_tokens)]
    targets = [int(piece.loss_mask.sum()) for piece in pieces]
    if not any(targets):
        past = {"truncate": "truncation", "split": "split"}[policy]
        raise BadRecord(f"no_target_after_{past}", f"no target is left of {tokens} tokens at max_tokens={max_tokens}")
    done = {"truncate": "truncated", "split": "split"}[policy]
    counts[f"{done}_documents"] += 1
    counts[f"{done}_targets_lost"] += int(document.loss_mask.sum()) - sum(targets)
    if policy == "truncate":
        counts["truncated_tokens"] += tokens - max_tokens
        counts["truncated_last_target_lost"] += int(document.loss_mask[max_tokens:].any())
    else:
        counts["split_tokens"] += tokens
        counts["split_pieces"] += len(pieces)
        counts["split_pieces_without_target"] += targets.count(0)
    return pieces
