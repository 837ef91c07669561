"""Weights that do not match the model's config are refused by name before any is read."""

import json
import os
import shutil
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Phi3Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig
from transformers.utils import logging as transformers_logging

from tests.lib.errors import names, refused
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_ranks
from tests.lib.reference import Reference, documents_of_answers, load_eager
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import build, into, small_run
from verl_ext.checkpoint.identity import BASE, weight_facts
from verl_ext.config.check import read_hf_config
from verl_ext.config.model_override import override as apply_override
from verl_ext.config.weights import check_weights, digest_of_weights, weight_problems
from verl_ext.layers.towers import model_class
from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM

MODELS = {
    "tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "untied": (Qwen3Config, {}),
    "experts": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 16}),
    "fused projections": (Phi3Config, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2": (GPT2Config, {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: write_tiny_model(tmp_path_factory.mktemp("m"), 0, cls, **more) for name, (cls, more) in MODELS.items()
    }


def check(folder, hf_config=None, allowed=(), **override):
    hf_config = read_hf_config(str(folder)) if hf_config is None else hf_config
    apply_override(hf_config, override)
    return check_weights(model_class(hf_config), hf_config, str(folder), allowed, override)


def refusal(*arguments, **options) -> str:
    with pytest.raises(ValueError, match=r"^model\.path ") as raised:
        check(*arguments, **options)
    return str(raised.value)


def rewritten(folder, target, change):
    """Copy a model, and let `change` modify its weights, name -> tensor, in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("name", MODELS)
def test_weights_as_transformers_saves_them_pass(name, folders, tmp_path, capfd):
    assert check(folders[name]) == []
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert check(tmp_path / "sharded") == []
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
    torch.save(load_file(folders[name] / "model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    assert check(tmp_path / "pickled") == []


def test_an_expert_without_a_part_is_named_also_when_transformers_is_silenced(folders, tmp_path):
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        gone = "model.layers.0.mlp.experts.0.gate_proj.weight"
        line = refusal(rewritten(folders["experts"], tmp_path, lambda weights: weights.pop(gone)))
    finally:
        transformers_logging.set_verbosity(verbosity)
    assert "model.layers.0.mlp.experts.gate_up_proj" in line


def test_a_weight_that_the_model_lacks_is_left_out_where_it_is_allowed(folders, tmp_path):
    more = {"v_head.weight": torch.zeros(1)}
    rewritten(folders["untied"], tmp_path, lambda weights: weights.update(more))
    (notice,) = check(tmp_path, allowed=["v_head.*"])
    assert "v_head.weight" in notice
    assert "left out" in notice


def test_weights_that_a_class_leaves_out_by_itself_are_named(tmp_path):
    write_tiny_model(tmp_path / "model", 0, Qwen3NextConfig, layer_types=["full_attention"] * 2)
    more = {"mtp.fc.weight": torch.zeros(1), "mtp.norm.weight": torch.zeros(1)}
    rewritten(tmp_path / "model", tmp_path, lambda weights: weights.update(more))
    (notice,) = check(tmp_path)
    assert "2: mtp.fc.weight, mtp.norm.weight" in notice


@pytest.mark.parametrize(
    ("override", "thing"),
    [
        ({"num_hidden_layers": 3}, "lacks 11: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "holds 11: model.layers.1.input_layernorm.weight"),
        ({"vocab_size": 256}, "2: lm_head.weight [128, 32] for [256, 32]"),
        ({"intermediate_size": 96}, "6: model.layers.0.mlp.down_proj.weight [32, 64] for [32, 96]"),
    ],
)
def test_an_override_that_changes_shapes_is_refused(override, thing, folders):
    assert names(refusal(folders["untied"], **override), f"model.override_config={override}", thing)


def test_overrides_that_do_not_fit_together_are_told_in_one_line(folders):
    hf_config = read_hf_config(str(folders["untied"]))
    hf_config.layer_types = ["full_attention", "sliding_attention"]
    with refused("model.override_config", "{'num_hidden_layers': 5}"):
        apply_override(hf_config, {"num_hidden_layers": 5})


def test_an_untied_head_may_be_new_where_it_is_allowed(folders):
    assert "lacks 1: lm_head.weight" in refusal(folders["tied"], tie_word_embeddings=False)
    (notice,) = check(folders["tied"], allowed=["lm_head.*"], tie_word_embeddings=False)
    assert "lm_head.weight" in notice
    assert "random" in notice


def test_a_plain_qwen_may_lack_a_memory_and_an_exported_one_no_part_of_it(folders, tmp_path):
    titans = QwenTitansConfig.from_base(read_hf_config(str(folders["tied"])), layers=[0, 1], chunk_size=64)
    assert check(folders["tied"], deepcopy(titans)) == []
    QwenTitansForCausalLM(titans).save_pretrained(tmp_path)
    assert check(tmp_path) == []
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if "long_term_memory" in name)
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert f"lacks 1: {gone}" in refusal(tmp_path)


def tied_twice(folder, difference, config_class=Qwen3Config, pickled=False):
    """Save a model whose config ties its head, with weights of both names that differ by `difference`."""
    write_tiny_model(folder, 0, config_class, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    embedding = next(weights[name] for name in weights if name.endswith(("embed_tokens.weight", "wte.weight")))
    weights["lm_head.weight"] = embedding + difference
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("config_class", [Qwen3Config, GPT2Config])
@pytest.mark.parametrize("difference", [0.0, 0.5])
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_of_both_names_of_a_tie_pass_with_a_notice(config_class, difference, pickled, tmp_path):
    (notice,) = check(tied_twice(tmp_path, difference, config_class, pickled))
    assert notice.startswith("model.path holds lm_head.weight and ")


def _gradients(folders):
    return [token_step(build_worker(folder).engine, [DOCUMENTS]).gradients for folder in folders]


DOCUMENTS = documents_of_answers(20, 9)


@pytest.mark.slow
def test_equal_weights_of_a_tie_train_as_one_and_others_apart_as_in_transformers(tmp_path):
    folders = [str(tied_twice(tmp_path / str(difference), difference)) for difference in (0.0, 0.5)]
    for folder, found in zip(folders, run_ranks(_gradients, 2, folders)[0], strict=True):
        expected = Reference(load_eager(folder), DOCUMENTS).step([DOCUMENTS], "token", {})
        assert found.keys() == expected.gradients.keys()
        assert ("lm_head.weight" in found) is (folder == folders[1])
        assert max(expected.gradient_errors(found).values()) < 1e-5


_IDENTITIES = """
import json, sys
from pathlib import Path
from verl_ext.config.weights import digest_of_weights, revision
found = {}
for commit in "a" * 40, "b" * 40:
    Path(sys.argv[1], "refs", "main").write_text(commit)
    found[commit] = [digest_of_weights("team/model"), revision("team/model")]
print(json.dumps(found))
"""


def test_a_model_with_an_adapter_in_its_folder_is_one_line(folders, tmp_path):
    shutil.copytree(folders["untied"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("{}")
    for line in (refusal(tmp_path), weight_problems(str(tmp_path))[0]):
        assert names(line, "model.path", tmp_path, "adapter_config.json")


@pytest.mark.slow
def test_a_hub_model_has_the_identity_of_its_weights_and_each_machine_its_revision(folders, tmp_path):
    hub = tmp_path / "models--team--model"
    snapshots = {"a" * 40: folders["untied"], "b" * 40: write_tiny_model(tmp_path / "other", 1)}
    for commit, folder in snapshots.items():
        shutil.copytree(folder, hub / "snapshots" / commit)
        (hub / "snapshots" / commit / "pytorch_model.bin").write_bytes(b"not read")
    (hub / "refs").mkdir()
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    told = subprocess.check_output([sys.executable, "-c", _IDENTITIES, str(hub)], env=environment, text=True)
    alone = {commit: digest_of_weights(str(folder)) for commit, folder in snapshots.items()}
    assert json.loads(told) == {commit: [alone[commit], commit] for commit in snapshots}
    assert len({*alone.values(), "nothing"}) == 3


def test_a_base_with_other_numbers_in_one_inner_tensor_is_another_base(tmp_path):
    digests = []
    for number in (0.0, 1e-3):
        save_file(
            {name: torch.full((40_000,), number * (name == "b")) for name in "abc"}, tmp_path / "model.safetensors"
        )
        digests.append(weight_facts(BASE, digest_of_weights(str(tmp_path))))
    assert digests[0][BASE] == digests[1][BASE]  # which an earlier checkpoint has alone
    assert digests[0] != digests[1]


def _exit(options):
    try:
        build(options)
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.slow
def test_a_run_ends_before_it_writes_anything(folders, tmp_path):
    model = rewritten(folders["untied"], tmp_path, lambda weights: weights.pop("model.norm.weight"))
    assert run_ranks(_exit, 2, small_run(tmp_path, model, [20] * 4, into(tmp_path / "run"))) == [2, 2]
    assert not (tmp_path / "run").exists()
