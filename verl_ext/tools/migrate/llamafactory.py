"""LLaMA-Factory: a YAML with its dataset_info.json; the keys of its version 0."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.options import DataError, UsageError, must
from verl_ext.tools.migrate import hf_trainer, preferences, sources
from verl_ext.tools.migrate.line import Moved, is_on, mapping, number, split_names
from verl_ext.tools.migrate.tables import reason, values_of

_PLACES = ("hf_hub_url", "ms_hub_url", "file_name")


def read_llamafactory(moved: Moved) -> None:
    """Translate a YAML of version 0; its dataset_info.json stands below its folder."""
    if (stage := moved.values.get("stage", "sft")) not in ("sft", "pt", "dpo", "kto"):
        raise UsageError(must("stage", "be sft, pt, dpo or kto", f"{stage}: {preferences.ELSEWHERE}"))
    moved.take("llamafactory")
    kind = str(moved.get("finetuning_type"))
    _read_data(moved)
    moved.put("data.max_tokens", moved.get("cutoff_len"))
    if stage in ("dpo", "kto"):
        _put_preferences(moved, stage)
    elif stage == "pt" and moved.get("packing") is not False:
        moved.put("data.over_length", "split")
        moved.differ("texts are joined and cut every cutoff_len tokens there; here a part sees its own text alone")
    elif stage == "pt":
        moved.put("data.over_length", "truncate")
    else:
        moved.put("data.over_length", "truncate")
        moved.differ(
            "cutoff_len cuts inside turns there and leaves later ones out; data.over_length=truncate cuts the end"
        )
    # What is trained.
    sources.differ_by_model(moved, "model_name_or_path")
    sources.put_rope(moved, moved.get("cutoff_len"))
    if kind == "lora":
        rank = moved.get("lora_rank")
        alpha = moved.get("lora_alpha") if moved.has("lora_alpha") else int(number(rank, 8) * 2)
        hf_trainer.put_lora(moved, rank, alpha, moved.get("lora_target"))
        if is_on(ratio := moved.get("loraplus_lr_ratio")):
            moved.put("optim.lr_of", {"lora_B": ratio})
    elif moved.words.pop("model.lora_adapter_path", None):
        moved.lack("adapter_name_or_path", "it is not merged into the model: model.path names one with it")
    if moved.is_on("quantization_bit"):
        form, nested = moved.get("quantization_type"), moved.get("double_quantization")
        hf_trainer.read_bits(moved, "quantization_bit", moved.get("quantization_method"), form, nested)
    if kind == "freeze":
        own = {name: moved.get(name) for name in ("freeze_trainable_layers", *_FROZEN)}
        put_frozen(moved, "finetuning_type", own)
    elif kind not in ("lora", "full"):
        moved.lack("finetuning_type", "all parameters are trained, or adapters; model.freeze leaves some out")
    _read_experts(moved)
    hf_trainer.put_split(moved, moved.get("cp_size", "context_parallel_size"))
    packs = moved.is_on("neat_packing", "packing", "use_packed_sequences")
    packs = packs or (stage == "pt" and not moved.has("packing"))
    rows, steps = moved.get("per_device_train_batch_size"), moved.get("gradient_accumulation_steps")
    hf_trainer.read_batch(moved, rows, steps, packs)
    hf_trainer.read_trainer(moved)
    if moved.is_on("use_muon"):
        moved.put("optim.optimizer", "Muon")
    if moved.is_on("use_swanlab"):
        moved.put("trainer.logger", [*moved.words.get("trainer.logger", ["console", "file"]), "swanlab"])
    if moved.is_on("train_from_scratch"):
        hf_trainer.put_new_model(moved, "train_from_scratch")
    if moved.is_on("disable_shuffling"):
        hf_trainer.put_order(moved)
    # What is learnt.
    if moved.is_on("train_on_prompt") and stage == "sft":
        moved.put("prompts", "learn")
    if stage != "pt":
        put_template(moved)
    hf_trainer.differ_by_tokens(moved, "as the mean of all rows with noise")
    if moved.is_on("packing") and not moved.is_on("neat_packing") and moved.get("stage") != "pt":
        moved.differ("packing without neat_packing lets documents of a pack attend to each other there; never here")


def _put_preferences(moved: Moved, stage: str) -> None:
    """Name the loss of answers, of which likelihoods count by their mean."""
    name = "kto" if stage == "kto" else str(moved.get("pref_loss"))
    options = preferences.loss_options(moved, name)
    if not is_on(options["nll_weight"]):
        del options["nll_weight"]
    if name == "orpo" or "nll_weight" in options:
        options["nll_mode"] = "sequence"
    preferences.put_loss(moved, "pref_loss", name, options)


_FROZEN = ("freeze_trainable_modules", "freeze_extra_modules")


def put_frozen(moved: Moved, key: str, options: Mapping[str, Any]) -> None:
    """Train some first or last layers, or their modules, and named ones."""
    count = int(number(options.get("freeze_trainable_layers"), 2.0))
    modules, extra = (split_names(options.get(name)) for name in _FROZEN)
    layers = range(-1, -count - 1, -1) if count > 0 else range(-count)
    within = [""] if modules in ([], ["all"]) else [f".{module}" for module in modules]
    moved.put(
        "model.freeze",
        [*(f"!layers.{layer}{module}" for layer in layers for module in within), *(f"!{name}" for name in extra)],
    )
    if moved.is_on("use_llama_pro"):
        moved.lack("use_llama_pro", "layers are neither added nor replaced")


def _read_experts(moved: Moved) -> None:
    """Translate KTransformers, which keeps a model's experts on the host."""
    if not moved.is_on("use_kt"):
        return
    moved.put("engine.offload_policy", True)
    moved.differ("experts are computed on the host there; here they wait in its memory and are computed on the GPUs")
    weights = mapping("kt_config", moved.get("kt_config")).get("kt_expert_weight_format", "bf16")
    if "bf16" not in str(weights):
        moved.lack("kt_config", reason("quantized"))


def put_template(moved: Moved) -> None:
    """Learn empty thinking blocks as there, and say what else a template of its own does."""
    if moved.get("enable_thinking") is False:
        moved.put("apply_chat_template_kwargs.enable_thinking", False)
    else:
        moved.put("empty_reasoning", "learn")
    if moved.is_on("template"):
        moved.differ(
            f"template={moved.get('template')} is LLaMA-Factory's own: the line end after a turn is learnt there, and "
            "with reasoning every reply begins with an empty thinking block; here the tokenizer's template renders "
            "chats, or chat_template=NAME of a folder chat_templates=FOLDER"
        )


def _read_data(moved: Moved) -> None:
    """Translate the names of datasets by dataset_info.json."""
    info: dict[str, Any] | None = None
    place = str(moved.get("dataset_dir"))
    for key, node in (("dataset", "data.sources"), ("eval_dataset", "data.val_sources")):
        for name in split_names(moved.get(key)):
            info = info if info is not None else _dataset_info(moved, place)
            if name not in info:
                raise DataError(must(key, f"be names of {place}/dataset_info.json", name))
            _put_dataset(moved, key, node, name, info[name], place)
    if is_on(most := moved.get("max_samples")) and "dataset" in moved.values:
        parts = [key.replace("data.sources.", "sample.") for key in moved.words if key.startswith("data.sources.")]
        moved.words |= {part: min(most, moved.words.get(part, most), key=number) for part in parts}
        moved.differ("max_samples takes the first records of each dataset there; sample draws as many at random")


def _dataset_info(moved: Moved, place: str) -> dict[str, Any]:
    """Read dataset_info.json, beside the YAML or where the command would run."""
    if place.startswith(("REMOTE:", "ONLINE")):
        raise DataError(must("dataset_dir", "be a folder with dataset_info.json", f"{place}: download it first"))
    file = Path(place) / "dataset_info.json"
    path = moved.file(str(file))
    if path is None:
        raise DataError(f"dataset_dir={place} must hold the dataset_info.json of LLaMA-Factory; there is no {file}")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be JSON: {error}") from error
    if not isinstance(info, dict) or not all(isinstance(entry, dict) for entry in info.values()):
        raise DataError(must(f"{path}", "map names of datasets to their descriptions", "another form"))
    return info


def _put_dataset(moved: Moved, key: str, node: str, name: str, entry: dict[str, Any], place: str) -> None:
    """Name one dataset's source, its fields and its part."""
    prefers = moved.get("stage") in ("dpo", "kto")
    if entry.get("ranking") and not prefers:
        moved.lack(key, f"{name} holds preferences: stage=dpo learns them")
    kind = next((kind for kind in _PLACES if is_on(entry.get(kind))), None)
    if kind is None:
        moved.lack(key, f"{name} is made by a script or lies in a bucket: its files or a URL are read here")
        return
    if kind == "ms_hub_url":
        moved.differ(f"{name} is of ModelScope; the source names the same data set of the Hub, if it is there")
    where = str(entry[kind])
    if kind == "file_name":
        category = sources.put_source(moved, node, name, f"{place}/{where}")
    else:
        category = sources.put_data(moved, key, node, where, entry.get("subset"), entry.get("split"), name)
    if is_on(most := entry.get("num_samples")) and node == "data.sources":
        moved.put(f"sample.{category}", most)
    # Its fields.
    columns = mapping(f"{name}.columns of dataset_info.json", entry.get("columns"))
    tags = mapping(f"{name}.tags of dataset_info.json", entry.get("tags"))
    is_chat, is_text = entry.get("formatting", "alpaca") != "alpaca", moved.get("stage") == "pt"
    named = {}
    known = values_of("llamafactory_columns")
    for field, (ours, usual) in known.items():
        if is_text and field == "prompt":
            named["text"] = columns.get(field)
        elif columns.get(field) != usual and not (is_chat and field in ("prompt", "query", "response")):
            named[ours] = columns.get(field)
    sources.put_columns(moved, key, name, named)
    # What no source has.
    names = {field: tags.get(f"{field}_tag") for field in ("role", "content")}
    roles = values_of("llamafactory_roles").items()
    sources.put_message_names(moved, key, name, names, {str(tags[tag]): ours for tag, ours in roles if tags.get(tag)})
    moved.lack_others(key, f"{name}: no field is read as", columns, known)
    read = (*_PLACES, "columns", "tags", "formatting", "ranking", "subset", "split")
    moved.lack_others(key, f"{name}: no source has", entry, (*read, *["num_samples"] * (node == "data.sources")))
