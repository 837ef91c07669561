"""The tensors of an adapter folder of PEFT, beside those that a model with these adapters has.

PEFT loads what it can: it warns of tensors that are missing, and passes over those of no layer.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from verl_ext.config.weights import counted_names, headers
from verl_ext.engines.new_rows import embeddings_and_head

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# What PEFT's files add to the names of embeddings and head that lie among the adapters.
_TABLE = r"base_model\.model\.({})(\.(token_adapter\.)?base_layer|\.modules_to_save|\.original_module)?\.weight"


def tables_of(model: Any, saved: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return {key: module} of the embeddings and heads of a plain model that lie whole among adapters."""
    pattern = re.compile(_TABLE.format("|".join(map(re.escape, embeddings_and_head(model)))))
    return {key: match[1] for key in saved if (match := pattern.fullmatch(key))}


def adapter_differences(adapted: Any, saved: Mapping[str, torch.Tensor], tables: Mapping[str, str]) -> Iterator[str]:
    """Yield how the tensors of a folder differ from those that PEFT's model needs.

    Args:
        adapted: the model with the adapters of the folder's config.
        saved: the tensors of the folder; those without storage are enough.
        tables: the result of :func:`tables_of`, which may be among them or not.
    """
    from peft import get_peft_model_state_dict  # here and below, because it takes seconds and adapters alone need it
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    needed = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # Adapters of transformers 4 have a tensor for each expert, which PEFT joins.
    found = convert_peft_adapter_state_dict_for_transformers(adapted, adapted.peft_config["default"], dict(saved))
    of_base = {f"base_model.model.{name}": value for name, value in adapted.get_base_model().state_dict().items()}
    if missing := needed.keys() - found.keys():
        yield f"lacks {counted_names(missing)}"
    if extra := found.keys() - needed.keys() - tables.keys():
        yield f"holds {counted_names(extra)} of no layer"
    both = {**{key: value for key, value in of_base.items() if key in tables}, **needed}
    shapes = {key: (list(found[key].shape), list(both[key].shape)) for key in both.keys() & found.keys()}
    if other := [f"{key} {has} for {must}" for key, (has, must) in shapes.items() if has != must]:
        yield f"holds other shapes of {counted_names(other)}"


def tables_in(plain: Any, folder: str) -> dict[str, str]:
    """Return :func:`tables_of` the tensors in `model.lora_adapter_path`."""
    return tables_of(plain, headers(folder, "model.lora_adapter_path", _FILES))


def adapter_weight_problems(plain: Any, adapted: Any, folder: str) -> Iterator[str]:
    """Yield a line if `model.lora_adapter_path` does not hold the tensors that the adapters need."""
    key = "model.lora_adapter_path"
    try:
        saved = headers(folder, key, _FILES)
        differences = [*adapter_differences(adapted, saved, tables_of(plain, saved))]
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        differences = [f"cannot be read: {error}"]
    for difference in differences:
        yield f"{key} must hold the tensors of its adapters on this model; {folder} {difference}"
