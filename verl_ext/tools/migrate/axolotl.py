"""axolotl: a YAML."""

import math
import re
from collections.abc import Mapping
from typing import Any

from verl_ext.options import DataError, UsageError, must
from verl_ext.tools.migrate import hf_trainer, preferences, sources
from verl_ext.tools.migrate.line import Moved, is_on, listed, mapping, number
from verl_ext.tools.migrate.tables import page, reason

# Plugins whose work is done here, or that have keys of their own; sizes whose product are the ranks.
_PLUGINS = ("cut_cross_entropy", "liger", "kernels", "swanlab", "expert_parallel")
_SIZES = ("dp_shard_size", "dp_replicate_size", "context_parallel_size", "tensor_parallel_size")
_TEMPLATES = "axolotl:utils/chat_templates/templates"
_TEXTS = ("completion", "pretrain")
_CHATS = ("", "None", "chat_template", "sharegpt")


def read_axolotl(moved: Moved) -> None:
    """Translate the YAML's keys."""
    values = moved.values
    rewards = str(values.get("rl")).lower() in preferences.REWARDS
    for key in (*["rl"] * rewards, "reward_model", "process_reward_model", "diffusion", "num_labels"):
        if moved.is_on(key):
            needed = "be left out: texts and given answers are learnt"
            raise UsageError(must(key, needed, f"{values[key]}: {preferences.ELSEWHERE}"))
    moved.take("axolotl")
    _read_data(moved)
    moved.put("data.max_tokens", moved.get("sequence_len"))
    longer = str(moved.get("excess_length_strategy")).lower()
    moved.put("data.over_length", {"truncate": "truncate", "raise": "error"}.get(longer, "drop"))
    if longer == "drop":
        moved.differ("longer records are left out there: data.over_length=drop counts them in the report")
    if moved.is_on("rl"):
        _put_preferences(moved)
    _read_model(moved)
    sizes = [number(moved.get(name), 1) for name in _SIZES]
    if moved.ranks is None and max(sizes) > 1:
        moved.ranks = int(math.prod(sizes))
    hf_trainer.put_split(moved, moved.get("context_parallel_size", "sequence_parallel_degree"))
    if number(moved.get("dp_replicate_size")) > 1 and is_on(shard := moved.get("dp_shard_size")):
        moved.put("engine.fsdp_size", shard)
    rows, steps = moved.get("micro_batch_size"), moved.get("gradient_accumulation_steps")
    if not moved.has("gradient_accumulation_steps") and (whole := number(moved.get("batch_size"))):
        steps = max(int(whole / max(number(rows), 1)), 1)
    plugins = map(str, listed(moved.get("plugins")))
    if others := [name for name in plugins if not any(known in name for known in _PLUGINS)]:
        moved.lack("plugins", f"{', '.join(others)}: trainer.hooks, loss.custom_cls and data.custom_cls take Python")
    packs = moved.is_on("sample_packing") or moved.is_on("pretraining_dataset")
    if packs and moved.is_on("sample_packing_sequentially"):
        moved.put("data.strategy", "next_fit")
    if not moved.is_on("rl") and moved.is_on("curriculum_sampling"):  # answers are shuffled all the same
        hf_trainer.put_order(moved)
    hf_trainer.read_batch(moved, rows, steps, packs)
    _read_run(moved)
    # What is learnt.
    metrics = listed(moved.get("eval_causal_lm_metrics"))
    if moved.is_on("do_causal_lm_eval") and metrics != ["perplexity"]:  # which is that of val/loss
        moved.lack("do_causal_lm_eval", "eval.prompts has prompts to answer while training")
    if moved.is_on("train_on_inputs") and not moved.is_on("pretraining_dataset"):
        moved.put("prompts", "learn")
    _read_tokens(moved)


def _read_model(moved: Moved) -> None:
    """Translate the model, its adapters and what is frozen."""
    sources.differ_by_model(moved, "base_model")
    if moved.is_on("reinit_weights"):
        hf_trainer.put_new_model(moved, "reinit_weights")
    if moved.is_on("processor_type"):
        moved.lack("processor_type", reason("images"))
    # Adapters begin as LoRA's do, on weights that are whole here.
    adapter = str(moved.get("adapter")).lower()
    if adapter in ("lora", "qlora"):
        targets = None if moved.is_on("lora_target_linear") else moved.get("lora_target_modules")
        hf_trainer.put_lora(moved, moved.get("lora_r"), moved.get("lora_alpha"), targets)
    elif is_on(adapter):
        moved.lack("adapter", "adapters are LoRA's")
    kwargs = mapping("bnb_config_kwargs", moved.get("bnb_config_kwargs"))
    nested = kwargs.get("bnb_4bit_use_double_quant", True)
    if moved.is_on("load_in_4bit") or (adapter == "qlora" and "load_in_4bit" not in moved.values):
        hf_trainer.put_four_bits(moved, "load_in_4bit" if moved.is_on("load_in_4bit") else "adapter", "nf4", nested)
    patterns = [str(pattern) for pattern in listed(moved.get("unfrozen_parameters"))]
    if not all(re.search(r"language_model|^(lm_head|embed_tokens)(\.\*)?$", pattern) for pattern in patterns):
        globs = [re.sub(r"^\^|\$$|\.\*$|\.$|\\", "", pattern) for pattern in patterns]
        globs = [re.sub(r"(\])\+", r"\1", glob) for glob in globs]  # [4-9]+: a digit of a layer's number
        if all(re.fullmatch(r"[\w.]+(\[[\d-]+\][\w.]*)*", glob) for glob in globs):
            moved.put("model.freeze", [f"!{glob}" for glob in globs])
            moved.differ("unfrozen_parameters: names are globs here, whole up to a dot; there a dot is any character")
        else:
            moved.lack("unfrozen_parameters", "model.freeze has globs of names")
    if moved.is_on("peft"):
        moved.lack("peft", "adapters begin as LoRA's do")
    if is_on(config := moved.get("model_config")):
        moved.put("model.override_config", mapping("model_config", config))


def _read_tokens(moved: Moved) -> None:
    """Translate the chat template, new tokens and the ends of turns."""
    template = str(moved.get("chat_template"))
    if template.startswith("tokenizer_default_fallback_"):
        moved.differ(f"chat_template={template}: the tokenizer's own; without one, chat_template=NAME must be given")
    elif is_on(template) and template not in ("tokenizer_default", "jinja"):
        _put_template(moved, template)
    hf_trainer.differ_by_tokens(moved, "at random")
    if len(ends := listed(moved.get("eot_tokens"))) == 1:
        moved.put("end_of_turn", ends[0])
    elif ends:
        moved.lack("eot_tokens", "end_of_turn names one text; left out, those of the chat template are found")
    special = mapping("special_tokens", moved.get("special_tokens"))
    if is_on(special.get("pad_token")):
        moved.differ("special_tokens.pad_token: packs have no padding, so no token is needed for it")
    if other := [name for name in special if name != "pad_token" and is_on(special[name])]:
        moved.differ(
            f"special_tokens: {', '.join(other)}: the tokenizer's own are used here; model.new_special_tokens adds one "
            "that it lacks"
        )


def _put_template(moved: Moved, name: str) -> None:
    """Name a chat template of axolotl's."""
    moved.put("chat_template", name)
    moved.put("chat_templates", _TEMPLATES)
    moved.differ(f"chat_templates={_TEMPLATES} is axolotl's folder, where it is installed; or name a copy of it")


def _put_preferences(moved: Moved) -> None:
    """Name the loss of answers."""
    family = str(moved.get("rl")).lower()
    forms = listed(moved.get("dpo_loss_type"))
    if len(forms) > 1:
        moved.lack("dpo_loss_type", "loss is one loss, without sums of several")
    name = str(forms[0]) if len(forms) == 1 and family == "dpo" else family
    options = preferences.loss_options(moved, family, mapping("trl", moved.get("trl")).get("beta"))
    if family == "kto":
        preferences.put_label(moved)
    preferences.put_loss(moved, "rl" if name == family else "dpo_loss_type", name, options)
    moved.differ("an answer follows its role's line there, without the empty thinking block that a template may print")


def _read_run(moved: Moved) -> None:
    """Translate length, rate, saves and trackers by the Trainer's names."""
    moved.adopt({"num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type", "optimizer": "optim"})
    _read_warmup(moved)
    if not moved.has("save_steps", "save_strategy"):
        moved.adopted["save_strategy"] = "no" if moved.is_on("saves_per_epoch") else "epoch"
    if moved.values.get("eval_steps") is not None:
        moved.adopted["eval_strategy"] = "steps"
    if moved.validates and moved.is_on("evals_per_epoch"):
        moved.put("trainer.tests_per_epoch", moved.get("evals_per_epoch"))
    if moved.is_on("saves_per_epoch"):
        moved.put("trainer.saves_per_epoch", moved.get("saves_per_epoch"))
    if not moved.has("save_total_limit"):
        moved.differ("save_total_limit not given: axolotl keeps the last 4 checkpoints, a run here all")
    moved.put("trainer.max_ckpt_to_keep", moved.get("save_total_limit") or 4)
    moved.adopted["report_to"] = [name for name in hf_trainer.TRACKERS if moved.is_on(f"use_{name}", f"{name}_project")]
    hf_trainer.read_trainer(moved, idles=True, rounds="down, and one step to 2")
    # What the Trainer has no name for.
    if is_on(eta := moved.get("eta_min")) and number(moved.words.get("optim.lr")):
        moved.put("optim.min_lr_ratio", number(eta) / number(moved.words["optim.lr"]))
    checkpointing = str(moved.get("gradient_checkpointing")).lower()
    if moved.is_on("activation_offloading") or checkpointing.startswith("offload"):
        moved.put("model.activation_offload", True)
        moved.words.pop("model.enable_gradient_checkpointing", None)


def _read_warmup(moved: Moved) -> None:
    """Give the Trainer a warm-up: a share is rounded down, one step becomes two, and a default ends at 100."""
    most = math.inf
    if not moved.has("warmup_steps", "warmup_ratio"):
        moved.adopted["warmup_ratio"], most = 0.03, 100
        moved.differ("no warm-up is given: axolotl's default is 3 % of the run, at most 100 steps")
    whole = number(moved.get("max_steps"))
    if not moved.has("warmup_steps") and whole > 0:
        steps = min(int(number(moved.get("warmup_ratio")) * whole), most)
        moved.adopted |= {"warmup_ratio": None, "warmup_steps": 2 if steps == 1 else steps}


def _read_data(moved: Moved) -> None:
    """Translate data sets: their places, parts and fields."""
    usual = {name: moved.get(name) for name in ("roles_to_train", "train_on_eos")}
    for key, node in (
        ("datasets", "data.sources"),
        ("pretraining_dataset", "data.sources"),
        ("test_datasets", "data.val_sources"),
    ):
        for entry in listed(moved.get(key)):
            own = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
            if not isinstance(own.get("path"), str):
                raise DataError(must(key, "be a list of mappings with a path", entry))
            _put_dataset(moved, key, node, usual | own)


def _put_dataset(moved: Moved, key: str, node: str, entry: Mapping[str, Any]) -> None:
    path, kind = str(entry.get("path", "")), entry.get("type", "pretrain" if key == "pretraining_dataset" else "")
    # Its place.
    place: Any = path
    if files := [str(name) for name in listed(entry.get("data_files"))]:
        is_format = path in ("json", "parquet", "csv", "text", "arrow")
        root = "" if is_format else f"{path.rstrip('/')}/" if sources.is_file(path) else f"hf://datasets/{path}/"
        place = [name if "://" in name or name.startswith("/") else f"{root}{name}" for name in files]
        place = place[0] if len(place) == 1 else place
    sources.put_data(moved, key, node, place, entry.get("name"), entry.get("split"), path)
    # Its fields.
    why = f"{path}: no source has"
    moved.lack_others(key, why, entry, page("axolotl")["entry"].split())
    columns = {"messages": entry.get("field_messages"), "tools": entry.get("field_tools")}
    columns |= {side: entry.get(f"field_{side}") for side in ("chosen", "rejected")}
    if isinstance(kind, Mapping):
        fields = {"field_instruction": "instruction", "field_output": "output", "field_input": "input"}
        columns |= {ours: kind.get(theirs) for theirs, ours in (fields | {"field_system": "system"}).items()}
        if kind.get("format") or kind.get("no_input_format"):
            moved.differ(
                f"{path}: format is a prompt's text of its own; here the record is a chat of the tokenizer's template"
            )
        known = (*fields, "field_system", "format", "no_input_format")
        moved.lack_others(key, why, kind, known)
    elif str(kind).split(".")[0] in _TEXTS:
        columns["text"] = entry.get("field") or entry.get("text_column")
    elif str(kind).partition(".")[0] not in _CHATS:
        moved.differ(
            f"type={kind} has a prompt's text of its own; here the record is a chat of the tokenizer's template, or of "
            "chat_template=FILE, which a base model without one needs"
        )
    sources.put_columns(moved, key, path, columns)
    if is_on(named := entry.get("conversation")) and "chat_template" not in moved.words:
        _put_template(moved, {"llama-3": "llama3"}.get(str(named), str(named)))
    # What is learnt of it.
    if roles := {*map(str, listed(entry["roles_to_train"]))} - {"assistant", "gpt"}:
        owner = "roles_to_train" if moved.is_on("roles_to_train") else key
        moved.lack(owner, f"{path}: assistant turns alone are learnt, not {', '.join(sorted(roles))}")
    if str(entry["train_on_eos"]) not in ("turn", "None"):
        moved.differ(f"{path}: train_on_eos={entry['train_on_eos']}: the end of each learnt turn is learnt here")
    own = mapping(f"message_property_mappings of {path}", entry.get("message_property_mappings"))
    fields = {"role": "role", "content": "content", "train": "training", "train_detail": "training_detail"}
    own |= {ours: entry[f"message_field_{name}"] for ours, name in fields.items() if entry.get(f"message_field_{name}")}
    thought = "reasoning_content"
    own[entry.get("template_thinking_key") or thought] = entry.get("field_thinking") or thought
    named = mapping(f"roles of {path}", entry.get("roles")).items()
    theirs = {str(name): str(ours) for ours, names in named for name in listed(names)}
    sources.put_message_names(moved, key, path, own, theirs)
