"""A Qwen with a memory on disk: its folder, its configuration, and impossible settings."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.lib.errors import refused
from tests.lib.tiny_titans import CHUNK, VOCABULARY, perturb, random_tokens, tiny_base, tiny_config
from verl_ext.checkpoint.identity import Identity
from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM
from verl_ext.titans.kind import QwenTitansModel

_LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": CHUNK}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_saved_folder_opens_with_the_same_logits(tmp_path, depth, name, tied):
    torch.manual_seed(0)
    config = tiny_config(tiny_base(name, tie_word_embeddings=tied), depth=depth)
    model = perturb(QwenTitansForCausalLM(config)).eval()
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(opened, QwenTitansForCausalLM)
    assert opened.config.memory_options == config.memory_options
    assert type(opened.config.base_config) is type(config.base_config)
    ids = random_tokens(1, CHUNK + 3)
    assert torch.equal(opened(ids).logits, model(ids).logits)


def test_a_configuration_answers_for_its_base_and_survives_the_disk(tmp_path):
    base = tiny_base(pad_token_id=3, eos_token_id=[1, 2], tie_word_embeddings=True)
    config = tiny_config(base, bptt_chunks=2)
    config.save_pretrained(tmp_path)
    for own in (config, AutoConfig.from_pretrained(tmp_path)):
        assert own.architectures == ["QwenTitansForCausalLM"]
        assert (own.vocab_size, own.hidden_size, own.num_hidden_layers, own.head_dim) == (VOCABULARY, 24, 3, 8)
        assert (own.pad_token_id, own.eos_token_id, own.tie_word_embeddings) == (3, [1, 2], True)
        assert own.get_text_config().vocab_size == VOCABULARY
        assert (own.chunk_size, own.memory["bptt_chunks"]) == (CHUNK, 2)
    config.eos_token_id = 4
    assert (config.base_config.eos_token_id, base.eos_token_id) == (4, [1, 2])


@pytest.mark.parametrize(
    ("fields", "things"),
    [
        ({"chunk_size": 20}, ("model.memory.chunk_size", "model.memory.sub_chunk (8)", 20)),
        ({"kind": "recurrent_tokens"}, ("model.memory.kind", "titans", "recurrent_tokens")),
        ({"depth": 3}, ("model.memory.depth", 2, 3)),
        ({"layers": [3]}, ("model.memory.layers", "0..2", "3 layers", "[3]")),
        ({"layers": [1, 1]}, ("model.memory.layers", "once", "[1, 1]")),
        ({"layers": "1"}, ("model.memory.layers", "list", "'1'")),
        ({"chunks": 3}, ("model.memory.chunks", "nearest: model.memory.chunk_size")),
    ],
)
def test_a_wrong_setting_is_answered_with_its_key(fields, things):
    with refused(*things):
        tiny_config(**fields)


def test_a_base_that_is_no_qwen_is_refused():
    with refused("model.path", "qwen2 or qwen3", "model.memory", "llama"):
        QwenTitansConfig.from_base(LlamaConfig())


def test_a_sliding_window_must_cover_a_chunk():
    window = {"use_sliding_window": True, "max_window_layers": 1}
    tiny_config(tiny_base(**window, sliding_window=CHUNK))
    with refused("model.memory.chunk_size", "16 tokens", "layer 1", 15, "got 16"):
        tiny_config(tiny_base(**window, sliding_window=CHUNK - 1))


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope", **_LONGROPE}])
def test_a_chunk_may_not_be_so_long_that_its_length_chooses_its_rotary_frequencies(rope):
    base = {"rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": CHUNK}
    tiny_config(tiny_base(**base))
    with refused("model.memory.chunk_size", f"{2 * CHUNK} positions", CHUNK):
        tiny_config(tiny_base(**base), chunk_size=2 * CHUNK)


def test_a_folder_of_an_earlier_version_opens_unless_it_is_of_memory_tokens(tmp_path):
    model = perturb(QwenTitansForCausalLM(tiny_config())).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    ids = random_tokens(1, CHUNK + 3)
    for kind in ("titans", "recurrent_tokens"):
        saved["memory"] |= {"kind": kind, "tokens": 16}
        (tmp_path / "config.json").write_text(json.dumps(saved))
        if kind == "titans":
            assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)
        else:
            with refused("model.memory.kind", "titans", "recurrent_tokens"):
                AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_loaded_before_stays_causal_when_its_config_is_read():
    base = AutoModelForCausalLM.from_config(tiny_base(), attn_implementation="sdpa").eval()
    ids = random_tokens(1, 9)
    before = base(input_ids=ids).logits
    tiny_config(base.config)
    assert torch.equal(base(input_ids=ids).logits, before)


def test_the_memory_of_an_earlier_version_is_compared_by_todays_keys():
    identity, today = Identity({"model.memory": {"heads": 2}}, {}, "run"), QwenTitansModel.identity_of_today
    identity.check(today({"model.memory": {"heads": 2, "kind": "titans", "tokens": 16}}))
    with refused("model.memory", "{'heads': 2}", "{'heads': 4}"):
        identity.check(today({"model.memory": {"heads": 4, "kind": "titans", "tokens": 16}}))
    with refused("model.memory.kind", "titans", "recurrent_tokens"):
        today({"model.memory": {"heads": 2, "kind": "recurrent_tokens", "tokens": 16}})
