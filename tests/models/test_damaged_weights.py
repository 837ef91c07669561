"""A tensor that is removed, renamed, added or of another shape is named, in any folder whose weights a run reads."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from tests.lib.checked import typed
from tests.lib.remote_code import add_code
from tests.lib.small_models import write_mxfp4
from tests.lib.tiny_model import write_tiny_model
from verl_ext.checkpoint.adapter_folder import merge_adapter_folder
from verl_ext.checkpoint.export import ExportForm
from verl_ext.config.adapters import adapter_notices, lora_problems
from verl_ext.config.architecture import Architecture
from verl_ext.config.check import read_hf_config
from verl_ext.config.compose import compose
from verl_ext.config.model import PackedModel
from verl_ext.config.quantized import dequantize
from verl_ext.options import DataError

pytestmark = pytest.mark.slow

EXPERTS = {"config_class": Qwen3MoeConfig, "num_experts": 4, "moe_intermediate_size": 16}
DENSE_FIRST = {"first_k_dense_replace": 1, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1}
SHARED = {"config_class": Glm4MoeConfig, **DENSE_FIRST}
BY_WEIGHT = ["shared_experts.down_proj.weight", "layers.0.mlp.up_proj.weight", "experts.gate_up_proj"]
MODELS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "experts": EXPERTS,
    "fused projections": {"config_class": Phi3Config, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt2": {"config_class": GPT2Config},
    "code of its own": {},
    "code that is not trusted": {},
    "fp8": {},
    "fp8 experts": EXPERTS,
    "mxfp4": {"config_class": GptOssConfig, "num_local_experts": 4, "initializer_range": 0.02, "hidden_size": 64},
}
ADAPTERS = {  # the base, and PEFT's settings
    "plain": ("untied", {"target_modules": "all-linear"}),
    "dora": ("untied", {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["lm_head"]}),
    "rows": ("untied", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "experts.down_proj"]}),
    "experts and more": ("shared", {"target_modules": ["q_proj"], "target_parameters": BY_WEIGHT}),
}


def write_fp8(folder: Path) -> None:
    """Store the projections of a model in FP8, in blocks of 8 by 16."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        rows, columns = weights[name].shape
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.ones(rows // 8, columns // 16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]})


def write_unused_code(folder: Path) -> None:
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_house.HouseForCausalLM"})
    (folder / "modeling_house.py").write_text("raise AssertionError")


def change_config(folder: Path, **values: object) -> None:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | values))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    others = {"mixtral": {"config_class": MixtralConfig, "num_local_experts": 4}, "shared": SHARED}
    made = {name: write_tiny_model(root / name, **config) for name, config in (MODELS | others).items()}
    of_code = {"code of its own": partial(add_code, output="output"), "code that is not trusted": write_unused_code}
    for name, write in {"fp8": write_fp8, "fp8 experts": write_fp8, "mxfp4": write_mxfp4, **of_code}.items():
        write(made[name])
    for name, (base, peft) in ADAPTERS.items():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(made[base]), LoraConfig(r=4, **peft))
        model.save_pretrained(root / f"adapter {name}")
        made[f"adapter {name}"] = root / f"adapter {name}"
    return made


@st.composite
def damages(draw):
    """Draw a kind of damage, and a place among tensors that are sorted by name."""
    return draw(st.sampled_from(["remove", "rename", "add", "reshape"])), draw(st.integers(0, 2**20))


def damaged(folder: Path, target: Path, damage: tuple[str, int]) -> str:
    """Copy a folder with damage; return the name that a line on it must hold."""
    kind, place = damage
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (file,) = target.glob("*model.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[place % len(tensors)]
    if kind == "add":
        name = f"{name.rpartition('.')[0]}.more"
        tensors[name] = torch.zeros(2)
    elif kind == "reshape":
        shape = list(tensors[name].shape)
        tensors[name] = torch.zeros(*shape[:-1], shape[-1] * 3).to(tensors[name].dtype)
    else:
        tensor = tensors.pop(name)
        if kind == "rename":
            tensors[f"{name}s"] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def of_model(name: str) -> set[str]:
    """Return what transformers and PEFT may call a tensor of a file, once they have joined experts or scales."""
    stem = name.removesuffix("_blocks").removesuffix("_scales").removesuffix("_scale_inv")
    parts = stem.split(".")
    joined = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
    if "experts" in parts and parts[-2] in {*joined, "down_proj"}:
        at = parts.index("experts")
        stem = ".".join([*parts[: at + 1], joined.get(parts[-2], parts[-2])])
    return {name, stem}


def assert_named(error: Exception, name: str) -> None:
    """Require one line a difference, of which one holds the name."""
    lines = str(error).splitlines()
    assert all(line.startswith(("model.path ", "model.lora_adapter_path ", "checkpoint ")) for line in lines)
    assert any(known in str(error) for known in of_model(name)), (name, str(error))


def check(folder: Path) -> list[str]:
    """Compare a model's weights with its config; return notices."""
    hf_config = read_hf_config(str(folder), trusted=folder.name == "code of its own")
    dequantize(hf_config)
    trusted = folder.name == "code of its own"
    options = SimpleNamespace(override_config={}, allow_weight_mismatch=[], trust_remote_code=trusted)
    return PackedModel.check_weights(SimpleNamespace(model_folder=str(folder), model_options=options), hf_config)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_passes(name, folders):
    assert check(folders[name]) == []


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=12)
@given(damage=damages())
def test_damage_to_a_model_is_named_before_its_weights_are_read(name, damage, folders, tmp_path_factory):
    target = tmp_path_factory.mktemp("damaged") / name
    gone = damaged(folders[name], target, damage)
    with pytest.raises(ValueError, match=r"^model\.path ") as told:
        check(target)
    assert_named(told.value, gone)


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    """Return the checked config of a run that goes on from each adapter folder, its architecture, and that folder."""
    found = {}
    for name, (base, _) in ADAPTERS.items():
        adapter, data = tmp_path_factory.mktemp("run") / "adapter", folders[base].parent
        shutil.copytree(folders[f"adapter {name}"], adapter)
        words = [f"model.path={folders[base]}", f"model.lora_adapter_path={adapter}", "model.lora_rank=4"]
        config = typed(compose([*words, f"data.train_dir={data}", "parallel=cpu"]))
        found[name] = config, read_hf_config(str(folders[base])), adapter
    return found


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_whole_adapter_folder_passes_and_the_run_says_where_it_is(name, runs):
    config, hf_config, _ = runs[name]
    assert list(lora_problems(config, Architecture(hf_config))) == []
    (line,) = adapter_notices(config, Architecture(hf_config))
    assert line.startswith("adapters of rank 4 are on ")
    assert "self_attn.q_proj (2)" in line


@pytest.mark.parametrize("name", ADAPTERS)
@settings(deadline=None, max_examples=12)
@given(damage=damages())
def test_damage_to_an_adapter_folder_is_named_by_a_run_and_by_an_export(name, damage, folders, runs, tmp_path_factory):
    config, hf_config, target = runs[name]
    gone = damaged(folders[f"adapter {name}"], target, damage)
    lines = list(lora_problems(config, Architecture(hf_config)))
    assert lines
    assert_named(ValueError("\n".join(lines)), gone)
    asked = ExportForm(str(target), str(tmp_path_factory.mktemp("out") / "merged"))
    with pytest.raises(DataError) as told:
        merge_adapter_folder(asked, str(folders[ADAPTERS[name][0]]))
    assert_named(told.value, gone)
