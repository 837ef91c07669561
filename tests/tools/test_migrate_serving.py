"""`verl-ext migrate` on what trains nothing: served models, merged adapters, accelerate's file."""

import json

import pytest
import yaml

from tests.lib.errors import names, refused
from verl_ext.tools.migrate.command import MigrateOptions, migrate

BASE = {"model_name_or_path": "o/base", "template": "qwen3", "trust_remote_code": True}
MERGED = {"adapter_name_or_path": "out/a b", "export_dir": "whole", "export_size": 2}
V1 = {"model": "o/base", "peft_config": {"name": "lora", "adapter_name_or_path": "a", "export_dir": "whole"}}
FSDP = {"fsdp_offload_params": True, "fsdp_reshard_after_forward": False}
LAUNCHED = {"distributed_type": "FSDP", "mixed_precision": "fp16", "num_processes": 4, "fsdp_config": FSDP}
ZERO = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
SPLIT = {"parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 2}
EXPORTED = (
    "swift export --model M --dataset o/a --split_dataset_ratio 0.1 --to_cached_dataset true --output_dir ./tokens"
)
CHUNKED = "swift sft --model M --tuner_type full --cached_dataset ./tokens/train --cached_val_dataset ./tokens/val"
FILES = [  # (a file's keys, the command that does its work)
    (BASE, "vllm serve o/base --trust-remote-code"),
    (BASE | {"infer_backend": "sglang"}, "python -m sglang.launch_server --model-path o/base --trust-remote-code"),
    (BASE | {"vllm_maxlen": 9}, "vllm serve o/base --max-model-len 9 --trust-remote-code"),
    (BASE | {"adapter_name_or_path": "tuned"},
     "vllm serve o/base --enable-lora --lora-modules mine=tuned --max-lora-rank 64 --trust-remote-code"),
    (BASE | MERGED,
     "verl-ext export 'checkpoint=out/a b' base=o/base output_dir=whole shard_gb=2 trust_remote_code=true"),
    (BASE | {"export_dir": "whole"}, "hf download o/base --local-dir whole"),
    (BASE | {"model_name_or_path": "./full", "export_dir": "whole"}, "cp -r ./full whole"),
    (V1, "verl-ext export checkpoint=a base=o/base output_dir=whole"),
    (LAUNCHED, "verl-ext train nproc=4 engine.mixed_precision.param_dtype=fp16 engine.offload_policy=true "
     "engine.reshard_after_forward=false"),
    ({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": ZERO},
     "verl-ext train nproc=2 engine.offload_policy=true engine.reshard_after_forward=false"),
    ({"distributed_type": "FSDP", "num_processes": 4, "parallelism_config": SPLIT},
     "verl-ext train nproc=4 engine.ulysses_sequence_parallel_size=2"),
]  # fmt: skip
COMMANDS = [
    ("llamafactory-cli api served.yaml vllm_maxlen=5", "vllm serve o/base --max-model-len 5 --trust-remote-code"),
    ("swift infer --model o/m --infer_backend vllm --stream true", "vllm serve o/m"),
    ("swift deploy --adapters x=tuned --port 8", "vllm serve o/own --enable-lora --lora-modules x=tuned "
     "--max-lora-rank 64 --port 8"),
    ("swift deploy --adapters gone", "vllm serve BASE --enable-lora --lora-modules mine=gone"),
    ("swift deploy --model M --infer_backend sglang --sglang_tp_size 2",
     "python -m sglang.launch_server --model-path M --tp-size 2"),
    ("swift export --adapters c/5 --merge_lora true", "verl-ext export checkpoint=c/5 output_dir=c/5-merged"),
    ("swift export --adapters c/5 --push_to_hub true --hub_model_id o/n", "hf upload o/n c/5"),
    ("axolotl merge-lora axolotl.yaml --lora-model-dir=c",
     "verl-ext export checkpoint=c base=o/base output_dir=out/merged"),
    ("axolotl inference axolotl.yaml", "vllm serve o/base --enable-lora --lora-modules mine=out"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned").mkdir()
    values = {"base_model_name_or_path": "o/own", "r": 40}
    (tmp_path / "tuned" / "adapter_config.json").write_text(json.dumps(values))
    (tmp_path / "served.yaml").write_text(yaml.safe_dump(BASE))
    of_axolotl = {"base_model": "o/base", "output_dir": "out", "datasets": ["o/a"], "adapter": "lora"}
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(of_axolotl))
    return tmp_path


def told(text: str) -> tuple[str, list[str]]:
    command, *comments = text.splitlines()
    return command, comments


@pytest.mark.parametrize(("values", "command"), FILES)
def test_a_file_that_trains_nothing_becomes_the_command_that_does_its_work(values, command, folder):
    (folder / "x.yaml").write_text(yaml.safe_dump(values))
    found, comments = told(migrate(MigrateOptions("x.yaml")))
    assert found == command
    assert comments[0].startswith("# no training: ")
    assert not any(line.startswith(("# no equivalent", "# unknown")) for line in comments)


@pytest.mark.parametrize(("given", "command"), COMMANDS)
def test_a_command_that_trains_nothing_becomes_the_one_that_does_its_work(given, command, folder):
    found, comments = told(migrate(MigrateOptions(given)))
    assert (found, comments[0][:15]) == (command, "# no training: ")


def test_what_is_asked_of_a_served_model_by_other_means_is_said(folder):
    _, comments = told(
        migrate(MigrateOptions("swift infer --model M --temperature 0.5 --val_dataset o/v --template q"))
    )
    assert "# differs: temperature=0.5: each request says it" in comments
    assert any(line.startswith("# no equivalent: val_dataset=o/v: ") for line in comments)
    assert any(line.startswith("# differs: template=q: ") for line in comments)


@pytest.mark.parametrize(
    ("given", "things"),
    [
        ("swift export --model M --quant_method awq --output_dir Q", ("quant_method", "awq")),
        ("swift deploy --model M --task_type seq_cls", ("task_type", "causal_lm", "seq_cls")),
        ("swift export --merge_lora true", ("adapters",)),
        ("swift infer --stream true", ("model",)),
        (EXPORTED, ("to_cached_dataset", "training")),
        ("swift eval --model M --eval_dataset gsm8k", ("command", "swift eval")),
    ],
)
def test_what_no_command_here_does_is_refused_by_its_key(given, things, folder):
    with refused(*things):
        migrate(MigrateOptions(given))


def test_a_recipe_is_of_a_training(folder):
    with refused("recipe", "own"):
        migrate(MigrateOptions("served.yaml", recipe="own"))


def test_a_training_has_the_raw_data_of_the_tokens_that_the_command_before_it_writes():
    text = migrate(MigrateOptions(f"{EXPORTED}\n{CHUNKED} --max_length 64"))
    assert {"data.sources.a=hf://datasets/o/a", "val_share=0.1"} <= {line.strip(" \\") for line in text.splitlines()}
    assert "# no equivalent" not in text
    other = migrate(MigrateOptions(f"{EXPORTED}\n{CHUNKED.replace('./tokens', './others')}"))
    assert "# no equivalent: cached_dataset=./others/train" in other


def test_the_file_of_accelerate_gives_a_command_its_ranks_and_sharding(folder, capsys):
    (folder / "acc.yaml").write_text(yaml.safe_dump(LAUNCHED))
    command = "accelerate launch --config_file {} trl/scripts/sft.py --model_name_or_path M --dataset_name o/a"
    text = migrate(MigrateOptions(command.format("acc.yaml")))
    assert text.startswith("verl-ext train nproc=4 ")
    assert "engine.offload_policy=true" in text
    text = migrate(MigrateOptions(command.format("acc.yaml --num_processes 3")))
    assert text.startswith("verl-ext train nproc=3 ")
    assert "# unknown" not in text
    assert migrate(MigrateOptions(command.format("gone.yaml"))).startswith("verl-ext train \\")
    assert names(capsys.readouterr().err, "gone.yaml", "--config_file")


@pytest.mark.parametrize(
    ("launcher", "nproc", "rows"),
    [
        ("torchrun --nnodes 4 --nproc_per_node=8", 8, 64),
        ("NNODES=2 NPROC_PER_NODE=4 torchrun", 4, 16),
        ("accelerate launch --num_machines 2 --num_processes 16", 8, 32),
        ("accelerate launch --config_file two.yaml", 2, 8),
    ],
)
def test_a_step_of_several_nodes_counts_the_ranks_of_all(launcher, nproc, rows, folder):
    (folder / "two.yaml").write_text(yaml.safe_dump({**LAUNCHED, "num_machines": 2}))
    training = "trl/scripts/sft.py --model_name_or_path M --dataset_name o/a --per_device_train_batch_size 2"
    lines = migrate(MigrateOptions(f"{launcher} {training}")).splitlines()
    assert lines[0].startswith(f"verl-ext train nproc={nproc} ")
    assert f"    data.train_batch_size={rows} \\" in lines
    assert any(names(line, "verl-ext launch") for line in lines if line.startswith("# differs"))
