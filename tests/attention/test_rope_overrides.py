"""Rotary parameters of `model.override_config` mean what transformers reads in a config.json."""

import itertools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2_5_VLConfig, Qwen3Config

from tests.lib.errors import refused
from tests.lib.rope_types import BY_TYPE, POSITIONS, SHAPE
from verl_ext.config.check import model_positions
from verl_ext.config.model_override import override

_YARN = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "original_max_position_embeddings": 8}
SOURCES = {  # name: values of a config; the last has a scaling of its own
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
    "scaled": Qwen3Config(**SHAPE, head_dim=8, rope_parameters={"rope_theta": 5e5, **_YARN}),
}
CASES = list(itertools.product(SOURCES, BY_TYPE, ("type", "rope_type"), ("rope_scaling", "rope_parameters")))


def _edited(source: str, folder, **values):
    """Read a config.json in which the scaling of `source` was replaced by hand, as an older release has it."""
    SOURCES[source].save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    theta = {"rope_theta": written.pop("rope_parameters")["rope_theta"]}
    (folder / "config.json").write_text(json.dumps({**written, **theta, **values}))
    return AutoConfig.from_pretrained(folder)


def _logits(config) -> torch.Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.arange(3 * POSITIONS)[None] % SHAPE["vocab_size"]).logits


def test_every_type_means_what_transformers_reads_however_it_is_spelt(tmp_path):
    logits = {}
    for case in CASES:
        source, rope_type, spelling, name = case
        given = {spelling: rope_type, **BY_TYPE[rope_type]}
        plain = _edited(source, tmp_path, **{name: given, "rope_theta": SOURCES[source].rope_parameters["rope_theta"]})
        if name == "rope_parameters":  # transformers 5 has the base inside
            plain.rope_parameters["rope_theta"] = SOURCES[source].rope_parameters["rope_theta"]
        config = AutoConfig.for_model(**SOURCES[source].to_dict())
        override(config, {name: given})
        assert config.rope_parameters == plain.rope_parameters, case
        key = (source, rope_type)
        logits.setdefault(key, _logits(plain))
        assert torch.equal(_logits(config), logits[key]), case
        assert rope_type == "default" or not torch.equal(logits[key], logits[source, "default"]), case


def test_null_ends_a_scaling_and_a_dict_without_a_type_changes_its_parameters():
    for name in "rope_scaling", "rope_parameters":
        config = AutoConfig.for_model(**SOURCES["scaled"].to_dict())
        override(config, {name: {"factor": 4.0}, "rope_theta": 100.0})
        assert config.rope_parameters == {**_YARN, "factor": 4.0, "rope_theta": 100.0}
        override(config, {name: None})
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
        assert model_positions(config) == POSITIONS


def test_parameters_of_no_type_stay_in_a_model_with_towers():
    config = Qwen2_5_VLConfig(text_config={"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}})
    override(config, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}})
    rope = config.text_config.rope_parameters
    assert (rope["rope_type"], rope["mrope_section"], rope["rope_theta"]) == ("yarn", [2, 1, 1], 1_000_000.0)


_YARNS = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("values", "things"),
    [
        ({"rope_scaling": {"factor": 8.0}}, ("model.override_config.rope_scaling", "factor", "rope_type=default")),
        ({"rope_scaling": {**_YARNS, "type": "linear"}}, ("one type", "{'rope_type': 'yarn', 'type': 'linear'}")),
        ({"rope_scaling": {"type": "yran", "factor": 8.0}}, ("yran", "nearest: yarn")),
        ({"rope_scaling": {"type": "linear", "factor": True}}, ("model.override_config.rope_scaling.factor", True)),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ("Missing required keys",)),
        ({"rope_scaling": "yarn"}, ("model.override_config.rope_scaling", "got yarn")),
        ({"rope_scaling": _YARNS, "rope_parameters": {"factor": 1.0}}, ("rope_scaling", "rope_parameters")),
    ],
)
def test_parameters_that_transformers_would_not_read_are_one_line(values, things):
    config = AutoConfig.for_model(**SOURCES["qwen3"].to_dict())
    with refused(*things):
        override(config, values)


@pytest.mark.parametrize(
    "values", [{"rope_scaling": _YARNS}, {"rope_theta": 1e6}, {"rope_parameters": {"factor": 2.0}}]
)
def test_parameters_of_each_kind_of_layer_are_given_by_kind(values):
    config = Gemma3TextConfig(**SHAPE, head_dim=8, layer_types=["sliding_attention", "full_attention"])
    with refused("model.override_config", "rope_parameters", "{sliding_attention:"):
        override(config, values)
    override(config, {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}})
    assert {name: rope["rope_type"] for name, rope in config.rope_parameters.items()} == {
        "sliding_attention": "default",
        "full_attention": "linear",
    }
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
