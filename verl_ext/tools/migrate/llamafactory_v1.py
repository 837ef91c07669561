"""LLaMA-Factory's version 1: other names, and nodes of plugins."""

from collections.abc import Mapping
from typing import Any

from verl_ext.tools.migrate import hf_trainer, llamafactory, preferences, sources
from verl_ext.tools.migrate.line import Moved, is_on, mapping, number
from verl_ext.tools.migrate.reading import read_yaml
from verl_ext.tools.migrate.tables import reason

_PEFT = {  # {a key of peft_config: ours}
    "adapter_name_or_path": "model.lora_adapter_path",
    **{name: f"model.{name}" for name in ("lora_dropout", "use_rslora", "use_dora", "modules_to_save")},
}


def read_llamafactory_v1(moved: Moved) -> None:
    """Translate a YAML of version 1, whose dataset is a YAML of files."""
    moved.take("llamafactory_v1")
    moved.put("data.over_length", "truncate")
    moved.put("data.max_tokens", moved.get("cutoff_len"))
    for key, node in (("train_dataset", "data.sources"), ("eval_dataset", "data.val_sources")):
        if is_on(name := moved.get(key)):
            _put_v1(moved, key, node, str(name))
    # What is trained.
    peft = mapping("peft_config", moved.get("peft_config"))
    if peft.get("name") == "lora":
        hf_trainer.put_lora(moved, peft.get("r", 8), peft.get("lora_alpha", 16), peft.get("target_modules"))
        peft.setdefault("lora_dropout", 0.05)
        moved.words |= {ours: peft[theirs] for theirs, ours in _PEFT.items() if is_on(peft.get(theirs))}
        known = (*_PEFT, "name", "r", "lora_alpha", "target_modules", "export_dir")
        moved.lack_others("peft_config", "adapters have no", peft, known)
    elif peft.get("name") == "freeze":
        llamafactory.put_frozen(moved, "peft_config", peft)
    elif peft:
        moved.lack("peft_config", "adapters are LoRA's")
    if quant := mapping("quant_config", moved.get("quant_config")):
        if quant.get("name") == "bnb" and number(quant.get("quantization_bit"), 4) == 4:
            form, nested = quant.get("quantization_type", "nf4"), quant.get("double_quantization", True)
            hf_trainer.put_four_bits(moved, "quant_config", form, nested)
        else:
            moved.lack("quant_config", reason("quantized"))
    if optim := mapping("optim_config", moved.get("optim_config")):
        _put_optimizer_v1(moved, optim)
    sources.differ_by_model(moved, "model")
    hf_trainer.put_split(moved, moved.get("cp_size"))
    # The steps of a run: those of all ranks, or a rank's number of micro-batches.
    micro, whole = moved.get("micro_batch_size"), moved.get("global_batch_size")
    steps = number(moved.get("gradient_accumulation_steps"), 1.0) if whole is None else 0.0
    steps = steps or number(whole) // max(number(micro, 1.0) * (moved.ranks or 1), 1)
    packs = "packing" in str(moved.get("batching_strategy")) or "dynamic" in str(moved.get("batching_strategy"))
    hf_trainer.read_batch(moved, micro, max(steps, 1), packs)
    moved.put("optim.lr", moved.get("learning_rate"))
    hf_trainer.read_length(moved)
    llamafactory.put_template(moved)
    if is_on(epochs := moved.get("save_epochs")):
        if number(epochs) == 1:
            moved.put("trainer.save_freq", "after_each_epoch")
        else:
            moved.lack("save_epochs", "trainer.save_freq counts steps, or is after_each_epoch")


def _put_optimizer_v1(moved: Moved, options: Mapping[str, Any]) -> None:
    """Translate Muon, whose options are ours."""
    if options.get("name") != "muon":
        moved.lack("optim_config", reason("unsharded"))
        return
    moved.put("optim.optimizer", "Muon")
    moved.put("optim.weight_decay", options.get("wd", 0.1))
    moved.put("optim.betas", options.get("adamw_betas", [0.9, 0.95]))
    own = {name: options[name] for name in ("momentum", "nesterov", "ns_steps") if name in options}
    moved.put("optim.override_optimizer_config", own | {"eps": options.get("adamw_eps", 1e-8)})


def _put_v1(moved: Moved, key: str, node: str, name: str) -> None:
    path = moved.file(name)
    if path is None or not name.endswith((".yaml", ".yml")):
        sources.put_data(moved, key, node, name)
        return
    for each, entry in read_yaml(path).items():
        entry = mapping(f"{each} of {path}", entry)
        where = str(entry.get("path", each))
        is_hub = "hub" in str(entry.get("source", "hf_hub"))
        if is_hub:
            category = sources.put_data(moved, key, node, where, None, entry.get("split"), each)
        else:
            category = sources.put_source(moved, node, each, where)
        if is_on(most := entry.get("size")) and node == "data.sources":
            moved.put(f"sample.{category}", most)
        known = ("path", "source", "split", "converter", *["size"] * (node == "data.sources"))
        moved.lack_others(key, f"{each}: no source has", entry, known)
        if (form := entry.get("converter")) == "pair" and "loss" not in moved.words:  # once, as it doubles the length
            preferences.put_loss(moved, key, "dpo", {"beta": 0.1})
        elif form not in (None, "alpaca", "sharegpt", "pair"):
            moved.lack(key, f"{each}: a record's fields say what it is, no converter; got {form}")
