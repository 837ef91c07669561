"""The merge of any trainer's adapter folder of PEFT into its base.

adapter_config.json + adapter_model.safetensors  ──┐
the base model, a folder or a name of the Hub    ──┴─►  PEFT merges  ──►  model.safetensors, config, tokenizer
"""

import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer

from verl_ext.checkpoint.export import copy_missing, write_weights
from verl_ext.checkpoint.layout import EXPORT_MARKER
from verl_ext.files import OutputFolder, write_json
from verl_ext.layers.towers import auto_class
from verl_ext.options import DataError, first_line

_TABLES = (".embed_tokens.weight", ".lm_head.weight")  # names of embeddings and head in PEFT's files


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
    except (OSError, ValueError, KeyError, RuntimeError) as error:
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
    # Embeddings with rows of new tokens lie among the adapters, so the base gets as many rows first.
    saved = load_peft_weights(folder, device="cpu")
    tables = {key: len(tensor) for key, tensor in saved.items() if key.endswith(_TABLES)}
    if tables and max(tables.values()) != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(max(tables.values()), mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing tensors, below an error; and what is merged at once
        adapted = PeftModel.from_pretrained(model, folder)
        needed = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        if other := sorted((needed ^ saved.keys()) - (tables.keys() - needed)):
            what = "is missing" if other[0] in needed else "is of no layer"
            raise ValueError(f"{other[0]} {what}")
        return adapted.merge_and_unload(), tokenizer
