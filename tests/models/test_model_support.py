"""Tell from its config alone whether an architecture keeps the documents of a pack apart."""

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import ShieldGemma2Config
from transformers.models.olmo2 import modeling_olmo2

from tests.lib.checked import support_problems
from tests.lib.errors import names, refused
from tests.lib.small_models import KINDS, model_class, model_config
from verl_ext.config import support
from verl_ext.config.architecture import Architecture
from verl_ext.config.check import read_hf_config
from verl_ext.config.newer import FIRST_VERSION, untried
from verl_ext.config.support import chosen_backend
from verl_ext.layers import MIXERS
from verl_ext.layers.trial import isolation_problem, trial_model

# The first came with transformers 5.10; the defaults of the second are refused by newer ones; 5.5 has neither.
_ASSISTANTS = [
    name for name in ("Gemma4UnifiedAssistantConfig", "Gemma4AssistantConfig") if hasattr(transformers, name)
]
PLAIN = ("Qwen2Config", "Qwen3Config", "Qwen3MoeConfig", "LlamaConfig", "MistralConfig")
MIXED = ("Qwen3NextConfig", "Qwen3_5TextConfig", "NemotronHConfig", "Lfm2Config", "MambaConfig", "JambaConfig")
SCORES = ("Gemma2Config", "GptOssConfig", "Llama4TextConfig")


@pytest.mark.parametrize("name", [*PLAIN, *MIXED, *SCORES])
def test_models_that_keep_documents_apart_are_supported(name):
    assert support_problems(getattr(transformers, name)()) == []


@pytest.mark.parametrize(
    ("name", "thing"),
    [
        ("RecurrentGemmaConfig", "state over time"),
        ("RwkvConfig", "'num_attention_heads'"),
        ("FalconConfig", "'verl_ext_packed'"),
        ("BloomConfig", "another document's tokens"),
        ("DogeConfig", "attention mask"),
        ("Phi4MultimodalConfig", "a text model"),
        ("PaliGemmaConfig", "use_bidirectional_attention=True"),
        ("T5Config", "causal language model"),
        *((name, "a model of its own") for name in _ASSISTANTS[:1]),
    ],
)
def test_models_that_would_leak_or_be_wrong_are_refused(name, thing):
    problems = support_problems(getattr(transformers, name)())
    assert any(names(problem, thing) for problem in problems), problems
    assert all(names(problem, f"model.path: {name}") for problem in problems)


@pytest.mark.parametrize(
    "kind", ["axk2", "deepseek_v32", "glm5_next", "glm_moe_dsa", "hy_v4", "mistral_large4", "minimax_m3_vl_text"]
)
def test_a_model_that_selects_the_keys_of_a_token_is_refused_by_name(kind):
    (problem,) = support_problems(_config_of_newer(kind))
    assert re.search(r"all tokens before; \w+Indexer", problem), problem


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        ("minimax_m3_vl_text", "block_indices"),
        ("inkling_text", "position_bias"),
        ("inkling2_text", "position_bias, sinks"),
        ("inkling2_loop_text", "position_bias, sinks"),
    ],
)
def test_what_a_model_gives_to_attention_beyond_what_is_read_is_refused_by_name(kind, keywords):
    config = _config_of_newer(kind)
    with refused("model.path", keywords, "verl_ext_packed"):
        isolation_problem(trial_model(config, model_class(kind)))
    assert support_problems(config) != []


def _config_of_newer(kind):
    if kind not in KINDS:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return model_config(kind)


def test_places_that_a_layer_counts_from_the_packs_first_token_are_found_by_a_trial(monkeypatch):
    monkeypatch.delitem(MIXERS, "Llama4TextAttention")
    (problem,) = support_problems(transformers.Llama4TextConfig(max_position_embeddings=4096))  # not tried before
    assert names(problem, "Llama4TextConfig", "logits in a pack", "alone")


def test_attention_that_differs_from_a_models_own_is_found_by_a_trial(monkeypatch):
    plain = modeling_olmo2.eager_attention_forward

    def with_bias(module, query, key, value, attention_mask, **given):
        places = torch.arange(query.size(2))
        return plain(module, query, key, value, attention_mask - 0.1 * (places[:, None] - places).abs(), **given)

    monkeypatch.setattr(modeling_olmo2, "eager_attention_forward", with_bias)
    (problem,) = support_problems(transformers.Olmo2Config(max_position_embeddings=4096))  # not tried before
    assert names(problem, "Olmo2Config", "attn_implementation=eager", "logits")


def _configs_of_encoders() -> list[type]:
    """Return config classes in transformers' causal-LM mapping whose architecture can also be an encoder."""
    classes = {cls for cls in transformers.MODEL_FOR_CAUSAL_LM_MAPPING if hasattr(cls, "is_decoder")}
    supported = [cls for cls in classes if transformers.MODEL_FOR_CAUSAL_LM_MAPPING[cls]._supports_attention_backend]
    return sorted(supported, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", _configs_of_encoders(), ids=lambda cls: cls.__name__)
def test_an_encoder_is_refused_from_its_config(cls):
    problems = support_problems(cls(num_hidden_layers=1))
    if cls is transformers.GPTNeoXConfig:  # has the option, but is always causal
        assert problems == []
    else:
        (problem,) = problems
        assert names(problem, "model.path", cls.__name__, "is_decoder=false")


def test_an_encoder_made_causal_is_supported_where_its_positions_are_known():
    assert support_problems(transformers.BertConfig(num_hidden_layers=1, is_decoder=True)) == []
    assert support_problems(transformers.RobertaConfig(num_hidden_layers=1, is_decoder=True)) == []
    (problem,) = support_problems(transformers.ProphetNetConfig(is_decoder=True))
    assert names(problem, "model.path", "ProphetNetConfig", "positions", "pad_token_id + 1")


def test_a_decoder_set_to_look_ahead_is_refused():
    (problem,) = support_problems(transformers.Gemma3TextConfig(use_bidirectional_attention=True))
    assert names(problem, "model.path", "Gemma3TextConfig", "use_bidirectional_attention=True")


def test_a_config_that_transformers_cannot_read_is_told_in_one_line(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"model_type": "bamba", "layers_block_type": ["mamba"]}')
    with refused("model.path", "config.json", "layers_block_type"):
        read_hf_config(str(tmp_path))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("version", "found"), [("5.15.1", False), ("5.16.0", True), ("5.24.0", True)])
def test_a_language_model_that_transformers_reads_without_its_weights_is_refused(version, found, monkeypatch):
    monkeypatch.setattr(support.transformers, "__version__", version)  # another module than the one imported here
    lines = [line for line in support_problems(ShieldGemma2Config()) if names(line, "language model's", version)]
    assert len(lines) == found


def test_a_model_type_of_a_newer_transformers_is_told_with_its_version(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "qwen99"}')
    with pytest.raises(ValueError, match=r"does not recognize this architecture"):
        read_hf_config(str(tmp_path))
    monkeypatch.setitem(FIRST_VERSION, "qwen99", "5.99")
    with refused("qwen99 from 5.99", transformers.__version__):
        read_hf_config(str(tmp_path))


def test_the_types_of_newer_transformers_are_those_that_older_ones_lack():
    for kind, since in FIRST_VERSION.items():
        assert (kind in KINDS) is (Version(transformers.__version__) >= Version(since)), kind


def test_versions_that_were_not_tried_are_told_in_one_line():
    inside = {"verl": "0.9.1", "transformers": "5.10.4", "torch": "2.13.0+cpu"}
    assert untried(inside) is None
    line = untried({**inside, "transformers": "5.25.1", "torch": "2.15.0"})
    assert line == (
        "the tests of this version did not run with transformers 5.25.1 (but with 5.9.0 to 5.24.0), "
        "torch 2.15.0 (but with 2.11.0 to 2.14.1)"
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sinks_beside_dropout_run_in_sdpa_and_are_refused_for_flash_by_name(dropout):
    model = Architecture(transformers.GptOssConfig(attention_dropout=dropout, num_hidden_layers=1, num_local_experts=2))
    config = SimpleNamespace(
        param_dtype="bf16",
        machine=SimpleNamespace(capability=(8, 0)),
        trainer=SimpleNamespace(device="cuda"),
        attention=SimpleNamespace(backend="auto"),
        engine=SimpleNamespace(full_determinism=False),
    )
    if not dropout:
        assert chosen_backend(config, model) != "sdpa"
        return
    assert chosen_backend(config, model) == "sdpa"
    config.attention.backend = "flash_attn"
    with refused("attention.backend=flash_attn", "sinks"):
        chosen_backend(config, model)
