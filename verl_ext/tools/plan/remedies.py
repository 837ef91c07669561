"""The overrides that a plan tries if a run does not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.config.run import RunConfig
from verl_ext.config.support import CP, SP
from verl_ext.options import options_of
from verl_ext.parallel.experts import KEY as EP
from verl_ext.trainer.run import Opened


@dataclass(frozen=True)
class Remedy:
    """An override that lowers the peak.

    Attributes:
        key: the option.
        values: its values, in the order of their trials.
        costs: what it costs.
        applies: whether it can help a run.
    """

    key: str
    values: tuple[Any, ...] | Callable[[Opened], Sequence[Any]]
    costs: str
    applies: Callable[[RunConfig], bool] = lambda config: True


def _freezes(config: RunConfig) -> bool:
    return bool(config.model_options.lora_rank or config.model_options.freeze)


def _has_adam(config: RunConfig) -> bool:
    return (config.optim.optimizer, config.optim.optimizer_impl) == ("AdamW", "torch.optim")


def _smaller_packs(run: Opened) -> list[int]:
    """Return half and a quarter of a pack's tokens, if every document fits as before."""
    if run.config.dataset_class.has_units or "max_tokens" not in options_of(run.config.dataset_class.Options):
        return []
    longest = run.train_set.facts().longest_document
    return [tokens for tokens in (run.config.max_tokens // 2, run.config.max_tokens // 4) if tokens >= longest]


# Ordered by their cost in a step.
REMEDIES = (
    Remedy("loss.head", ("fused",), "nothing"),
    Remedy("model.frozen_dtype", ("compute",), "frozen weights are held as a forward reads them", _freezes),
    Remedy("model.tile_tokens", (4096,), "about a tenth of what a step costs without attention"),
    Remedy("engine.use_no_sync_for_gradient_accumulation", (False,), "a reduction of gradients every micro-batch"),
    Remedy("data.micro_batch_size_per_gpu", (1,), "smaller forwards, more of them"),
    Remedy("optim.optimizer", ("AdamW8bit",), "moments of eight bits, which round the steps", _has_adam),
    Remedy("model.enable_gradient_checkpointing", (True,), "every layer's forward once more"),
    Remedy("model.activation_offload", (True,), "copies of each layer's hidden state beside the computation"),
    Remedy(EP, (4, 8), "rows of tokens to and from the ranks of their experts, which no computation hides"),
    Remedy(SP, (2, 4, 8, 16, 32, 64), "all-to-alls over more ranks, fewer packs at a time"),
    Remedy(CP, (2, 4, 8), "keys and values between groups of ranks, fewer packs at a time"),
    Remedy("engine.offload_policy", (True,), "parameters, gradients and optimizer on the host: copies every step"),
    Remedy("data.max_tokens", _smaller_packs, "fewer tokens a step, unless data.train_batch_size grows"),
)
# Those that say which ranks share a pack, and which share experts.
SHARED_PACKS = tuple(next(remedy for remedy in REMEDIES if remedy.key == key) for key in (SP, CP))
SHARED_EXPERTS = next(remedy for remedy in REMEDIES if remedy.key == EP)
