"""Random packs of documents, and the formula of attention over all scores of a document."""

from itertools import pairwise

import torch

LENGTHS = (11, 1, 7, 18)


def attention_pack(lengths=LENGTHS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids[T]`` and ``position_ids[T]`` of documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (sum(lengths),), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in lengths])


def _scores(query, key, options, unseen):
    logits = torch.einsum("qhe,khe->hqk", query, key) * (options.scale or query.size(-1) ** -0.5)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits.masked_fill(unseen, -torch.inf)


def _documents(query, key, value, layout, options):
    """Yield each document's queries, keys and values, with a key head for every query head, and its hidden pairs."""
    shared = query.size(1) // key.size(1)
    for queries, keys in zip(pairwise(layout.offsets), pairwise(layout.keys.offsets), strict=True):
        q, k, v = query[slice(*queries)], *(x[slice(*keys)].repeat_interleave(shared, 1) for x in (key, value))
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        yield q, k, v, (distance < 0) | (distance >= (options.window or len(k)))


def of_all_scores(query, key, value, layout, options):
    """Apply the formula to all scores of a document, with the sink as one more score."""
    outputs = []
    for q, k, v, unseen in _documents(query, key, value, layout, options):
        logits = _scores(q, k, options, unseen)
        if options.sinks is not None:
            logits = torch.cat([logits, options.sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
        outputs.append(torch.einsum("hqk,khe->qhe", logits.softmax(-1)[..., : len(k)], v))
    return torch.cat(outputs)
