"""The commands as a user types them: the seed's own line, a mistake, and a wheel in an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import verl_ext
from tests.chat_server import chat_server
from tests.ranks import forked
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from verl_ext.__main__ import COMMANDS, main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

# The training script of the document that requested this project, verbatim except for the sequence-parallel size.
SEED_COMMAND = r"""
PYTHONUNBUFFERED=1 torchrun --nnodes=$nnodes --nproc_per_node=$nproc_per_node --node_rank=$NODE_RANK --master_addr=$master_ip --master_port=$master_port  \
    fsdp_sft_trainer.py \
    +data.train_dir=$train_files \
    +data.max_tokens=131072 \
    optim.lr=3e-5 \
    data.train_batch_size=$nnodes \
    data.micro_batch_size=1 \
    data.micro_batch_size_per_gpu=1 \
    data.custom_cls.path=sft_data_packer.py \
    data.custom_cls.name=SFTDataSet \
    model.partial_pretrain=$model_path \
    model.use_liger=True \
    trainer.default_local_dir=$save_path \
    trainer.project_name=$task_name \
    trainer.experiment_name=$task_name \
    trainer.logger=['console'] \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path):
    documents = random_documents(np.random.default_rng(0), [9, 17, 30, 4], VOCABULARY, 2)
    return write_tokenized(tmp_path / "data", documents, {1: "maths", 2: "code"})


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "VERL_ENGINE_VENDOR")}
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def run(command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=240
    )


def test_the_seeds_command_runs_word_for_word(folder, tiny_model, tmp_path, free_port):
    seed = {"nnodes": "1", "nproc_per_node": "2", "NODE_RANK": "0", "master_ip": "127.0.0.1", "master_port": free_port}
    paths = {"train_files": folder, "model_path": str(tiny_model), "save_path": str(tmp_path / "out"), "task_name": "t"}
    done = run(SEED_COMMAND, ROOT / "verl_ext", **seed, **paths)  # by file path, from the file's folder
    assert done.returncode == 0, done.stderr[-3000:]
    start, line, *_ = done.stdout.splitlines()
    assert start.startswith(f"verl-ext {verl_ext.__version__}: starting, ranks 2")  # before torch is imported
    assert line == "2 × CPU (gloo) · fp32 · attention sdpa · head fused · AdamW loop · decay 0.01 on all"
    assert done.stdout.count("verl-ext ") == done.stdout.count("reading the weights of") == 1  # only rank 0 prints it
    assert not set("\r\x1b") & set(done.stdout + done.stderr)
    assert re.search(r"^step +1/\d+ \| loss \d", done.stdout, re.MULTILINE)
    assert "note: model.partial_pretrain (verl ≤ 0.6) is read as model.path" in done.stderr
    assert (tmp_path / "out" / "global_step_1").is_dir()
    assert not (tmp_path / "out" / "run.lock").exists()
    assert "Warning" not in done.stderr


def test_a_mistake_is_one_line_from_one_rank(folder, tiny_model, tmp_path, free_port):
    done = run(
        f"torchrun --nproc_per_node=2 --master_port={free_port} -m verl_ext.fsdp_sft_trainer "
        f"data.train_dir={folder} model.path={tiny_model} data.max_tokenz=64",
        tmp_path,
    )
    assert done.returncode != 0
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert told == ["error: unknown key data.max_tokenz; nearest: data.max_tokens"]


def test_the_trainer_starts_from_an_installed_wheel_in_an_empty_folder(folder, tiny_model, tmp_path):
    pip = f"{sys.executable} -m pip"
    built = run(f"{pip} wheel -q --no-deps --no-build-isolation -w {tmp_path / 'wheel'} {ROOT}", tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheel").glob(f"verl_ext-{verl_ext.__version__}-*.whl")
    installed = run(f"{pip} install -q --no-deps --target {tmp_path / 'site'} {wheel}", tmp_path)
    assert installed.returncode == 0, installed.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run(
        "python -c 'import verl_ext; print(verl_ext.__file__)' && python -m verl_ext.fsdp_sft_trainer "
        f"recipe=token_aware_pack data.train_dir={folder} model.path={tiny_model} data.max_tokens=64 "
        "data.train_batch_size=1 engine.ulysses_sequence_parallel_size=1 trainer.total_training_steps=1",
        empty,
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "step 1/1 | loss " in done.stdout


HELP = """
import contextlib, io, sys
from verl_ext.__main__ import COMMANDS, main
for words in (["--help"], *([name, "--help"] for name in COMMANDS), ["babilong", "outptu_dir=x"], ["init-model", "x"]):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        code = main(words)
    heavy = {"torch", "verl", "transformers", "ray", "datasets", "pandas"} & set(sys.modules)
    print(code, *heavy, printed.getvalue().partition("\\n")[0], sep="|")
"""


def test_help_waits_for_neither_torch_nor_verl_and_mistakes_of_small_commands_neither():
    done = subprocess.run([sys.executable, "-c", HELP], env=environment(), capture_output=True, text=True, check=True)
    *helps, first, second = done.stdout.splitlines()
    assert (first, second) == ("2|", "2|")
    assert len(helps) == 1 + len(COMMANDS)
    for line, command in zip(helps, ("COMMAND", *COMMANDS), strict=True):
        assert line.startswith(f"0|usage: verl-ext {command} "), line


WITHOUT_TORCH = """
import json, sys
from verl_ext.__main__ import main
for words in json.loads(sys.argv[1]):
    print(main(words), "torch" in sys.modules)
"""


def test_tools_that_need_a_tokenizer_alone_run_without_torch(folder, tiny_model, tmp_path):
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": "w5 w6 w7 " * 50}))
    model, output = f"model.path={tiny_model}", f"output_dir={tmp_path}"
    with chat_server(lambda _: "1: Why?") as server:
        endpoint = [f"endpoint.base_url={server.url}", "endpoint.model=tiny"]
        source = f"sources={{docs:{tmp_path / 'documents.jsonl'}}}"
        commands = [
            ["babilong", model, f"{output}/samples", "samples=2", "num_workers=1"],
            ["synthesize", model, f"{output}/records", "task=longalign", source, "intervals=[100,400]", *endpoint],
            *(["show", folder], ["show", folder, model, "row=0"]),
        ]
        command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))] == ["0 False"] * 4


def test_verl_does_not_import_megatron_for_a_run():
    code = (
        "import sys\nfrom verl_ext.trainer.distributed import process_group\n"
        "with process_group():\n    import verl.workers.engine\n    assert sys.modules['megatron'] is None\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=120)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_command_that_is_slow_to_import_prints_a_line_before(command, capfd, monkeypatch):
    def slow(name):
        heard.append(capfd.readouterr().out)
        raise KeyboardInterrupt

    heard = []
    monkeypatch.setattr("verl_ext.__main__.importlib.import_module", slow)
    with pytest.raises(KeyboardInterrupt):
        main([command, "model.path=MODEL"])
    assert heard[0].endswith(f": {command} …\n")


def one_of_two_ranks_on_one_gpu(stderr: Path) -> None:
    from verl_ext.trainer.distributed import process_group

    os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY), 2)
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="::1", MASTER_PORT="1"
    )
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    with process_group():
        pass


def test_more_ranks_than_gpus_are_one_line(tmp_path):
    rank = forked(one_of_two_ranks_on_one_gpu, tmp_path / "stderr")
    rank.join(120)
    assert rank.exitcode == 2
    told = (tmp_path / "stderr").read_text().splitlines()
    assert told[-1] == "error: ranks (nproc) must be at most the node's GPUs, 1; got 2"
