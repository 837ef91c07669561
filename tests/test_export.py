"""`verl-ext export` writes the folder that training would have exported, from the shards of any number of ranks."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import stopped_at, train
from verl_ext.__main__ import main as judge_main
from verl_ext.commands.export import main

pytestmark = pytest.mark.slow

RUNS = {
    "plain": [],
    "lora": ["model=lora", "model.lora_rank=4"],
    "adapters": ["model=lora", "model.lora_rank=4", "checkpoint.save_lora_only=true"],
}


def train_all(runs):
    for overrides in runs:
        train([*overrides, "trainer.logger=[console]"])


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """Return the folder of three one-step runs on two ranks, which training also exported."""
    folder = tmp_path_factory.mktemp("runs")
    documents = random_documents(np.random.default_rng(0), [40, 30, 20, 60], VOCABULARY, 1)
    data = write_tokenized(folder / "data", documents)
    common = (f"data.train_dir={data}", f"model.path={tiny_model}", "trainer.total_training_steps=1")
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    overrides = [[*common, *own, contents, f"trainer.default_local_dir={folder / name}"] for name, own in RUNS.items()]
    overrides.append([*common, f"trainer.default_local_dir={folder / 'shards'}"])  # the plain run, without an export
    run_ranks(train_all, 2, overrides)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_it_is_what_training_exports_in_shards_of_the_size_asked_for(name, runs, tiny_model, tmp_path, capsys):
    checkpoint = runs / name / "global_step_1"
    base = [f"base={tiny_model}"] if name == "adapters" else []
    asked = [f"checkpoint={checkpoint}", f"output_dir={tmp_path / 'out'}", "shard_gb=2e-5", *base]
    assert main(asked) == 0, capsys.readouterr().err
    expected = load_file(checkpoint / "huggingface" / "model.safetensors")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert len(files) > 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.float32
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == set()


def test_the_precision_can_be_another_and_what_was_exported_is_written_down(runs, tmp_path):
    asked = [f"checkpoint={runs / 'plain' / 'global_step_1'}", f"output_dir={tmp_path / 'out'}", "dtype=bfloat16"]
    assert main(asked) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "export.json").read_text())["step"] == 1


def test_the_last_checkpoint_of_a_run_is_taken_and_a_folder_without_one_is_refused(runs, tmp_path, capsys):
    stopped_at(runs / "plain", tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run" / "global_step_1", tmp_path / "run" / "global_step_0")
    assert main([f"checkpoint={tmp_path / 'run'}", f"output_dir={tmp_path / 'out'}"]) == 0
    assert json.loads((tmp_path / "out" / "export.json").read_text())["checkpoint"] == "global_step_1"
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert main([f"checkpoint={tmp_path / 'empty'}", f"output_dir={tmp_path / 'none'}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: checkpoint must be a folder with manifest.json, or hold global_step_N folders; got")
    assert error.count("\n") == 1


def test_what_is_damaged_or_without_its_base_is_refused_in_one_line(runs, tmp_path, capsys):
    adapters = runs / "adapters" / "global_step_1"
    assert main([f"checkpoint={adapters}", f"output_dir={tmp_path / 'out'}"]) == 1
    assert capsys.readouterr().err.startswith("error: base is required for a checkpoint of adapters alone")
    stopped_at(runs / "plain", tmp_path / "cut", 1)
    shard = tmp_path / "cut" / "global_step_1" / "state" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main([f"checkpoint={shard.parent.parent}", f"output_dir={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "its state/__1_0.distcp has" in error
    assert not (tmp_path / "out").exists()


def test_checkpoints_with_and_without_an_export_and_a_run_are_judged_as_the_exported_folder_is(runs, tmp_path, capsys):
    exported = runs / "plain" / "global_step_1" / "huggingface"
    models = {"folder": exported, "checkpoint": exported.parent, "shards": runs / "shards" / "global_step_1"}
    models["run"] = runs / "shards"
    (tmp_path / "hay.txt").write_text("w1 w2 w3 w4. " * 40)
    given = ["judge", "task=needle", f"cases={tmp_path / 'hay.txt'}", f"model.path={exported}", "max_tokens=6"]
    given += ["needle.lengths=[40]", "needle.depths=[0,50]", f"output_dir={tmp_path / 'judged'}"]
    assert judge_main([*given, *(f"models.{name}={path}" for name, path in models.items())]) == 0, capsys.readouterr()
    said = []
    for name in models:
        rows = map(json.loads, (tmp_path / "judged" / name / "answers.jsonl").read_text().splitlines())
        said.append([(row["case"], row["answer"], row["outcome"]) for row in rows])
    assert all(answers == said[0] for answers in said)
    assert all(answer for _, answer, _ in said[0])
