"""A layer's experts, shared among the ranks of a group by `parallel.expert_parallel`.

Each of N neighbours holds E/N experts of every layer. Rows of tokens travel to their experts and back; everything else,
such as which ranks share a pack, is as without it.

```
ranks       0           1           2           3            4 ranks, N = 2, E = 8: a mesh of efsdp 2 × ep 2
experts     0-3         4-7         0-3         4-7          FSDP2 shards them over ranks {0, 2} and {1, 3}
exchange    └── {0, 1} ──┘          └── {2, 3} ──┘
```

A weight remains one tensor ``[E, …]``, a DTensor on (efsdp, ep), so that clipping, `full_tensor` and torch's
checkpoints read it like any other. Transformers calls :func:`exchanged_experts` for the models whose engine chose it;
it runs the model's own implementation (a grouped product or a loop) over this rank's experts. Routing weights and the
sum over a token's experts are computed at home, in the order and precision of a layer that holds all experts.

Legend: T tokens of a rank, k experts a token, E experts, N ranks of a group, H hidden size, R rows that arrive.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from verl_ext.options import must
from verl_ext.parallel.exchange import exchange_rows

KEY = "parallel.expert_parallel"
FACTORS = "adapters_on_weights"  # the attribute with adapters of packed weights, by name
_FUNCTION = "verl_ext_expert_parallel"  # its name among transformers' functions, which will have one of its own

# Upstream: torch warns that a strided shard is gathered by two all-gathers one after the other. To go when it does not.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Routing(NamedTuple):
    """Who sends which rows in a layer.

    Attributes:
        order: int64[T · k], the pairs of a token and an expert in the order of the experts, and so of the ranks.
        place: int64[T · k], where each pair lies in that order.
        experts: int64[R], the expert of this rank that each arriving row visits.
        send, receive: the number of rows for and from each rank.
    """

    order: torch.Tensor
    place: torch.Tensor
    experts: torch.Tensor
    send: list[int]
    receive: list[int]


@dataclass(eq=False)
class ExpertShare:
    """The experts of a layer that this rank holds."""

    group: dist.ProcessGroup  # the ranks that together hold all experts of the layer
    rank: int  # this rank's place in the group
    ranks: int
    count: int  # the experts of each rank
    run: Callable[..., torch.Tensor]  # the model's own implementation
    adapters: dict[str, Any] = field(default_factory=dict)  # PEFT's wrappers, by the name of the weight inside
    rows: int = 0  # that arrived since a reader set it to 0, without those of recomputations
    is_met: bool = False  # whether a forward has called `exchanged_experts`

    @property
    def own(self) -> slice:
        """This rank's experts among all."""
        return slice(self.rank * self.count, (self.rank + 1) * self.count)


def expert_layers(module: nn.Module) -> Iterator[Any]:
    """Yield the modules of stacked experts, which transformers calls through its table of functions."""
    return (part for part in module.modules() if "is_transposed" in vars(part) and hasattr(part, "num_experts"))


def own_code_layers(module: nn.Module) -> set[str]:
    """Return the classes of experts that transformers calls in no other way than their own."""
    shared = {*expert_layers(module)}
    parts = ((name, part) for name, part in module.named_modules() if name.rpartition(".")[2] == "experts")
    return {type(part).__name__ for _, part in parts if part not in shared and [*part.parameters()]}


def expert_mesh(fsdp: DeviceMesh, ranks: int) -> DeviceMesh:
    """Arrange the ranks of FSDP's mesh as (replicate ×) efsdp × ep.

    The ranks of a group are neighbours, so that their exchange stays inside a node.
    """
    *replicas, shards = fsdp.shape
    names = (*["replicate"] * len(replicas), "efsdp", "ep")
    return init_device_mesh(fsdp.device_type, (*replicas, shards // ranks, ranks), mesh_dim_names=names)


def share_experts(part: Any, ep: DeviceMesh) -> None:
    """Keep this rank's experts of a layer, as DTensors; weights without memory stay so."""
    own_loop = type(part).forward.__wrapped__  # below transformers' decorator
    run = ALL_EXPERTS_FUNCTIONS.get(part.config._experts_implementation, own_loop)
    part.expert_share = ExpertShare(ep.get_group(), ep.get_local_rank(), ep.size(), part.num_experts // ep.size(), run)
    for name, weight in [*part.named_parameters(recurse=False)]:
        assert weight.shape[0] == part.num_experts, f"{name} of {type(part).__name__} is not a stack of experts"
        own = DTensor.from_local(weight.detach()[part.expert_share.own], ep, [Shard(0)], run_check=False)
        part.register_parameter(name, nn.Parameter(own, requires_grad=weight.requires_grad))
    part.register_forward_hook(_require_met)


def _require_met(part: Any, *_: Any) -> None:
    """Refuse a layer with a replaced forward, which would index its own experts by the numbers of all."""
    share = part.expert_share
    if not share.is_met:
        raise ValueError(must(KEY, f"be 1 for a {type(part).__name__} whose forward is replaced", share.ranks))


def adapt_shares(module: nn.Module) -> None:
    """Let shared experts add their adapters.

    PEFT replaces a weight by a sum while its module runs, and FSDP2 could not gather the weight; here the layer adds
    what its own experts need.
    """
    for wrapper in [part for part in module.modules() if hasattr(part, "get_delta_factors")]:
        share = getattr(wrapper.get_base_layer(), "expert_share", None)  # type: ignore[operator]
        if share is not None:
            share.adapters[wrapper.parameter_name] = wrapper
            wrapper.forward = partial(nn.Module.__call__, wrapper.base_layer)


def choose_exchange(model: Any) -> None:
    """Let a model's layers call :func:`exchanged_experts`."""
    model.set_experts_implementation(_FUNCTION)


def exchanged_experts(
    layer: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' weighted sums ``[T, H]`` for this rank's tokens.

    top_k_index and top_k_weights are ``[T, k]``. A collective of the group, in which a rank without tokens takes part.
    """
    share: ExpertShare = layer.expert_share
    share.is_met = True
    k = top_k_index.shape[1]
    routing = KeptRouting.of_layer(lambda: _route(share, top_k_index))
    rows = exchange_rows(hidden_states[routing.order // k], share.group, routing.send, routing.receive)
    rows = _run_own(layer, rows, routing.experts)
    rows = exchange_rows(rows, share.group, routing.receive, routing.send)
    # Both factors are kept for the backward after the last exchange, so that no rank ends its recomputation before it.
    weighted = rows[routing.place] * top_k_weights.reshape(-1, 1)
    return weighted.view(len(hidden_states), k, -1).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(_FUNCTION, exchanged_experts)


@torch.no_grad()
def _route(share: ExpertShare, index: torch.Tensor) -> Routing:
    """Sort pairs of a token and an expert by expert, and tell each rank what it gets."""
    pairs, order = index.reshape(-1).sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    edges = torch.arange(share.ranks * share.count + 1, dtype=pairs.dtype, device=order.device)
    counts = torch.searchsorted(pairs, edges).diff().view(share.ranks, share.count)
    theirs = torch.empty_like(counts)  # from each rank, for each of this rank's experts
    dist.all_to_all_single(theirs, counts, group=share.group)
    send, receive = row_counts(counts, theirs, len(order))
    share.rows += sum(receive)
    experts = torch.arange(share.count, device=order.device).repeat(share.ranks)
    return Routing(order, place, experts.repeat_interleave(theirs.flatten(), output_size=sum(receive)), send, receive)


def row_counts(counts: torch.Tensor, theirs: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows for and from each rank: a layer's only wait for its device.

    counts and theirs are ``[N, E/N]``. A plan, whose tensors have no values, puts a function of ``rows``, those that
    this rank sends in all, in this place.
    """
    send, receive = torch.stack((counts.sum(1), theirs.sum(1))).tolist()
    return send, receive


def _run_own(layer: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Run this rank's experts on ``rows[R, H]``."""
    arrived = len(rows)
    if arrived == 0:  # without a row, some implementations leave weights without a gradient, for which FSDP2 would wait
        rows, experts = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), experts.new_zeros(1)
    share = layer.expert_share
    return share.run(_OwnExperts(layer), rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))[:arrived]


class _OwnExperts:
    """A layer as if it had this rank's experts alone, with plain weights."""

    def __init__(self, layer: Any) -> None:
        self._layer, self.num_experts = layer, layer.expert_share.count

    def __getattr__(self, name: str) -> Any:
        value, share = getattr(self._layer, name), self._layer.expert_share
        if not isinstance(value, DTensor):
            return value
        value, wrapper = value.to_local(), share.adapters.get(name)
        if value.requires_grad:
            value = _MeanGradient.apply(value, share.ranks)
        if wrapper is not None and not wrapper.disable_adapters and not value.is_floating_point():
            # A packed weight, whose product adds the factors (verl_ext.engines.nf4).
            factors = wrapper.factors_of(wrapper.active_adapters)
            own = [(down[share.own], up[share.own], scale) for down, up, scale in factors]
            vars(self).setdefault(FACTORS, {})[name] = own
        elif wrapper is not None and not wrapper.disable_adapters:
            # The factors of all experts belong to the layer's unit of FSDP. A rank's gradient has the rows of its own
            # experts, summed over its group's tokens, so that the mean over all ranks is right.
            for adapter in wrapper.active_adapters:
                left, right, scale = wrapper.get_delta_factors(adapter)
                value = torch.baddbmm(value, left[share.own], right[share.own], alpha=scale)
        vars(self)[name] = value  # a loop over experts asks for it again
        return value


class _MeanGradient(torch.autograd.Function):
    """A weight whose gradient, a sum over the N ranks of a group, becomes their mean.

    FSDP2 then takes the mean over the ranks with the same experts, and the result is that over all ranks. FSDP2's own
    factor depends on the backend, the type and the number of ranks: with one rank, torch 2.13 may divide twice.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_outputs[0].div_(ctx.ranks), None  # the product's own tensor; a copy would double the peak


class KeptRouting:
    """The routing of the layers inside a checkpoint, which its recomputation takes again.

    Computed again, a router may break a near tie in another way; then other experts would get the gradients, or ranks
    would wait for rows that no one sends.
    """

    now: ClassVar["KeptRouting | None"] = None

    def __init__(self, routings: list[Routing], replays: bool) -> None:
        self._routings, self._replays, self._next = routings, replays, iter(routings)

    @classmethod
    def contexts(cls) -> tuple["KeptRouting", "KeptRouting"]:
        """Return the contexts of a checkpoint's forward and recomputation, as torch's `context_fn`."""
        routings: list[Routing] = []
        return cls(routings, replays=False), cls(routings, replays=True)

    @classmethod
    def of_layer(cls, make: Callable[[], Routing]) -> Routing:
        """Return the routing of the next layer: that of its forward in a recomputation, else a new one."""
        if cls.now is None:
            return make()
        if cls.now._replays:
            return next(cls.now._next)
        cls.now._routings.append(make())
        return cls.now._routings[-1]

    def __enter__(self) -> None:
        self._outer, KeptRouting.now, self._next = KeptRouting.now, self, iter(self._routings)

    def __exit__(self, *_: Any) -> None:
        KeptRouting.now = self._outer
