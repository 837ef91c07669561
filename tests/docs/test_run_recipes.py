"""Recipes that are whole runs: their files compose, and their small forms learn what their README says."""

import re
import runpy
import shutil
from pathlib import Path

import pytest

from tests.lib.recipe_runs import RECIPES, run_recipe, values
from verl_ext.__main__ import main

NAMES = sorted(path.parent.name for path in RECIPES.glob("*/run.yaml"))
HUB = {"qwen3_0.6b_first_run": "chats", "dpo_after_sft": "sum_pairs"}  # takes the place of data of the Hub
SMALL = "num_hidden_layers: 1, hidden_size: 64, num_attention_heads: 8, head_dim: 8"
# What each small form reaches at its end, by metrics of validation, as its README says.
REACHED = {
    "qwen3_0.6b_first_run": {"chats_loss": 0.3, "maths_loss": 1.0},
    "qwen3_8b_sft": {"chats_loss": 0.05, "code_loss": 0.1},
    "qwen3_8b_lora_24gb": {"code_loss": 1.0, "chats_loss": 0.1},
    "qwen3_30b_a3b_sft": {"chats_loss": 0.8, "code_loss": 1.0},
    "qwen3_8b_128k": {"chats_loss": 1.0, "long_loss": 0.6},
    "reasoning_and_tools": {"reasoning_loss": 0.25, "tools_loss": 0.8},
    "continued_pretraining": {"domain_loss": 0.15, "general_loss": 0.65},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Return a folder with the data of every recipe, by the names that their files have, and two models."""
    folder = tmp_path_factory.mktemp("recipes")
    small_data = runpy.run_path(str(RECIPES / "small_data.py"))
    small_data["main"](folder / "data", [f"{kind}=40" for kind in small_data["KINDS"]])
    words = [f"tokenizer.train_on=[{folder}/data/chats.jsonl]", "tokenizer.vocab_size=300"]
    for name, preset, config in (
        ("model", "tiny", "intermediate_size: 64"),
        ("mixture", "minimind3_moe_198m", "moe_intermediate_size: 32, num_experts: 8"),
    ):
        config = f"config={{{SMALL}, {config}}}"
        assert main(["init-model", f"model={preset}", config, f"output_dir={folder / name}", *words]) == 0
    (folder / "base").symlink_to(folder / "model")
    sources = f"sources={{domain:{folder}/data/domain.jsonl,general:{folder}/data/general.jsonl}}"
    assert main(["index", sources, f"output_dir={folder / 'index'}", f"model.path={folder / 'model'}"]) == 0
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_composes_as_it_is_and_in_its_small_form(name, inputs, tmp_path, capsys):
    shutil.copytree(RECIPES / name, tmp_path / name)
    model = inputs / ("mixture" if "a3b" in name else "model")
    for link, target in {
        "model": model,
        "base": model,
        "data": inputs / "data",
        "val": inputs / "data",
        "index": inputs / "index",
    }.items():
        (tmp_path / name / link).symlink_to(target)
    for file in sorted((tmp_path / name).glob("*.yaml")):
        words = []
        if file.name != "small.yaml":  # which name models and data of the Hub
            words += [f"model.path={model}"]
            words += [f"data.sources={{hub:{inputs}/data/{HUB[name]}.jsonl}}"] if name in HUB else []
            words += ["engine.offload_policy=false"] if "a3b" in name else []  # which a CPU refuses
        assert main(["train", str(file), "dry_run=true", *words]) == 0, (file.name, capsys.readouterr().err)
        assert "Nothing was started." in capsys.readouterr().out


def test_a_list_shows_where_to_begin_and_a_copy_has_what_its_scripts_need(tmp_path, capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert listed.index("qwen3_8b_sft") < listed.index("quickstart") < listed.index("longalign")
    for name, place in (("qwen3_8b_sft", "qwen3_8b_sft"), ("longalign", "papers/longalign")):
        assert main(["recipes", name, f"to={tmp_path}"]) == 0
        scripts = [path for path in (tmp_path / place).iterdir() if path.suffix == ".sh"]
        for script in scripts:
            for shared in re.findall(r'^source "(?:\$here|\$\(.*\))/(.*)"$', script.read_text(), re.MULTILINE):
                assert (script.parent / shared).is_file()
        assert scripts
    assert main(["recipes", "longalign", f"to={tmp_path}"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", REACHED)
def test_the_small_form_reaches_the_losses_of_its_readme(name, tmp_path):
    printed = run_recipe(f"{name}/small.sh", tmp_path / "run")
    for metric, bound in REACHED[name].items():
        first, *_, last = values(tmp_path / "run" / "out", f"val/{metric}")
        assert last < bound < first, metric
    if name == "qwen3_0.6b_first_run":
        assert "Tuesday follows Monday." in printed


@pytest.mark.slow
def test_preferences_are_learnt_from_pairs_and_from_labels_on_one_base(tmp_path):
    for loss in ("dpo", "kto"):
        printed = run_recipe("dpo_after_sft/small.sh", tmp_path / "run", f"loss={loss}")
        assert ("A base model" in printed) == (loss == "dpo")  # the second start keeps it
        for category in ("sums", "facts"):
            margins = values(tmp_path / "run" / "out", f"val/{category}_reward_margin")
            assert margins[0] == 0
            assert margins[-1] > 3


@pytest.mark.slow
def test_a_tenth_of_general_chats_keeps_what_the_base_knew(tmp_path):
    run_recipe("categories/small.sh", tmp_path / "run")
    kept, lost = (values(tmp_path / "run" / f"{name}_chats", "val/chats_loss") for name in ("with", "without"))
    assert kept[0] == lost[0]
    assert kept[-1] < 2 * kept[0] + 0.1
    assert lost[-1] > 5 * kept[-1]
    for name in ("with", "without"):
        assert values(tmp_path / "run" / f"{name}_chats", "val/code_loss")[-1] < 0.9
