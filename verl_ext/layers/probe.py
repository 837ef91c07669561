"""A trial that an architecture keeps a pack's documents apart.

Two documents go through a small random model of the same class. A token of the first changes: the logits of the second
must stay equal to the last bit (of a mixture of experts, but for rounding: an expert's product has rows of both), and
equal those that it has alone, in packed attention as in the model's own. The trial
covers all that a model does across tokens: attention that is not dispatched, masks without positions, biases that the
model's own attention adds, remote code, layers of a new release.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group

from verl_ext.attention.packed import PACKED_ATTENTION
from verl_ext.layers.experts import has_experts
from verl_ext.layers.mixers import install, torch_forms
from verl_ext.layers.pack import RunningPack, attach
from verl_ext.layers.shrink import shrunk
from verl_ext.parallel.shards import document_layout

_LENGTHS = (21, 18)  # longer than the windows and chunks of a shrunk config
_MOST_PARAMETERS = 50_000_000  # of a trial model; a config whose names of sizes are not in the table stays large
_TOLERANCE = 1e-4  # relative to the largest logit; matrices of other sizes round differently
_ROUNDING = 1e-6  # of products of experts, 1e-7 by MKL with two threads; a leak is above 1e-2


def trial_model(config: Any, cls: Any, **sizes: Any) -> nn.Module:
    """Return a small random model of a class, for CPU packs.

    Args:
        config: the real model's config.
        cls: its class; transformers' Auto class for remote code.
        sizes: values that override those of the small config.

    Raises ValueError if the small config's model is still too large to be tried.
    """
    small = shrunk(config, **sizes)
    with torch.random.fork_rng(devices=[]), torch_forms(cls):
        torch.manual_seed(0)
        given: dict[str, Any] = {"attn_implementation": PACKED_ATTENTION}
        if hasattr(cls, "_from_config"):
            make = functools.partial(cls._from_config, small, **given)
        else:  # an Auto class; the config of remote code was read with the user's consent
            make = functools.partial(cls.from_config, small, trust_remote_code=True, **given)
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in make().parameters())
        if parameters > _MOST_PARAMETERS:
            raise ValueError(f"its smallest form has {parameters:,} parameters")
        model = make().float()
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and not name.endswith("A_log"):  # so large that attention is far from uniform
                nn.init.normal_(weight, std=0.5 if "embed" in name else weight[0].numel() ** -0.5)
            else:
                weight.data += 0.1 * torch.randn_like(weight)
    pack = RunningPack()
    attach(model, pack)
    install(model, pack)
    return model.eval()


@contextmanager
def _on_one_rank() -> Iterator[None]:
    """Keep an engine's exchange of heads out of a trial."""
    group: Any = get_ulysses_sequence_parallel_group()
    no_group: Any = None
    set_ulysses_sequence_parallel_group(no_group)
    try:
        yield
    finally:
        set_ulysses_sequence_parallel_group(group)


@torch.no_grad()
@_on_one_rank()
def isolation_problem(model: nn.Module) -> str | None:
    """Return how a model mixes documents; None if it does not.

    Args:
        model: a model of :func:`trial_model`.
    """
    ids = torch.randint(3, 190, (sum(_LENGTHS),), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[_LENGTHS[0] // 2] += 1
    first, second = _LENGTHS
    together, other = (_logits(model, x, _LENGTHS)[first:] for x in (ids, changed))
    alone = _logits(model, ids[first:], (second,))
    if not (_agree(together, other, _ROUNDING) if has_experts(model) else torch.equal(together, other)):
        return "another document's tokens change a document's logits"
    if not _agree(together, alone):
        return "a document's logits in a pack differ from those that it has alone"
    _use_own_attention(model)
    # Packed attention alone reads a module's `attention_needs`; without a layout, the module itself computes them.
    has_needs = any(hasattr(module, "attention_needs") for module in model.modules())
    if not _agree(alone, _logits(model, ids[first:], (second,), has_layout=not has_needs)):
        return "its own attention (attn_implementation=eager) gives a document other logits than packed attention"
    return None


def _agree(logits: torch.Tensor, others: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    return bool((logits - others).abs().max() <= tolerance * others.abs().max())


def _use_own_attention(model: nn.Module) -> None:
    """Let a model use its own attention; other layers compute packs."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == PACKED_ATTENTION:
            config._attn_implementation_internal = "eager"  # type: ignore[union-attr]


def _logits(model: nn.Module, ids: torch.Tensor, lengths: tuple[int, ...], has_layout: bool = True) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    layout = document_layout(positions) if has_layout else None
    given: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None}
    return model(**given, document_layout=layout, use_cache=False).logits[0]
