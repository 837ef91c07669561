"""Cross-field checks before a model loads: one line for each mistake, all lines at once. No GPU is needed, because the
accelerator is passed in."""

import importlib.util
import inspect

import pytest
import torch
from omegaconf import OmegaConf
from peft import IA3Config, LoraConfig
from safetensors.torch import save_file
from transformers import (
    BertGenerationConfig,
    DbrxConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    RobertaConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from tests.lib.checked import changed as overridden_by
from tests.lib.checked import checked, sound_run, typed
from tests.lib.errors import names, refused
from verl_ext.config.architecture import Architecture
from verl_ext.config.check import check_categories, check_positions, model_positions
from verl_ext.config.compose import compose
from verl_ext.config.support import attention_dropout, model_notices
from verl_ext.config.weights import weight_problems
from verl_ext.losses import LossOptions

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 96, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return sound_run(tmp_path_factory.mktemp("run"))


def changed(config, **updates):
    config = config.copy()
    for key, value in updates.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def lines(config, world_size=1, accelerator=None):
    with pytest.raises(ValueError, match=r"\S") as raised:
        checked(config, world_size, accelerator)
    return str(raised.value).splitlines()


def test_a_good_config_passes_and_gives_the_models_config(good):
    assert checked(good, 1).hf_config.num_attention_heads == 12
    checked(changed(good, engine__ulysses_sequence_parallel_size=2), 4)
    checked(changed(good, engine__ulysses_sequence_parallel_size=4), 4)  # key/value heads repeat: 4 is 2 × 2
    checked(changed(good, engine__ulysses_sequence_parallel_size=4, parallel__context_parallel_size=4), 16)
    checked(changed(good, engine__ulysses_sequence_parallel_size=8), 8)  # groups of 6 heads become groups of 8
    checked(changed(good, trainer__device="auto"), 2)
    checked(changed(good, attention__backend="sdpa", data__val_dir=good.data.train_dir, trainer__test_freq=3), 2)
    checked(changed(good, trainer__device="auto", attention__backend="varlen"), 8, "cuda")


def test_keys_of_lora_without_a_rank_and_weights_in_bf16_are_told(good):
    lora = "model.lora_rank=0 trains all parameters: no effect of model.lora_alpha"
    for rank, is_told in ((0, True), (4, False)):
        notices = typed(changed(good, model__lora_alpha=5, model__lora_rank=rank), 1, None).notices
        assert (lora in notices) == is_told
    (notice,) = [x for x in checked(changed(good, engine__model_dtype="bf16"), 1).notices if "model_dtype" in x]
    assert "a step below 1/512 of a weight is lost" in notice
    plain = [*typed(good, 1, None).notices, *checked(good, 1).notices]
    assert not [notice for notice in plain if "lora" in notice or "model_dtype" in notice]


def test_what_a_class_keeps_in_fp32_is_told_to_be_rounded(good):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(vocab_size=100, **sizes, **heads, **experts)
    model = Architecture(config)
    for dtype, is_told in (("bf16", True), ("fp32", False), (None, False)):
        run = typed(changed(good, engine__model_dtype=dtype), 1)
        told = [line for line in model_notices(run, model, "fused") if "e_score_correction_bias" in line]
        assert bool(told) is is_told


def test_correction_biases_that_no_loss_trains_are_counted(good):
    notices = checked(good, 1, hf_config=DeepseekV3Config(**MIXTURE)).notices
    (told,) = [line for line in notices if "correction biases" in line]
    assert told.endswith("no loss trains: mlp.gate.e_score_correction_bias (1)")
    assert not [line for line in checked(good, 1).notices if "correction biases" in line]


def overridden(good, **values):
    return checked(
        changed(good, **{f"model__override_config__{key}": value for key, value in values.items()}), 1
    ).hf_config


def test_what_overrides_a_models_config_is_what_is_checked_and_trained(good):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    config = overridden(good, max_position_embeddings=2048, rope_parameters=yarn, rms_norm_eps=1)
    assert (config.max_position_embeddings, config.rope_parameters) == (2048, rope)
    assert (config.rms_norm_eps, type(config.rms_norm_eps)) == (1.0, float)
    assert overridden(good, rope_scaling=yarn).rope_parameters == rope
    longer = overridden(good, max_position_embeddings=1100, rope_parameters={"rope_type": "yarn"})
    of_512 = {"factor": 3.0, "original_max_position_embeddings": 512}
    assert longer.rope_parameters == {**longer.rope_parameters, **of_512, "rope_type": "yarn"}
    linear = overridden(good, max_position_embeddings=1100, rope_scaling={"type": "linear"})
    assert (linear.rope_parameters["factor"], linear.rope_parameters["rope_type"]) == (3.0, "linear")
    assert overridden(good, rope_theta=5e5).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("values", "key", "things"),
    [
        ({"rope_thetta": 5}, ".rope_thetta", ("Qwen3Config", "nearest: model.override_config.rope_theta")),
        ({"hidden_sizes": 5}, ".hidden_sizes", ("Qwen3Config", "nearest: model.override_config.hidden_size")),
        ({"output_router_logits": True}, ".output_router_logits", ("Qwen3Config",)),
        ({"max_position_embeddings": "many"}, ".max_position_embeddings", ("Qwen3Config", "many")),
        ({"hidden_act": "foo"}, "", ("Qwen3ForCausalLM", "KeyError: 'foo'")),
        ({"rope_scaling": {"rope_type": "yarn"}}, ".rope_parameters", ("Qwen3Config", "yarn")),
    ],
)
def test_an_override_that_a_model_cannot_have_is_told_in_one_line(good, values, key, things):
    with refused(f"model.override_config{key}", *things):
        overridden(good, **values)


STEPLESS = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
MISTAKES = [  # overrides of a good config, with its ranks and its accelerator; what a line that answers them names
    ("model.lora_adapter_path=/tmp", ("model.lora_rank", "model.lora_adapter_path", 0)),
    ("model.lora.rank=8", ("model.lora.rank", "model.lora_rank", 8)),
    ("model.lora_rank=-1", ("model.lora_rank", -1)),
    ("model.enable_activation_offload=true", ("model.enable_activation_offload", True)),
    ("model.tiled_mlp.enabled=true", ("model.tiled_mlp.enabled", "model.tile_tokens", True)),
    ("model.use_fused_kernels=true", ("model.use_fused_kernels", True)),
    ("model.lora_rank=4 model.target_modules='.*(proj|embed_tokens)'", ("model.target_modules", "model.embed_tokens")),
    ("model.lora_rank=4 model.target_modules=[q_proj,v_prj]", ("Qwen3ForCausalLM", "v_prj", "nearest: v_proj")),
    ("model.lora_rank=4 model.target_modules='.*foo'", ("model.target_modules", "Qwen3ForCausalLM", ".*foo")),
    ("model.path=null", ("model.path", None)),
    ("model.path=./no/such", ("model.path", "./no/such")),
    ("model.tokenizer_path=/dev", ("model.tokenizer_path", "/dev")),
    ("model.external_lib=no.such", ("model.external_lib", "no.such")),
    ("model.external_lib=[3]", ("model.external_lib", 3)),
    ("engine.forward_only=true", ("engine.forward_only", True)),
    ("engine.use_torch_compile=true", ("engine.use_torch_compile", True)),
    ("engine.max_token_len_per_gpu=5", ("engine.max_token_len_per_gpu", "data.max_tokens", 5)),
    ("engine.param_offload=3", ("engine.param_offload", 3)),
    ("engine.offload_policy=true", ("engine.offload_policy", "CPU", True)),
    ("engine.fsdp_size=3 ranks=2", ("engine.fsdp_size", 3, 2)),
    ("engine.fsdp_size=0 ranks=2", ("engine.fsdp_size", 0, 2)),
    ("engine.mixed_precision={param_dtype:fp99}", ("engine.mixed_precision.param_dtype", "fp99")),
    ("engine.mixed_precision=bf16", ("engine.mixed_precision", "param_dtype", "bf16")),
    ("engine.model_dtype=half", ("engine.model_dtype", "float32", "half")),
    ("engine.strategy=megatron", ("engine.strategy", "fsdp2", "megatron")),
    ("engine.strategy=fsdp", ("engine.strategy", "fsdp2", "fsdp")),
    (
        "engine.wrap_policy.transformer_layer_cls_to_wrap=[NoSuchLayer]",
        ("engine.wrap_policy.transformer_layer_cls_to_wrap", "Qwen3DecoderLayer", "NoSuchLayer"),
    ),
    ("engine.ulysses_sequence_parallel_size=0 ranks=4", ("engine.ulysses_sequence_parallel_size", 1, 0)),
    ("engine.ulysses_sequence_parallel_size=3 ranks=4", ("engine.ulysses_sequence_parallel_size", "3 with 4 ranks")),
    ("engine.ulysses_sequence_parallel_size=16 ranks=16", ("engine.ulysses_sequence_parallel_size", 12, 16)),
    (
        "engine.ulysses_sequence_parallel_size=2 parallel.context_parallel_size=3 ranks=4",
        ("parallel.context_parallel_size", "2 × 3", "4 ranks"),
    ),
    (
        "data.train_batch_size=6 data.micro_batch_size_per_gpu=2 engine.ulysses_sequence_parallel_size=2 ranks=8",
        ("data.micro_batch_size_per_gpu = 4 × 2 = 8", "ranks 8", "engine.ulysses_sequence_parallel_size 2", 6),
    ),
    (
        "data.train_batch_size=3 parallel.context_parallel_size=2 ranks=4",
        ("ranks 4", "engine.ulysses_sequence_parallel_size × parallel.context_parallel_size 1 × 2", 3),
    ),
    ("data.train_dir=null", ("data.train_dir", None)),
    ("data.train_dir=/no/such", ("data.train_dir", "/no/such")),
    ("data.custom_cls.path=/no/x.py data.custom_cls.name=X", ("data.custom_cls.path", "/no/x.py")),
    ("data.custom_cls.path='pkg://x'", ("data.custom_cls.name", "data.custom_cls.path", None)),
    ("optim.lr=0", ("optim.lr", 0)),
    ("optim.weight_decay=-1", ("optim.weight_decay", -1)),
    ("optim.clip_grad=0", ("optim.clip_grad", 0)),
    ("optim.betas=[0.9]", ("optim.betas", "[0.9]")),
    ("optim.optimizer=AdamZ", ("optim.optimizer", "AdamZ", "nearest: Adam")),
    ("optim.optimizer=[]", ("optim.optimizer", "ASGD, Adadelta", "[]")),
    *[(f"optim.optimizer={name}", ("optim.optimizer", "weight decay", name)) for name in STEPLESS],
    ("optim.optimizer_impl=no.such", ("optim.optimizer_impl", "installed", "no.such")),
    ("optim.optimizer_impl=null", ("optim.optimizer_impl", "installed", None)),
    ("optim.optimizer_impl=abc", ("optim.optimizer_impl", "optimizers", "abc")),
    (
        "optim.optimizer_impl=torch.optim.adamw",
        ("checkpoint.save_contents", "optimizer", "optim.optimizer_impl=torch.optim.adamw"),
    ),
    (
        "optim.optimizer_impl=torch.optim.adamw checkpoint.save_contents=[model] checkpoint.load_contents=[optimizer]",
        ("checkpoint.load_contents", "optimizer", "optim.optimizer_impl=torch.optim.adamw"),
    ),
    ("optim.override_optimizer_config={fussed:true}", ("optim.override_optimizer_config", "AdamW", "{'fussed': True}")),
    (
        "trainer.device=cuda accelerator=cuda optim.optimizer=AdamW8bit optim.override_optimizer_config={fused:true}",
        ("optim.override_optimizer_config", "AdamW8bit", "{'fused': True}"),
    ),
    ("optim.lr_wsd_decay_steps=5", ("optim.lr_wsd_decay_steps", "optim.lr_scheduler_type=wsd", 5)),
    (
        "optim.lr_scheduler_type=cosine_with_restarts",
        ("optim.num_cycles", "optim.lr_scheduler_type=cosine_with_restarts", 0.5),
    ),
    ("optim.lr_scheduler_type=wsd optim.num_cycles=2", ("optim.num_cycles", "optim.lr_scheduler_type=wsd", 0.5, 2)),
    ("trainer.device=auto accelerator=npu", ("trainer.device", "NPU", "cuda", "cpu")),
    ("trainer.device=cuda", ("trainer.device=cuda", "parallel=cpu")),
    ("accelerator=cuda", ("trainer.device", "CUDA_VISIBLE_DEVICES=")),
    ("trainer.resume_from_path=/no/such", ("trainer.resume_from_path", "/no/such")),
    ("trainer.test_freq=[-1,3]", ("data.val_dir", "trainer.test_freq=[-1, 3]", None)),
    ("trainer.test_freq=after_each_epoch", ("data.val_dir", "trainer.test_freq=after_each_epoch", None)),
    ("attention.backend=flash_attn", ("attention.backend=flash_attn", "CUDA GPU")),
    ("attention.backend=varlen", ("attention.backend=varlen", "CUDA GPU")),
    (
        "trainer.device=auto attention.backend=varlen engine.mixed_precision={param_dtype:fp32} accelerator=cuda",
        ("attention.backend=varlen", "engine.mixed_precision.param_dtype", "torch.float32"),
    ),
    ("loss.head_block_mib=1", ("loss.head_block_mib", 2, 151936, 1)),
    ("checkpoint.save_contents=[hf_modle]", ("checkpoint.save_contents", "hf_modle", "nearest: hf_model")),
    ("checkpoint.save_contents=model", ("checkpoint.save_contents", "list", "got model")),
]


@pytest.mark.parametrize(("words", "things"), MISTAKES)
def test_a_mistake_is_a_line_with_its_key(good, words, things):
    machine = dict(word.split("=") for word in words.split() if word.startswith(("ranks=", "accelerator=")))
    config = overridden_by(good, (word for word in words.split() if word.partition("=")[0] not in machine))
    with refused(*things, alone=False):
        checked(config, int(machine.get("ranks", 1)), machine.get("accelerator"))


def test_all_mistakes_are_told_at_once(good):
    assert len(lines(changed(good, data__max_tokens=0, optim__lr=-1, engine__strategy="x"))) == 3
    more = {"model__path": None, "data__train_batch_size": 3, "trainer__test_freq": 1, "engine__forward_only": True}
    assert len(lines(changed(good, **more), 2)) == 4  # each value alone is valid
    for line, key in zip(lines(compose([])), ("data.train_dir", "model.path"), strict=False):
        assert names(line, key, None)


def test_packages_that_are_not_installed_name_the_extra(good):
    on_gpu = changed(good, trainer__device="cuda", attention__backend="flash_attn", model__use_liger=True)
    missing = [name for name in ("flash_attn", "liger_kernel") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("both are installed here")
    found = lines(on_gpu, 1, "cuda")
    assert len(found) == len(missing)
    assert ("liger_kernel" in missing) == any(names(line, "pip install 'verl-ext[gpu]'") for line in found)
    assert ("flash_attn" in missing) == any(names(line, "attention.backend=flash_attn") for line in found)


def test_a_model_folder_without_config_json_is_told(good, tmp_path):
    for key in ("path", "hf_config_path"):
        with refused(f"model.{key}", "config.json", tmp_path, alone=False):
            checked(changed(good, **{f"model__{key}": str(tmp_path)}))


def test_weights_of_categories_that_the_data_lacks_are_refused():
    check_categories(LossOptions(), ("gsm8k", "code"))
    check_categories(LossOptions(category_weights={"code": 0.0}), ("gsm8k", "code"))
    with refused("loss.category_weights", "gsm8", "nearest: gsm8k"):
        check_categories(LossOptions(category_weights={"gsm8": 2.0}), ("gsm8k", "code"))
    with refused("loss.category_weights", 0, "gsm8k, code"):
        check_categories(LossOptions(category_weights={"gsm8k": 0.0, "code": 0.0}), ("gsm8k", "code"))


def test_a_pack_may_be_longer_than_the_models_positions_but_a_document_may_not(good):
    model = Qwen3Config(max_position_embeddings=512, **HEADS)
    check_positions(512, 4096, model)
    check_positions(4096, 512, model)
    with refused("data.max_tokens", 512, 4096, 513):
        check_positions(513, 4096, model)
    check_positions(513, 4096, overridden(good, max_position_embeddings=1024))
    check_positions(513, 4096, overridden(good, rope_parameters={"rope_type": "yarn", "factor": 2.0}))


def test_positions_include_the_rope_scaling_however_the_model_writes_it():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert model_positions(Qwen3Config(max_position_embeddings=32768)) == 32768
    assert model_positions(Qwen3Config(max_position_embeddings=32768, rope_parameters=yarn)) == 131072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert model_positions(LlamaConfig(max_position_embeddings=131072, rope_parameters=llama3)) == 131072
    assert model_positions(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512  # 0, 1 are padding's


@pytest.mark.parametrize("name", ["model", "model [1]"])
def test_missing_and_torn_weights_are_told_before_they_are_read(name, tmp_path):
    tmp_path = tmp_path / name
    tmp_path.mkdir()
    (problem,) = weight_problems(str(tmp_path))
    assert names(problem, "model.path", "*.safetensors", tmp_path)
    save_file({"w": torch.zeros(100)}, tmp_path / "model.safetensors")
    assert weight_problems(str(tmp_path)) == []
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (problem,) = weight_problems(str(tmp_path))
    assert names(problem, "model.path", f"{tmp_path}/model.safetensors")


def test_varlen_is_refused_before_loading_where_the_model_or_the_gpu_lacks_what_it_needs(good, tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    on_gpu = changed(good, trainer__device="cuda", attention__backend="varlen")
    gpt2 = changed(on_gpu, model__path=str(tmp_path))
    with refused("attention.backend=varlen", "dropout", 0.1, "attention.backend=auto"):
        checked(gpt2, 1, "cuda")
    checked(changed(gpt2, model__override_config={"attn_pdrop": 0.0}), 1, "cuda", (8, 0))
    with refused("attention.backend=varlen", "8.0", "7.0"):
        checked(on_gpu, 1, "cuda", (7, 0))


@pytest.mark.parametrize(
    "hf_config",
    [
        GPT2Config(attn_pdrop=0.2),
        Qwen3Config(attention_dropout=0.2),
        BertGenerationConfig(attention_probs_dropout_prob=0.2),
        DbrxConfig(attn_config={"attn_pdrop": 0.2}),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_dropout_is_read_under_each_of_its_names(hf_config):
    assert attention_dropout(hf_config) == 0.2


_HEADS_OF_32 = {**HEADS, "head_dim": 32}


@pytest.mark.parametrize(
    ("model", "updates", "capability", "told"),
    [
        (Qwen3Config(**_HEADS_OF_32), {}, (9, 0), None),
        (Qwen3Config(**_HEADS_OF_32), {"attention__backend": "sdpa"}, (9, 0), None),  # its own flash kernel
        (Qwen3Config(**_HEADS_OF_32), {}, (7, 5), "newer; got 7.5"),
        (Qwen3Config(**{**HEADS, "head_dim": 12}), {}, (9, 0), "the model's is 12"),
        (Qwen3Config(**HEADS), {"engine__mixed_precision": {"param_dtype": "fp32"}}, (9, 0), "half precision"),
        (MistralConfig(**HEADS, sliding_window=64), {"attention__backend": "sdpa"}, (9, 0), None),  # block masks
        (MistralConfig(**HEADS, sliding_window=64), {"attention__backend": "sdpa"}, (7, 5), None),
        (MistralConfig(**HEADS, sliding_window=4096), {"data__max_tokens": 4096}, (7, 5), "newer; got 7.5"),
    ],
)
def test_sdpa_on_a_gpu_is_told_where_its_memory_may_be_quadratic(good, model, updates, capability, told):
    on_gpu = changed(good, trainer__device="cuda", **updates)
    notices = checked(on_gpu, 1, "cuda", capability, hf_config=model).notices
    assert len(notices) == (told is not None)
    assert all("uses sdpa, whose memory may grow" in notice and told in notice for notice in notices)
    assert checked(good, 1, hf_config=model).notices == []


def test_adapters_beside_the_embeddings_are_accepted(good):
    for targets in ("all-linear", ["q_proj", "v_proj"], ".*_proj", ["q_proj", "lm_head"]):
        checked(changed(good, model__lora_rank=4, model__target_modules=targets), 1)
    without = {"model__target_modules": ".*(proj|tokens|head)", "model__exclude_modules": ["lm_head", "embed_tokens"]}
    checked(changed(good, model__lora_rank=4, **without), 1)


def test_an_adapter_folder_and_tied_embeddings_are_checked_as_the_options_are(good, tmp_path):
    LoraConfig(target_modules=["q_proj", "embed_tokens"]).save_pretrained(tmp_path)
    with refused("model.lora_adapter_path", "target_modules", "model.embed_tokens", "0.9.1", alone=False):
        checked(changed(good, model__lora_rank=8, model__lora_adapter_path=str(tmp_path)), 1)
    tied = Qwen3Config(**HEADS, tie_word_embeddings=True)
    with refused("model.target_modules", "lm_head", "tied"):
        checked(changed(good, model__lora_rank=4, model__target_modules=["lm_head"]), 1, hf_config=tied)


MIXTURE = {**HEADS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
ADAPTERS = {  # an adapter that is refused: its folder's values and what the line names
    "alora": ({"alora_invocation_tokens": [3]}, ("model.lora_adapter_path", "alora_invocation_tokens")),
    "pissa": ({"init_lora_weights": "pissa"}, ("model.path", "init_lora_weights=pissa")),
    "no bias": ({"lora_bias": True}, ("checkpoint.save_contents", "hf_model", "bias")),
    "dropout": (
        {"lora_dropout": 0.5, "target_parameters": ["q_proj.weight"], "target_modules": ["k_proj"]},
        ("model.lora_adapter_path", "Qwen3Config", "lora_dropout"),
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_cannot_be_trained_or_merged_is_refused_before_weights(good, name, tmp_path):
    adapter, things = ADAPTERS[name]
    LoraConfig(**{"target_modules": ["q_proj"], **adapter}).save_pretrained(tmp_path)
    words = {"model__lora_rank": 8, "model__lora_adapter_path": str(tmp_path)}
    given = changed(good, **words, checkpoint__save_contents=["model", "hf_model"])
    with refused(*things):
        checked(given, 1, hf_config=Qwen3Config(**HEADS))


def test_an_adapter_of_another_kind_or_that_is_nowhere_is_one_line(good, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(tmp_path)
    for path in (tmp_path, "adapters/of_mine"):
        with refused("model.lora_adapter_path", "LoRA", path):
            checked(changed(good, model__lora_rank=8, model__lora_adapter_path=str(path)), 1)


def test_adapters_of_a_router_whose_buffer_its_layer_reads_are_refused_and_all_linear_leaves_it_out(good):
    mixture = DeepseekV3Config(**MIXTURE)
    adapted = changed(good, model__lora_rank=4, model__target_modules="all-linear")
    (told,) = [line for line in checked(adapted, 1, hf_config=mixture).notices if "adapters of rank" in line]
    assert "mlp.experts.down_proj (" in told
    if ".gate.e_score_correction_bias" in inspect.getsource(modeling_deepseek_v3):  # else the router itself reads it
        assert "mlp.gate" not in told
        weight = {"model__target_parameters": ["mlp.gate.weight"]}
        named = changed(good, model__lora_rank=4, model__target_modules=["q_b_proj"], **weight)
        with refused("model.target_modules", "DeepseekV3Config", "'e_score_correction_bias'"):
            checked(named, 1, hf_config=mixture)
    checked(changed(good, model__lora_rank=4, model__target_modules=["q_b_proj"]), 1, hf_config=mixture)
