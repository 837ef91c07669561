"""Greedy generation that reads a prompt once: it keeps the state before each row's last chunk and re-runs that chunk.

Rows of different lengths cost nothing extra. While the prompts' whole chunks are read, a row with fewer of them is
masked out, so that its state stays as it was at its own boundary. The rows' tails are then run together.

```
prompts, C = 4      read together      tails, re-run for every new token
a b c d | e f       a b c d            e f +
g h i               - - - -            g h i +
```

Legend: B samples, T tokens of the longest prompt, C tokens of a chunk.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.nn import functional as F


def require_right_padding(attention_mask: torch.Tensor) -> None:
    """Raise ValueError unless each row is 1 … 1 0 … 0 with at least one 1."""
    mask = attention_mask.bool()
    if not mask[:, 0].all() or (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("attention_mask must be tokens first, padding on the right; got padding before a token")


@torch.no_grad()
def generate_greedily(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    all_max: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the most likely continuation of each prompt, ``[B, steps]`` with steps ≤ ``max_new_tokens``.

    Args:
        model: a ``QwenTitansForCausalLM``, which may be sharded.
        input_ids: ``[B, T]``, padded on the right.
        attention_mask: ``[B, T]``.
        max_new_tokens: the most tokens of a continuation.
        eos_token_ids: the tokens that end a row.
        pad_token_id: the token that fills a row after its end.
        all_max: the element-wise maximum of an int64 tensor over all ranks, so that every rank runs the same forwards,
            as FSDP needs; None for a rank on its own.
    """
    require_right_padding(attention_mask)
    all_max = all_max or (lambda values: values)
    size = model.config.chunk_size
    lengths = attention_mask.sum(1)
    whole = (lengths - 1) // size  # chunks before the one that predicts a row's next token
    tails = lengths - whole * size
    chunks, width = all_max(torch.stack([whole.max(), tails.max()])).tolist()

    state = None
    if chunks:
        width_read = chunks * size
        prefix = F.pad(input_ids, (0, max(0, width_read - input_ids.shape[1])), value=pad_token_id)[:, :width_read]
        mask = torch.arange(width_read, device=lengths.device) < (whole * size)[:, None]
        state = model(prefix, mask, logits_to_keep=1, return_memory_state=True).memory_state
    columns = (whole * size)[:, None] + torch.arange(width + max_new_tokens, device=lengths.device)
    padded = F.pad(input_ids, (0, 1), value=pad_token_id)
    tokens = padded.gather(1, columns.clamp(max=input_ids.shape[1]))

    rows = torch.arange(len(tokens), device=tokens.device)
    ends = torch.tensor(sorted(eos_token_ids), device=tokens.device)
    done = torch.zeros_like(lengths, dtype=torch.bool)
    generated = []
    for step in range(max_new_tokens):
        here = torch.arange(width + step, device=tokens.device)
        last = here == (tails + step - 1)[:, None]
        mask = here < (tails + step)[:, None]
        logits = model(tokens[:, : width + step], mask, logits_to_keep=last, memory_state=state).logits
        chosen = logits.argmax(-1).masked_fill(done, pad_token_id)
        tokens[rows, tails + step] = chosen
        generated.append(chosen)
        done |= torch.isin(chosen, ends)
        if len(ends) and not all_max((~done).any().long()[None]).item():
            break
    return torch.stack(generated, 1)
