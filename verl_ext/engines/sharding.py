"""What FSDP shards separately, and what of it stays in fp32."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_ext.layers import SCANS, mixers_of


def keep_decays_precise(module: nn.Module, fsdp_kwargs: dict[str, Any]) -> None:
    """Shard recurrent layers so that their rates of decay stay fp32.

    A_log and dt_bias are summed and exponentiated over all tokens of a document: in bf16 a rate is off by up to 0.4 %.
    A layer's own parameters, and those of its convolution, which it reads and does not call, are a group in fp32 that
    stays whole between forward and backward; its projections and norm are another group with the usual arguments.

    Args:
        module: the model before it is sharded.
        fsdp_kwargs: verl's arguments of fully_shard.
    """
    policy: MixedPrecisionPolicy = fsdp_kwargs["mp_policy"]
    if policy.param_dtype == torch.float32:
        return
    precise = MixedPrecisionPolicy(torch.float32, policy.reduce_dtype, cast_forward_inputs=False)
    for layer in [layer for layer, mixer in mixers_of(module) if mixer.time in SCANS]:
        called = [part for part in layer.children() if [*part.parameters()] and not isinstance(part, nn.Conv1d)]
        fully_shard(called, **fsdp_kwargs)
        fully_shard(layer, **{**fsdp_kwargs, "mp_policy": precise, "reshard_after_forward": False})


def sharded_apart(module: Any) -> list[str]:
    """Return the classes of layers that FSDP2 can shard by themselves."""
    # Upstream: verl 0.9.1 shards classes of _no_split_modules and untied embeddings, outer modules before inner ones,
    # and shards tied embeddings apart from the head (RoBERTa's). FSDP2 refuses both. Without such classes (Electra),
    # verl stops. To go when verl shards from the inside out and leaves shared weights to the parent.
    names = set(getattr(module, "_no_split_modules", None) or _layers(module))
    uses = Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))
    tied = getattr(module.config, "tie_word_embeddings", False)

    def stands_alone(layer: Any) -> bool:
        inner = [part for part in layer.modules() if part is not layer]
        if any(type(part).__name__ in names or (isinstance(part, nn.Embedding) and not tied) for part in inner):
            return False
        counts = Counter(weight for _, weight in layer.named_parameters(remove_duplicate=False))
        return all(uses[weight] == count for weight, count in counts.items())

    layers = [layer for layer in module.modules() if type(layer).__name__ in names]
    return sorted({*names} - {type(layer).__name__ for layer in layers if not stands_alone(layer)})


def local_part(tensor: Any) -> torch.Tensor:
    """Return a rank's part of a tensor, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(module: Any) -> set[str]:
    """Return the classes of the members of a model's outermost lists."""
    lists = {path: part for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [part for path, part in lists.items() if not path.startswith(tuple(f"{other}." for other in lists))]
    return {type(layer).__name__ for part in outer for layer in part}
