"""Rows of embeddings and head for new tokens.

    rows   0 … n-1           n … m-1               m … M-1
           of the tokens     free, as Qwen has     added; M has the powers of two of m, up to 64

A new token's row begins as the mean of the rows of its old pieces: the model has read and written this text with them,
so that a step begins near what it knows, and two new tokens differ. The mean of all rows, as transformers' own resize
draws from, knows nothing of the text. Rows that no token has yet begin as that mean: a head's row of zeros would get a
logit of 0, which is the highest of all in models whose logits are negative. A token without known pieces gets it too.
With adapters, PEFT trains these rows alone (`trainable_token_indices`), and all else of the matrices is frozen.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

ROWS = "trainable_token_indices"  # of PEFT's LoraConfig
_DIVISOR = 64  # of a matrix's rows, by which kernels for matrix products and shards are fast
Pieces = Mapping[int, list[int]]  # {the id of a new token: the ids of its old pieces}


def rows_with(rows: int, ids: Iterable[int]) -> int:
    """Return the number of rows that `rows` become for new tokens.

    Free rows are used first. Beyond them, the number stays as divisible as it was, by powers of two up to 64.
    """
    needed, divisor = max(ids) + 1, math.gcd(rows, _DIVISOR)
    return rows if needed <= rows else -(-needed // divisor) * divisor


def add_to_config(hf_config: Any, pieces: Pieces) -> None:
    """Let a model's config have the rows of new tokens, in place."""
    if pieces:
        text = hf_config.get_text_config()
        text.vocab_size = rows_with(text.vocab_size, pieces)


@torch.no_grad()
def add_rows(module: Any, pieces: Pieces) -> None:
    """Give embeddings and head the rows of new tokens, in place; tied weights stay tied."""
    ends = [part for part in (module.get_input_embeddings(), module.get_output_embeddings()) if part is not None]
    rows = len(ends[0].weight)
    size = rows_with(rows, pieces)
    grown = {id(p): _with_rows(p, size, pieces) for part in ends for p in part.parameters() if len(p) == rows}
    # Not by transformers' resize, which draws random rows first and loses the class of scaled embeddings.
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in grown:
                setattr(part, name, grown[id(parameter)])
    for part in ends:
        for name in ("num_embeddings", "out_features"):
            if hasattr(part, name):
                setattr(part, name, size)
    add_to_config(module.config, pieces)


def _with_rows(parameter: nn.Parameter, size: int, pieces: Pieces) -> nn.Parameter:
    """Return a weight [rows, H] or bias [rows] with `size` rows, those of new tokens as their pieces'."""
    mean = parameter.mean(0, keepdim=True, dtype=torch.float32).to(parameter.dtype)
    values = torch.cat([parameter, mean.expand(size - len(parameter), *parameter.shape[1:])])
    for number, old in pieces.items():
        values[number] = parameter[old].mean(0, dtype=torch.float32) if old else mean[0]
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def embeddings_and_head(module: Any) -> list[str]:
    """Return the names of a plain model's input embeddings and head."""
    names = {part: name for name, part in module.named_modules()}
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    return [names[part] for part in ends if part is not None]


def is_whole(name: str, whole: Iterable[str]) -> bool:
    """Tell whether `modules_to_save` names a module."""
    return any(f".{name}".endswith(f".{end}") for end in whole)


def trained_rows(module: Any, pieces: Pieces, whole: Iterable[str]) -> dict[str, dict[str, list[int]]]:
    """Return PEFT's setting that trains new tokens' rows alone, {} if they are trained anyway.

    module: the plain model. whole: `modules_to_save`, the modules that are trained whole. Of tied weights, PEFT trains
    the rows of both by the embeddings' name.
    """
    names = embeddings_and_head(module)
    is_tied = module.get_submodule(names[0]).weight is module.get_submodule(names[-1]).weight
    alone = [name for name in names[:1] if is_tied] or names
    alone = [name for name in alone if not is_whole(name, whole)]
    return {ROWS: {name: sorted(pieces) for name in alone}} if pieces and alone else {}
