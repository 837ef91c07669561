"""Each value of another trainer's key has its place in the command of `verl-ext migrate`, or is said to have none."""

import pytest

from tests.lib.migrated import RICH, SMALL, moved, write_files

SIMPO = {"loss": "simpo", "loss.beta": 2.0, "loss.margin": 1.5, "loss.nll_weight": 1.0}
TWO_LAYERS = {"name": "freeze", "freeze_trainable_layers": 2}
FROZEN = {"finetuning_type": "freeze", "freeze_trainable_layers": -1, "freeze_trainable_modules": "mlp"}
FROZEN |= {"freeze_extra_modules": "lm_head"}
TRAINED = ["!lm_head.weight", "!x.4[4-9].y"]
REACHED = {"max_position_embeddings": 9, "rope_parameters": {"rope_type": "yarn"}}
FACTOR = {"type": "yarn", "factor": 2}
QKV = ["q_proj", "k_proj", "v_proj"]
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
NF4 = {"model": "lora", "model.quantization": "nf4"}
OF_AXOLOTL = "axolotl:utils/chat_templates/templates"
AUXILIARY = {"a": 1, "output_router_logits": True, "router_aux_loss_coef": 0.5}
BLIND = {"test_datasets": None, "val_dataset": None, "eval_dataset": None}
THOUGHT = {"path": "o/a", "field_thinking": "thinking"}
PRECISION = "engine.mixed_precision.param_dtype"
ACCURACY = {"metric_for_best_model": "eval_rewards/accuracies", "dataset_test_split": "test"}
SWIFT_2 = {"model": None, "sft_type": "full", "model_id_or_path": "O/M", "batch_size": 4, "dtype": "fp16"}
# (a trainer, keys beside those of RICH, words of the command, "lacks", "free" or "differs" and keys)
ROWS_OF_RICH = [
    # what runs of the trainers showed
    ("trl", {"warmup_ratio": 0.1, "max_steps": 12}, {"optim.lr_warmup_steps": 2}, ""),
    ("axolotl", {"warmup_ratio": 0.1, "max_steps": 26}, {"optim.lr_warmup_steps": 2}, ""),  # 2.6, rounded down
    ("axolotl", {"warmup_ratio": 0.1, "max_steps": 12}, {"optim.lr_warmup_steps": 2}, ""),  # never one step
    ("axolotl", {"max_steps": 9000}, {"optim.lr_warmup_steps": 100, "optim.lr_warmup_steps_ratio": None}, ""),
    ("axolotl", {}, {"optim.lr_warmup_steps_ratio": 0.03}, ""),
    ("trl", {"activation_checkpointing": False}, {"model.enable_gradient_checkpointing": False}, ""),
    ("trl", {"train_sampling_strategy": "sequential"}, {"data.shuffle": False, "data.balance": "none"}, ""),
    ("trl", {"train_sampling_strategy": "random"}, {"data.shuffle": None}, ""),
    ("trl", {"assistant_only_loss": True}, {"empty_reasoning": "learn"}, ""),
    ("trl", {}, {"prompts": "learn", "empty_reasoning": "learn"}, ""),
    ("trl", {"completion_only_loss": True}, {"prompts": None, "empty_reasoning": None}, ""),
    # values of keys that mostly need nothing
    ("axolotl", {"bf16": False, "fp16": False}, {PRECISION: "fp32"}, ""),
    ("axolotl", {"bf16": False, "fp16": True}, {PRECISION: "fp16"}, ""),
    ("axolotl", {"bf16": "auto"}, {PRECISION: None}, "free bf16"),
    ("axolotl", {"float16": True}, {PRECISION: "fp16"}, ""),
    ("axolotl", {"wandb_watch": "gradients"}, {}, "lacks wandb_watch"),
    ("axolotl", {"wandb_watch": "false", "wandb_log_model": ""}, {}, "free wandb_watch wandb_log_model"),
    ("axolotl", {"pretrain_multipack_attn": True}, {}, "free pretrain_multipack_attn"),
    ("swift", {"torch_dtype": "float16"}, {PRECISION: "fp16"}, ""),
    ("swift", {"torch_dtype": "float32", "fp16": False, "bf16": False}, {PRECISION: "fp32"}, ""),
    ("swift", {"torch_dtype": "bfloat16"}, {PRECISION: None}, "free torch_dtype"),
    ("trl", {"torch_dtype": "float32"}, {PRECISION: None}, "free torch_dtype"),
    ("trl", {"no_cuda": True}, {"parallel": "cpu"}, ""),
    # a best checkpoint
    ("trl_dpo", ACCURACY, {"checkpoint.keep_best": "val/reward_accuracy"}, ""),
    ("trl_dpo", {**ACCURACY, "greater_is_better": False}, {"checkpoint.keep_best": None},
     "lacks metric_for_best_model"),
    ("trl", {"metric_for_best_model": "entropy"}, {"checkpoint.keep_best": None}, "lacks metric_for_best_model"),
    ("trl", {"metric_for_best_model": "eval_accuracy"}, {}, "lacks metric_for_best_model"),
    # answers with labels, and losses' older names
    ("trl_kto", {}, {"columns.kto_tag": "label", "loss": "kto"}, ""),
    ("swift", {"rlhf_type": "kto"}, {"columns.kto_tag": "label"}, ""),
    ("swift", {"rlhf_type": "dpo"}, {"columns.kto_tag": None}, ""),
    ("axolotl", {"rl": "kto"}, {"columns.kto_tag": "label"}, ""),
    ("axolotl", {"rl": "dpo", "dpo_beta": 0.3, "rpo_alpha": 0.2}, {"loss.beta": 0.3, "loss.nll_weight": 0.2}, ""),
    ("trl_dpo", {"rpo_alpha": 0.5}, {"loss.nll_weight": 0.5}, ""),
    # names of earlier versions
    ("axolotl", {"datasets": [{"path": "o/a", "conversation": "chatml"}]}, {"chat_template": "chatml"}, ""),
    ("swift", SWIFT_2, {"model.path": "O/M", "model": None, PRECISION: "fp16", "data.micro_batch_size_per_gpu": 4}, ""),
    ("swift", {"dataset": ["alpaca-zh"]}, {}, "lacks dataset"),
    ("trl", {"completion_only_loss": False}, {"prompts": "learn", "empty_reasoning": "learn"}, ""),
    ("llamafactory", {"template": "qwen3"}, {"empty_reasoning": "learn"}, ""),
    ("llamafactory", {"template": "qwen3", "enable_thinking": False}, {"empty_reasoning": None}, ""),
    ("llamafactory", {"stage": "pt"}, {"data.over_length": "split", "empty_reasoning": None}, ""),
    ("llamafactory", {"stage": "pt", "packing": False}, {"data.over_length": "truncate"}, ""),
    ("llamafactory", {"disable_shuffling": True}, {"data.shuffle": False, "data.balance": "none"}, ""),
    ("llamafactory", {"early_stopping_steps": 3}, {"trainer.early_stop.patience": 3}, ""),
    ("llamafactory", {"train_from_scratch": True}, {"model.path": "random_init"}, ""),
    ("swift", {"disable_ignore_empty_think": True}, {"empty_reasoning": "learn"}, ""),
    ("swift", {"add_non_thinking_prefix": False}, {"empty_reasoning": None}, ""),
    ("swift", {"packing": True, "packing_strategy": "sequential"}, {"data.strategy": "next_fit"}, ""),
    ("swift", {"target_regex": "model.*q_proj"}, {"model.target_modules": "model.*q_proj"}, ""),
    # a length is of a prompt with one answer there, and of a unit here
    ("swift", {"rlhf_type": "dpo", "max_length": 512}, {"data.max_tokens": 1024}, ""),
    ("swift", {"rlhf_type": "dpo", "max_length": "$L"}, {"data.max_tokens": "$L"}, "differs data.max_tokens=$L is not"),
    ("swift", {"rlhf_type": "kto", "max_length": 512}, {"data.max_tokens": 512}, ""),
    ("llamafactory", {"stage": "dpo", "cutoff_len": 512}, {"data.max_tokens": 1024}, ""),
    ("axolotl", {"rl": "dpo", "sequence_len": 512}, {"data.max_tokens": 1024}, ""),
    ("axolotl", {"rl": "dpo", "curriculum_sampling": True}, {"data.shuffle": None}, "free curriculum_sampling"),
    ("axolotl", {"curriculum_sampling": True}, {"data.shuffle": False, "data.balance": "none"}, ""),
    ("trl", {"optim": "adamw_torch_8bit"}, {"optim.optimizer": "AdamW8bit", "optim.optimizer_impl": None}, ""),
    ("axolotl", {"optimizer": "paged_adamw_8bit"}, {"optim.optimizer": "AdamW8bit", "optim.optimizer_impl": None}, ""),
    ("trl", {"fp16": True, "save_only_model": True}, {"checkpoint.save_contents": ["model", "hf_model"]}, ""),
    ("trl", {"save_total_limit": 0, "fp16": False}, {"trainer.max_ckpt_to_keep": None}, "free fp16 save_total_limit"),
    ("trl", {"warmup_steps": 0.25}, {"optim.lr_warmup_steps_ratio": 0.25}, ""),
    ("trl", {"save_steps": 0.1}, {"trainer.test_freq": 10}, "lacks save_steps"),
    ("trl", {"eval_strategy": False, "eval_steps": 9}, {"data.val_sources.a": None, "trainer.test_freq": None}, ""),
    ("trl", {"seed": 3, "data_seed": 4}, {"trainer.seed": 3, "data.seed": 4}, ""),
    ("trl", {"dataset_train_split": "train[:10]"}, {"data.sources.a": "hf://datasets/o/a:train[:10]"}, ""),
    ("trl", {"lr_scheduler_kwargs": "{a"}, {}, "lacks lr_scheduler_kwargs"),
    ("trl", {"report_to": ["wandb", "comet"]}, {"trainer.logger": ["console", "file", "wandb"]}, "lacks report_to"),
    ("trl", {"fsdp_config": {"offload_optimizer": {"device": "none"}}}, {}, "free fsdp_config"),
    ("swift", {"max_epochs": 5}, {"trainer.total_epochs": 3}, ""),
    ("swift", {"num_train_epochs": 9, "max_epochs": 5}, {"trainer.total_epochs": 5}, ""),
    ("swift", BLIND | {"eval_steps": 9}, {"trainer.test_freq": None}, "free eval_steps"),
    ("swift", BLIND | {"eval_steps": 9, "split_dataset_ratio": 0.1}, {"val_share": 0.1, "trainer.test_freq": 9}, ""),
    ("swift", {"columns": {"text1": "query"}}, {"columns": {"query": "text1"}}, ""),
    ("swift", {"new_special_tokens": ["<a>"]}, {"model.new_special_tokens": ["<a>"]}, ""),
    ("swift", {"new_special_tokens": ["a.txt"]}, {}, "lacks new_special_tokens"),
    ("swift", {"freeze_parameters": "embed_tokens"}, {"model.freeze": ["embed_tokens"]}, ""),
    ("swift", {"dataset": "s3://b/x.jsonl#5"}, {"data.sources.x": "s3://b/x.jsonl", "sample.x": "5"}, ""),
    ("swift", {"val_dataset": "o/a"}, {"data.val_sources.a": "hf://datasets/o/a"}, ""),
    ("swift", {"val_dataset": "o/a", "split_dataset_ratio": 0.1}, {"val_share": None}, ""),
    ("axolotl", BLIND | {"evals_per_epoch": 2}, {"trainer.tests_per_epoch": None}, "free evals_per_epoch"),
    ("axolotl", BLIND | {"evals_per_epoch": 2, "val_set_size": 0.1}, {"val_share": 0.1}, ""),
    ("swift", {"tuner_type": "lora", "lora_dropout": 0}, {"model.lora_dropout": None}, ""),
    ("swift", {"tuner_type": "lora"}, {"model.lora_dropout": 0.05}, ""),
    ("swift", {"tuner_type": "full", "lora_dropout": 0.1}, {"model.lora_dropout": None}, ""),
    ("axolotl", {"eot_tokens": ["<|end|>"]}, {"end_of_turn": "<|end|>"}, ""),
    ("axolotl", {"tokens": ["<a>", "<b>"]}, {"model.new_tokens": ["<a>", "<b>"]}, ""),
    ("axolotl", {"chat_template": "chatml"}, {"chat_template": "chatml", "chat_templates": OF_AXOLOTL}, ""),
    ("axolotl", {"chat_template": "tokenizer_default"}, {"chat_template": None, "chat_templates": None}, ""),
    ("axolotl", {"datasets": {"path": "./d", "data_files": ["a.jsonl"]}}, {"data.sources.d": "./d/a.jsonl"}, ""),
    ("axolotl", {"datasets": THOUGHT | {"message_field_role": "from", "template_thinking_key": "thinking"}}, {}, ""),
    ("axolotl", {"datasets": THOUGHT}, {"message_columns": {"reasoning_content": "thinking"}}, ""),
    ("axolotl", {"datasets": {"path": "o/a", "drop_system_message": True}}, {}, "lacks datasets"),
    ("axolotl", {"roles_to_train": ["assistant", "user"]}, {}, "lacks roles_to_train"),
    ("axolotl", {"model_config": {"a": 1}, "router_aux_loss_coef": 0.5}, {"model.override_config": AUXILIARY}, ""),
    ("llamafactory", {"add_tokens": "<a>, <b>", "resize_vocab": True}, {"model.new_tokens": ["<a>", "<b>"]}, ""),
    ("llamafactory", {"add_special_tokens": "<a>"}, {"model.new_special_tokens": ["<a>"]}, ""),
    ("llamafactory", {"lora_target": "q_proj, v_proj"}, {"model.target_modules": ["q_proj", "v_proj"]}, ""),
    ("llamafactory", {"mask_history": True, "pure_bf16": True}, {"turns": "last", "engine.model_dtype": "bf16"}, ""),
    ("llamafactory", {"finetuning_type": "full", "adapter_name_or_path": "D"}, {}, "lacks adapter_name_or_path"),
    ("llamafactory", {"dataset": "sums,chats", "max_samples": 500}, {"sample.sums": 100, "sample.chats": 500}, ""),
    ("llamafactory", {"dataset": "asked"}, {"columns.input": "q"}, "lacks dataset"),
    ("llamafactory", BLIND, {"trainer.test_freq": None}, "lacks eval_strategy"),
    ("llamafactory_v1", {"gradient_accumulation_steps": 8}, {"data.train_batch_size": 8}, ""),
    ("llamafactory_v1", {"num_train_epochs": 2.5}, {"trainer.total_epochs": None}, "lacks num_train_epochs"),
    ("llamafactory_v1", {"peft_config": {"name": "lora", "r": 4, "p": 1}}, {"model.lora_rank": 4}, "lacks peft_config"),
    ("llamafactory_v1", {"train_dataset": "local.yaml"}, {"data.sources.b": "b", "sample.b": 5}, "lacks train_dataset"),
]  # fmt: skip
# The same beside SMALL: what public configurations ask for.
ROWS = [
    # losses of answers: β, γ and weights as each trainer counts them
    ("llamafactory", {"stage": "dpo"},
     {"loss": "dpo", "loss.beta": 0.1, "data.over_length": "drop", "data.strategy": "none"}, ""),
    ("llamafactory", {"stage": "dpo", "pref_ftx": 0.2}, {"loss.nll_weight": 0.2, "loss.nll_mode": "sequence"}, ""),
    ("llamafactory", {"stage": "dpo", "pref_loss": "orpo"}, {"loss": "orpo", "loss.nll_mode": "sequence"}, ""),
    ("llamafactory", {"stage": "dpo", "pref_loss": "simpo"}, {"loss.beta": 0.1, "loss.margin": 0.5}, ""),
    ("llamafactory", {"stage": "dpo", "pref_loss": "kto_pair"}, {"loss": None}, "lacks pref_loss"),
    ("llamafactory", {"stage": "kto", "kto_chosen_weight": 2}, {"loss": "kto", "loss.desirable_weight": 2}, ""),
    ("llamafactory", {"stage": "kto"}, {"data.strategy": None}, ""),
    ("llamafactory_v1", {"train_dataset": "pairs.yaml"},
     {"loss": "dpo", "data.over_length": "drop", "data.max_tokens": 4096}, ""),
    ("swift", {"rlhf_type": "dpo", "rpo_alpha": 0.1}, {"loss": "dpo", "loss.beta": 0.1, "loss.nll_weight": 0.1}, ""),
    ("swift", {"rlhf_type": "simpo", "simpo_gamma": 1.5}, SIMPO, ""),
    ("swift", {"rlhf_type": "dpo", "loss_type": ["sigmoid", "sft"]}, {"loss": "dpo"}, "lacks loss_type"),
    ("swift", {"rlhf_type": "cpo", "loss_type": "sigmoid"}, {"loss": "cpo", "loss.beta": 0.1}, ""),
    ("swift", {"rlhf_type": "cpo", "cpo_alpha": 0.5}, {"loss": "cpo", "loss.nll_weight": 0.5}, ""),
    ("swift", {"rlhf_type": "cpo", "loss_type": "hinge"}, {"loss": None}, "lacks loss_type"),
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.3}, {"loss": "orpo", "loss.beta": 0.3}, ""),
    ("axolotl", {"rl": "dpo", "trl": {"beta": 0.4}, "rl_beta": 0.2}, {"loss.beta": 0.4}, ""),
    ("axolotl", {"rl": "kto", "kto_desirable_weight": 0.2}, {"loss.desirable_weight": 0.2}, ""),
    ("axolotl", {"rl": "dpo", "datasets": [ENTRY]}, {"columns.chosen": "good", "columns.messages": "conversation"}, ""),
    ("trl_dpo", {"loss_type": "hinge", "ld_alpha": 0.5}, {"loss": "hinge", "loss.tail_weight": 0.5}, ""),
    ("trl_dpo", {}, {"optim.lr": 1e-6, "data.max_tokens": 2048}, ""),  # of both answers
    ("trl_kto", {"loss_type": "apo_zero_unpaired"}, {"loss": "apo_zero"}, ""),
    # a step of several ranks: ranks that split a matrix share rows here, stages of layers do not
    ("axolotl", {"dp_shard_size": 2, "tensor_parallel_size": 2},
     {"engine.ulysses_sequence_parallel_size": 2, "data.train_batch_size": 2}, ""),
    ("axolotl", {"dp_shard_size": 4, "expert_parallel_size": 4}, {"parallel.expert_parallel": 4}, ""),
    ("llamafactory", {"pipeline_model_parallel_size": 4, "nproc": 8}, {"data.train_batch_size": 16}, ""),
    ("llamafactory", EXPERTS, {"engine.offload_policy": True}, ""),
    ("llamafactory", INT8_EXPERTS, {"engine.offload_policy": True}, "lacks kt_config"),
    # sharding by the name of a description, which a file beside it says better
    ("swift", {"deepspeed": "zero2"}, {"engine.reshard_after_forward": False, "engine.offload_policy": None}, ""),
    ("swift", {"deepspeed": "zero3_offload"}, {"engine.offload_policy": True}, ""),
    ("swift", {"deepspeed": "zero3.json"}, {"engine.offload_policy": True, "engine.reshard_after_forward": False}, ""),
    ("swift", {"deepspeed": "gone3.json"}, {"engine.reshard_after_forward": None}, "differs deepspeed: gone3.json"),
    ("swift", {"deepspeed": {"bf16": {"enabled": True}}}, {"engine.reshard_after_forward": False}, ""),  # stage 0
    ("swift", {"deepspeed": {"deepspeed_config_file": "zero3.json"}}, {"engine.offload_policy": True}, ""),
    ("axolotl", {"fsdp_config": {"reshard_after_forward": False}}, {"engine.reshard_after_forward": False}, ""),
    ("axolotl", {"fsdp_config": {"reshard_after_forward": True}}, {"engine.reshard_after_forward": None}, ""),
    ("swift", {"deepspeed": "split.json"}, {"engine.reshard_after_forward": False}, "lacks deepspeed"),
    # data sets: names of roles, fields of messages, texts that are filled in
    ("llamafactory", {}, {"message_columns": {"role": "speaker", "content": "says"}, "columns.kto_tag": "label"}, ""),
    ("llamafactory", {}, {"roles": {"Customer": "user"}}, ""),
    ("trl", {"dataset_train_split": "train+test"}, {}, "lacks dataset_name"),
    ("axolotl", {"datasets": [{"path": "a.jsonl", "split": "train[:9]"}]}, {}, "lacks datasets"),
    ("axolotl", {"datasets": [SPEAKERS]}, {"roles": {"Customer": "user"}, "message_columns": None}, ""),
    ("axolotl", {"datasets": [{"path": "o/a", "message_property_mappings": {"mood": "m"}}]}, {}, "lacks datasets"),
    ("swift", SELF | {"model_name": "Bo", "model_author": "Us"}, {"replace": {"{{NAME}}": "Bo", "{{AUTHOR}}": "Us"}},
     ""),
    ("swift", SELF | UNEQUAL, {"replace": {"{{AUTHOR}}": "A"}}, "lacks model_name"),
    ("swift", SELF, {"replace": None}, ""),
    ("swift", {"dataset": ["swift/self-cognition:empty_think"]}, {}, "lacks dataset"),
    ("swift", {"FPS_MAX_FRAMES": "12"}, {}, "lacks FPS_MAX_FRAMES"),
    ("axolotl", {"processor_type": "AutoProcessor"}, {}, "lacks processor_type"),
    # what is learnt: prompts, weights of an agent's words
    ("axolotl", {"train_on_inputs": True}, {"prompts": "learn"}, ""),
    ("llamafactory", {"train_on_prompt": True}, {"prompts": "learn"}, ""),
    ("swift", {"loss_scale": "all"}, {"prompts": "learn", "weights": None}, ""),
    ("swift", {"loss_scale": "last_round+hermes"}, {"turns": "last", "weights": HERMES}, ""),
    ("swift", {"loss_scale": "agentflan"}, {"weights": None}, "lacks loss_scale"),
    ("swift", {"model": "Qwen/Qwen3-8B", "dataset": ["swift/self-cognition:empty_think"]}, {}, ""),
    ("swift", {"model": "Qwen/Qwen3-8B", "dataset": ["swift/self-cognition:qwen3"]}, {}, "lacks dataset"),
    ("swift", {"new_special_tokens": ["tokens.txt", "<b>"]}, {"model.new_special_tokens": ["<a>", "<c d>", "<b>"]}, ""),
    ("swift", {"new_special_tokens": ["gone.txt"]}, {}, "lacks new_special_tokens"),
    ("swift", {"enable_dft_loss": True}, {"loss.by_probability": True}, ""),
    ("llamafactory", {"use_dft_loss": True}, {"loss.by_probability": True}, ""),
    ("trl", {"loss_type": "dft"}, {"loss.by_probability": True}, ""),
    # positions beyond the model's own
    ("swift", {"rope_scaling": "yarn", "max_model_len": 9}, {"model.override_config": REACHED}, ""),
    ("swift", {"rope_scaling": {"type": "yarn", "factor": 2}}, {"model.override_config": {"rope_scaling": FACTOR}}, ""),
    ("swift", {"rope_scaling": "yarn"}, {"model.override_config": None}, "lacks rope_scaling"),
    ("llamafactory", {"rope_scaling": "yarn", "cutoff_len": 9}, {"model.override_config": REACHED}, ""),
    ("llamafactory", {"rope_scaling": "llama3"}, {"model.override_config": None}, "lacks rope_scaling"),
    # ms-swift's Megatron engine: a step counts the rows of all ranks, whatever shares them
    ("megatron", {"nproc": 8, "global_batch_size": 4, "tensor_model_parallel_size": 2}, {"data.train_batch_size": 4},
     ""),
    ("megatron", {"context_parallel_size": 2}, {"engine.ulysses_sequence_parallel_size": 2}, ""),
    ("megatron", {"micro_batch_size": 2}, {"data.micro_batch_size_per_gpu": 2, "data.train_batch_size": 16}, ""),
    ("megatron", {}, {"optim.lr": 1e-4, "model": None, "optim.weight_decay": 0.1, "optim.betas": [0.9, 0.95]}, ""),
    ("megatron", {"min_lr": 1e-5}, {"optim.min_lr_ratio": 0.1}, ""),
    ("megatron", {"lr_warmup_fraction": 0.05}, {"optim.lr_warmup_steps_ratio": 0.05}, ""),
    ("megatron", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 7}, {"optim.lr_scheduler_type": "wsd"}, ""),
    ("megatron", {"train_iters": 7}, {"trainer.total_training_steps": 7}, ""),
    ("megatron", {"recompute_granularity": "none"}, {"model.enable_gradient_checkpointing": False}, ""),
    ("megatron", {"tuner_type": "lora", "target_modules": ["linear_qkv"]}, {"model.target_modules": QKV}, ""),
    ("megatron", {"tuner_type": "lora", "target_modules": ["all-linear", "all-router"]}, {}, "lacks target_modules"),
    ("megatron", {"tuner_type": "lora", "modules_to_save": ["output_layer"]}, {"model.modules_to_save": ["lm_head"]},
     ""),
    ("megatron", {"moe_expert_capacity_factor": 2, "mtp_num_layers": 1}, {},
     "lacks moe_expert_capacity_factor mtp_num_layers"),
    ("megatron", {"rlhf_type": "dpo", "rpo_alpha": 0.1}, {"loss": "dpo", "loss.nll_weight": 0.1}, ""),
    # what is frozen
    ("axolotl", {"unfrozen_parameters": ["^lm_head.weight$", "x.4[4-9]+.y."]}, {"model.freeze": TRAINED}, ""),
    ("axolotl", {"unfrozen_parameters": ["layers.(1|2)"]}, {"model.freeze": None}, "lacks unfrozen_parameters"),
    ("llamafactory_v1", {"peft_config": TWO_LAYERS}, {"model.freeze": ["!layers.-1", "!layers.-2"]}, ""),
    ("llamafactory", FROZEN, {"model.freeze": ["!layers.0.mlp", "!lm_head"]}, ""),
    # weights and optimizers
    ("axolotl", {"load_in_8bit": True, "fp8": True, "hub_model_id": "o/m"}, {}, ""),
    ("axolotl", {"load_in_4bit": True}, {}, "lacks load_in_4bit"),
    ("axolotl", {"adapter": "qlora", "load_in_4bit": True}, {**NF4, "model.quantization_nested": True}, ""),
    ("axolotl", {"adapter": "qlora", "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
     {**NF4, "model.quantization_nested": None}, ""),
    ("llamafactory", {"finetuning_type": "lora", "quantization_bit": 4}, {**NF4, "model.quantization_nested": True},
     ""),
    ("llamafactory", {"finetuning_type": "lora", "quantization_bit": 8}, {"model.quantization": None}, ""),
    ("llamafactory", {"quantization_bit": 4, "quantization_method": "hqq"}, {}, "lacks quantization_bit"),
    ("swift", {"quant_bits": 4, "quant_method": "bnb", "tuner_type": "lora"}, NF4, ""),
    ("swift", {"quant_method": "awq"}, {}, "lacks quant_method"),
    ("swift", {"quant_bits": 4, "quant_method": "bnb", "bnb_4bit_quant_type": "fp4"}, {}, "lacks quant_bits"),
    ("trl", {"use_peft": True, "load_in_4bit": True}, {**NF4, "model.quantization_nested": None}, ""),
    ("trl", {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, NF4, ""),
    ("swift", {"model": "o/M-7B-AWQ"}, {}, "lacks model"),
    ("swift", {"model": "o/M-7B-Instruct"}, {}, ""),
    ("llamafactory", {"use_muon": True}, {"optim.optimizer": "Muon"}, ""),
    ("llamafactory_v1", {"optim_config": MUON_V1}, MUON, ""),
    ("llamafactory_v1", {"optim_config": {"name": "lion"}}, {"optim.optimizer": None}, "lacks optim_config"),
    ("llamafactory_v1", {"peft_config": {"name": "lora"}}, LEAST_V1, ""),
    ("llamafactory_v1", {"peft_config": {"name": "oft"}}, {}, "lacks peft_config"),
    ("axolotl", {"optimizer": "muon"}, {"optim.optimizer": "Muon"}, ""),
    # the run
    ("axolotl", {}, {"trainer.max_ckpt_to_keep": 4}, ""),
    ("axolotl", {"save_total_limit": 9}, {"trainer.max_ckpt_to_keep": 9}, ""),
    ("axolotl", {"loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 2}, {"trainer.max_loss": 5.0}, ""),
    ("axolotl", {"sample_packing": True, "sample_packing_sequentially": True}, {"data.strategy": "next_fit"}, ""),
    ("axolotl", {"reinit_weights": True}, {"model.path": "random_init"}, ""),
    ("axolotl", {"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["perplexity"]}, {}, ""),
    ("axolotl", {"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["comet"]}, {}, "lacks do_causal_lm_eval"),
    ("axolotl", {"pretraining_dataset": ["o/t"], "train_on_inputs": True}, {}, ""),
    ("swift", {"max_steps": 9, "max_epochs": 2}, {"trainer.total_training_steps": 9, "trainer.total_epochs": 2}, ""),
    ("trl", {"report_to": "trackio"}, {"trainer.logger": ["console", "file", "trackio"]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "trainer", "changes", "words", "comment"),
    [*((RICH, *row) for row in ROWS_OF_RICH), *((SMALL, *row) for row in ROWS)],
)
def test_a_value_has_its_place_or_is_said_to_have_none(beside, trainer, changes, words, comment, tmp_path):
    changes = dict(changes)
    ranks = changes.pop("nproc", None)
    found = moved(trainer, beside[trainer] | changes, write_files(tmp_path), ranks)
    kind, *keys = comment.split() or [""]
    assert {key: found.words.get(key) for key in words} == words
    lines = [*found.comments()]
    lacks = [line.split(": ", 1)[1] for line in lines if line.startswith(("no equivalent", "unknown"))]
    assert [line.split("=")[0] for line in lacks] == [key for key in keys if kind == "lacks"]
    assert {*keys} <= {*found.free} or kind != "free"
    assert kind != "differs" or any(f"differs: {' '.join(keys)}" in line for line in lines)
