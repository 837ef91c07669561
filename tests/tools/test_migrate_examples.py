"""`verl-ext migrate` on what public configurations ask for: answers, parallelism, data sets, quantized bases."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from verl_ext.tools.migrate import axolotl, llamafactory, llamafactory_v1, swift, swift_megatron, trl
from verl_ext.tools.migrate.command import MigrateOptions, migrate
from verl_ext.tools.migrate.line import Moved

READERS = {
    "axolotl": (axolotl.read_axolotl, {"base_model": "M", "datasets": ["o/a"]}),
    "llamafactory": (llamafactory.read_llamafactory, {"model_name_or_path": "M", "dataset": "own"}),
    "llamafactory_v1": (llamafactory_v1.read_llamafactory_v1, {"model": "M", "train_dataset": "o/a"}),
    "swift": (swift.read_swift, {"model": "M", "dataset": ["o/a"]}),
    "megatron": (swift_megatron.read_megatron, {"model": "M", "dataset": ["o/a"], "lr": 1e-4}),
    "trl": (trl.read_trl, {"model_name_or_path": "M", "dataset_name": "o/a"}),
    "trl_dpo": (partial(trl.read_trl, family="dpo"), {"model_name_or_path": "M", "dataset_name": "o/a"}),
    "trl_kto": (partial(trl.read_trl, family="kto"), {"model_name_or_path": "M", "dataset_name": "o/a"}),
}
DATASETS = {
    "own": {
        "file_name": "own.json",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "kto_tag": "label"},
        "tags": {"role_tag": "speaker", "content_tag": "says", "user_tag": "Customer", "assistant_tag": "gpt"},
    }
}


def moved(trainer: str, folder: Path, ranks: int | None = None, **changes: object) -> Moved:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(DATASETS))
    read, values = READERS[trainer]
    found = Moved("T", {**values, **changes}, ranks, folder)
    read(found)
    return found


def lacking(found: Moved) -> list[str]:
    """Return the keys that have no equivalent or are unknown."""
    lines = [line for line in found.comments() if line.startswith(("no equivalent", "unknown"))]
    return [line.split(": ", 1)[1].split("=")[0] for line in lines]


SIMPO = {"loss": "simpo", "loss.beta": 2.0, "loss.margin": 1.5, "loss.nll_weight": 1.0}
TWO_LAYERS = {"name": "freeze", "freeze_trainable_layers": 2}
EXTRA = {"freeze_extra_modules": "lm_head"}
TRAINED = ["!lm_head.weight", "!x.4[4-9].y"]
REACHED = {"max_position_embeddings": 9, "rope_parameters": {"rope_type": "yarn"}}
FACTOR = {"type": "yarn", "factor": 2}
QKV, MTP = ["q_proj", "k_proj", "v_proj"], ["mtp_num_layers"]
HERMES = {r"<tool_call>[\s\S]+?</tool_call>": 2.0}
EXPERTS = {"use_kt": True, "kt_config": {"kt_backend": "AMXBF16"}}
INT8_EXPERTS = {"use_kt": True, "kt_config": {"kt_expert_weight_format": "int8"}}
ENTRY = {"path": "o/a", "field_messages": "conversation", "field_chosen": "good", "field_rejected": "bad"}
SPEAKERS = {"path": "o/a", "roles": {"user": ["Customer", "human"], "assistant": ["gpt"]}}
MUON_V1 = {"name": "muon", "wd": 0.1, "momentum": 0.9, "adamw_betas": [0.9, 0.95]}
MUON = {"optim.optimizer": "Muon", "optim.betas": [0.9, 0.95]}
LEAST_V1 = {"model.lora_dropout": 0.05, "model.lora_rank": 8}
UNEQUAL = {"model_name": ["小黄", "Huang"], "model_author": ["A", "A"]}
SELF = {"dataset": ["swift/self-cognition#10"]}
# (a trainer, keys, words of the command, keys without an equivalent)
NF4 = {"model": "lora", "model.quantization": "nf4"}
ROWS = [
    # losses of answers: β, γ and weights as each trainer counts them
    ("llamafactory", {"stage": "dpo"}, {"loss": "dpo", "loss.beta": 0.1, "data.over_length": "drop"}, []),
    ("llamafactory", {"stage": "dpo", "pref_ftx": 0.2}, {"loss.nll_weight": 0.2, "loss.nll_mode": "sequence"}, []),
    ("llamafactory", {"stage": "dpo", "pref_loss": "orpo"}, {"loss": "orpo", "loss.nll_mode": "sequence"}, []),
    ("llamafactory", {"stage": "dpo", "pref_loss": "simpo"}, {"loss.beta": 0.1, "loss.margin": 0.5}, []),
    ("llamafactory", {"stage": "dpo", "pref_loss": "kto_pair"}, {"loss": None}, ["pref_loss"]),
    ("llamafactory", {"stage": "kto", "kto_chosen_weight": 2}, {"loss": "kto", "loss.desirable_weight": 2}, []),
    ("llamafactory", {"stage": "kto"}, {"data.strategy": None}, []),
    ("llamafactory", {"stage": "dpo"}, {"data.strategy": "none"}, []),
    (
        "llamafactory_v1",
        {"train_dataset": "pairs.yaml"},
        {"loss": "dpo", "data.over_length": "drop", "data.max_tokens": 4096},
        [],
    ),
    ("swift", {"rlhf_type": "dpo", "rpo_alpha": 0.1}, {"loss": "dpo", "loss.beta": 0.1, "loss.nll_weight": 0.1}, []),
    ("swift", {"rlhf_type": "simpo", "simpo_gamma": 1.5}, SIMPO, []),
    ("swift", {"rlhf_type": "dpo", "loss_type": ["sigmoid", "sft"]}, {"loss": "dpo"}, ["loss_type"]),
    ("swift", {"rlhf_type": "cpo", "loss_type": "sigmoid"}, {"loss": "cpo", "loss.beta": 0.1}, []),
    ("swift", {"rlhf_type": "cpo", "cpo_alpha": 0.5}, {"loss": "cpo", "loss.nll_weight": 0.5}, []),
    ("swift", {"rlhf_type": "cpo", "loss_type": "hinge"}, {"loss": None}, ["loss_type"]),
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.3}, {"loss": "orpo", "loss.beta": 0.3}, []),
    ("axolotl", {"rl": "dpo", "trl": {"beta": 0.4}, "rl_beta": 0.2}, {"loss.beta": 0.4}, []),
    ("axolotl", {"rl": "kto", "kto_desirable_weight": 0.2}, {"loss.desirable_weight": 0.2}, []),
    ("axolotl", {"rl": "dpo", "datasets": [ENTRY]}, {"columns.chosen": "good", "columns.messages": "conversation"}, []),
    ("trl_dpo", {"loss_type": "hinge", "ld_alpha": 0.5}, {"loss": "hinge", "loss.tail_weight": 0.5}, []),
    ("trl_dpo", {}, {"optim.lr": 1e-6, "data.max_tokens": 2048}, []),  # of both answers
    ("trl_kto", {"loss_type": "apo_zero_unpaired"}, {"loss": "apo_zero"}, []),
    # a step of several ranks: ranks that split a matrix share rows here, stages of layers do not
    ("axolotl", {"dp_shard_size": 2, "tensor_parallel_size": 2}, {"engine.ulysses_sequence_parallel_size": 2}, []),
    ("axolotl", {"dp_shard_size": 2, "tensor_parallel_size": 2}, {"data.train_batch_size": 2}, []),
    ("axolotl", {"dp_shard_size": 4, "expert_parallel_size": 4}, {"parallel.expert_parallel": 4}, []),
    ("llamafactory", {"pipeline_model_parallel_size": 4, "nproc": 8}, {"data.train_batch_size": 16}, []),
    ("llamafactory", EXPERTS, {"engine.offload_policy": True}, []),
    ("llamafactory", INT8_EXPERTS, {"engine.offload_policy": True}, ["kt_config"]),
    # sharding by the name of a description, which a file beside it says better
    ("swift", {"deepspeed": "zero2"}, {"engine.reshard_after_forward": False, "engine.offload_policy": None}, []),
    ("swift", {"deepspeed": "zero3_offload"}, {"engine.offload_policy": True}, []),
    ("swift", {"deepspeed": "zero3.json"}, {"engine.offload_policy": True, "engine.reshard_after_forward": False}, []),
    ("axolotl", {"fsdp_config": {"reshard_after_forward": False}}, {"engine.reshard_after_forward": False}, []),
    ("axolotl", {"fsdp_config": {"reshard_after_forward": True}}, {"engine.reshard_after_forward": None}, []),
    ("swift", {"deepspeed": "split.json"}, {"engine.reshard_after_forward": None}, ["deepspeed"]),
    # data sets: names of roles, fields of messages, texts that are filled in
    ("llamafactory", {}, {"message_columns": {"role": "speaker", "content": "says"}, "columns.kto_tag": "label"}, []),
    ("llamafactory", {}, {"roles": {"Customer": "user"}}, []),
    ("trl", {"dataset_train_split": "train+test"}, {}, ["dataset_name"]),
    ("axolotl", {"datasets": [{"path": "a.jsonl", "split": "train[:9]"}]}, {}, ["datasets"]),
    ("axolotl", {"datasets": [SPEAKERS]}, {"roles": {"Customer": "user"}, "message_columns": None}, []),
    ("axolotl", {"datasets": [{"path": "o/a", "message_property_mappings": {"mood": "m"}}]}, {}, ["datasets"]),
    (
        "swift",
        SELF | {"model_name": "Bo", "model_author": "Us"},
        {"replace": {"{{NAME}}": "Bo", "{{AUTHOR}}": "Us"}},
        [],
    ),
    ("swift", SELF | UNEQUAL, {"replace": {"{{AUTHOR}}": "A"}}, ["model_name"]),
    ("swift", SELF, {"replace": None}, []),
    ("swift", {"dataset": ["swift/self-cognition:empty_think"]}, {}, ["dataset"]),
    ("swift", {"FPS_MAX_FRAMES": "12"}, {}, ["FPS_MAX_FRAMES"]),
    ("axolotl", {"processor_type": "AutoProcessor"}, {}, ["processor_type"]),
    # what is learnt: prompts, weights of an agent's words
    ("axolotl", {"train_on_inputs": True}, {"prompts": "learn"}, []),
    ("llamafactory", {"train_on_prompt": True}, {"prompts": "learn"}, []),
    ("trl", {"completion_only_loss": False}, {"prompts": "learn"}, []),
    ("trl", {"completion_only_loss": True}, {"prompts": None}, []),
    ("swift", {"loss_scale": "all"}, {"prompts": "learn", "weights": None}, []),
    ("swift", {"loss_scale": "last_round+hermes"}, {"turns": "last", "weights": HERMES}, []),
    ("swift", {"loss_scale": "agentflan"}, {"weights": None}, ["loss_scale"]),
    ("swift", {"model": "Qwen/Qwen3-8B", "dataset": ["swift/self-cognition:empty_think"]}, {}, []),
    ("swift", {"model": "Qwen/Qwen3-8B", "dataset": ["swift/self-cognition:qwen3"]}, {}, ["dataset"]),
    ("swift", {"new_special_tokens": ["tokens.txt", "<b>"]}, {"model.new_special_tokens": ["<a>", "<c d>", "<b>"]}, []),
    ("swift", {"new_special_tokens": ["gone.txt"]}, {}, ["new_special_tokens"]),
    ("swift", {"enable_dft_loss": True}, {"loss.by_probability": True}, []),
    ("llamafactory", {"use_dft_loss": True}, {"loss.by_probability": True}, []),
    ("trl", {"loss_type": "dft"}, {"loss.by_probability": True}, []),
    # positions beyond the model's own
    ("swift", {"rope_scaling": "yarn", "max_model_len": 9}, {"model.override_config": REACHED}, []),
    ("swift", {"rope_scaling": {"type": "yarn", "factor": 2}}, {"model.override_config": {"rope_scaling": FACTOR}}, []),
    ("swift", {"rope_scaling": "yarn"}, {"model.override_config": None}, ["rope_scaling"]),
    ("llamafactory", {"rope_scaling": "yarn", "cutoff_len": 9}, {"model.override_config": REACHED}, []),
    ("llamafactory", {"rope_scaling": "llama3"}, {"model.override_config": None}, ["rope_scaling"]),
    # ms-swift's Megatron engine: a step counts the rows of all ranks, whatever shares them
    (
        "megatron",
        {"nproc": 8, "global_batch_size": 4, "tensor_model_parallel_size": 2},
        {"data.train_batch_size": 4},
        [],
    ),
    ("megatron", {"context_parallel_size": 2}, {"engine.ulysses_sequence_parallel_size": 2}, []),
    ("megatron", {"micro_batch_size": 2}, {"data.micro_batch_size_per_gpu": 2, "data.train_batch_size": 16}, []),
    ("megatron", {}, {"optim.lr": 1e-4, "model": None, "optim.weight_decay": 0.1, "optim.betas": [0.9, 0.95]}, []),
    ("megatron", {"min_lr": 1e-5}, {"optim.min_lr_ratio": 0.1}, []),
    ("megatron", {"lr_warmup_fraction": 0.05}, {"optim.lr_warmup_steps_ratio": 0.05}, []),
    ("megatron", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 7}, {"optim.lr_scheduler_type": "wsd"}, []),
    ("megatron", {"train_iters": 7}, {"trainer.total_training_steps": 7}, []),
    ("megatron", {"recompute_granularity": "none"}, {"model.enable_gradient_checkpointing": False}, []),
    ("megatron", {"tuner_type": "lora", "target_modules": ["linear_qkv"]}, {"model.target_modules": QKV}, []),
    ("megatron", {"tuner_type": "lora", "target_modules": ["all-linear", "all-router"]}, {}, ["target_modules"]),
    (
        "megatron",
        {"tuner_type": "lora", "modules_to_save": ["output_layer"]},
        {"model.modules_to_save": ["lm_head"]},
        [],
    ),
    ("megatron", {"moe_expert_capacity_factor": 2, "mtp_num_layers": 1}, {}, ["moe_expert_capacity_factor", *MTP]),
    ("megatron", {"rlhf_type": "dpo", "rpo_alpha": 0.1}, {"loss": "dpo", "loss.nll_weight": 0.1}, []),
    # what is frozen
    ("axolotl", {"unfrozen_parameters": ["^lm_head.weight$", "x.4[4-9]+.y."]}, {"model.freeze": TRAINED}, []),
    ("axolotl", {"unfrozen_parameters": ["layers.(1|2)"]}, {"model.freeze": None}, ["unfrozen_parameters"]),
    ("llamafactory_v1", {"peft_config": TWO_LAYERS}, {"model.freeze": ["!layers.-1", "!layers.-2"]}, []),
    (
        "llamafactory",
        {"finetuning_type": "freeze", "freeze_trainable_layers": -1, "freeze_trainable_modules": "mlp", **EXTRA},
        {"model.freeze": ["!layers.0.mlp", "!lm_head"]},
        [],
    ),
    # weights and optimizers
    ("axolotl", {"load_in_8bit": True, "fp8": True, "hub_model_id": "o/m"}, {}, []),
    ("axolotl", {"load_in_4bit": True}, {}, ["load_in_4bit"]),
    ("axolotl", {"adapter": "qlora", "load_in_4bit": True}, {**NF4, "model.quantization_nested": True}, []),
    (
        "axolotl",
        {"adapter": "qlora", "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
        {**NF4, "model.quantization_nested": None},
        [],
    ),
    (
        "llamafactory",
        {"finetuning_type": "lora", "quantization_bit": 4},
        {**NF4, "model.quantization_nested": True},
        [],
    ),
    ("llamafactory", {"finetuning_type": "lora", "quantization_bit": 8}, {"model.quantization": None}, []),
    ("llamafactory", {"quantization_bit": 4, "quantization_method": "hqq"}, {}, ["quantization_bit"]),
    ("swift", {"quant_bits": 4, "quant_method": "bnb", "tuner_type": "lora"}, NF4, []),
    ("swift", {"quant_bits": 4, "quant_method": "bnb", "bnb_4bit_quant_type": "fp4"}, {}, ["quant_bits"]),
    ("trl", {"use_peft": True, "load_in_4bit": True}, {**NF4, "model.quantization_nested": None}, []),
    ("trl", {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, NF4, []),
    ("swift", {"model": "o/M-7B-AWQ"}, {}, ["model"]),
    ("swift", {"model": "o/M-7B-Instruct"}, {}, []),
    ("llamafactory", {"use_muon": True}, {"optim.optimizer": "Muon"}, []),
    ("llamafactory_v1", {"optim_config": MUON_V1}, MUON, []),
    ("llamafactory_v1", {"optim_config": {"name": "lion"}}, {"optim.optimizer": None}, ["optim_config"]),
    ("llamafactory_v1", {"peft_config": {"name": "lora"}}, LEAST_V1, []),
    ("llamafactory_v1", {"peft_config": {"name": "oft"}}, {}, ["peft_config"]),
    ("axolotl", {"optimizer": "muon"}, {"optim.optimizer": "Muon"}, []),
    # the run
    ("axolotl", {}, {"trainer.max_ckpt_to_keep": 4}, []),
    ("axolotl", {"save_total_limit": 9}, {"trainer.max_ckpt_to_keep": 9}, []),
    ("axolotl", {"loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 2}, {"trainer.max_loss": 5.0}, []),
    ("axolotl", {"sample_packing": True, "sample_packing_sequentially": True}, {"data.strategy": "next_fit"}, []),
    ("axolotl", {"curriculum_sampling": True}, {"data.shuffle": False, "data.balance": "none"}, []),
    ("axolotl", {"reinit_weights": True}, {"model.path": "random_init"}, []),
    ("axolotl", {"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["perplexity"]}, {}, []),
    ("axolotl", {"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["comet"]}, {}, ["do_causal_lm_eval"]),
    ("axolotl", {"pretraining_dataset": ["o/t"], "train_on_inputs": True}, {}, []),
    ("swift", {"max_steps": 9, "max_epochs": 2}, {"trainer.total_training_steps": 9, "trainer.total_epochs": 2}, []),
    ("trl", {"report_to": "trackio"}, {"trainer.logger": ["console", "file", "trackio"]}, []),
]


@pytest.mark.parametrize(("trainer", "changes", "words", "lacks"), ROWS)
def test_keys_of_public_configurations_have_their_places(trainer, changes, words, lacks, tmp_path):
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "zero3.json").write_text(json.dumps(offload))
    (tmp_path / "split.json").write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}}))
    (tmp_path / "tokens.txt").write_text("<a>\n\n <c d>\n")
    pairs = {name: {"path": f"o/{name}", "converter": "pair"} for name in "pq"}
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(pairs))
    found = moved(trainer, tmp_path, **{"ranks" if key == "nproc" else key: value for key, value in changes.items()})
    assert {key: found.words.get(key) for key in words} == words
    assert lacking(found) == lacks


def test_a_key_whose_work_is_done_otherwise_is_said_with_its_value_and_counted_apart(tmp_path):
    found = moved("axolotl", tmp_path, load_in_8bit=True, fp8=False)
    lines = list(found.comments())
    assert lines[0] == "4 keys of T: 2 in the command, 1 need nothing, 1 done otherwise"
    assert any(line.startswith("differs: load_in_8bit=true: the base stays in bf16") for line in lines)
    assert "differs: save_total_limit not given: axolotl keeps the last 4 checkpoints, a run here all" in lines


def test_variables_that_read_images_are_named_if_the_command_sets_them():
    text = migrate(MigrateOptions("MAX_PIXELS=9 OTHER=1 swift sft --model M --dataset o/a"))
    assert "# no equivalent: MAX_PIXELS=9: records are text" in text
    assert "OTHER" not in text


def test_a_command_of_answers_passes_the_checks_of_the_trainer():
    """The trainer refuses options that the loss does not take, and units that would be cut."""
    for command in (
        "trl dpo --model_name_or_path M --dataset_name o/a --beta 0.2 --label_smoothing 0.1",
        "swift rlhf --rlhf_type simpo --model M --dataset o/a --split_dataset_ratio 0.1",
        "swift rlhf --rlhf_type kto --model M --dataset o/a --truncation_strategy right",
    ):
        assert "# to correct" not in migrate(MigrateOptions(command))


def test_a_command_of_the_megatron_engine_names_its_own_keys(tmp_path):
    command = "NPROC_PER_NODE=4 megatron sft --model M --dataset o/a --lr 1e-5 --global_batch_size 8 --no_such 3"
    lines = migrate(MigrateOptions(command)).splitlines()
    assert lines[0].startswith("verl-ext train nproc=4")
    assert "    data.train_batch_size=8 \\" in lines
    assert migrate(MigrateOptions(command.partition(" ")[2])).startswith("verl-ext train \\\n")
    assert "# 5 keys of ms-swift: 4 in the command, 0 need nothing, 1 unknown" in lines


def test_the_command_of_answers_without_a_type_is_dpo(tmp_path):
    (tmp_path / "x.yaml").write_text("model: M\ndataset: o/a\nrlhf_type: kto\nENV: {MAX_PIXELS: 9}\n")
    assert "loss=dpo" in migrate(MigrateOptions("swift rlhf --model M --dataset o/a"))
    text = migrate(MigrateOptions(f"megatron rlhf --config {tmp_path}/x.yaml"))
    assert "loss=kto" in text
    assert "# no equivalent: MAX_PIXELS=9: records are text" in text


def test_the_weights_of_an_agents_words_are_those_of_ms_swift(tmp_path):
    """Its own splitting of this turn: a key and the text after it, up to the next key."""
    patterns = moved("swift", tmp_path, loss_scale="react").words["weights"]
    text = "Thought: a Action: b Action Input: c Observation: d Thought: e Final Answer: f"
    weights = [1.0] * len(text)
    for pattern, weight in patterns.items():
        for match in re.finditer(pattern, text):
            for place in range(match.start(), match.end()):
                weights[place] *= weight
    parts = [("Thought: a ", 1), ("Action: b Action Input: c Observation:", 2), (" d ", 0), (text[-26:], 1)]
    assert weights == [weight for part, weight in parts for _ in part]
