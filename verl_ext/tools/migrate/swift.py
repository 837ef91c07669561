"""ms-swift: the command `swift sft` or `swift pt`, or a script with it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.options import UsageError, must
from verl_ext.tools.migrate import hf_trainer, preferences, sources
from verl_ext.tools.migrate.line import Moved, is_on, listed, mapping
from verl_ext.tools.migrate.tables import page, reason, values_of

_CACHED = ("cached_dataset", "cached_val_dataset")


def read_swift(moved: Moved) -> None:
    """Translate the command's flags."""
    of_version_2 = values_of("swift_2")
    if old := [name for name in of_version_2 if name in moved.values]:
        moved.values = {of_version_2.get(name, name): value for name, value in moved.values.items()}
        moved.values.setdefault("warmup_ratio", 0.05)
        dtype = str(moved.values.get("torch_dtype", ""))
        moved.values["torch_dtype"] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype)
        moved.differ(f"{', '.join(old)}: names of ms-swift 2, whose default of warmup_ratio is 0.05")
    moved.take("swift")
    read_swift_keys(moved)


def read_swift_keys(moved: Moved) -> None:
    """Translate the keys that need each other."""
    kind = str(moved.get("tuner_type", "train_type"))
    trains_texts = moved.get("use_chat_template") is False
    if (task := str(moved.get("task_type"))) != "causal_lm":
        raise UsageError(must("task_type", f"be causal_lm: {reason('classifies')}", task))
    if (family := str(moved.get("rlhf_type"))) in preferences.REWARDS:
        raise UsageError(must("rlhf_type", "be a loss of given answers", f"{family}: {preferences.ELSEWHERE}"))
    _read_data(moved)
    moved.put("data.max_tokens", moved.get("packing_length", "max_length"))
    if not moved.has("packing_length", "max_length"):
        moved.differ("max_length not given: the model's length there; data.max_tokens is the budget of a pack")
    cut = str(moved.get("truncation_strategy")).lower()
    moved.put("data.over_length", {"right": "truncate", "left": "truncate", "split": "split"}.get(cut, "drop"))
    if cut == "left":
        moved.lack("truncation_strategy", "data.over_length=truncate cuts the end of a document")
    if cut == "delete":
        moved.differ("longer records are left out there: data.over_length=drop counts them in the report")
    if family:
        preferences.read_loss(moved, family)
    elif moved.get("loss_type") not in (None, "loss_scale"):
        moved.lack("loss_type", "loss.mode names the mean; a loss of one's own is loss.custom_cls")
    _read_model(moved, kind)
    # The steps of a run.
    hf_trainer.put_split(moved, moved.get("sequence_parallel_size"))
    if moved.is_on("packing") and moved.get("packing_strategy") == "sequential":
        moved.put("data.strategy", "next_fit")
    per_device = moved.get("per_device_train_batch_size")
    steps = moved.get("gradient_accumulation_steps")
    if steps is None or "expr" in str(steps):
        whole = re.search(r"expr\s+(\d+)", str(steps))  # $(expr 16 / $nproc_per_node): so many over all ranks
        steps = max(int(whole[1] if whole else 16) // (moved.ranks or 1), 1)
    hf_trainer.read_batch(moved, per_device, steps, moved.is_on("packing"))
    if kind == "full":
        moved.usual["learning_rate"] = 1e-5
    hf_trainer.read_trainer(moved, validates=True, idles=True)
    if moved.get("optimizer") == "muon":
        moved.put("optim.optimizer", "Muon")
    elif moved.is_on("optimizer"):
        moved.lack("optimizer", reason("unsharded"))
    _read_learnt(moved, trains_texts)
    hf_trainer.differ_by_tokens(moved, "as transformers draws them around the mean of all")
    if tokens := moved.words.get("model.new_special_tokens"):
        moved.put("model.new_special_tokens", [each for token in tokens for each in _tokens_of(moved, token)])
    if moved.is_on("agent_template"):
        moved.differ(
            f"agent_template={moved.get('agent_template')}: the chat template of the tokenizer prints tools here"
        )
    if is_on(wait := moved.get("early_stop_interval")) and moved.validates:
        moved.put("trainer.early_stop.metric", "val/loss")
        moved.put("trainer.early_stop.patience", wait)
    elif is_on(wait):
        moved.lack("early_stop_interval", hf_trainer.NO_VALIDATION)


def _read_model(moved: Moved, kind: str) -> None:
    """Translate the model, its adapters and what is frozen."""
    sources.differ_by_model(moved, "model")
    sources.put_rope(moved, moved.get("max_model_len"))
    if kind in ("lora", "lora_llm"):
        rank, alpha = moved.get("lora_rank"), moved.get("lora_alpha")
        hf_trainer.put_lora(moved, rank, alpha, moved.get("target_regex", "target_modules"))
        if is_on(ratio := moved.get("lorap_lr_ratio")):
            moved.put("optim.lr_of", {"lora_B": ratio})
    elif kind != "full":
        moved.lack("tuner_type" if "tuner_type" in moved.values else "train_type", "adapters are LoRA's")
    asks = ("quantization_bit", "quant_bits", "quant_method")
    if bits := next((key for key in asks if moved.is_on(key)), None):
        form, nested = moved.get("bnb_4bit_quant_type"), moved.get("bnb_4bit_use_double_quant")
        hf_trainer.read_bits(moved, bits, moved.get("quant_method"), form, nested)
    if adapters := listed(moved.get("adapters")):
        moved.put("model.lora_adapter_path", adapters[0])
        if len(adapters) > 1:
            moved.lack("adapters", "model.lora_adapter_path names one")
    for key in ("freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex"):
        if moved.is_on(key):
            moved.lack(key, "model.freeze has globs of names, with ! of what is trained")


def _read_learnt(moved: Moved, trains_texts: bool) -> None:
    """Translate what of a chat is learnt, and with which weight."""
    scale = str(moved.get("loss_scale"))
    if "last_round" in scale:
        moved.put("turns", "last")
    parts = re.split(r"[+,]", scale)
    if "all" in parts and not trains_texts:
        moved.put("prompts", "learn")
    scales = page("values")["scales"]
    for name in [part for part in parts if part in scales]:
        moved.put("weights", {**moved.words.get("weights", {}), **_patterns(scales[name])})
        moved.differ(f"loss_scale={name}: a step's loss is divided by the sum of the weights here, there by the tokens")
    if {*parts} - {"default", "last_round", "ignore_empty_think", "none", "all", *scales} and not trains_texts:
        moved.lack("loss_scale", "weights has factors by patterns of the assistant's turns")
    if trains_texts:
        moved.differ("messages of a chat are joined without a template there, and learnt whole; here one renders them")
    else:
        if moved.is_on("disable_ignore_empty_think"):
            moved.put("empty_reasoning", "learn")
        blocks = "and a hybrid model's replies without reasoning all begin with an empty thinking block"
        if moved.get("add_non_thinking_prefix") is False:
            blocks = "and no empty thinking block is put before a reply"
        moved.differ(
            f"the line end after a turn is learnt there, {blocks}; here the chat template says which have a block"
        )
    if moved.is_on("template"):
        moved.differ(
            f"template={moved.get('template')}: the tokenizer's own chat template renders chats here, or "
            "chat_template=NAME of a folder chat_templates=FOLDER"
        )


def _read_data(moved: Moved) -> None:
    """Translate ID[:subset][#number], files, and folders of tokens that ms-swift made."""
    is_of_hub = moved.is_on("use_hf")
    for key, node in (("dataset", "data.sources"), ("val_dataset", "data.val_sources")):
        for each in listed(moved.get(key)):
            source, _, part = str(each).partition("#")
            path = re.sub(r"^(hf|HF|ms|MS)::", "", source)
            is_file = sources.is_file(path) or "://" in path
            name, *subset = [path] if is_file else path.split(":")
            if "self-cognition" in name:
                _fill_in(moved, key, name, *subset)
                subset = []
            category = sources.put_source(moved, node, name, path if is_file else sources.hub(name, *subset[:1]))
            if not is_file and "/" not in name:
                moved.lack(key, f"{name} is of ms-swift's own list of data sets: name its owner too, or its files")
            elif not is_file and not is_of_hub and not source.lower().startswith("hf::"):
                moved.differ(f"{name} is of ModelScope; the source names the same data set of the Hub, if it is there")
            if part and node == "data.sources":
                moved.put(f"sample.{category}", part)
                moved.differ(f"{name} is repeated there if it has fewer than {part} records; sample takes each once")
            elif part:
                moved.lack(key, f"{name}: sample draws a part of a source")
    if listed(moved.get("val_dataset")):
        moved.words.pop("val_share", None)  # nothing is held out there then
    if is_on(columns := mapping("columns", moved.get("columns"))):
        moved.put("columns", {ours: theirs for theirs, ours in columns.items()})
    # There records are shuffled once, and again in each epoch.
    if moved.get("train_dataloader_shuffle") is False and moved.get("dataset_shuffle") is False:
        hf_trainer.put_order(moved)
    elif moved.get("train_dataloader_shuffle") is False:
        moved.differ("train_dataloader_shuffle=false: one order serves all epochs there; here each draws its own")
    for key in _CACHED:
        if moved.is_on(key):
            moved.lack(key, "tokens that ms-swift wrote are not read: give the raw files")


def _patterns(scale: Mapping[str, list[float]]) -> dict[str, float]:
    """Return weights by patterns: of a key, and of the text after it."""
    keys, found = "|".join(map(re.escape, scale)), dict[str, float]()
    for key, (own, *after) in scale.items():
        text = rf"[\s\S]*?(?={keys}|\Z)"
        named = {key: own} if not after else {re.escape(key): own, rf"(?<={re.escape(key)}){text}": after[0]}
        found |= {pattern: weight for pattern, weight in named.items() if weight != 1}
    return found


def _tokens_of(moved: Moved, token: str) -> list[str]:
    """Return a token, or those of a file's lines."""
    if not token.endswith(".txt"):
        return [token]
    path = moved.file(token)
    if path is None:
        moved.lack("new_special_tokens", f"{token} is not here: name its lines")
        return []
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def take_cached(values: dict[str, Any], exports: Sequence[Mapping[str, Any]]) -> None:
    """Give a training the raw data of tokens that `swift export` writes."""
    for export in exports:
        folder = _folder(export.get("output_dir"))
        read = [_folder(each) for key in _CACHED for each in listed(values.get(key))]
        if export.get("to_cached_dataset") and any(
            each == folder or each.rpartition("/")[0] == folder for each in read
        ):
            for key in _CACHED:
                values.pop(key, None)
            own = ("dataset", "val_dataset", "split_dataset_ratio", "max_length", "truncation_strategy", "loss_scale")
            for key in (*own, "use_chat_template", "columns", "system"):
                if key in export:
                    values.setdefault(key, export[key])


def _folder(place: Any) -> str:
    return str(place).removeprefix("./").rstrip("/")


def _fill_in(moved: Moved, key: str, name: str, form: str = "") -> None:
    """Name what ms-swift writes for {{NAME}} and {{AUTHOR}} of its own data set, if anything."""
    if form == "empty_think" and re.match(r"(Qwen/)?Qwen3-\d", str(moved.get("model"))):
        moved.differ(f"{name}:{form}: Qwen3's chat template prints the empty thinking block of its answers")
    elif form:
        moved.lack(key, f"{name}:{form} is made by ms-swift's code")
    for field, option in (("{{NAME}}", "model_name"), ("{{AUTHOR}}", "model_author")):
        texts = listed(moved.get(option))
        if len({*map(str, texts)}) == 1:
            moved.put("replace", {**moved.words.get("replace", {}), field: str(texts[0])})
        elif texts:
            moved.lack(option, f"replace has one text for {field}, not one for each language")
