"""The options of new LoRA adapters that verl lacks, by PEFT's names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from verl_ext.options import Options, option, plain, spell


@dataclass  # not frozen: a base of verl's own dataclass of the model node
class LoraOptions(Options):
    """The keys of the model node about new adapters."""

    prefix: ClassVar[str] = "model"

    lora_dropout: float = option(
        0.0,
        "share of the adapters' inputs that dropout sets to 0 in training; from 0 to below 1",
        least=0,
        resume="same",
    )
    use_rslora: bool = option(
        False, "true: factor lora_alpha / √lora_rank instead of lora_alpha / lora_rank (rank-stabilized)", resume="same"
    )
    use_dora: bool = option(
        False, "true: a trained length of each row of an adapted weight beside its direction (DoRA)", resume="same"
    )
    layers_to_transform: list[int] | None = option(
        None, "numbers of the layers, from 0, that have adapters; null: all", resume="same"
    )
    layers_pattern: list[str] = option(
        [],
        "names of the lists of layers that layers_to_transform counts ([layers]); empty: the first number of a name",
        resume="same",
    )
    modules_to_save: list[str] = option(
        [],
        "embeddings and linear layers trained whole beside the adapters, by names or ends of names "
        "([embed_tokens, lm_head])",
        resume="same",
    )

    def problems(self) -> Iterator[str]:
        """Yield a line for a dropout of everything, and for a pattern alone."""
        if self.lora_dropout >= 1:
            yield f"model.lora_dropout must be below 1; got {spell(self.lora_dropout)}"
        if self.layers_pattern and self.layers_to_transform is None:
            yield f"model.layers_pattern needs model.layers_to_transform; got {spell(self.layers_pattern)}"


def given_settings(model_node: Any) -> dict[str, Any]:
    """Return the LoraOptions of a node's attributes that are not the defaults."""
    return LoraOptions.read({name: plain(value) for name, value in vars(model_node).items()}).changed()


def separate_tied_rows(module: nn.Module) -> None:
    """Let PEFT's adapters of tied embeddings share parameters, and no module."""
    # Upstream: torch 2.13 reads a full state dict into FSDP2's shards by the first name of a module alone, and PEFT
    # 0.21 puts the dictionary of trained rows below both embeddings and head. To go when torch reads all names.
    from peft.tuners.trainable_tokens import TrainableTokensLayer  # heavy, and needed with adapters only

    for layer in [part for part in module.modules() if isinstance(part, TrainableTokensLayer) and part.tied_adapter]:
        rows, begun = layer.trainable_tokens_delta, layer.trainable_tokens_original
        layer.trainable_tokens_delta = nn.ParameterDict(dict(rows.items()))
        # A buffer of its own: verl broadcasts one after the other, and ranks may hold a shared one once or twice.
        layer.trainable_tokens_original = type(begun)({name: buffer.clone() for name, buffer in begun.items()})
