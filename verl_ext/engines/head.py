"""The head inside the engine: targets' loss terms in place of logits.

Sequence-parallel ranks hold slices of the pack whose targets are spread unevenly (an answer ends a document). Hidden
states of targets move between ranks, so that every rank has equally many.

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
from torch.distributed.fsdp import FSDPModule

from verl_ext.losses import Coefficients, head_terms
from verl_ext.parallel.exchange import exchange_rows
from verl_ext.parallel.shards import SequenceShards


@dataclass(frozen=True)
class TargetRows:
    """A sequence-parallel rank's targets before and after the exchange.

    All of this is known on the host.

    Attributes:
        positions: int64[N], those of all targets in the pack, in the order of the ranks that hold them.
        local: int64[≤ N], the targets in this rank's slice, counted from the slice's beginning.
        part: the part of `positions` that this rank's head computes.
        send: the number of hidden states that go to each rank.
        receive: the number of hidden states that come from each rank.
        most: R.
    """

    positions: torch.Tensor
    local: torch.Tensor
    part: slice
    send: list[int]
    receive: list[int]
    most: int

    @classmethod
    def from_rows(cls, rows: torch.Tensor, tokens: int, shards: SequenceShards) -> "TargetRows":
        """Read the rows of targets on the host, some maybe twice, among T = `tokens`, padding included."""
        is_target = torch.zeros(tokens, dtype=torch.bool)
        is_target[rows] = True
        by_rank = shards.by_rank(is_target).nonzero().flatten()
        rank, ranks, length = shards.rank, shards.ranks, tokens // shards.ranks
        most = max(-(-len(by_rank) // ranks), 1)  # a gather of nothing has no backward
        # The edges of ranks among the targets: by the slices that hold them, and evenly.
        slices = np.searchsorted(by_rank.numpy(), np.arange(ranks + 1) * length)
        even = np.minimum(np.arange(ranks + 1) * most, len(by_rank))

        def overlaps(edges: np.ndarray, others: np.ndarray) -> list[int]:
            first, last = np.maximum(edges[rank], others[:-1]), np.minimum(edges[rank + 1], others[1:])
            return np.maximum(last - first, 0).tolist()

        local = by_rank[slices[rank] : slices[rank + 1]] - rank * length
        positions = shards.by_rank(torch.arange(tokens))[by_rank]
        part = slice(*even[rank : rank + 2].tolist())
        return cls(positions, local, part, overlaps(slices, even), overlaps(even, slices), most)


@dataclass(frozen=True)
class HeadInputs:
    """The inputs of a :class:`FusedHead` beside the hidden states.

    Attributes:
        labels: int64[≤ R], the labels of the targets `rows.part`.
        coefficients: fp32[≤ R], the coefficients of the same targets, or a function of their losses.
        rows: the targets of this rank.
        group: the sequence-parallel ranks; None for a single rank.
        block_bytes, with_stats: the arguments of :func:`head_terms`.
    """

    labels: torch.Tensor
    coefficients: Coefficients
    rows: TargetRows
    group: dist.ProcessGroup | None
    block_bytes: int
    with_stats: bool = False


class FusedHead:
    """A module's output embedding, which computes ``(loss term, nll)`` per target.

    It does so inside :meth:`computing_loss`, with ``logits_to_keep=rows.local``, and gives logits elsewhere. FSDP's
    hooks stay around its forward, so its weight is whole inside, as it is for logits. The backward of loss terms needs
    no weight, so FSDP2 does not gather it a second time, if the head is sharded by itself (as untied heads are).
    """

    def __init__(self, module: Any) -> None:
        self._head = _computing_head(module)
        self._logits = self._head.forward
        self._head.forward = self._forward
        self._inputs: HeadInputs | None = None

    @contextmanager
    def computing_loss(self, inputs: "HeadInputs | None") -> Iterator[None]:
        """Let the forward inside compute loss terms of `inputs`; None: logits."""
        self._inputs = inputs
        if isinstance(self._head, FSDPModule) and isinstance(self._head, nn.Linear):  # an adapter needs its weights
            self._head.set_unshard_in_backward(inputs is None)
        try:
            yield
        finally:
            self._inputs = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return terms fp32``[1, R, 2 or 4]``, or logits without inputs."""
        if (inputs := self._inputs) is None:
            return self._logits(hidden)
        x = hidden.squeeze(0)  # [targets of this rank's slice, H]
        if inputs.group is not None:
            x = exchange_rows(x, inputs.group, inputs.rows.send, inputs.rows.receive)
        head: Any = self._head
        base = _base_layer(head)
        x = x.to(base.weight.dtype)
        factors = [(x, _weight(head))]
        for name in _active_adapters(head):
            if name in head.lora_A:
                low = head.lora_A[name](head.lora_dropout[name](x)) * head.scaling[name]
                factors.append((low.to(x.dtype), head.lora_B[name].weight.to(x.dtype)))
        terms = head_terms(
            factors,
            inputs.labels,
            inputs.coefficients,
            bias=base.bias,
            block_bytes=inputs.block_bytes,
            with_stats=inputs.with_stats,
        )
        return torch.stack([x[None] for x in terms], dim=-1)  # a copy: FSDP2 warns if a forward returns a view


def _computing_head(module: Any) -> Any:
    """Return the output embedding, or PEFT's copy that is trained in its place (`model.modules_to_save`)."""
    head = module.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapter]


def _base_layer(head: Any) -> Any:
    """Return a head's own linear layer, below any adapters."""
    holder = getattr(head, "token_adapter", head)
    return holder.get_base_layer() if hasattr(holder, "get_base_layer") else head


def _weight(head: Any) -> torch.Tensor:
    """Return a head's weight, with the rows in place that PEFT trains alone."""
    rows = getattr(head, "token_adapter", None)
    if rows is None:
        return _base_layer(head).weight
    return rows.get_merged_weights(() if rows.disable_adapters or rows.merged else rows.active_adapters)


def _active_adapters(head: Any) -> Sequence[str]:
    """Return the LoRA adapters that PEFT would add, unless merged."""
    if not hasattr(head, "lora_A"):
        return ()
    if head.disable_adapters:
        if head.merged:
            head.unmerge()
        return ()
    return () if head.merged else head.active_adapters


def cheapest_head(module: Any) -> str:
    """Return the leanest form of head: ``fused``, ``targets`` or ``plain``.

    `fused` needs a linear head, with LoRA adapters or trained rows at most, whose logits the model returns unchanged: a
    soft cap or a scale would change the terms. A model of the same class without its layers shows that. `targets` needs
    a model that takes ``logits_to_keep``.
    """
    model = module.get_base_model() if hasattr(module, "get_base_model") else module
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return "plain"
    head = _computing_head(module)
    base = _base_layer(head)
    is_linear = isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward
    is_plain = (
        head is base
        or hasattr(head, "token_adapter")
        or (
            hasattr(head, "lora_A")  # neither DoRA, nor a bias in the adapter
            and not getattr(head, "lora_variant", None)
            and all(type(adapter) is nn.Linear and adapter.bias is None for adapter in head.lora_B.values())
        )
    )
    return "fused" if is_linear and is_plain and _gives_logits_unchanged(type(model), model.config) else "targets"


class _LayersOutput:
    """A layers' output: a hidden state, and None for other names."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def _gives_logits_unchanged(cls: type, hf_config: Any) -> bool:
    """Tell whether this class returns the very tensor of its head."""
    probe = torch.ones(1, 1, 2, device="cpu")  # even if the caller builds on meta
    hidden: Any = torch.zeros(1, 1, hf_config.get_text_config().hidden_size, device="cpu")

    class Layers(nn.Module):
        def forward(self, *_: Any, **__: Any) -> _LayersOutput:
            return _LayersOutput(hidden)

    try:
        with torch.device("meta"):
            model = cls(copy.deepcopy(hf_config))
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        head.forward = lambda _: probe
        # The layers are siblings of the head, which may belong to a model inside this one.
        parent = next(part for part in model.modules() if head in part.children())
        for name, part in list(parent.named_children()):
            if embeddings in part.modules():
                setattr(parent, name, Layers())
        logits = model(inputs_embeds=hidden, use_cache=False).logits
    except Exception:  # a class that reads more than hidden states can raise any exception
        return False
    return logits is probe and bool((probe == 1).all())
