"""The merge of any trainer's adapter folder of PEFT into its base.

adapter_config.json + adapter_model.safetensors  ──┐
the base model, a folder or a name of the Hub    ──┴─►  PEFT merges  ──►  model.safetensors, config, tokenizer
"""

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from verl_ext.checkpoint import source
from verl_ext.checkpoint.export import NF4_FACTS, ExportForm, base_of, convert, dtypes_of, write_weights
from verl_ext.checkpoint.layout import EXPORT_MARKER
from verl_ext.checkpoint.untrained import Untrained
from verl_ext.config.adapter_weights import adapter_differences, tables_of
from verl_ext.engines.new_rows import embeddings_and_head
from verl_ext.engines.nf4_reading import round_to_nf4
from verl_ext.files import OutputFolder, write_json
from verl_ext.options import DataError, first_line, must


def merge_adapter_folder(asked: ExportForm, base: str) -> str:
    """Merge adapters into their base, which is held in memory as a whole; return a line about it.

    Raises:
        DataError: If one of both cannot be read, or if they do not fit, with one line.
    """
    transformers.utils.logging.set_verbosity_error()
    folder = asked.checkpoint
    try:
        nf4 = _nf4_facts(Path(folder))
        rounded = nf4 if asked.base_form == "dequantized" else {}
        model, tokenizer, untrained = _merged_model(asked, base, rounded)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise DataError(f"checkpoint must hold adapters that PEFT merges into {base}: {first_line(error)}") from error
    with OutputFolder(asked.output_dir, asked.overwrite) as output:
        tokenizer.save_pretrained(output.path)
        source.copy_missing(source.folder_of(base), output.path, [source.GENERATION])
        write_weights(model, output.path, asked.shard_bytes)
        if untrained is not None:
            untrained.copy(output.path, shard_bytes=asked.shard_bytes)
        for place in (Path(folder), source.folder_of(base)):
            source.copy_missing(place, output.path)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        write_json(output.path / EXPORT_MARKER, {"adapter": folder, "base": base, "form": "merged", **nf4})
        output.publish()
    about = f", {base_of(nf4, asked)}" if nf4 else ""
    return f"{folder} in {base}: {parameters:,} parameters in {model.dtype}{about}, written to {asked.output_dir}"


def _nf4_facts(folder: Path) -> dict[str, Any]:
    """Return what an adapter folder of this project says of a base in NF4; {} for others."""
    file = folder / EXPORT_MARKER
    facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: facts[name] for name in NF4_FACTS if facts.get(name)}


def _merged_model(asked: ExportForm, name: str, nf4: Mapping[str, Any]) -> tuple[Any, Any, Untrained | None]:
    """Return the merged model, the adapters' tokenizer, and the tensors that the class does not load."""
    from peft import PeftConfig, PeftModel, load_peft_weights  # heavy, and needed with adapters only

    folder, trusted = asked.checkpoint, asked.trust_remote_code
    config = source.read_config(name, trusted)
    model = source.read_model(name, copy.deepcopy(config), trusted)
    config.dtype = getattr(torch, asked.dtype, source.source_dtype(config, name))
    plain = source.plain_model(config, trusted)
    untrained = Untrained.of_source(name, model, lambda: plain, ())
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder if has_tokenizer else name, trust_remote_code=trusted)
    saved = load_peft_weights(folder, device="cpu")
    lora: Any = PeftConfig.from_pretrained(folder)
    tables = _with_rows_of(model, saved, lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing tensors, below an error; and what is merged at once
        if nf4:
            round_to_nf4(model, nf4.get(NF4_FACTS[1], False), lora.modules_to_save or ())
        adapted = PeftModel.from_pretrained(model, folder, ignore_mismatched_sizes=True)  # told below
        if difference := next(adapter_differences(adapted, saved, tables), None):
            raise ValueError(f"the folder {difference}")
        _untie_adapted(adapted)
        merged = adapted.merge_and_unload()  # in fp32, so that sums are rounded and not their terms
    if told := convert(merged, dtypes_of(plain), plain.config.dtype, torch.empty):
        raise ValueError(must("dtype", "hold the weights", f"{asked.dtype}: {told}"))
    return merged, tokenizer, untrained


def _with_rows_of(model: Any, saved: Mapping[str, torch.Tensor], peft_config: Any) -> dict[str, str]:
    """Give a base the adapters' rows of embeddings and head.

    Returns the result of :func:`tables_of`. Raises ValueError if one of both lacks its rows of new tokens, which are in
    no file then.
    """
    weights: dict[str, Any] = {name: model.get_submodule(name).weight for name in embeddings_and_head(model)}
    tables = tables_of(model, saved)
    before, named = len(weights[next(iter(weights))]), {*tables.values()}
    rows = max((len(saved[key]) for key in tables), default=before)
    # Adapters that train rows hold these alone, of the embeddings if they name no part.
    trained = getattr(peft_config, "trainable_token_indices", None) or {}
    trained = trained if isinstance(trained, dict) else {next(iter(weights)): trained}
    if not tables:
        rows = max([before, *(1 + row for of_part in trained.values() for row in of_part)])
        whole = [part for part, of_part in trained.items() if {*range(before, rows)} <= {*of_part}]
        named = {name for name in weights for part in whole if f".{name}".endswith(f".{part}")}
    if rows != before:
        here = {id(weights[name]) for name in named}
        if rows > before and (lacking := [name for name, weight in weights.items() if id(weight) not in here]):
            raise ValueError(f"{lacking[0]} lacks the rows of new tokens")
        model.resize_token_embeddings(rows, mean_resizing=False)
    return tables


def _untie_adapted(adapted: Any) -> None:
    """Untie embeddings and head that an adapter would change together."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # as above

    ends: list[Any] = [adapted.get_input_embeddings(), adapted.get_base_model().get_output_embeddings()]
    layers: list[Any] = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    is_tied = all(hasattr(layer, "weight") for layer in layers) and layers[0].weight is layers[1].weight
    if is_tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        layers[1].weight = torch.nn.Parameter(layers[0].weight.detach().clone())
        adapted.config.tie_word_embeddings = False
