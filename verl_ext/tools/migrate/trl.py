"""TRL: the command `trl sft`, its script sft.py, or its YAML."""

from verl_ext.tools.migrate import hf_trainer, preferences, sources
from verl_ext.tools.migrate.line import Moved, listed, mapping, number


def read_trl(moved: Moved, family: str = "sft") -> None:
    """Translate the command's flags, or the YAML's keys.

    family: that of the command, sft, dpo or kto.
    """
    moved.take("trl" if family == "sft" else f"trl_{family}")
    _read_data(moved)
    moved.put("data.max_tokens", moved.get("max_length", "max_seq_length"))
    if not moved.has("max_length", "max_seq_length"):
        moved.differ("max_length not given: TRL's default is 1024; data.max_tokens is the budget of a pack")
    packs, kind = moved.is_on("packing"), str(moved.get("packing_strategy"))
    moved.put("data.over_length", "split" if packs and kind in ("bfd_split", "wrapped") else "truncate")
    if packs and kind == "wrapped":
        moved.differ("packing_strategy=wrapped lets documents attend to each other there; never here")
    if family != "sft":
        preferences.read_loss(moved, family)
    elif moved.get("loss_type") == "dft":
        moved.put("loss.by_probability", True)
    elif moved.get("loss_type") not in (None, "nll", "chunked_nll"):
        moved.lack("loss_type", "a loss of the prediction; loss.custom_cls has coefficients by token")
    # What is trained.
    sources.differ_by_model(moved, "model_name_or_path")
    if moved.is_on("use_peft"):
        rank, alpha = moved.get("lora_r"), moved.get("lora_alpha")
        hf_trainer.put_lora(moved, rank, alpha, moved.get("lora_target_modules"))
    if moved.is_on("load_in_4bit"):
        kind, nested = moved.get("bnb_4bit_quant_type"), moved.get("use_bnb_nested_quant")
        hf_trainer.put_four_bits(moved, "load_in_4bit", kind, nested)
    parallel = mapping("parallelism_config", moved.get("parallelism_config"))
    hf_trainer.put_split(moved, max((parallel.get(name, 1) for name in ("sp_size", "cp_size")), key=number))
    known = ("sp_size", "cp_size", "dp_shard_size")
    if other := [name for name, value in parallel.items() if name not in known and number(value) > 1]:
        moved.lack("parallelism_config", f"ranks share parameters and packs; got {', '.join(other)}")
    rows, steps = moved.get("per_device_train_batch_size"), moved.get("gradient_accumulation_steps")
    hf_trainer.read_batch(moved, rows, steps, packs)
    hf_trainer.read_trainer(moved)
    # What is learnt.
    if family == "sft" and moved.is_on("assistant_only_loss"):
        moved.put("empty_reasoning", "learn")
        moved.differ(
            "assistant_only_loss takes a template of TRL's own for the families it knows: Qwen3's begins every reply "
            "with an empty thinking block, and learns the line end after it; here the tokenizer's template renders "
            "chats, or chat_template=qwen3_training chat_templates=trl:chat_templates"
        )
    elif family == "sft" and not moved.is_on("completion_only_loss"):
        moved.words |= {"prompts": "learn", "empty_reasoning": "learn"}
        if not moved.has("completion_only_loss"):
            moved.differ(
                "without assistant_only_loss every token of a chat is learnt there (prompts=learn "
                "empty_reasoning=learn); leave both out for a prompt and its completion, which alone is learnt there"
            )


def _read_data(moved: Moved) -> None:
    """Translate the data set's name, configuration and splits."""
    if name := str(moved.get("dataset_name")):
        subset = moved.get("dataset_config")
        sources.put_data(moved, "dataset_name", "data.sources", name, subset, moved.get("dataset_train_split"))
        if moved.is_on("eval_strategy", "evaluation_strategy") and not sources.is_file(name):
            split = moved.get("dataset_test_split")
            sources.put_data(moved, "dataset_name", "data.val_sources", name, subset, split)
    for entry in listed(moved.get("datasets")):
        fields = entry if isinstance(entry, dict) else {"path": entry}
        path = str(fields.get("path", ""))
        sources.put_data(moved, "datasets", "data.sources", path, fields.get("name"), fields.get("split"))
        moved.lack_others("datasets", f"{path}: no source has", fields, ("path", "name", "split"))
