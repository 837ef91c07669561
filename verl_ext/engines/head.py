"""The head of a causal language model inside the engine: loss terms of target tokens in place of logits.

Sequence-parallel ranks hold slices of the pack whose targets lie unevenly (an answer ends a document): their hidden
states move so that every rank has equally many.

    slices of a pack    ····│··TT│TTTT│T···        targets T of 4 ranks: 0, 2, 4, 1
    rows of the head      TT│  TT│  TT│   T        after an all-to-all whose sizes the host knows

Legend: T tokens of a micro-batch, N its targets, n the sequence-parallel size, R = ⌈N / n⌉, at least 1.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from verl_ext.attention import SequenceShards
from verl_ext.losses import head_terms


@dataclass(frozen=True)
class TargetRows:
    """Which target tokens a sequence-parallel rank has before and after the exchange, all known on the host.

    Attributes:
        at: int64[N], the positions of all targets in the pack, in the order of the ranks that hold them.
        held: int64[≤ N], those of this rank's slice, counted from its beginning.
        rows: the part of `at` that this rank's head computes.
        send, receive: how many hidden states go to, and come from, each rank.
        padded: R.
    """

    at: torch.Tensor
    held: torch.Tensor
    rows: slice
    send: list[int]
    receive: list[int]
    padded: int

    @classmethod
    def of(cls, is_target: torch.Tensor, shards: SequenceShards) -> "TargetRows":
        """For bool[T] of a pack on the host, padding included."""
        places = shards.by_rank(is_target).nonzero().flatten()
        rank, ranks, length = shards.rank, shards.ranks, len(is_target) // shards.ranks
        padded = max(-(-len(places) // ranks), 1)  # a gather of nothing has no backward
        held = np.searchsorted(places.numpy(), np.arange(ranks + 1) * length)  # edges within `places`
        even = np.minimum(np.arange(ranks + 1) * padded, len(places))

        def shared(edges: np.ndarray, others: np.ndarray) -> list[int]:
            first, last = np.maximum(edges[rank], others[:-1]), np.minimum(edges[rank + 1], others[1:])
            return np.maximum(last - first, 0).tolist()

        at, mine = shards.positions(places, len(is_target)), places[held[rank] : held[rank + 1]] - rank * length
        return cls(at, mine, slice(*even[rank : rank + 2].tolist()), shared(held, even), shared(even, held), padded)


@dataclass(frozen=True)
class HeadWork:
    """What a :class:`FusedHead` computes in a forward.

    Attributes:
        labels: int64[≤ R]; coefficients: fp32[≤ R]; both of the targets `rows.rows`.
        group: the sequence-parallel ranks, None for one alone.
        block_bytes: as of :func:`head_terms`.
    """

    labels: torch.Tensor
    coefficients: torch.Tensor
    rows: TargetRows
    group: dist.ProcessGroup | None
    block_bytes: int


class FusedHead:
    """The output embedding of a module, which gives ``(loss term, nll)`` per target inside :meth:`doing`.

    FSDP's hooks stay around its forward: its weight is whole inside, gathered as for logits.
    """

    def __init__(self, module: Any) -> None:
        self._head = module.get_output_embeddings()
        self._logits = self._head.forward
        self._head.forward = self._forward
        self._work: HeadWork | None = None

    @contextmanager
    def doing(self, work: "HeadWork | None") -> Iterator[None]:
        """Compute these terms in the forward inside, whose ``logits_to_keep`` is ``work.rows.held``; None: logits."""
        self._work = work
        try:
            yield
        finally:
            self._work = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32``[1, R, 2]`` in place of logits; logits where no work is given."""
        work = self._work
        if work is None:
            return self._logits(hidden)
        x = hidden.squeeze(0)
        if work.group is not None:
            x = _Exchange.apply(x, work.rows.send, work.rows.receive, work.group)
        head: Any = self._head
        base = head.get_base_layer() if hasattr(head, "get_base_layer") else head
        x = x.to(base.weight.dtype)
        factors = [(x, base.weight)]
        for name in _active_adapters(head):
            if name in head.lora_A:
                low = head.lora_A[name](head.lora_dropout[name](x)) * head.scaling[name]
                factors.append((low.to(x.dtype), head.lora_B[name].weight.to(x.dtype)))
        terms, nll = head_terms(factors, work.labels, work.coefficients, bias=base.bias, block_bytes=work.block_bytes)
        return torch.stack([terms[None], nll[None]], dim=-1)  # no view: FSDP2 warns of one


def _active_adapters(head: Any) -> Sequence[str]:
    """The adapters that PEFT's own forward of a layer would add to its base, which holds those that are merged."""
    if getattr(head, "disable_adapters", True):  # a layer without adapters has no such attribute
        if getattr(head, "merged", False):
            head.unmerge()
        return ()
    return () if head.merged else head.active_adapters


class _Exchange(torch.autograd.Function):
    """Rows between the ranks of a group, of split sizes that all of them know."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        moved = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(moved, x.contiguous(), receive, send, group=group)
        return moved

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(grad_outputs[0], ctx.receive, ctx.send, ctx.group), None, None, None


def head_use(module: Any) -> str:
    """The least memory that a model's head allows: ``fused``, ``targets`` (with ``logits_to_keep``) or ``plain``.

    fused needs a linear head, with LoRA adapters at most, whose logits the model gives as they are: a soft cap or a
    scale would change the terms. That is tried on the model's class without its layers.
    """
    module = module.module if isinstance(module, FullyShardedDataParallel) else module
    model = module.get_base_model() if hasattr(module, "get_base_model") else module
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return "plain"
    head = module.get_output_embeddings()
    base = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    is_linear = isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward
    is_plain = head is base or (
        hasattr(head, "lora_A")  # and neither DoRA nor a bias in the adapter, nor FSDP1 around it
        and not getattr(head, "lora_variant", None)
        and all(type(adapter) is nn.Linear and adapter.bias is None for adapter in head.lora_B.values())
    )
    return "fused" if is_linear and is_plain and _gives_logits_unchanged(type(model), model.config) else "targets"


@dataclass
class _LayersOutput(BaseModelOutputWithPastAndCrossAttentions):
    router_logits: Any = None  # which models with experts read


def _gives_logits_unchanged(cls: type, hf_config: Any) -> bool:
    """Whether a model of this class returns the very tensor that its head gave."""
    given = torch.ones(1, 1, 2, device="cpu")  # also where the caller builds on meta
    hidden: Any = torch.zeros(1, 1, hf_config.get_text_config().hidden_size, device="cpu")

    class Layers(nn.Module):
        def forward(self, *_: Any, **__: Any) -> _LayersOutput:
            return _LayersOutput(last_hidden_state=hidden)

    try:
        with torch.device("meta"):
            model = cls(copy.deepcopy(hf_config))
        model.get_output_embeddings().forward = lambda _: given
        setattr(model, cls.base_model_prefix, Layers())  # type: ignore[attr-defined]
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except Exception:  # of a class that reads more than hidden states
        return False
    return logits is given and bool((given == 1).all())
