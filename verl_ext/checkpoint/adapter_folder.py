"""The merge of any trainer's adapter folder of PEFT into its base.

adapter_config.json + adapter_model.safetensors  ──┐
the base model, a folder or a name of the Hub    ──┴─►  PEFT merges  ──►  model.safetensors, config, tokenizer
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from verl_ext.checkpoint.export import copy_missing, write_weights
from verl_ext.checkpoint.layout import EXPORT_MARKER
from verl_ext.engines.new_rows import embeddings_and_head
from verl_ext.files import OutputFolder, write_json
from verl_ext.layers.towers import auto_class
from verl_ext.options import DataError, first_line

# What PEFT's files add to the names of embeddings and head that lie among the adapters.
_TABLE = r"base_model\.model\.({})(\.(token_adapter\.)?base_layer|\.modules_to_save|\.original_module)?\.weight"


def merge_adapter_folder(
    folder: str,
    base: str,
    output_dir: str,
    overwrite: bool = False,
    dtype: str = "saved",
    shard_gb: float = 5.0,
    trust_remote_code: bool = False,
) -> str:
    """Merge adapters into their base; return a line about it.

    The arguments are the options of `verl-ext export`; the base is held in memory as a whole.

    Raises:
        DataError: If one of both cannot be read, or if they do not fit, with one line.
    """
    transformers.utils.logging.set_verbosity_error()
    try:
        model, tokenizer = _merged_model(folder, base, "auto" if dtype == "saved" else dtype, trust_remote_code)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise DataError(f"checkpoint must hold adapters that PEFT merges into {base}: {first_line(error)}") from error
    with OutputFolder(output_dir, overwrite) as output:
        tokenizer.save_pretrained(output.path)
        write_weights(model, output.path, shard_bytes=int(shard_gb * 1e9))
        for place in (Path(folder), Path(base)):
            copy_missing(place, output.path)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        write_json(output.path / EXPORT_MARKER, {"adapter": folder, "base": base, "form": "merged"})
        output.publish()
    return f"{folder} in {base}: {parameters:,} parameters in {model.dtype}, written to {output_dir}"


def _merged_model(folder: str, name: str, dtype: str, trusted: bool) -> tuple[Any, Any]:
    """Return the plain model and the tokenizer that adapters were trained with."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights  # heavy, and needed with adapters only

    config = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
    model = auto_class(config).from_pretrained(name, dtype=dtype, trust_remote_code=trusted)
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder if has_tokenizer else name, trust_remote_code=trusted)
    saved = load_peft_weights(folder, device="cpu")
    tables = _with_rows_of(model, saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing tensors, below an error; and what is merged at once
        adapted = PeftModel.from_pretrained(model, folder)
        needed = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        if other := sorted((needed ^ saved.keys()) - (tables - needed)):
            what = "is missing" if other[0] in needed else "is of no layer"
            raise ValueError(f"{other[0]} {what}")
        _untie_adapted(adapted)
        return adapted.merge_and_unload(), tokenizer


def _with_rows_of(model: Any, saved: Mapping[str, torch.Tensor]) -> set[str]:
    """Give a base the adapters' rows of embeddings and head.

    Returns the keys of these. Raises ValueError if one of both lacks its rows of new tokens, which are in no file then.
    """
    weights: dict[str, Any] = {name: model.get_submodule(name).weight for name in embeddings_and_head(model)}
    pattern = re.compile(_TABLE.format("|".join(map(re.escape, weights))))
    tables = {key: match[1] for key in saved if (match := pattern.fullmatch(key))}
    before, rows = len(weights[next(iter(weights))]), max((len(saved[key]) for key in tables), default=0)
    if tables and rows != before:
        here = {id(weights[name]) for name in tables.values()}
        if rows > before and (lacking := [name for name, weight in weights.items() if id(weight) not in here]):
            raise ValueError(f"{lacking[0]} lacks the rows of new tokens")
        model.resize_token_embeddings(rows, mean_resizing=False)
    return {*tables}


def _untie_adapted(adapted: Any) -> None:
    """Untie embeddings and head that an adapter would change together."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # as above

    ends: list[Any] = [adapted.get_input_embeddings(), adapted.get_base_model().get_output_embeddings()]
    layers: list[Any] = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    is_tied = all(hasattr(layer, "weight") for layer in layers) and layers[0].weight is layers[1].weight
    if is_tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        layers[1].weight = torch.nn.Parameter(layers[0].weight.detach().clone())
        adapted.config.tie_word_embeddings = False
