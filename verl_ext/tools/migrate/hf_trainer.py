"""The work of transformers' Trainer, which LLaMA-Factory, ms-swift and TRL share."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_ext.options import spell
from verl_ext.tools.migrate.line import Moved, is_on, listed, mapping, number, split_names
from verl_ext.tools.migrate.reading import read_yaml
from verl_ext.tools.migrate.tables import reason, values_of

TRACKERS = ("wandb", "swanlab", "mlflow", "tensorboard", "trackio", "clearml")
NO_VALIDATION = "there is no validation data to measure"
# Keys of other engines' parallelism: each has the number of ranks that hold one copy's parts.
_TENSOR = ("tensor_parallel_size", "tensor_model_parallel_size")
_STAGES = ("pipeline_parallel_size", "pipeline_model_parallel_size")
_PATIENCE = ("early_stopping_patience", "early_stopping_steps")  # the latter is LLaMA-Factory's


def read_trainer(moved: Moved, validates: bool = False, idles: bool = False, rounds: str = "up") -> None:
    """Translate the Trainer's keys that need each other.

    Args:
        moved: what the keys become, with the trainer's usual values.
        validates: whether the trainer validates as often as it saves.
        idles: whether it validates nothing, without a word, if there is no data for that.
        rounds: how it rounds a warm-up that is a share of the steps.
    """
    _read_rate(moved, rounds)
    read_length(moved)
    if moved.get("bf16") is False and not moved.is_on("fp16", "pure_bf16", "bfloat16", "float16"):
        moved.put("engine.mixed_precision.param_dtype", "fp32")
        moved.differ("bf16=false without fp16: products are fp32, as there")
    _read_saves(moved, validates, idles)
    _read_optimizer(moved)
    seed = moved.get("seed")
    for key, value in (("trainer.seed", seed), ("data.seed", moved.get("data_seed", "seed"))):
        if value is not None:
            moved.put(key, value)
    if moved.words.get("model") != "lora":  # keys of adapters that are not there
        for name in ("lora_dropout", "use_rslora", "use_dora", "modules_to_save"):
            moved.words.pop(f"model.{name}", None)
    if is_on(share := moved.get("router_aux_loss_coef", "moe_aux_loss_coef")):
        own = moved.words.get("model.override_config", {})
        moved.put("model.override_config", {**own, "output_router_logits": True, "router_aux_loss_coef": share})
    # transformers 5.24 calls it activation_checkpointing.
    if moved.get("activation_checkpointing", "gradient_checkpointing") is False:
        moved.put("model.enable_gradient_checkpointing", False)
    if moved.get("train_sampling_strategy") == "sequential":
        put_order(moved)
    read_sharding(moved, ("deepspeed", "fsdp", "fsdp_config"))
    path = moved.get("resume_from_checkpoint")
    if is_on(path) and str(path).lower() not in ("true", "auto"):
        moved.lack("resume_from_checkpoint", "a run resumes its own checkpoints; model.path takes exported weights")
    trackers = [str(name).lower() for name in listed(moved.get("report_to")) if is_on(name)]
    if trackers and "all" not in trackers:
        moved.put("trainer.logger", ["console", "file", *(name for name in trackers if name in TRACKERS)])
        if other := [name for name in trackers if name not in TRACKERS]:
            moved.lack("report_to", f"trainer.logger has no {', '.join(other)}")


def put_new_model(moved: Moved, key: str) -> None:
    """Train a model of random weights, which a command makes first."""
    old = moved.words.get("model.path")
    moved.put("model.path", "random_init")
    moved.differ(
        f"{key}: first `verl-ext init-model model=FOLDER tokenizer.path=FOLDER output_dir=random_init`; FOLDER has the "
        f"config.json and the tokenizer of {old}"
    )


def put_order(moved: Moved) -> None:
    """Train records in their order."""
    moved.put("data.shuffle", False)
    moved.put("data.balance", "none")


def read_sharding(moved: Moved, keys: Iterable[str]) -> None:
    """Translate descriptions of DeepSpeed or FSDP: mappings, files of JSON or names."""
    for key in keys:
        value, stage = moved.values.get(key), 3
        if isinstance(value, Mapping):  # accelerate's may name a file of DeepSpeed's
            value = value.get("deepspeed_config_file", value)
        if isinstance(value, str):
            name = re.search(r"z(?:ero)?_?([0-3])", value)
            stage = int(name[1]) if name and key == "deepspeed" else 3
            path = None if value.startswith("{") else moved.file(value)
            if path is None and value.endswith(".json") and key.startswith("deepspeed"):
                moved.differ(f"{key}: {value} is not here; it is taken for stage {stage}, by its name or as usual")
            value = value if path is None else read_yaml(path)
        if _offloads(value):  # else the key needs nothing
            moved.put("engine.offload_policy", moved.is_on(key))
        if isinstance(value, Mapping):
            usual = {"deepspeed": 0.0, "deepspeed_config": 2.0}.get(key, 3.0)  # DeepSpeed's own, accelerate's, FSDP's
            described = mapping(key, value.get("zero_optimization")).get("stage", value.get("zero_stage"))
            stage = int(number(described, usual))
            keeps = [value.get(f"{prefix}reshard_after_forward") for prefix in ("", "fsdp_")]
            if False in keeps or "SHARD_GRAD_OP" in (*keeps, value.get("fsdp_sharding_strategy")):
                stage = 2
            if number(size := mapping(key, value.get("tensor_parallel")).get("autotp_size")) > 1:
                why = "engine.ulysses_sequence_parallel_size splits rows"
                moved.lack(key, f"its autotp_size={size} splits matrices; {why}")
        if stage < 3:  # every rank keeps a step's parameters
            moved.put("engine.reshard_after_forward", not moved.is_on(key))


def _offloads(value: Any) -> bool:
    """Tell whether a description of sharding keeps something in the memory of hosts."""
    if isinstance(value, Mapping):
        return any(
            ("offload" in str(key) and is_on(below.get("device") if isinstance(below, Mapping) else below))
            or _offloads(below)
            for key, below in value.items()
        )
    return any("offload" in str(each) for each in listed(value))


def _read_optimizer(moved: Moved) -> None:
    """Name an optimizer and its module."""
    if (given := str(moved.get("optim")).lower()) not in values_of("optimizers"):
        moved.lack("optim", "optim.optimizer and optim.optimizer_impl name a class of torch.optim or another package")
        return
    module, _, name = values_of("optimizers")[given].rpartition(".")
    if name != "AdamW":
        moved.put("optim.optimizer", name)
    if name == "Muon":
        moved.differ("Muon scales steps by 0.2·√(longer side); axolotl's over FSDP by √(rows / columns)")
    if name == "AdamW8bit":
        there = "those of embeddings too, which bitsandbytes keeps in 32 bits; nothing is paged"
        there = "in torchao's blocks where rows are multiples of 256" if given == "adamw_torch_8bit" else there
        moved.differ(f"{name} has moments of 8 bits for rows that divide into blocks, {there}")
    if module:
        moved.put("optim.optimizer_impl", module)
        moved.differ(
            f"{name} is of the package {module.partition('.')[0]}: its checkpoints need as many ranks as wrote them"
        )


def _read_rate(moved: Moved, rounds: str) -> None:
    """Translate the learning rate, its schedule and the decay, which all have other defaults in verl."""
    moved.put("optim.lr", moved.get("learning_rate"))
    kind = str(moved.get("lr_scheduler_type")).lower()
    schedules = values_of("schedules")
    if kind in schedules:
        moved.put("optim.lr_scheduler_type", schedules[kind])
    else:
        moved.lack("lr_scheduler_type", f"optim.lr_scheduler_type has {', '.join(sorted({*schedules.values()}))}")
    given = moved.get("lr_scheduler_kwargs")
    options = dict(given) if isinstance(given, Mapping) else {}
    if given is not None and not isinstance(given, Mapping):
        moved.lack("lr_scheduler_kwargs", "it must map names to values")
    ours = {"min_lr_rate": "optim.min_lr_ratio", "num_decay_steps": "optim.lr_wsd_decay_steps"}
    ours["num_cycles"] = "optim.num_cycles"
    for name, key in ours.items():
        if name in options:
            moved.put(key, options.pop(name))
    if "min_lr" in options and number(moved.words["optim.lr"]):
        moved.put("optim.min_lr_ratio", number(options.pop("min_lr")) / number(moved.words["optim.lr"]))
    if options:
        moved.lack("lr_scheduler_kwargs", f"the schedule has no {', '.join(options)}")
    if kind == "cosine_with_restarts":
        moved.words.setdefault("optim.num_cycles", 1)
    # Since transformers 5 `warmup_steps` below 1 is a share.
    steps, share = moved.get("warmup_steps"), moved.get("warmup_ratio")
    if 0 < number(steps) < 1:
        steps, share = None, steps
    if kind != "constant" and is_on(steps):
        moved.put("optim.lr_warmup_steps", steps)
    elif kind != "constant" and is_on(share):
        moved.put("optim.lr_warmup_steps_ratio", share)
    # A share is rounded up there, and down by verl.
    whole, part = number(moved.get("max_steps")), number(moved.words.get("optim.lr_warmup_steps_ratio"))
    if whole > 0 and part:
        del moved.words["optim.lr_warmup_steps_ratio"]
        moved.put("optim.lr_warmup_steps", math.ceil(whole * part))
    elif part:
        moved.differ(f"a warm-up of a share of the steps is rounded {rounds} there, and down here")
    decay = moved.get("weight_decay")
    moved.put("optim.weight_decay", decay)
    if number(decay, 1.0):
        moved.put("optim.decay", "matrices")
        moved.differ("optim.decay=matrices, as there: verl's own decay is on norms and biases too")
    betas = [moved.get("adam_beta1"), moved.get("adam_beta2")]
    if [number(beta) for beta in betas] != [0.9, 0.999]:
        moved.put("optim.betas", betas)
    # What the configuration leaves open: verl's value, which is not the trainer's.
    silent = {
        "learning_rate": "1e-3",
        "lr_scheduler_type": "constant",
        "weight_decay": "0.01, on all parameters",
        "adam_beta2": "0.999",
    }
    for name, verls in silent.items():
        theirs = moved.usual[name] if isinstance(moved.usual[name], str) else f"{moved.usual[name]:g}"
        if not moved.has(name) and theirs != verls:
            moved.differ(f"{name} not given: {moved.trainer}'s default is {theirs}, verl's is {verls}")


def read_length(moved: Moved) -> None:
    """Translate the run's length: steps win over epochs there."""
    steps = moved.get("max_steps")
    if steps is not None and number(steps, 1.0) > 0:
        moved.put("trainer.total_training_steps", steps)
        if is_on(most := moved.get("max_epochs")):  # the lesser of both ends a run here too
            moved.put("trainer.total_epochs", int(number(most, 1.0)))
        return
    # ms-swift ends at the lesser of two.
    lengths = {"num_train_epochs": moved.get("num_train_epochs")}
    if moved.is_on("max_epochs"):
        lengths["max_epochs"] = moved.get("max_epochs")
    name, passes = min(lengths.items(), key=lambda item: number(item[1]))
    whole = number(passes, 1.0)
    if whole != int(whole):
        moved.lack(name, "trainer.total_epochs is a whole number; trainer.total_training_steps any length")
    else:
        moved.put("trainer.total_epochs", int(whole) if isinstance(passes, float) else passes)
    if not moved.has("num_train_epochs") and name == "num_train_epochs" and passes != 1:
        moved.differ(f"num_train_epochs not given: {moved.trainer}'s default is {passes:g}, ours is 1")


def _read_saves(moved: Moved, validates: bool, idles: bool) -> None:
    """Translate when a run saves and validates, and which checkpoints it keeps."""
    from verl_ext.config.best import is_gain  # imports verl, which takes seconds

    saves = moved.get("save_strategy")
    # (our key, when, the trainer's keys of the steps between)
    plans = [("trainer.save_freq", saves, ["save_steps"])]
    if moved.validates or not idles:
        tests = moved.get("eval_strategy", "evaluation_strategy", *["save_strategy"] * validates)
        if moved.validates:
            plans.append(("trainer.test_freq", tests, ["eval_steps", "save_steps" if validates else "logging_steps"]))
        elif is_on(tests):
            for name in ("eval_strategy", "evaluation_strategy", "eval_steps"):
                if moved.is_on(name):
                    moved.lack(name, NO_VALIDATION)
    for key, strategy, names in plans:
        if str(strategy).lower() == "epoch":
            moved.put(key, "after_each_epoch")
        elif str(strategy).lower() in ("steps", "best"):
            steps = moved.get(*names)
            share = number(steps, 1.0)
            if 0 < share < 1:
                name = next(name for name in names if moved.has(name))
                why = "a share of the run; trainer.saves_per_epoch and tests_per_epoch have shares of an epoch"
                moved.lack(name, why)
            else:
                moved.put(key, max(round(share), 1) if isinstance(steps, float) else steps)
    # The best checkpoint and an early end by it.
    best = moved.get("metric_for_best_model")
    name = str(best).removeprefix("eval_")
    metric = values_of("metrics").get(name)
    asks = {key for key in ("load_best_model_at_end", *_PATIENCE, "metric_for_best_model") if moved.is_on(key)}
    asks |= {"save_strategy"} if str(saves).lower() == "best" else set()
    rises = moved.get("greater_is_better") if moved.has("greater_is_better") else not name.endswith("loss")
    if asks and (metric is None or is_on(rises) != is_gain(metric)):
        why = "checkpoint.keep_best is by a metric of validation or of the answers to eval.prompts"
        if metric is not None:
            why = f"the best {metric} is the {'highest' if is_gain(metric) else 'lowest'} here"
        for key in sorted(asks):
            moved.lack(key, why)
    elif asks and not moved.validates:
        for key in sorted(asks):
            moved.lack(key, NO_VALIDATION)
    elif asks:
        moved.put("checkpoint.keep_best", metric)
        if moved.is_on(*_PATIENCE):
            moved.put("trainer.early_stop.metric", metric)
            moved.put("trainer.early_stop.patience", moved.get(*_PATIENCE))
            if is_on(least := moved.get("early_stopping_threshold")):
                moved.put("trainer.early_stop.least", least)


def read_batch(moved: Moved, per_device: Any, accumulation: Any, packs: bool) -> None:
    """Translate a step: rows or packs of all ranks here, of one rank there."""
    split = int(number(moved.words.get("engine.ulysses_sequence_parallel_size", 1), 1.0))
    stages = max(int(number(moved.get(*_STAGES), 1.0)), 1)
    if stages > 1:
        moved.differ(f"FSDP2 shards every parameter over all ranks, in place of {stages} stages of layers")
    ranks = (moved.ranks or 1) // stages
    micro, steps = number(per_device), number(accumulation)
    if not packs and moved.words.get("loss") == "kto":  # z is of the other answers in a pack
        packs = True
        moved.differ("kto needs packs of several answers: data.train_batch_size counts packs here, and rows there")
    unit = "packs" if packs else "rows"
    if micro and steps:
        moved.put("data.train_batch_size", int(micro * steps) * max(ranks // split, 1))
        moved.put("data.micro_batch_size_per_gpu", int(micro))
    else:
        moved.differ(f"data.train_batch_size counts {unit} of all ranks: {per_device} × {accumulation} × ranks there")
    if not packs:
        moved.put("data.strategy", "none")
    if moved.ranks is None:
        moved.differ(
            f"data.train_batch_size counts {unit} over all ranks, and is for 1 rank here: migrate with nproc=N for N"
        )
    if not packs:
        moved.differ("data.strategy=none: a row is one document, as there; without it documents share packs")


def put_split(moved: Moved, size: Any) -> None:
    """Let a group of ranks share each row, also that which splits matrices there."""
    tensor = number(moved.get(*_TENSOR), 1.0)
    if tensor > 1:
        moved.differ(
            f"{tensor:g} ranks split each matrix there; here they split a row's tokens (Ulysses), and all ranks share "
            "the parameters (FSDP2)"
        )
        size = int(number(size, 1.0) * tensor)
    if number(size, 1.0) > 1:
        moved.put("engine.ulysses_sequence_parallel_size", size)


def put_lora(moved: Moved, rank: Any, alpha: Any, targets: Any) -> None:
    """Train adapters; targets "all" are every linear layer."""
    if not moved.has("lora_dropout") and is_on(dropout := moved.get("lora_dropout")):
        moved.put("model.lora_dropout", dropout)
    moved.put("model", "lora")
    moved.put("model.lora_rank", rank)
    moved.put("model.lora_alpha", alpha)
    is_pattern = isinstance(targets, str) and not re.fullmatch(r"[\w -]*|.*,.*", targets)
    names = targets if is_pattern else split_names(targets)
    if names not in ([], ["all"], ["all-linear"]):
        moved.put("model.target_modules", names)


def put_four_bits(moved: Moved, key: str, kind: Any, nested: Any) -> None:
    """Let the base under adapters lie in four bits.

    Args:
        moved: what the keys become, with its adapters.
        key: the key that asks for it.
        kind: the form of the numbers.
        nested: whether scales are quantized too, with the trainer's default.
    """
    if moved.words.get("model") != "lora":
        moved.lack(key, "four bits are not trained; adapters on them are (model=lora)")
    elif str(kind).lower() != "nf4":
        moved.lack(key, f"a base of four bits lies in NF4, not in {spell(kind)}")
    else:
        moved.put("model.quantization", "nf4")
        if is_on(nested):
            moved.put("model.quantization_nested", True)


def read_bits(moved: Moved, key: str, method: Any, kind: Any, nested: Any) -> None:
    """Translate a base of few bits: NF4 for bitsandbytes' 4, whole weights for its 8; the last two as above.

    key: that of their number, without which it is 4. method: who quantizes.
    """
    bits = number(moved.get(key), 4)
    if str(method).lower() not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        moved.lack(key, reason("quantized"))
    elif bits == 8:
        moved.differ(f"{key}=8: {reason('in_8_bits')}")
    else:
        put_four_bits(moved, key, kind, nested)


def differ_by_tokens(moved: Moved, begins: str) -> None:
    """Say what is otherwise about new tokens, whose rows begin there as `begins`."""
    if names := [name for name in ("model.new_tokens", "model.new_special_tokens") if name in moved.words]:
        moved.differ(
            f"{' and '.join(names)}: rows begin as the mean of those of a token's old pieces, there {begins}; a token "
            "that the tokenizer has is refused, there it is passed over"
        )
