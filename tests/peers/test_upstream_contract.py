"""The names in verl, transformers and torch on which this package relies, with the parameters that it uses."""

import ast
import importlib
import importlib.resources
import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from packaging.version import Version
from torch.nn.attention import varlen
from transformers.modeling_layers import GradientCheckpointingLayer
from verl.plugin.platform import PlatformBase
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import FileLogger
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorkerConfig

from tests.lib.packed_engine import build_worker
from tests.lib.ranks import run_ranks
from tests.lib.small_models import packed_and_plain
from verl_ext.attention import packed
from verl_ext.attention.kernels import KernelOptions
from verl_ext.config.newer import untried
from verl_ext.cpu_platform import CPUDevice, CPUPlatform
from verl_ext.engines import upstream
from verl_ext.engines.tiles import _ARGUMENTS, tileable
from verl_ext.environment import versions
from verl_ext.layers import SCANS, mixers_of
from verl_ext.layers.convolution import convolve
from verl_ext.layers.scans import delta_rule, state_space
from verl_ext.trainer.batch import _ENGINE_FLAGS

ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"

# A callable, and the parameters that are passed to it or that our override takes.
CALLABLES = {
    # attention
    "transformers:AttentionInterface.register": ("key", "value"),
    "verl.utils.ulysses:gather_outputs_and_unpad": ("x", "gather_dim"),
    "verl.utils.ulysses:get_ulysses_sequence_parallel_group": (),
    "verl.utils.ulysses:get_ulysses_sequence_parallel_world_size": ("group",),
    "torch.nn.attention.bias:causal_lower_right": (),
    "torch.nn.attention.varlen:varlen_attn": (
        *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"),
    ),
    # engine
    "verl.workers.engine.base:EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
    "verl.workers.engine.base:EngineRegistry.get_engine_cls": ("model_type", "backend"),
    f"{ENGINE}.__init__": ("model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    f"{ENGINE}._init_device_mesh": (),
    f"{ENGINE}.initialize": (),
    f"{ENGINE}.forward_step": ("micro_batch", "loss_function", "forward_only"),
    f"{ENGINE}.prepare_model_inputs": ("micro_batch",),
    f"{ENGINE}.prepare_model_outputs": ("output", "output_args", "micro_batch", "logits_processor_func"),
    f"{ENGINE}._gather_and_unpad_packed": ("tensor", "pad_size"),
    f"{ENGINE}._gradient_sync_context": ("is_last_micro_batch",),
    f"{ENGINE}.train_mode": (),
    f"{ENGINE}.eval_mode": (),
    f"{ENGINE}.optimizer_zero_grad": (),
    f"{ENGINE}.optimizer_step": (),
    f"{ENGINE}.lr_scheduler_step": (),
    f"{ENGINE}.get_data_parallel_rank": (),
    f"{ENGINE}.get_data_parallel_size": (),
    f"{ENGINE}.get_data_parallel_group": (),
    f"{ENGINE}.is_mp_src_rank_with_outputs": (),
    f"{ENGINE}.save_checkpoint": ("local_path", "global_step", "max_ckpt_to_keep"),
    f"{ENGINE}.load_checkpoint": ("local_path",),
    "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler.__init__": (
        *("device", "growth_interval", "process_group"),
    ),
    "verl.workers.engine.utils:detach_tree": ("obj",),
    "verl.workers.utils.losses:sft_loss": ("model_output", "data", "dp_group"),  # how verl calls any loss
    # chat templates
    "transformers.utils.chat_template_utils:_compile_jinja_template": ("chat_template",),
    "transformers.utils.chat_template_utils:_render_with_assistant_indices": (
        *("compiled_template", "documents", "add_generation_prompt", "template_kwargs"),
    ),
    # batches and configuration
    "verl.utils.tensordict_utils:get_tensordict": ("tensor_dict", "non_tensor_dict"),
    "verl.utils.tensordict_utils:get_non_tensor_data": ("data", "key", "default"),
    "verl.utils.config:omega_conf_to_dataclass": ("config",),
    "verl.utils.import_utils:load_extern_object": ("module_path", "object_name"),
    "verl.utils.device:get_device_id": (),
    "verl.utils.device:get_device_name": (),
    "verl.utils.distributed:initialize_global_process_group": ("timeout_second",),
    "torch.distributed.device_mesh:DeviceMesh.get_all_groups": (),
    # worker
    "verl.workers.engine_workers:TrainingWorker.__init__": ("config",),
    "verl.workers.engine_workers:TrainingWorker.reset": (),
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": ("loss_fn",),
    "verl.workers.engine_workers:TrainingWorker.start_profile": (),
    "verl.workers.engine_workers:TrainingWorker.step_profile": (),
    "verl.workers.engine_workers:TrainingWorker.stop_profile": (),
    # checkpoints and tracking
    "verl.utils.fsdp_utils:load_fsdp_model_to_gpu": ("model",),
    "verl.utils.fsdp_utils:offload_fsdp_model_to_cpu": ("model",),
    "verl.utils.fsdp_utils:offload_fsdp_optimizer": ("optimizer",),
    "torch.distributed.checkpoint:FileSystemWriter.__init__": ("path", "sync_files"),
    "torch.distributed.checkpoint:FileSystemWriter.stage": ("state_dict",),
    "torch.distributed.checkpoint:FileSystemWriter.storage_meta": (),
    "torch.distributed.checkpoint:FileSystemReader.read_metadata": (),
    "torch.distributed.checkpoint:save": ("state_dict", "storage_writer", "process_group"),
    "torch.distributed.checkpoint:load": ("state_dict", "storage_reader", "no_dist"),
    "torch.distributed.checkpoint.state_dict:get_optimizer_state_dict": ("model", "optimizers"),
    "verl.utils.tracking:Tracking.__init__": ("project_name", "experiment_name", "default_backend", "config"),
    "verl.utils.tracking:Tracking.log": ("data", "step"),
    "verl.utils.fsdp_utils:_select_fsdp2_wrap_targets": ("model", "fsdp_transformer_layer_cls_to_wrap"),
    "verl.workers.engine.fsdp.transformer_impl:apply_fsdp2": ("model", "fsdp_kwargs", "config"),
    "verl.workers.engine.fsdp.transformer_impl:fsdp2_clip_grad_norm_": ("parameters", "max_norm"),
    "peft:get_peft_model": ("model", "peft_config"),
    "peft:PeftModel.save_pretrained": ("save_directory", "save_embedding_layers"),
    # Muon
    "torch.optim._muon:_zeropower_via_newtonschulz": ("grad", "ns_coefficients", "ns_steps", "eps"),
    "torch.optim._muon:_adjust_lr": ("lr", "adjust_lr_fn", "param_shape"),
    # loader processes
    "torch.utils.data._utils.signal_handling:_set_SIGCHLD_handler": (),
    # the fake GPU of a plan
    "torch._guards:active_fake_mode": (),
    "torch._subclasses.fake_tensor:FakeTensorMode.create_symbolic_nested_int": ("nt_tensor_id",),
    "torch.utils.backend_registration:_setup_privateuseone_for_python_backend": ("rename", "backend_module"),
    # platform
    "verl.plugin.platform:PlatformRegistry.register": ("platform",),
    "verl.plugin.platform:get_platform": (),
}


KEYS = {  # of verl's configuration: an option that comes is to be read, refused (config/upstream.py) or left to verl
    "model": "path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib "
    "override_config enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank "
    "lora_alpha target_modules exclude_modules lora_adapter_path use_liger use_fused_kernels "
    "fused_kernel_options tiled_mlp mtp lora",
    "engine": "wrap_policy param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size "
    "forward_prefetch model_dtype use_orig_params seed full_determinism ulysses_sequence_parallel_size "
    "entropy_from_logits_with_chunking entropy_from_logits_chunk_size use_torch_compile entropy_checkpointing "
    "use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket forward_only strategy dtype qat "
    "turbo_config",
    "optim": "optimizer optimizer_impl lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps "
    "betas clip_grad min_lr_ratio num_cycles lr_scheduler_type zero_indexed_step warmup_style "
    "override_optimizer_config",
    "checkpoint": "save_contents load_contents",
    "data": "train_batch_size micro_batch_size_per_gpu max_token_len_per_gpu use_dynamic_bsz train_files val_files "
    "train_max_samples val_max_samples messages_key tools_key enable_thinking_key enable_thinking_default "
    "pad_mode max_length truncation balance_dp_token custom_cls use_shm apply_chat_template_kwargs num_workers "
    "ignore_input_ids_mismatch",
    "trainer": "default_local_dir default_hdfs_dir project_name experiment_name total_epochs total_training_steps "
    "logger seed save_freq test_freq max_ckpt_to_keep balance_batch resume_mode resume_from_path device nnodes "
    "n_gpus_per_node profile_interval",
}
# The functions over time that verl_ext/layers/mixers.py replaces, and ours.
OVER_TIME = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": state_space,
}
WITHOUT_CACHE = {  # what ours need not read where there is no cache, and documents come from the layout
    *("initial_state", "initial_states", "output_final_state", "cu_seqlens", "seq_idx", "chunk_size", "z")
}
# What models give to attention and packed attention refuses, as nothing in it reads them.
REFUSED_KEYWORDS = {"position_bias", "sinks", "indices", "block_indices"}
MODELS = Path(transformers.__file__).parent / "models"


def _resolve(name: str):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", CALLABLES)
def test_a_name_that_is_used_is_there_with_its_parameters(name):
    assert set(CALLABLES[name]) <= set(inspect.signature(_resolve(name)).parameters)


def test_verl_has_every_attribute_that_the_engines_replace():
    patches = [value for value in vars(upstream).values() if isinstance(value, upstream.Patch)]
    assert len(patches) == 6
    assert all(patch.original is not None for patch in patches)


def test_torch_has_the_private_names_that_the_fake_gpu_of_a_plan_uses():
    assert hasattr(torch._C, "_get_nested_int")
    for wrapper in ("torch.distributed.tensor:DTensor", "torch.nested._internal.nested_tensor:NestedTensor"):
        assert hasattr(_resolve(wrapper), "__tensor_flatten__")
    assert torch.ops.profiler._record_function_enter_new.default
    assert torch.ops.profiler._record_function_exit._RecordFunction
    source = inspect.getsource(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group"))
    for name in ("all_gather", "pre_forward", "pre_backward", "post_backward_accumulate", "post_backward_reshard"):
        assert f"FSDP::{name}" in source, name


@pytest.mark.skipif(not hasattr(varlen, "_can_use_cudnn"), reason="torch 2.14 brought a kernel of cuDNN")
@pytest.mark.parametrize("window", [None, 512])
def test_torchs_varlen_attention_runs_the_flash_kernel_that_a_run_names(window, monkeypatch):
    """On Hopper and Blackwell cuDNN computes attention without a window, as which torch counts no causal one."""
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: True)
    device, shape = SimpleNamespace(index=0), (4096, 16, 128)
    heads = SimpleNamespace(is_cuda=True, device=device, dtype=torch.bfloat16, shape=shape, size=lambda place: 16)
    assert varlen._can_use_cudnn(heads, heads, heads, 4096, [-1, -1])
    assert not varlen._can_use_cudnn(heads, heads, heads, 4096, [*KernelOptions(window=window).flash_window])


def test_versions_are_those_that_were_tried():
    assert untried(versions()) is None


@pytest.mark.slow
def test_the_keywords_that_models_give_to_attention_are_read_or_refused():
    calls = [call for path in MODELS.glob("*/modeling_*.py") for call in _calls(path.read_text(encoding="utf-8"))]
    to_attention = [call for call in calls if getattr(call.func, "id", None) == "attention_interface"]
    given = {keyword.arg for call in to_attention for keyword in call.keywords if keyword.arg is not None}
    read = {*inspect.signature(packed.packed_attention).parameters, *packed._READ_ELSEWHERE}
    assert given > {"scaling", "sliding_window", "softcap", "s_aux"}
    assert given - read <= REFUSED_KEYWORDS, "a keyword that nothing in packed attention reads"


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "nemotron_h", "bamba", "lfm2"])
def test_a_layer_over_time_has_functions_that_are_replaced_with_what_they_are_given(kind):
    """Before transformers 5.15 these are attributes of a layer, or names in its forward for GPUs."""
    layers = [layer for layer, mixer in mixers_of(packed_and_plain(kind)[1]) if mixer.time in (*SCANS, "convolution")]
    assert layers
    for cls in {type(layer): layer for layer in layers}:
        if Version(transformers.__version__) < Version("5.15"):
            assert {"cuda_kernels_forward", "torch_forward", "chunk_gated_delta_rule", "act_fn"} & _names_in(cls), cls
            continue
        calls = [call for call in _calls(inspect.getsource(cls)) if getattr(call.func, "id", None) in OVER_TIME]
        assert calls[0].func.id == "causal_conv1d_fn", f"{cls.__name__} convolves by another function"
        assert len(calls) == 1 + (kind != "lfm2"), f"{cls.__name__} has other functions over time"
        for call in calls:
            read = {*inspect.signature(OVER_TIME[call.func.id]).parameters, *WITHOUT_CACHE}
            assert {keyword.arg for keyword in call.keywords if keyword.arg} <= read, f"{cls.__name__}: {call.func.id}"


def _calls(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def _names_in(cls):
    nodes = ast.walk(ast.parse(inspect.getsource(cls)))
    return {getattr(node, "attr", getattr(node, "name", None)) for node in nodes}


def test_a_layers_class_or_its_call_checkpoints_the_layer_once_as_a_whole():
    class Layer(GradientCheckpointingLayer):
        def forward(self, hidden, scale=1.0):
            return hidden * scale

    calls, layer = [], Layer().train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = lambda function, *args: calls.append(args) or function(*args)
    hidden = torch.ones(1, requires_grad=True)
    assert layer(hidden, scale=2.0).item() == 2.0
    assert [args[0] is hidden for args in calls] == [True], "hidden states by position, all else bound"


def test_layers_name_what_they_are_given_as_tiles_know_it():
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            num_hidden_layers=1, vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2
        )
    )
    names = set(inspect.signature(type(model.model.layers[0]).forward).parameters) - {"self"}
    assert names <= _ARGUMENTS, "an argument that is no row for each token and not attention's"
    assert names & {"cache", "past_key_values"}
    assert tileable(model)[0] == list(model.model.layers)


def test_verls_configuration_has_the_keys_that_are_known():
    with initialize_config_dir(str(importlib.resources.files("verl.trainer.config")), version_base=None):
        theirs = compose("sft_trainer_engine")
    for node, known in KEYS.items():
        assert {name for name in theirs[node] if name != "_target_"} == set(known.split()), f"{node}: keys came or went"


def test_the_workers_configuration_has_the_fields_that_are_filled():
    filled = {"model_type", "model_config", "engine_config", "optimizer_config", "checkpoint_config", "profiler_config"}
    assert filled <= {field.name for field in fields(TrainingWorkerConfig)}


def test_the_cpu_platform_has_everything_that_verl_asks_of_a_platform():
    assert not CPUPlatform.__abstractmethods__
    for name in PlatformBase.__abstractmethods__:
        theirs, ours = inspect.getattr_static(PlatformBase, name), inspect.getattr_static(CPUPlatform, name)
        assert isinstance(theirs, property) is isinstance(ours, property), name


def test_device_calls_that_the_cpu_answers_are_those_of_a_gpu():
    ours = {name for name in vars(CPUDevice) if not name.startswith("_")}
    assert ours <= set(dir(torch.cuda))


def test_the_file_logger_writes_a_line_a_step_into_its_open_file(tmp_path):
    logger = FileLogger.__new__(FileLogger)
    with (tmp_path / "metrics.jsonl").open("ab", buffering=0) as logger.fp:
        logger.log({"loss": 1.0}, 3)
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":3,"data":{"loss":1.0}}\n'
        logger.finish()
        assert logger.fp.closed


def _what_an_engine_has(model: str) -> dict[str, object]:
    engine = build_worker(model).engine
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 5]))
    micro_batch = tu.get_tensordict({"input_ids": ids, "position_ids": ids}, dict(_ENGINE_FLAGS))
    inputs, outputs = FSDPEngineWithLMHead.prepare_model_inputs(engine, micro_batch)
    manager = engine.checkpoint_manager
    return {
        "inputs": {name: None if value is None else tuple(value.shape) for name, value in inputs.items()},
        "labels": outputs["input_ids_rmpad_rolled"].tolist(),
        "pad_size": outputs["pad_size"],
        "scaler": engine.scaler,
        "autocast": engine._autocast_dtype,
        "mesh": engine.ulysses_device_mesh,
        "lora": engine._is_lora,
        "schedule": engine.lr_scheduler.get_last_lr(),
        "offload": (engine._is_offload_param, engine._is_offload_optimizer),
        "contents": list(manager.checkpoint_save_contents),
        "exports": manager.should_save_hf_model,
        "attention": engine.module.config._attn_implementation,
    }


def test_an_engine_has_the_attributes_that_are_read(tiny_model):
    (seen,) = run_ranks(_what_an_engine_has, 1, str(tiny_model))
    assert seen == {
        "inputs": {"input_ids": (1, 5), "attention_mask": None, "position_ids": (1, 5)},
        "labels": [1, 2, 3, 4, 0],  # rolled over the micro-batch, so coefficients are shifted by document
        "pad_size": 0,
        "scaler": None,
        "autocast": torch.float32,
        "mesh": None,
        "lora": False,
        "schedule": [0.0],
        "offload": (False, False),
        "contents": ["model", "optimizer", "extra"],
        "exports": False,
        "attention": "verl_ext_packed",
    }
