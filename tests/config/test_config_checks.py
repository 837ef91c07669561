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
    ("values", "line"),
    [
        ({"rope_thetta": 5}, "rope_thetta of Qwen3Config; nearest: model.override_config.rope_theta"),
        ({"hidden_sizes": 5}, "hidden_sizes of Qwen3Config; nearest: model.override_config.hidden_size"),
        ({"output_router_logits": True}, "unknown key model.override_config.output_router_logits of Qwen3Config"),
        ({"max_position_embeddings": "many"}, "config.max_position_embeddings must fit a Qwen3Config; got many"),
        ({"hidden_act": "foo"}, "must give a config that Qwen3ForCausalLM takes; got KeyError: 'foo'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "model.override_config.rope_parameters must fit a Qwen3Config; got"),
    ],
)
def test_an_override_that_a_model_cannot_have_is_told_in_one_line(good, values, line):
    with pytest.raises(ValueError, match=r"model\.override_config") as raised:
        overridden(good, **values)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


STEPLESS = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
MISTAKES = [  # overrides of a good config, with its ranks and its accelerator; a part of a line that answers them
    ("model.lora_adapter_path=/tmp", "model.lora_rank must be at least 1 with model.lora_adapter_path"),
    ("model.lora.rank=8", "model.lora.rank must be 0: it is Megatron's; model.lora_rank is the one"),
    ("model.lora_rank=-1", "model.lora_rank must be at least 0; got -1"),
    ("model.enable_activation_offload=true", "model.enable_activation_offload must be false: verl's"),
    ("model.tiled_mlp.enabled=true", "engine does not apply it; model.tile_tokens is what works"),
    ("model.use_fused_kernels=true", "model.use_fused_kernels must be false"),
    ("model.lora_rank=4 model.target_modules='.*(proj|embed_tokens)'", "must leave out model.embed_tokens: verl"),
    ("model.lora_rank=4 model.target_modules=[q_proj,v_prj]", "of a Qwen3ForCausalLM; got v_prj (nearest: v_proj)"),
    ("model.lora_rank=4 model.target_modules='.*foo'", "model.target_modules must name modules of a Qwen3ForCausalLM"),
    ("model.path=null", "model.path is required: a folder or hub name of a model; got null"),
    ("model.path=./no/such", "model.path must be an existing folder or a hub name; got ./no/such"),
    ("model.tokenizer_path=/dev", "model.tokenizer_path must hold a tokenizer; got /dev"),
    ("model.external_lib=no.such", "model.external_lib must be a module that can be imported; got no.such"),
    ("model.external_lib=[3]", "model.external_lib must be a module that can be imported; got 3"),
    ("engine.forward_only=true", "engine.forward_only must be false: it would not train; got true"),
    ("engine.use_torch_compile=true", "engine.use_torch_compile must be false: verl's compiles the entropy"),
    ("engine.max_token_len_per_gpu=5", "engine.max_token_len_per_gpu must be null: data.max_tokens"),
    ("engine.param_offload=3", "engine.param_offload must be true or false; got 3"),
    ("engine.offload_policy=true", "engine.offload_policy must be false on CPU, where host memory holds"),
    ("engine.fsdp_size=3 ranks=2", "engine.fsdp_size must divide the number of ranks or be -1; got 3 with 2"),
    ("engine.fsdp_size=0 ranks=2", "engine.fsdp_size must divide the number of ranks or be -1; got 0 with 2"),
    ("engine.mixed_precision={param_dtype:fp99}", "engine.mixed_precision.param_dtype must be one"),
    ("engine.mixed_precision=bf16", "engine.mixed_precision must map param_dtype, reduce_dtype, "),
    ("engine.model_dtype=half", "engine.model_dtype must be one of fp32, bf16, fp16, float32, "),
    ("engine.strategy=megatron", "engine.strategy must be fsdp2; got megatron"),
    ("engine.strategy=fsdp", "engine.strategy must be fsdp2; got fsdp"),
    ("engine.wrap_policy.transformer_layer_cls_to_wrap=[NoSuchLayer]", "transformer_layer_cls_to_wrap must be one of "),
    ("engine.ulysses_sequence_parallel_size=0 ranks=4", "must be at least 1; got 0"),
    ("engine.ulysses_sequence_parallel_size=3 ranks=4", "must divide the number of ranks; got 3 with 4 ranks"),
    ("engine.ulysses_sequence_parallel_size=16 ranks=16", "must be at most the model's 12 attention heads; got 16"),
    (
        "engine.ulysses_sequence_parallel_size=2 parallel.context_parallel_size=3 ranks=4",
        "parallel.context_parallel_size must divide the number of ranks; got 2 × 3 with 4 ranks",
    ),
    (
        "data.train_batch_size=6 data.micro_batch_size_per_gpu=2 engine.ulysses_sequence_parallel_size=2 ranks=8",
        "data.train_batch_size must be a multiple of the data-parallel size × data.micro_batch_size_per_gpu = "
        "4 × 2 = 8 (ranks 8, engine.ulysses_sequence_parallel_size 2); got 6",
    ),
    (
        "data.train_batch_size=3 parallel.context_parallel_size=2 ranks=4",
        "(ranks 4, engine.ulysses_sequence_parallel_size × parallel.context_parallel_size 1 × 2); got 3",
    ),
    ("data.train_dir=null", "data.train_dir is required"),
    ("data.train_dir=/no/such", "data.train_dir must be an existing folder; got /no/such"),
    ("data.custom_cls.path=/no/x.py data.custom_cls.name=X", "data.custom_cls.path must be an"),
    ("data.custom_cls.path='pkg://x'", "data.custom_cls.name is required with data.custom_cls.path"),
    ("optim.lr=0", "optim.lr must be above 0; got 0"),
    ("optim.weight_decay=-1", "optim.weight_decay must be at least 0 and finite; got -1"),
    ("optim.clip_grad=0", "optim.clip_grad must be above 0; got 0"),
    ("optim.betas=[0.9]", "optim.betas must be two numbers from 0 to below 1; got [0.9]"),
    ("optim.optimizer=AdamZ", "; got AdamZ (nearest: Adam"),
    ("optim.optimizer=[]", "optim.optimizer must be one of ASGD, Adadelta, "),
    *[(f"optim.optimizer={name}", f"with a weight decay; got {name} (") for name in STEPLESS],
    ("optim.optimizer_impl=no.such", "optim.optimizer_impl must be a module that is installed; got no."),
    ("optim.optimizer_impl=null", "optim.optimizer_impl must be a module that is installed; got null"),
    ("optim.optimizer_impl=abc", "optim.optimizer_impl must be a module of optimizers; got abc"),
    (
        "optim.optimizer_impl=torch.optim.adamw",
        "checkpoint.save_contents must leave out optimizer with optim.optimizer_impl=torch.optim.adamw, whose state",
    ),
    (
        "optim.optimizer_impl=torch.optim.adamw checkpoint.save_contents=[model] checkpoint.load_contents=[optimizer]",
        "checkpoint.load_contents must leave out optimizer with optim.optimizer_impl=torch.optim.adamw",
    ),
    ("optim.override_optimizer_config={fussed:true}", "must be options of AdamW; got {'fussed': True} ("),
    (
        "trainer.device=cuda accelerator=cuda optim.optimizer=AdamW8bit optim.override_optimizer_config={fused:true}",
        "must be options of AdamW8bit; got {'fused': True} (",
    ),
    ("optim.lr_wsd_decay_steps=5", "optim.lr_wsd_decay_steps needs optim.lr_scheduler_type=wsd; got 5"),
    ("optim.lr_scheduler_type=cosine_with_restarts", "optim.num_cycles must be a whole number from 1 with optim.lr_s"),
    ("optim.lr_scheduler_type=wsd optim.num_cycles=2", "must be 0.5 with optim.lr_scheduler_type=wsd; got 2"),
    ("trainer.device=auto accelerator=npu", "trainer.device must be cuda or cpu, on a machine that shows no NPU"),
    ("trainer.device=cuda", "(trainer.device=cuda) needs a GPU; none is visible; use parallel=cpu"),
    ("accelerator=cuda", "start it with CUDA_VISIBLE_DEVICES="),
    ("trainer.resume_from_path=/no/such", "trainer.resume_from_path must be an existing global_step_N"),
    ("trainer.test_freq=[-1,3]", "data.val_dir is required with trainer.test_freq=[-1, 3]; got null"),
    ("trainer.test_freq=after_each_epoch", "data.val_dir is required with trainer.test_freq=after_each"),
    ("attention.backend=flash_attn", "attention.backend=flash_attn needs a CUDA GPU"),
    ("attention.backend=varlen", "attention.backend=varlen needs a CUDA GPU"),
    (
        "trainer.device=auto attention.backend=varlen engine.mixed_precision={param_dtype:fp32} accelerator=cuda",
        "attention.backend=varlen needs half precision (engine.mixed_precision.param_dtype); got torch.float32",
    ),
    ("loss.head_block_mib=1", "loss.head_block_mib must be at least 2, a row of the model's 151936 logits"),
    ("checkpoint.save_contents=[hf_modle]", "checkpoint.save_contents must be one of model, optimizer"),
    ("checkpoint.save_contents=model", "checkpoint.save_contents must be a list of model, optimizer"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES)
def test_a_mistake_is_a_line_with_its_key(good, words, line):
    machine = dict(word.split("=") for word in words.split() if word.startswith(("ranks=", "accelerator=")))
    config = overridden_by(good, (word for word in words.split() if word.partition("=")[0] not in machine))
    found = lines(config, int(machine.get("ranks", 1)), machine.get("accelerator"))
    assert any(line in one for one in found), found


def test_all_mistakes_are_told_at_once(good):
    assert len(lines(changed(good, data__max_tokens=0, optim__lr=-1, engine__strategy="x"))) == 3
    more = {"model__path": None, "data__train_batch_size": 3, "trainer__test_freq": 1, "engine__forward_only": True}
    assert len(lines(changed(good, **more), 2)) == 4  # each value alone is valid
    missing = lines(compose([]))
    assert missing[0].startswith("data.train_dir is required")
    assert missing[1].startswith("model.path is required")


def test_packages_that_are_not_installed_name_the_extra(good):
    on_gpu = changed(good, trainer__device="cuda", attention__backend="flash_attn", model__use_liger=True)
    missing = [name for name in ("flash_attn", "liger_kernel") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("both are installed here")
    found = lines(on_gpu, 1, "cuda")
    assert len(found) == len(missing)
    assert ("liger_kernel" in missing) == any("pip install 'verl-ext[gpu]'" in line for line in found)
    assert ("flash_attn" in missing) == any("attention.backend=flash_attn needs the package" in line for line in found)


def test_a_model_folder_without_config_json_is_told(good, tmp_path):
    for key in ("path", "hf_config_path"):
        (line, *_) = lines(changed(good, **{f"model__{key}": str(tmp_path)}))
        assert line.startswith(f"model.{key} must hold a model's config.json; got {tmp_path}")


def test_weights_of_categories_that_the_data_lacks_are_refused():
    check_categories(LossOptions(), ("gsm8k", "code"))
    check_categories(LossOptions(category_weights={"code": 0.0}), ("gsm8k", "code"))
    with pytest.raises(
        ValueError, match=r"a name in loss.category_weights must be one of gsm8k, code; got gsm8 \(nearest: gsm8k\)"
    ):
        check_categories(LossOptions(category_weights={"gsm8": 2.0}), ("gsm8k", "code"))
    with pytest.raises(ValueError, match="must leave a category a weight above 0; got 0 for all of gsm8k, code"):
        check_categories(LossOptions(category_weights={"gsm8k": 0.0, "code": 0.0}), ("gsm8k", "code"))


def test_a_pack_may_be_longer_than_the_models_positions_but_a_document_may_not(good):
    model = Qwen3Config(max_position_embeddings=512, **HEADS)
    check_positions(512, 4096, model)
    check_positions(4096, 512, model)
    with pytest.raises(ValueError, match=r"^data\.max_tokens must be at most the model's 512 positions.*got 4096.*513"):
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
    assert weight_problems(str(tmp_path)) == [
        f"model.path must hold weights (*.safetensors or pytorch_model*.bin); got {tmp_path}"
    ]
    save_file({"w": torch.zeros(100)}, tmp_path / "model.safetensors")
    assert weight_problems(str(tmp_path)) == []
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (problem,) = weight_problems(str(tmp_path))
    assert problem.startswith(f"model.path must hold weights that can be read; got {tmp_path}/model.safetensors: ")


def test_varlen_is_refused_before_loading_where_the_model_or_the_gpu_lacks_what_it_needs(good, tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    on_gpu = changed(good, trainer__device="cuda", attention__backend="varlen")
    gpt2 = changed(on_gpu, model__path=str(tmp_path))
    assert lines(gpt2, 1, "cuda") == [
        "attention.backend=varlen needs a model without attention dropout; the model's is 0.1; "
        "attention.backend=auto uses one that runs"
    ]
    checked(changed(gpt2, model__override_config={"attn_pdrop": 0.0}), 1, "cuda", (8, 0))
    with pytest.raises(ValueError, match=r"^attention\.backend=varlen needs a GPU .* newer; got 7\.0"):
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
    found = lines(changed(good, model__lora_rank=8, model__lora_adapter_path=str(tmp_path)))
    assert found[0].startswith("model.lora_adapter_path: target_modules must leave out model.embed_tokens: verl 0.9.1")
    tied = Qwen3Config(**HEADS, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"leave out lm_head: tied weights are exported as one"):
        checked(changed(good, model__lora_rank=4, model__target_modules=["lm_head"]), 1, hf_config=tied)


MIXTURE = {**HEADS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
ADAPTERS = {  # an adapter, or a config with an adapter, that is refused: its folder's values, the model and the line
    "alora": ({"alora_invocation_tokens": [3]}, {}, "an adapter without alora_invocation_tokens, which packs do not"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, "weights in model.path as they are; got .* init_lora_weights=pissa"),
    "no bias": ({"lora_bias": True}, {}, "checkpoint.save_contents must leave out hf_model for adapters .* no bias"),
    "dropout": (
        {"lora_dropout": 0.5, "target_parameters": ["q_proj.weight"], "target_modules": ["k_proj"]},
        {},
        "model.lora_adapter_path must be adapters that a Qwen3Config can have; .*lora_dropout",
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_cannot_be_trained_or_merged_is_refused_before_weights(good, name, tmp_path):
    adapter, model, line = ADAPTERS[name]
    LoraConfig(**{"target_modules": ["q_proj"], **adapter}).save_pretrained(tmp_path)
    words = {"model__lora_rank": 8, "model__lora_adapter_path": str(tmp_path)}
    given = changed(good, **words, checkpoint__save_contents=["model", "hf_model"])
    with pytest.raises(ValueError, match=line) as raised:
        checked(given, 1, hf_config=Qwen3Config(**HEADS, **model))
    assert "\n" not in str(raised.value)


def test_an_adapter_of_another_kind_or_that_is_nowhere_is_one_line(good, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(tmp_path)
    for path in (tmp_path, "adapters/of_mine"):
        (line,) = lines(changed(good, model__lora_rank=8, model__lora_adapter_path=str(path)))
        assert line.startswith(f"model.lora_adapter_path must hold an adapter of LoRA; got {path}")


def test_adapters_of_a_router_whose_buffer_its_layer_reads_are_refused_and_all_linear_leaves_it_out(good):
    mixture = DeepseekV3Config(**MIXTURE)
    adapted = changed(good, model__lora_rank=4, model__target_modules="all-linear")
    (told,) = [line for line in checked(adapted, 1, hf_config=mixture).notices if "adapters of rank" in line]
    assert "mlp.experts.down_proj (" in told
    if ".gate.e_score_correction_bias" in inspect.getsource(modeling_deepseek_v3):  # else the router itself reads it
        assert "mlp.gate" not in told
        weight = {"model__target_parameters": ["mlp.gate.weight"]}
        named = changed(good, model__lora_rank=4, model__target_modules=["q_b_proj"], **weight)
        with pytest.raises(ValueError, match=r"must be adapters .*e_score_correction_bias") as raised:
            checked(named, 1, hf_config=mixture)
        assert "\n" not in str(raised.value)
    checked(changed(good, model__lora_rank=4, model__target_modules=["q_b_proj"]), 1, hf_config=mixture)
