"""New LoRA adapters: the options that verl lacks, by PEFT's names, and the modules that their names mean."""

import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from verl_ext.options import Options, must, option, plain, spell

ALL_LINEAR = "all-linear"  # PEFT's word


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
            yield must("model.lora_dropout", "be below 1", self.lora_dropout)
        if self.layers_pattern and self.layers_to_transform is None:
            yield f"model.layers_pattern needs model.layers_to_transform; got {spell(self.layers_pattern)}"


def given_settings(model_node: Any) -> dict[str, Any]:
    """Return the LoraOptions of a node's attributes that are not the defaults."""
    return LoraOptions.read({name: plain(value) for name, value in vars(model_node).items()}).changed()


def modules_to_save(model_node: Any) -> list[str]:
    """Return the names of layers that adapters train whole, from a model node or its folder of adapters."""
    if folder := getattr(model_node, "lora_adapter_path", None):
        from peft import LoraConfig  # heavy; with adapters

        lora: Any = LoraConfig.from_pretrained(folder)
        return list(lora.modules_to_save or ())
    return list(model_node.modules_to_save)


def as_written(module: nn.Module, lora: Any) -> Any:
    """Return a LoraConfig with which PEFT adapts every module that `target_modules` names, and no other.

    module: the plain model. The modules of all-linear are all linear layers, beside the experts that PEFT adds to them;
    of the routers, those whose weights PEFT can wrap.
    """
    # Upstream: for types whose experts transformers 5 has as one tensor, PEFT 0.21 reads gate_proj, up_proj, down_proj
    # and gate as that tensor alone, so that shared experts and dense layers of these names get no adapter, and of a
    # regular expression it keeps the last parts of names. Named by their weights (`target_parameters`), such layers are
    # adapted, also when PEFT loads the exported adapters. To go when PEFT adapts the modules of these names.
    if not lora.target_modules:
        return lora
    is_all, read = lora.target_modules == ALL_LINEAR, _as_peft_reads(module, lora)
    written, given = _targeted(module, lora), set(lora.target_parameters or ())
    hidden = _hidden_routers(module, read) - given if is_all and read is not None else set()
    if (
        read is not None
        and not hidden
        and _targeted(module, read) == written
        and (is_all or {*(read.target_parameters or ())} == given)
    ):
        return lora
    new = copy.deepcopy(read if is_all else lora)  # with PEFT's ranks of joined experts
    alone, by_weight = copy.copy(lora), []
    for name in written:
        alone.target_modules, alone.target_parameters = [name], None
        of_name = _as_peft_reads(module, alone)
        if of_name is None or name not in of_name.target_modules:
            by_weight.append(name)
    new.target_modules = [name for name in written if name not in by_weight]
    by_name = {*(new.target_parameters or ())} - hidden
    new.target_parameters = sorted({*by_name, *(f"{name}.weight" for name in by_weight)})
    new.layers_to_transform = new.layers_pattern = None  # whole names have their layers
    return new


def _hidden_routers(module: nn.Module, lora: Any) -> set[str]:
    """Return the `target_parameters` of routers whose buffers their layers read.

    PEFT's module around a weight does not show the buffers, such as DeepSeek-V3's corrections, so that its model fails.
    """
    hidden = set()
    for name in {*(lora.target_parameters or ())}:
        for path in [path for path, _ in module.named_parameters() if f".{path}".endswith(f".{name}")]:
            router, _, _ = path.rpartition(".")
            layer, _, own = router.rpartition(".")
            buffers = [buffer for buffer, _ in module.get_submodule(router).named_buffers(recurse=False)]
            source = inspect.getsource(type(module.get_submodule(layer))) if buffers else ""
            hidden |= {name} if any(f".{own}.{buffer}" in source for buffer in buffers) else set()
    return hidden


def _as_peft_reads(module: nn.Module, lora: Any) -> Any:
    """Return PEFT's reading of a LoraConfig for a plain model; None if it refuses the names."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers  # heavy; with adapters

    read: Any = copy.deepcopy(lora)
    try:
        convert_peft_config_for_transformers(read, module, None)
    except ValueError:  # of gate_proj without up_proj
        return None
    return read


def _targeted(module: nn.Module, lora: Any) -> list[str]:
    """Return the modules that a LoraConfig's `target_modules` name."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists  # as above

    named: Any = _maybe_include_all_linear_layers(copy.copy(lora), module)
    names = [name for name, _ in module.named_modules() if name]
    return [name for name in names if named.target_modules and check_target_module_exists(named, name)]


def expected_parts(module: nn.Module, lora: Any) -> list[str]:
    """Return the modules and parameters of a plain model that get adapters, by the names of a LoraConfig."""
    read = _as_peft_reads(module, lora) or lora
    names, ends = _targeted(module, read), tuple(f".{end}" for end in read.target_parameters or ())
    return sorted({*names, *(name for name, _ in module.named_parameters() if f".{name}".endswith(ends))})


def adapted_parts(adapted: Any) -> list[str]:
    """Return the modules and parameters of a plain model that have adapters in PEFT's model around it."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper  # as above

    parts = set()
    for name, part in adapted.get_base_model().named_modules():
        if isinstance(part, ParamWrapper):
            parts.add(f"{name.replace('.base_layer', '')}.{part.parameter_name}")
        elif isinstance(part, LoraLayer):
            parts.add(name)
    return sorted(parts)


def counted_parts(parts: Iterable[str]) -> str:
    """Count parts by their names inside a layer: `mlp.down_proj (28), self_attn.q_proj (28)`."""
    counts = Counter(re.sub(r".*\.\d+\.", "", part) for part in parts)
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))


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
