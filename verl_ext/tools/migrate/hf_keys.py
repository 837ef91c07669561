"""The keys of transformers' Trainer, which LLaMA-Factory, ms-swift and TRL share, and their places."""

from verl_ext.tools.migrate.line import FREE, READ, Rule, differing, lacking, rules, to

TRACKERS = ("wandb", "swanlab", "mlflow", "tensorboard", "trackio", "clearml")
NO_VALIDATION = "there is no validation data to measure"
HELD_OUT = to("val_share", {"0": None, "0.0": None})
QUANTIZED = lacking("a base of 4 or 8 bits is not trained; adapters of its bf16 weights are (model=lora)", "none")
IN_8_BITS = differing(
    "the base stays in bf16: its weights take twice the memory, and its products are not rounded to 8 bits"
)
UNSHARDED = lacking("optim.optimizer names a class of torch.optim or another package that steps shards")
TOKENS, SPECIAL_TOKENS = (to(f"model.new_{kind}tokens", is_names=True) for kind in ("", "special_"))
IMAGES = lacking("records are text; media=drop leaves their images out")
DFT = to("loss.by_probability", {"false": None})
FP8 = differing("weights and products are bf16")
# {parallelism of other engines}: each has the number of ranks that hold one copy's parts.
TENSOR = "tensor_parallel_size tensor_model_parallel_size"
STAGES = "pipeline_parallel_size pipeline_model_parallel_size"
_EXPERTS = "expert_parallel_size expert_model_parallel_size"
GROUPS: dict[str, Rule] = {
    **rules(READ, f"{TENSOR} {STAGES}"),
    **rules(differing("FSDP2 shards experts as all parameters; a rank computes its own tokens'", "1"), _EXPERTS),
}

KEYS: dict[str, Rule] = {
    **rules(
        FREE,
        "ddp_timeout ddp_find_unused_parameters bf16 greater_is_better tf32 do_train do_eval overwrite_output_dir "
        "logging_strategy logging_first_step gradient_checkpointing_kwargs remove_unused_columns "
        "dataloader_pin_memory disable_tqdm dataloader_persistent_workers save_safetensors log_level logging_dir "
        "hub_strategy hub_private_repo include_num_input_tokens_seen local_rank per_device_eval_batch_size "
        "eval_accumulation_steps dataloader_prefetch_factor torch_compile use_cpu group_by_length "
        "prediction_loss_only label_names fsdp_transformer_layer_cls_to_wrap accelerator_config "
        "average_tokens_across_devices auto_find_batch_size ddp_backend include_tokens_per_second no_cuda "
        "activation_checkpointing_kwargs batch_eval_metrics bf16_full_eval fp16_full_eval dataloader_in_order "
        "dataloader_multiprocessing_context ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph debug "
        "enable_jit_checkpoint eval_do_concat_batches eval_use_gather_object hub_always_push hub_revision hub_token "
        "include_for_metrics length_column_name liger_kernel_config log_level_replica log_on_each_node "
        "logging_nan_inf_filter restore_callback_states_from_checkpoint save_on_each_node skip_memory_metrics "
        "torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id "
        "trackio_static_space_id use_cache full_determinism ignore_data_skip",
    ),
    **rules(
        READ,
        "per_device_train_batch_size gradient_accumulation_steps learning_rate lr_scheduler_type warmup_ratio "
        "warmup_steps weight_decay num_train_epochs max_steps save_steps save_strategy eval_steps eval_strategy "
        "evaluation_strategy optim report_to metric_for_best_model load_best_model_at_end early_stopping_patience "
        "adam_beta1 adam_beta2 gradient_checkpointing seed resume_from_checkpoint lr_scheduler_kwargs "
        "early_stopping_threshold router_aux_loss_coef moe_aux_loss_coef data_seed deepspeed fsdp fsdp_config "
        "activation_checkpointing train_sampling_strategy",
    ),
    "trust_remote_code": to("model.trust_remote_code"),
    "lora_dropout": to("model.lora_dropout", {"0": None, "0.0": None}),
    "use_rslora": to("model.use_rslora", {"false": None}),
    "use_dora": to("model.use_dora", {"false": None}),
    **rules(to("model.modules_to_save", is_names=True), "modules_to_save lora_modules_to_save additional_target"),
    **rules(to("model.target_parameters", is_names=True), "target_parameters lora_target_parameters"),
    **rules(to("system"), "system default_system default_system_message"),
    "max_grad_norm": to("optim.clip_grad"),
    "output_dir": to("trainer.default_local_dir"),
    "run_name": to("trainer.experiment_name"),
    "project": to("trainer.project_name"),
    "eval_on_start": to("trainer.val_before_train"),
    "logging_steps": to("trainer.log_freq"),
    "save_total_limit": to("trainer.max_ckpt_to_keep", {"0": None, "-1": None}),
    "save_only_model": to("checkpoint.save_contents", {"true": ["model", "hf_model"], "false": None}),
    "use_liger_kernel": to("model.use_liger", {"false": None}),
    "dataloader_drop_last": to("data.drop_last", {"false": None}),
    "fp16": to("engine.mixed_precision.param_dtype", {"true": "fp16", "false": None, "auto": None}),
    "dataloader_num_workers": to("data.num_workers"),
    "adam_epsilon": to("optim.override_optimizer_config.eps"),
    "eval_delay": lacking("validation begins with the first trainer.test_freq"),
    "neftune_noise_alpha": lacking("no noise is added to embeddings"),
    "label_smoothing_factor": lacking("labels are not smoothed", "0", "0.0"),
    **rules(
        differing("no run uploads; `verl-ext export` writes a folder for `hf upload NAME FOLDER`"),
        "push_to_hub hub_model_id",
    ),
    "optim_target_modules": UNSHARDED,
    "optim_args": lacking("optim.override_optimizer_config has the options of an optimizer by name"),
    **rules(lacking("eval.prompts has prompts to answer while training"), "predict_with_generate do_predict"),
    "parallelism_config": lacking("ranks share parameters, and rows by engine.ulysses_sequence_parallel_size"),
}
