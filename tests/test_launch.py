"""launch/: the torchrun line for every topology, and the slurm script around it."""

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from verl_ext.__main__ import main
from verl_ext.launch.run import preflight_command
from verl_ext.launch.topology import Topology

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
MODULE = ["-m", "verl_ext.fsdp_sft_trainer"]
ONE_NODE = ["torchrun", "--standalone", "--local_addr=127.0.0.1"]


def launch(*words: str, command: str = "launch", **environment: str) -> tuple[int, str, str]:
    """Return the code, the output and the errors of a dry run without this process's topology."""
    clean = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "DRY_RUN": "1"}
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, clean | environment, clear=True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main([command, *words])
    return code, output.getvalue(), errors.getvalue()


def line(*overrides: str, **environment: str) -> list[str]:
    """Return the words of the line that a node would run."""
    code, output, errors = launch(*overrides, **environment)
    assert code == 0, errors
    return shlex.split(output)


def test_one_host_without_gpus_gets_one_process_and_a_free_port():
    assert line() == [*ONE_NODE, "--nproc_per_node=1", *MODULE]


def test_overrides_go_through_unchanged():
    overrides = [
        "data.train_dir=/a folder/x",
        "loss.category_weights={code: 2.0, gsm8k: 1}",
        "trainer.logger=['console']",
    ]
    assert line(*overrides)[-3:] == overrides


@pytest.mark.parametrize("devices", ["0", "0,1,3", "GPU-ab12,GPU-cd34"])
def test_processes_follow_the_visible_devices(devices):
    assert f"--nproc_per_node={len(devices.split(','))}" in line(CUDA_VISIBLE_DEVICES=devices)


def test_processes_follow_nvidia_smi_where_no_device_list_is_set(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    assert Topology.of({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, 29500).processes == 2
    assert Topology.of({"PATH": ""}, 29500).processes == 1


def test_a_named_port_on_one_node_is_used():
    assert line(MASTER_PORT="12345", NPROC_PER_NODE="2") == [
        "torchrun",
        "--nnodes=1",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        "--master_port=12345",
        "--nproc_per_node=2",
        *MODULE,
    ]


@pytest.mark.parametrize(
    "environment",
    [
        {"NNODES": "4", "NODE_RANK": "3", "NPROC_PER_NODE": "8", "MASTER_ADDR": "host0", "MASTER_PORT": "6000"},
        {"nnodes": "4", "NODE_RANK": "3", "nproc_per_node": "8", "master_ip": "host0", "master_port": "6000"},
        {
            "PET_NNODES": "4",
            "PET_NODE_RANK": "3",
            "PET_NPROC_PER_NODE": "8",
            "PET_MASTER_ADDR": "host0",
            "PET_MASTER_PORT": "6000",
        },
    ],
    ids=["ours", "the seed's", "torchrun's"],
)
def test_several_nodes_meet_at_the_first_under_every_set_of_names(environment):
    assert line("a=1", **environment) == [
        "torchrun",
        "--nnodes=4",
        "--node_rank=3",
        "--master_addr=host0",
        "--master_port=6000",
        "--nproc_per_node=8",
        *MODULE,
        "a=1",
    ]


def test_several_nodes_have_a_default_port():
    assert "--master_port=29500" in line(NNODES="2", NODE_RANK="0", MASTER_ADDR="host0")


@pytest.mark.parametrize("name", ["MAX_RESTARTS", "max_restarts", "PET_MAX_RESTARTS"])
@pytest.mark.parametrize("rank", [0, 1])
def test_restarts_meet_by_c10d_at_a_store_on_node_0(name, rank):
    environment = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "host0", "LOCAL_ADDR": f"10.0.0.{rank}"}
    assert line("a=1", **environment, **{name: "3"}) == [
        *("torchrun", "--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=host0:29500"),
        *("--rdzv_id=verl-ext-29500", f"--rdzv_conf=is_host={1 - rank}", f"--local_addr=10.0.0.{rank}"),
        *("--max_restarts=3", "--nproc_per_node=1", *MODULE, "a=1"),
    ]


def test_one_host_restarts_by_itself():
    assert line(MAX_RESTARTS="2") == [*ONE_NODE, "--max_restarts=2", "--nproc_per_node=1", *MODULE]


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "NPROC_PER_NODE": "4"}


def test_the_check_of_several_nodes_has_the_topology_of_torchrun():
    words = preflight_command(Topology.of({**TWO, "local_addr": "10.0.0.1", "MAX_RESTARTS": "1"}, 29500), "9")
    assert words[-9:] == [
        *("preflight", "nnodes=2", "node_rank=1", "master_addr=host0", "master_port=29500"),
        *("processes=4", "timeout=9", "local_addr=10.0.0.1", "rdzv_id=verl-ext-29500"),
    ]
    assert "--rdzv_id=verl-ext-29500" in line(**TWO, MAX_RESTARTS="1")
    assert preflight_command(Topology.of(TWO, 29500), "9")[-1] == "timeout=9"


COMMANDS = """
import sys
from verl_ext.launch.run import supervise
sys.exit(supervise([["sh", "-c", text] for text in sys.argv[1:]], {"ADDED": "1"}))
"""


def supervised(*commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands one after another, as `verl-ext launch` runs preflight and torchrun."""
    command = [sys.executable, "-c", COMMANDS, *commands]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_torchrun_is_started_after_a_check_and_only_where_it_passes():
    done = supervised("echo checked", "echo $ADDED; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "checked\n")
    done = supervised("exit 2", "echo started")
    assert (done.returncode, done.stdout) == (2, "")
    assert supervised("kill -KILL $$").returncode == 137


def test_a_request_that_comes_before_there_are_handlers_waits_where_the_parent_blocks_signals():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as Ray's actor does
    try:
        launcher = subprocess.Popen([sys.executable, "-c", COMMANDS, "exec sleep 60"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    launcher.terminate()
    assert launcher.wait(30) == os.EX_TEMPFAIL


def test_torchrun_finds_no_other_topology_in_its_own_variables():
    pod = {"PET_NNODES": "4", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "3", "PET_NODE_RANK": "1"}
    done = supervised("env | grep ^PET_ | sort", **pod)
    kept = [line.partition("=")[0] for line in done.stdout.splitlines()]
    assert kept == ["PET_SHUTDOWN_TIMEOUT", "PET_SIGNALS_TO_HANDLE"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64 None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None max_split_size_mb:64"),
    ],
)
def test_torch_is_imported_with_expandable_segments_unless_the_user_says_otherwise(given, seen, tmp_path):
    torch = "import os\nprint(*map(os.environ.get, ['PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF']))\nos._exit(0)\n"
    (tmp_path / "torch.py").write_text(f"import sys\nsys.stdout.reconfigure(line_buffering=True)\n{torch}")
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-m", "verl_ext.fsdp_sft_trainer"]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": str(tmp_path), **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == seen


def test_ambiguous_world_size_and_rank_are_not_read():
    assert line(WORLD_SIZE="16", RANK="3") == line()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "two"}, "NNODES must be a whole number of at least 1; got 'two'"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE must be a whole number of at least 1; got '0'"),
        ({"MAX_RESTARTS": "no"}, "MAX_RESTARTS must be a whole number of at least 0; got 'no'"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR (or master_ip) must name the first node"),
        ({"NNODES": "2", "MASTER_ADDR": "host0"}, "NODE_RANK must be 0 to 1 when NNODES=2; got ''"),
        ({"NNODES": "2", "MASTER_ADDR": "host0", "NODE_RANK": "2"}, "NODE_RANK must be 0 to 1 when NNODES=2; got '2'"),
        (
            {"NNODES": "9", "MASTER_ADDR": "host0", "NODE_RANK": "08"},
            "NODE_RANK must be 0 to 8 when NNODES=9; got '08'",
        ),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a port, 1 to 65535; got 'http'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a port, 1 to 65535; got '65536'"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_in_one_line(environment, message):
    code, output, errors = launch(**environment)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize("script", [path.name for path in sorted(LAUNCH.iterdir()) if path.suffix != ".yaml"])
def test_every_launcher_is_valid_bash_and_executable(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)
    assert os.access(LAUNCH / script, os.X_OK)


def slurm(tmp_path: Path, restarts: str) -> subprocess.CompletedProcess[str]:
    """Run slurm.sbatch on two nodes; scontrol and srun are small scripts, and srun runs its command once a node."""
    programs = {
        "scontrol": 'printf "%s\\n" node-a node-b',
        "srun": "\n".join(
            [
                'echo "$*" >"$SRUN_ARGUMENTS"',
                "while [[ $1 == --* ]]; do shift; done",
                'for i in 0 1; do SLURM_NODEID=$i "$@"; done',
            ]
        ),
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{body}\n")
        (tmp_path / name).chmod(0o755)
    submit = tmp_path / "repo"
    submit.mkdir(exist_ok=True)
    if not (submit / "launch").exists():
        (submit / "launch").symlink_to(LAUNCH)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DRY_RUN": "1",
        "SLURM_SUBMIT_DIR": str(submit),
        "SLURM_JOB_ID": "40007",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_RESTART_COUNT": restarts,
        "SRUN_ARGUMENTS": str(tmp_path / "srun_arguments"),
    }
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "recipe=token_aware_pack", "data.train_dir=/a folder/x"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_slurm_runs_the_line_once_a_node_and_passes_overrides_through(tmp_path):
    first, second = (shlex.split(text) for text in slurm(tmp_path, "0").stdout.splitlines()[-2:])
    shared = ["--master_addr=node-a", "--master_port=24007", "--nproc_per_node=8", *MODULE]
    overrides = ["recipe=token_aware_pack", "data.train_dir=/a folder/x"]
    assert first == ["torchrun", "--nnodes=2", "--node_rank=0", *shared, *overrides]
    assert second == ["torchrun", "--nnodes=2", "--node_rank=1", *shared, *overrides]
    assert "--kill-on-bad-exit=1" in (tmp_path / "srun_arguments").read_text()


def test_a_requeued_slurm_job_logs_into_a_folder_of_its_own(tmp_path):
    for restarts in ("0", "1"):
        slurm(tmp_path, restarts)
        assert f"job-40007/attempt-{restarts}/node-%n.log" in (tmp_path / "srun_arguments").read_text()
    logs = tmp_path / "repo" / "logs" / "job-40007"
    assert sorted(path.name for path in logs.iterdir()) == ["attempt-0", "attempt-1"]


RAY = ["python", "-m", "verl_ext.fsdp_sft_trainer_ray"]


def ray_lines(*words: str, **environment: str) -> list[list[str]]:
    """Return the words of the lines that a node of a Ray cluster would run."""
    code, output, errors = launch(*words, command="launch-ray", **{"RAY_AUTH_MODE": "token", **environment})
    assert code == 0, errors
    return [shlex.split(text) for text in output.splitlines()]


def test_the_first_node_of_a_ray_cluster_runs_the_head_and_the_run_on_it():
    topology = {"NNODES": "4", "NODE_RANK": "0", "master_ip": "host0", "NPROC_PER_NODE": "8", "MAX_RESTARTS": "3"}
    head, run = ray_lines(
        "node", "data.train_dir=/a folder/x", **topology, CUDA_VISIBLE_DEVICES="0,1", LOCAL_ADDR="::2"
    )
    assert head == [
        *("ray", "start", "--block", "--disable-usage-stats", "--node-ip-address=::2", "--num-gpus=8"),
        *("--head", "--port=6379", "--include-dashboard=false"),
    ]
    assert run == [
        *("env", "RAY_ADDRESS=host0:6379", *RAY, "trainer.nnodes=4", "trainer.n_gpus_per_node=8", "ray.max_restarts=3"),
        "data.train_dir=/a folder/x",
    ]


def test_one_node_needs_no_head():
    (run,) = ray_lines("node", "a=1", NPROC_PER_NODE="2", RAY_AUTH_MODE="")
    assert run == ["env", "-u", "RAY_ADDRESS", *RAY, "trainer.n_gpus_per_node=2", "ray.max_restarts=0", "a=1"]


def test_other_nodes_join_the_head_and_a_head_without_overrides_waits_for_jobs():
    two = {"NNODES": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "7000"}
    start = ["ray", "start", "--block", "--disable-usage-stats"]
    assert ray_lines("node", "a=1", **two, NODE_RANK="1") == [[*start, "--address=host0:7000"]]
    assert ray_lines("node", **two, NODE_RANK="0") == [
        [*start, "--head", "--port=7000", "--dashboard-host=0.0.0.0"],
    ]


def test_a_ray_job_has_the_overrides_as_they_are():
    overrides = ["data.train_dir=/a folder/x", "loss.category_weights={code: 2.0, gsm8k: 1}"]
    assert ray_lines("submit", *overrides) == [["ray", "job", "submit", "--", *RAY, *overrides]]
    environment = {"NNODES": "2", "NPROC_PER_NODE": "8", "MAX_RESTARTS": "1", "WORKING_DIR": "."}
    environment["RUNTIME_ENV"] = '{"env_vars": {"NCCL_DEBUG": "INFO"}}'
    assert ray_lines("submit", "a=1", **environment) == [
        [
            *(
                "ray",
                "job",
                "submit",
                "--working-dir=.",
                f"--runtime-env-json={environment['RUNTIME_ENV']}",
                "--",
                *RAY,
            ),
            *("trainer.nnodes=2", "trainer.n_gpus_per_node=8", "ray.max_restarts=1", "a=1"),
        ]
    ]


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {}, "the first argument must be node or submit; got ''"),
        (["a=1"], {}, "the first argument must be node or submit; got 'a=1'"),
        (["node"], {}, "RAY_AUTH_MODE must be token or disabled, the same on every node; got ''"),
        (["node"], {"NNODES": "2"}, "MASTER_ADDR (or master_ip) must name the first node when NNODES=2; got nothing"),
    ],
)
def test_a_ray_line_that_cannot_be_is_refused_in_one_line(words, environment, message):
    code, output, errors = launch(*words, command="launch-ray", **environment)
    assert (code, output, errors) == (2, "", f"error: {message}\n")
