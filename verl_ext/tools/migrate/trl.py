"""TRL: the command `trl sft`, its script sft.py, or its YAML."""

from pathlib import Path

from verl_ext.tools.migrate import hf_trainer
from verl_ext.tools.migrate.hf_trainer import (
    QUANTIZED,
    TrainerDefaults,
    hub,
    is_file,
    name_of,
    put_lora,
    put_split,
    read_batch,
    read_trainer,
)
from verl_ext.tools.migrate.line import FREE, READ, Moved, Rule, lacking, rules, to

NAME = "TRL"

KEYS: dict[str, Rule] = {
    **hf_trainer.KEYS,
    "model_name_or_path": to("model.path"),
    **rules(
        READ,
        "dataset_name dataset_config dataset_train_split dataset_test_split dataset_text_field datasets max_length "
        "max_seq_length packing packing_strategy assistant_only_loss completion_only_loss use_peft "
        "lora_r lora_alpha lora_target_modules parallelism_config",
    ),
    **rules(
        FREE,
        "torch_dtype dtype attn_implementation pad_to_multiple_of pad_token "
        "streaming test_split_size env use_cache loss_chunk_size lora_task_type "
        "bnb_4bit_quant_type use_bnb_nested_quant dataset_streaming ignore_bias_buffers trackio_space_id "
        "eval_packing",
    ),
    "model_revision": lacking("a Hub model is its newest: download the revision and name its folder", "main"),
    "dataset_num_proc": to("num_workers"),
    "chat_template_path": to("chat_template"),
    "eos_token": to("end_of_turn"),
    "activation_offloading": to("model.activation_offload"),
    "truncation_mode": lacking("data.over_length=truncate cuts the end of a document", "keep_start"),
    "dataset_kwargs": lacking("`tokenize` reads raw records"),
    "model_init_kwargs": lacking("model.override_config has keys of config.json"),
    **rules(FREE, "padding_free shuffle_dataset"),
    **rules(QUANTIZED, "load_in_4bit load_in_8bit"),
    "loss_type": lacking("a loss of the prediction; loss.custom_cls has coefficients by token", "nll", "chunked_nll"),
}


def read_trl(moved: Moved, folder: Path) -> None:
    """Translate the command's flags, or the YAML's keys."""
    moved.take(KEYS)
    _read_data(moved)
    moved.put("data.max_tokens", moved.get("max_length", "max_seq_length", default=1024))
    if moved.get("max_length", "max_seq_length") is None:
        moved.differ("max_length not given: TRL's default is 1024; data.max_tokens is the budget of a pack")
    packs, kind = moved.is_on("packing"), str(moved.get("packing_strategy", default="bfd"))
    moved.put("data.over_length", "split" if packs and kind in ("bfd_split", "wrapped") else "truncate")
    if packs and kind == "wrapped":
        moved.differ("packing_strategy=wrapped lets documents attend to each other there; never here")
    # What is trained.
    if moved.is_on("use_peft"):
        rank, alpha = moved.get("lora_r", default=16), moved.get("lora_alpha", default=32)
        put_lora(moved, rank, alpha, moved.get("lora_target_modules", default="all-linear"), 0.05)
    parallel = moved.get("parallelism_config", default={})
    if isinstance(parallel, dict):
        put_split(moved, parallel.get("sp_size", parallel.get("cp_size", 1)))
    rows, steps = (
        moved.get("per_device_train_batch_size", default=8),
        moved.get("gradient_accumulation_steps", default=1),
    )
    read_batch(moved, rows, steps, packs)
    read_trainer(moved, TrainerDefaults(2e-5))
    # What is learnt.
    if not moved.is_on("assistant_only_loss"):
        moved.differ(
            "without assistant_only_loss every token of a chat is learnt there; here the assistant's turns are, "
            "and of a text every token"
        )
    if moved.get("completion_only_loss") is False:
        moved.lack("completion_only_loss", "prompts are not learnt; text records are learnt whole")


def _read_data(moved: Moved) -> None:
    """Translate the data set's name, configuration and splits."""
    if name := str(moved.get("dataset_name", default="")):
        subset, split = moved.get("dataset_config"), moved.get("dataset_train_split", default="train")
        where = name_of(name, moved.words)
        moved.put(f"data.sources.{where}", name if is_file(name) else hub(name, subset, split))
        validates = str(moved.get("eval_strategy", default="no")) != "no"
        if validates and not is_file(name):
            moved.put(f"data.val_sources.{where}", hub(name, subset, moved.get("dataset_test_split", default="test")))
    for entry in moved.get("datasets", default=[]):
        if isinstance(entry, dict) and (path := str(entry.get("path") or "")):
            source = path if is_file(path) else hub(path, entry.get("name"), entry.get("split"))
            moved.put(f"data.sources.{name_of(path, moved.words)}", source)
    if (field := moved.get("dataset_text_field")) not in (None, "text"):
        moved.put("columns.text", field)
