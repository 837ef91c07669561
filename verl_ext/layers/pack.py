"""The pack that runs through a model, as its layers see it.

Layers with a state over time must know where documents begin. Some models (Falcon-H1, Jamba) pass no keyword arguments
to their layers, so the layout reaches layers through an object that all modules of a model share.
"""

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_ext.options import first_line, must
from verl_ext.parallel.shards import DocumentLayout, SequenceShards, pinned


class RunningPack:
    """The micro-batch that a model computes, until its backward ends.

    A recomputed layer reads the same layout as in the forward, because an engine runs the backward of a micro-batch
    before the forward of the next one.

    Attributes:
        shards: the division of a pack's tokens among the ranks that share it.
        group: the process group of these ranks; None for one rank.
        layout: the documents of all T tokens, padding included; None outside of packs, as in generation.
    """

    def __init__(self, shards: SequenceShards | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.shards, self.group = shards or SequenceShards(), group
        self.layout: DocumentLayout | None = None

    def __deepcopy__(self, memo: Any) -> "RunningPack":
        return self  # a layer that PEFT copies (modules_to_save) computes the same micro-batch

    def positions(self) -> torch.Tensor:
        """Return int64[L], the places of this rank's tokens in documents."""
        assert self.layout is not None
        layout, device = self.layout, self.layout.cu_seqlens.device

        def make() -> torch.Tensor:
            return pinned(self.shards.slice(layout.positions()), device).to(device, non_blocking=True)

        return layout.derived("positions", make)


def fla_lengths(layout: DocumentLayout) -> dict[str, torch.Tensor]:
    """Return boundaries on device and host, so flash-linear-attention need not wait.

    All layers of a micro-batch get the same tensors: for others, it would copy the indices of its chunks again.
    """
    return layout.derived(
        "fla", lambda: {"cu_seqlens": layout.cu_seqlens.long(), "cu_seqlens_cpu": torch.tensor(layout.offsets)}
    )


def import_fla(module: str) -> Any:
    """Import a module of flash-linear-attention; raise ImportError if it is not there.

    Raises RuntimeError if there is a package without Triton, or one for another torch.
    """
    # Upstream: any import of flash-linear-attention 0.6 replaces configs of transformers (mamba2, bitnet) by its own in
    # transformers' Auto classes, so that a later read gives another class. To go when it leaves them.
    try:
        return importlib.import_module(f"fla.{module}")
    except Exception as error:  # of another torch, a package may raise any error
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "fla":
            raise  # the package is not installed, or this version has no such module
        got = f"torch {torch.__version__} ({first_line(error)})"
        raise RuntimeError(must("flash-linear-attention", "be importable, or be uninstalled", got)) from error
    finally:
        known = CONFIG_MAPPING._extra_content
        for kind in [kind for kind, config in known.items() if config.__module__.startswith("fla.")]:
            if kind in CONFIG_MAPPING._mapping:
                del known[kind]


def attach(model: nn.Module, pack: RunningPack) -> None:
    """Let all modules read their model's `document_layout`."""

    def begin(_: nn.Module, args: tuple, kwargs: dict) -> None:
        pack.layout = kwargs.get("document_layout")

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for module in model.modules():
        module.running_pack = pack  # type: ignore[assignment]
