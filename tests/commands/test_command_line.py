"""The commands as a user types them: the seed's own line, a mistake, and a wheel in an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import verl_ext
from tests.lib.chat_server import chat_server
from tests.lib.errors import names
from tests.lib.project import ROOT
from tests.lib.ranks import forked
from tests.lib.seed import SEED_CLASS, SEED_COMMAND
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import tensors_of
from verl_ext.__main__ import COMMANDS, main
from verl_ext.trainer.step_plan import StepPlan

pytestmark = pytest.mark.slow

NAMES = ("input_ids", "loss_mask", "category_ids")


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
    assert (
        line == "2 × CPU (gloo) · fp32 · attention sdpa · head fused · AdamW loop · rate 3e-05, constant · no warm-up "
        "· decay 0.01 on all"
    )
    assert done.stdout.count("verl-ext ") == done.stdout.count("reading the weights of") == 1  # only rank 0 prints it
    assert not set("\r\x1b") & set(done.stdout + done.stderr)
    assert re.search(r"^step +1/\d+ \| loss \d", done.stdout, re.MULTILINE)
    assert "note: model.partial_pretrain (verl ≤ 0.6) is read as model.path" in done.stderr
    assert (tmp_path / "out" / "global_step_1").is_dir()
    assert not (tmp_path / "out" / "run.lock").exists()
    assert "Warning" not in done.stderr


def trained_plainly(model_folder, packs):
    """Return a plain loop's mean loss of each category and step, and its trained weights."""
    model, losses = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.01)
    for pack in packs:
        rows = [[torch.as_tensor(row[name]).long()[None] for name in NAMES] for row in pack]
        targets = sum(int(mask[:, 1:].sum()) for _, mask, _ in rows)
        sums = {1: [0.0, 0], 2: [0.0, 0]}
        for ids, mask, category in rows:
            nll = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            (nll[mask[0, 1:] == 1].sum() / targets).backward()
            for number, total in sums.items():
                of_it = nll[(mask * (category == number))[0, 1:] == 1]
                sums[number] = [total[0] + of_it.double().sum().item(), total[1] + len(of_it)]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([total / count for total, count in sums.values()])
    return losses, model.state_dict()


def test_the_seeds_command_trains_on_the_packs_of_the_seeds_own_class(tiny_model, tmp_path, free_port):
    documents = random_documents(np.random.default_rng(0), [480] * 300, VOCABULARY, 2)
    folder = write_tokenized(tmp_path / "data", documents, {1: "maths", 2: "code"})
    (tmp_path / "fsdp_sft_trainer.py").symlink_to(ROOT / "verl_ext" / "fsdp_sft_trainer.py")
    (tmp_path / "sft_data_packer.py").write_text(SEED_CLASS)
    seed = {"nnodes": "1", "nproc_per_node": "2", "NODE_RANK": "0", "master_ip": "127.0.0.1", "master_port": free_port}
    paths = {"train_files": folder, "model_path": str(tiny_model), "save_path": str(tmp_path / "out"), "task_name": "t"}
    done = run(SEED_COMMAND, tmp_path, **seed, **paths)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if "has no effect" in line] == [
        "data.micro_batch_size=1 has no effect: neither CollatedOptions nor verl's data has it"
    ]
    own: dict[str, Any] = {}
    exec(SEED_CLASS, own)
    packer = own["SFTDataSet"](folder, 131072, 0)
    order = StepPlan(2, 1, seed=42, costs=np.array([len(packer[pack]) for pack in range(2)], float)).order(0)
    packs = [[packer.dataframe[row] for row in packer[int(pack)]] for pack in order]
    losses, weights = trained_plainly(tiny_model, packs)
    printed = re.findall(r"^step \d/2 \| loss \S+ +maths_loss (\S+) +code_loss (\S+) ", done.stdout, re.MULTILINE)
    assert [[float(loss) for loss in step] for step in printed] == [pytest.approx(step, abs=6e-4) for step in losses]
    begun, trained = load_file(tiny_model / "model.safetensors"), tensors_of(tmp_path / "out" / "global_step_2")
    for name, tensor in weights.items():
        change = tensor - begun[name]
        assert (trained[f"model.{name}"] - tensor).norm() < 1e-2 * change.norm(), name


def test_a_mistake_is_one_line_from_one_rank(folder, tiny_model, tmp_path, free_port):
    done = run(
        f"torchrun --nproc_per_node=2 --master_port={free_port} -m verl_ext.fsdp_sft_trainer "
        f"data.train_dir={folder} model.path={tiny_model} data.max_tokenz=64",
        tmp_path,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert names(line, "error", "data.max_tokenz", "nearest: data.max_tokens")


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
        assert f"{line} ".startswith(f"0|usage: verl-ext {command} "), line


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


def test_the_trainer_chooses_the_device_before_it_imports_verls_engines_without_megatron():
    code = (
        "import sys\nfrom verl_ext.fsdp_sft_trainer import process_group\nwith process_group():\n"
        "    from verl.workers.engine.fsdp.transformer_impl import device_name\n"
        "    assert (device_name, sys.modules['megatron']) == ('cpu', None)\n"
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
    assert names((tmp_path / "stderr").read_text().splitlines()[-1], "ranks (nproc)", 1, 2)
