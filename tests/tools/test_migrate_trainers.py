"""`verl-ext migrate` reads axolotl, LLaMA-Factory, ms-swift and TRL, and names what it does not translate."""

import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.lib.errors import names
from tests.lib.migrated import RICH, moved, write, write_files
from verl_ext.__main__ import main
from verl_ext.config import schema
from verl_ext.config.compose import prepare_overrides
from verl_ext.tools.migrate.line import tokenize_keys
from verl_ext.tools.migrate.tables import Rule, key_table

LLAMAFACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 16,
    "lora_target": "q_proj,v_proj",
    "dataset": "chats,sums",
    "template": "qwen3",
    "cutoff_len": 8192,
    "neat_packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": "1e-4",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
}
AXOLOTL = {
    "base_model": "NousResearch/Meta-Llama-3.1-8B",
    "sequence_len": 4096,
    "sample_packing": True,
    "datasets": [
        {"path": "owner/chats", "type": "chat_template", "split": "train[:10%]", "field_messages": "turns"},
        {"path": "owner/texts", "name": "en", "type": "completion", "field": "body"},
    ],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "dp_shard_size": 4,
    "context_parallel_size": 2,
    "learning_rate": "2e-5",
    "cosine_min_lr_ratio": 0.1,
    "optimizer": "adamw_torch_fused",
    "weight_decay": 0.1,
    "saves_per_epoch": 2,
    "num_epochs": 2,
}
SWIFT = r"""
# the ranks, and the model's name
nproc_per_node=4
MODEL=Qwen/Qwen2.5-7B
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model ${MODEL} \
    --dataset 'AI-ModelScope/LongAlpaca-12k#500' "$DATA/own.jsonl" \
    --tuner_type full --packing true --max_length 32768 \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \
    --sequence_parallel_size 2 --loss_scale last_round --save_steps 50 --save_total_limit 2  # it's the end
swift sft --model another \
"""
TRL = (
    "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path M --dataset_name owner/texts "
    "--max_length 2048 --assistant_only_loss --eval_strategy steps --eval_steps 25 --load_best_model_at_end "
    "--early_stopping_patience 4 --early_stopping_threshold 0.01"
)


def migrated(capsys, *words: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Return (the new command's first words, its keys and values, its comments)."""
    assert main(["migrate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    found = shlex.split("\n".join(line for line in lines if not line.startswith("# ")).replace("\\\n", " "))
    keys = dict(word.split("=", 1) for word in found[2:])
    return found[:2], keys, comments


def of_llamafactory(folder: Path, **changes: object) -> str:
    return write(write_files(folder), "train.yaml", LLAMAFACTORY | changes)


def test_llamafactory_has_the_data_sets_of_its_registry_adapters_and_packs_of_all_ranks(tmp_path, capsys):
    start, keys, comments = migrated(capsys, of_llamafactory(tmp_path), "nproc=4")
    assert start == ["verl-ext", "train"]
    wanted = """
        nproc=4 model.path=Qwen/Qwen3-4B data.sources.chats=hf://datasets/owner/chats columns.messages=turns
        data.sources.sums=data/sums.json sample.sums=100 data.max_tokens=8192 data.over_length=truncate
        empty_reasoning=learn model=lora model.lora_rank=16 model.lora_alpha=32 model.target_modules=[q_proj,v_proj]
        data.train_batch_size=32 data.micro_batch_size_per_gpu=2 optim.lr=1e-4 optim.lr_scheduler_type=cosine
        optim.lr_warmup_steps_ratio=0.1 optim.weight_decay=0.0 trainer.total_epochs=3 trainer.save_freq=500
    """
    assert {f"{key}={value}" for key, value in keys.items()} == {*wanted.split()}
    assert comments[0] == "15 keys of LLaMA-Factory: 14 in the command, 1 need nothing"
    assert "differs: num_train_epochs not given: LLaMA-Factory's default is 3, ours is 1" in comments
    assert (
        "differs: weight_decay not given: LLaMA-Factory's default is 0, verl's is 0.01, on all parameters" in comments
    )
    assert any("here the tokenizer's template renders chats" in line for line in comments)
    assert comments[-1] == "needs nothing here: bf16"


def test_rows_that_share_no_pack_stay_rows_and_a_step_of_unknown_ranks_says_so(tmp_path, capsys):
    _, keys, comments = migrated(capsys, of_llamafactory(tmp_path, neat_packing=False))
    assert (keys["data.strategy"], keys["data.train_batch_size"]) == ("none", "8")
    assert any(line.endswith("is for 1 rank here: migrate with nproc=N for N") for line in comments)


def test_axolotl_has_its_parts_of_data_sets_its_ranks_and_the_decay_of_matrices(tmp_path, capsys):
    _, keys, comments = migrated(capsys, write(tmp_path, "train.yaml", AXOLOTL))
    wanted = """
        nproc=8 data.sources.chats='hf://datasets/owner/chats:train[:10%]' columns.messages=turns
        data.sources.texts=hf://datasets/owner/texts:en:train columns.text=body
        engine.ulysses_sequence_parallel_size=2 data.train_batch_size=8 optim.lr_scheduler_type=cosine
        optim.min_lr_ratio=0.1 optim.lr_warmup_steps_ratio=0.03 optim.weight_decay=0.1 optim.decay=matrices
        trainer.saves_per_epoch=2 trainer.total_epochs=2
    """
    assert not {*wanted.split()} - {f"{key}={value}" for key, value in keys.items()}
    assert "data.strategy" not in keys
    assert "differs: no warm-up is given: axolotl's default is 3 % of the run, at most 100 steps" in comments


def test_a_script_of_swift_has_its_variables_in_place_its_ranks_and_its_own_defaults(tmp_path, capsys):
    (tmp_path / "sft.sh").write_text(SWIFT)
    _, keys, comments = migrated(capsys, str(tmp_path / "sft.sh"))
    wanted = """
        nproc=4 model.path=Qwen/Qwen2.5-7B data.sources.LongAlpaca_12k=hf://datasets/AI-ModelScope/LongAlpaca-12k
        sample.LongAlpaca_12k=500 data.sources.own=$DATA/own.jsonl data.max_tokens=32768 data.over_length=drop
        turns=last data.train_batch_size=8 optim.lr=1e-05 optim.weight_decay=0.1 optim.betas=[0.9,0.95]
        trainer.max_ckpt_to_keep=2
    """
    assert not {*wanted.split()} - {f"{key}={value}" for key, value in keys.items()}
    assert "model" not in keys
    assert "differs: adam_beta2 not given: ms-swift's default is 0.95, verl's is 0.999" in comments


def test_trl_keeps_its_best_checkpoint_its_patience_and_its_length(capsys):
    _, keys, comments = migrated(capsys, TRL)
    wanted = """
        data.val_sources.texts=hf://datasets/owner/texts:test trainer.test_freq=25 checkpoint.keep_best=val/loss
        trainer.early_stop.metric=val/loss trainer.early_stop.patience=4 trainer.early_stop.least=0.01
        data.train_batch_size=16 optim.lr=2e-05 optim.lr_scheduler_type=linear
    """
    assert not {*wanted.split()} - {f"{key}={value}" for key, value in keys.items()}
    assert not any("no equivalent" in line for line in comments)
    assert not any("every token of a chat is learnt there" in line for line in comments)


def test_a_quoted_operator_is_a_word_and_an_operator_ends_the_command(capsys):
    before = "cd sft && trl sft --model_name_or_path M --dataset_name d/e"
    _, keys, comments = migrated(capsys, f"{before} --eos_token '<|im_end|>' --max_length 9 2>&1 | tee --log_level")
    assert keys["data.max_tokens"] == "9"
    assert comments[0] == "4 keys of TRL: 4 in the command, 0 need nothing"
    assert keys["end_of_turn"] == "<|im_end|>"


def test_what_has_no_equivalent_is_said_with_its_reason_and_an_unknown_key_with_the_nearest(tmp_path, capsys):
    _, _, comments = migrated(
        capsys, write(tmp_path, "train.yaml", AXOLOTL | {"load_in_4bit": True, "load_in_8bit": False})
    )
    assert comments[0].endswith("1 need nothing, 1 without an equivalent")
    assert any(line.startswith("no equivalent: load_in_4bit=true: four bits are not trained") for line in comments)
    _, _, comments = migrated(capsys, write(tmp_path, "train.yaml", AXOLOTL | {"sequence_lenn": 3}))
    assert any(names(line, "axolotl", "sequence_lenn=3", "nearest: sequence_len") for line in comments)


def test_the_trainers_own_checks_read_the_command(tmp_path, capsys):
    _, _, comments = migrated(capsys, of_llamafactory(tmp_path, learning_rate=-1, lr_scheduler_type="cosine"))
    assert any(names(line, "to correct", "optim.lr", -1.0) for line in comments)
    _, _, comments = migrated(capsys, of_llamafactory(tmp_path, cp_size=3), "nproc=4")
    assert any(names(line, "to correct", "engine.ulysses_sequence_parallel_size", "4 ranks") for line in comments)


@pytest.mark.parametrize(
    "changes", [{}, {"model_config": {"rope_theta": 5e5}, "adapter": "lora", "output_dir": "$OUT/a"}]
)
def test_a_recipe_holds_the_trainers_keys_and_composes_as_the_command_does(changes, tmp_path, capsys):
    file = write(tmp_path, "train.yaml", AXOLOTL | changes)
    _, keys, _ = migrated(capsys, file)
    assert main(["migrate", file, "recipe=mine"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    command = next(line for line in text.splitlines() if line.startswith("# verl-ext train"))
    assert "--config-dir DIR recipe=mine model.path=" in command
    assert "$" not in text.partition("# verl-ext train")[0]
    assert composed(tmp_path, shlex.split(command)[3:]) == composed(tmp_path, [f"{key}={keys[key]}" for key in keys])


def composed(folder: Path, words: list[str]) -> DictConfig:
    """Return the trainer's config for the words that are its own."""
    own = [word for word in words if not word.startswith(("nproc", "data.sources", "columns", "sample"))]
    overrides, _ = prepare_overrides([f"--config-dir={folder}", *(word for word in own if "=" in word)])
    paths = f"hydra.searchpath=[pkg://verl.trainer.config,file://{folder}]"
    return schema.composed(schema.CONF, "sft", [*overrides[1:], paths])


# Values of one form each, of which a key takes one, and those of the keys that take none of them.
FORMS = [7, 0.5, True, False, "xyz", ["xyz"], "no", "epoch"]
VALUES = {
    "recompute_granularity": "none",
    "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "fsdp": "full_shard offload",
    "fsdp_config": {"offload_params": True},
    "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "model_config": {"rope_theta": 5},
    "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False},
    "special_tokens": {"eos_token": "E"},
    "stage": "pt",
    "dataset": "chats",
    "eval_dataset": "sums",
    "peft_config": {"name": "lora"},
    "quant_config": {"name": "bnb"},
    "optim_config": {"name": "muon"},
    "batching_strategy": "padding_free_packing",
    "columns": {"a": "query"},
    "packing_strategy": "wrapped",
    **{f"{name}.packing_strategy": "sequential" for name in ("swift", "megatron")},
    "train_sampling_strategy": "sequential",
    "parallelism_config": {"cp_size": 2},
    "dataset_dir": "elsewhere",
    "rl": "dpo",
    "trl": {"beta": 0.3},
    "dpo_loss_type": ["ipo"],
    "pref_loss": "ipo",
    "rlhf_type": "kto",
    "kt_config": {"kt_expert_weight_format": "int8"},
    "eval_causal_lm_metrics": ["perplexity"],
}
# What a key needs beside it; null takes a key of the rich ones away.
BESIDE = {
    "early_stopping_threshold": {"early_stopping_patience": 3},
    **{key: {"quantization_bit": 4} for key in ("quantization_method", "quantization_type", "double_quantization")},
    **{f"bnb_4bit_{key}": {"load_in_4bit": True, "quant_bits": 4} for key in ("quant_type", "use_double_quant")},
    **{key: {"load_in_4bit": True} for key in ("use_bnb_nested_quant", "bnb_config_kwargs")},
    "greater_is_better": {"metric_for_best_model": "loss"},
    "dpo_beta": {"rl": "dpo"},
    "batch_size": {"micro_batch_size": 1},
    "lora_target_linear": {"lora_target_modules": ["q_proj"]},
    "dp_replicate_size": {"dp_shard_size": 2},
    "max_epochs": {"num_train_epochs": 9},
    "evaluation_strategy": {"eval_strategy": None},
    "dataset_shuffle": {"train_dataloader_shuffle": False},
    "sample_packing_sequentially": {"sample_packing": True},
    "eval_causal_lm_metrics": {"do_causal_lm_eval": True},
    "kt_config": {"use_kt": True},
    "max_model_len": {"rope_scaling": "yarn"},
    "train_type": {"tuner_type": None},
    "packing_strategy": {"packing": True},
    **{key: {"finetuning_type": "freeze"} for key in ("freeze_trainable_layers", "freeze_extra_modules")},
    "freeze_trainable_modules": {"finetuning_type": "freeze"},
    **{key: {"dataset": ["swift/self-cognition"]} for key in ("model_name", "model_author")},
    # the losses of answers, by the keys of each trainer
    **{key: {"rl": "dpo"} for key in ("rl_beta", "trl", "dpo_loss_type", "dpo_label_smoothing")},
    **{key: {"stage": "dpo"} for key in ("pref_loss", "pref_beta", "pref_ftx")},
    **{key: {"rlhf_type": "dpo"} for key in ("beta", "label_smoothing", "ref_model")},
    "rpo_alpha": {"rl": "dpo", "rlhf_type": "dpo"},
    "ld_alpha": {"rlhf_type": "dpo", "stage": "dpo"},
    "orpo_alpha": {"rl": "orpo"},
    "cpo_alpha": {"rl": "simpo", "rlhf_type": "simpo"},
    "simpo_gamma": {"rl": "simpo", "rlhf_type": "simpo", "stage": "dpo", "pref_loss": "simpo"},
    **{key: {"rl": "kto"} for key in ("kto_desirable_weight", "kto_undesirable_weight")},
    **{key: {"stage": "kto"} for key in ("kto_chosen_weight", "kto_rejected_weight")},
    "dpo_label_smoothing": {"rl": "dpo", "stage": "dpo"},
    **{key: {"rlhf_type": "kto"} for key in ("desirable_weight", "undesirable_weight")},
}
# Keys without a place in the command: another value is refused.
REFUSED = {"dataset_dir": "a folder without dataset_info.json has no data", "task_type": "causal_lm alone is trained"}


def outcome(trainer: str, values: dict[str, object], folder: Path) -> object:
    """Return what becomes of a configuration: the words and comments, or the refusal."""
    try:
        found = moved(trainer, values, folder)
    except ValueError as error:
        return str(error)
    return found.words, found.ranks, [line for line in list(found.comments())[1:] if "needs nothing" not in line]


@pytest.mark.parametrize(
    ("trainer", "key"),
    [(name, key) for name in RICH for key, rule in key_table(name).items() if rule.read],
)
def test_each_key_that_is_read_changes_the_command_or_its_comments(trainer, key, tmp_path):
    write_files(tmp_path)
    without = RICH[trainer] | BESIDE.get(key, {})
    given = VALUES.get(f"{trainer}.{key}", VALUES.get(key))
    values = FORMS if given is None else [given]
    outcomes = [outcome(trainer, without | {key: value}, tmp_path) for value in values]
    counted = [each for each in outcomes if key in REFUSED or not isinstance(each, str)]
    assert any(each != outcome(trainer, without, tmp_path) for each in counted)


@pytest.mark.parametrize("trainer", RICH)
def test_a_key_that_needs_nothing_changes_nothing(trainer, tmp_path):
    write_files(tmp_path)
    rich = RICH[trainer]
    free = [key for key, rule in key_table(trainer).items() if rule == Rule()]
    assert free
    for value in FORMS:
        assert outcome(trainer, rich | dict.fromkeys(free, value), tmp_path) == outcome(trainer, rich, tmp_path)


@pytest.mark.parametrize("name", RICH)
def test_every_key_that_a_table_names_is_one_of_ours(name):
    groups, of_tokenize = schema.groups(), tokenize_keys()
    for key in filter(None, (rule.to for rule in key_table(name).values())):
        assert key.partition(".")[0] in of_tokenize or key in groups or schema.is_known(key)


@pytest.mark.parametrize(
    ("content", "things", "code"),
    [
        (["base_model"], ("train.yaml", "a list"), 1),
        ("{a: [1", ("train.yaml", "read"), 1),
        ({"compute_environment": "LOCAL"}, ("train.yaml", "axolotl, LLaMA-Factory, ms-swift or TRL", "none"), 2),
        (LLAMAFACTORY, ("dataset_dir=data", "dataset_info.json"), 1),
        ({"model": "M", "train_dataset": "d", "peft_config": 3}, ("peft_config", 3), 1),
        (LLAMAFACTORY | {"stage": "rm"}, ("stage", "sft, pt, dpo or kto", "rm"), 2),
        (AXOLOTL | {"rl": "grpo"}, ("rl", "grpo"), 2),
    ],
)
def test_a_file_that_is_no_configuration_of_such_a_training_is_refused(
    content, things, code, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert_refused(write(tmp_path, "train.yaml", content), things, code, capsys)


@pytest.mark.parametrize(
    ("command", "things"),
    [
        ("swift sft --model 'M --dataset d", ("command", "quote")),
        ("llamafactory-cli train --stage ppo --model_name_or_path M", ("stage", "sft, pt, dpo or kto", "ppo")),
        ("swift rlhf --rlhf_type grpo --model M", ("rlhf_type", "grpo", "PPO and GRPO")),  # where its trainers are
        ("swift sample --model M", ("command", "swift sample")),
        ("trl sft --config nowhere.yaml", ("command", "keys", "nowhere.yaml")),
        ("nowhere.yaml", ("command", "a command", "nowhere.yaml")),
        ("swift sft --model M --dataset d --task_type embedding", ("task_type", "causal_lm", "embedding")),
    ],
)
def test_a_command_of_another_kind_is_refused(command, things, capsys):
    assert_refused(command, things, 2, capsys)


def assert_refused(command: str, things: tuple[object, ...], code: int, capsys) -> None:
    assert main(["migrate", command]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, "error", *things), line
