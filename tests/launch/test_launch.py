"""launch/: the torchrun line for every topology, and the slurm script around it."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from tests.lib.errors import names
from tests.lib.launchers import LAUNCH, launch
from verl_ext.launch.run import preflight_command
from verl_ext.launch.topology import Topology

MODULE = ["-m", "verl_ext.fsdp_sft_trainer"]


def line(*overrides: str, **environment: str) -> list[str]:
    """Return the words of the line that a node would run."""
    code, output, errors = launch(*overrides, **environment)
    assert code == 0, errors
    return shlex.split(output)


OVERRIDES = [
    "optim.lr=1e-5",
    "data.train_dir=/a folder/x",
    "loss.category_weights={code: 2.0, gsm8k: 1}",
    "trainer.logger=['console']",
]
FOUR = {"NNODES": "4", "NODE_RANK": "3", "NPROC_PER_NODE": "8", "MASTER_ADDR": "host0", "MASTER_PORT": "6000"}
OF_FOUR = ["--nnodes=4", "--node_rank=3", "--master_addr=host0", "--master_port=6000", "--nproc_per_node=8"]
THE_SEEDS = ["nnodes", "NODE_RANK", "nproc_per_node", "master_ip", "master_port"]
TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "LOCAL_ADDR": "10.0.0.1"}
OF_TWO = [
    *("--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=host0:29500", "--rdzv_id=verl-ext-29500"),
    *("--rdzv_conf=is_host=0", "--local_addr=10.0.0.1", "--max_restarts=3", "--nproc_per_node=1"),
]
ONE = ["--standalone", "--local_addr=127.0.0.1"]
LINES = [  # variables of a node, and the options of its torchrun
    ({}, [*ONE, "--nproc_per_node=1"]),
    ({"WORLD_SIZE": "16", "RANK": "3"}, [*ONE, "--nproc_per_node=1"]),  # ambiguous, so not read
    *(
        ({"CUDA_VISIBLE_DEVICES": x}, [*ONE, f"--nproc_per_node={n}"])
        for x, n in (("0", 1), ("0,1", 2), ("GPU-a,b", 2))
    ),
    (
        {"MASTER_PORT": "12345", "NPROC_PER_NODE": "2"},
        ["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", "--master_port=12345", "--nproc_per_node=2"],
    ),
    *(
        (dict(zip(names, FOUR.values(), strict=True)), OF_FOUR)
        for names in (FOUR, THE_SEEDS, [f"PET_{x}" for x in FOUR])
    ),
    ({k: v for k, v in FOUR.items() if k != "MASTER_PORT"}, [*OF_FOUR[:3], "--master_port=29500", OF_FOUR[4]]),
    *((TWO | {name: "3"}, OF_TWO) for name in ("MAX_RESTARTS", "max_restarts", "PET_MAX_RESTARTS")),
    (
        TWO | {"NODE_RANK": "0", "LOCAL_ADDR": "10.0.0.0", "MAX_RESTARTS": "3"},
        [*OF_TWO[:4], "--rdzv_conf=is_host=1", "--local_addr=10.0.0.0", *OF_TWO[6:]],
    ),
    ({"MAX_RESTARTS": "2"}, [*ONE, "--max_restarts=2", "--nproc_per_node=1"]),
]


@pytest.mark.parametrize(("environment", "options"), LINES)
def test_a_node_runs_torchrun_with_the_topology_of_its_variables_and_the_overrides_as_they_are(environment, options):
    assert line(*OVERRIDES, **environment) == ["torchrun", *options, *MODULE, *OVERRIDES]


def test_processes_follow_nvidia_smi_where_no_device_list_is_set(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    assert Topology.of({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, 29500).processes == 2
    assert Topology.of({"PATH": ""}, 29500).processes == 1


def test_the_check_of_several_nodes_has_the_topology_of_torchrun():
    words = preflight_command(Topology.of({**TWO, "NPROC_PER_NODE": "4", "MAX_RESTARTS": "1"}, 29500), "9")
    assert words[-9:] == [
        *("preflight", "nnodes=2", "node_rank=1", "master_addr=host0", "master_port=29500"),
        *("processes=4", "timeout=9", "local_addr=10.0.0.1", "rdzv_id=verl-ext-29500"),
    ]
    without = {name: value for name, value in TWO.items() if name != "LOCAL_ADDR"}
    assert preflight_command(Topology.of(without, 29500), "9")[-1] == "timeout=9"


COMMANDS = """
import sys
from verl_ext.launch.run import supervise
sys.exit(supervise([["sh", "-c", text] for text in sys.argv[1:]], {"ADDED": "1"}))
"""


def supervised(*commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands one after another, as `verl-ext launch` runs preflight and torchrun."""
    command = [sys.executable, "-c", COMMANDS, *commands]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_torchrun_is_started_after_a_check_that_passes_and_finds_no_other_topology_in_its_variables():
    pod = {"PET_NNODES": "4", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "3", "PET_NODE_RANK": "1"}
    done = supervised("echo checked", "echo $ADDED; env | grep ^PET_ | sort; kill -KILL $$", **pod)
    assert (done.returncode, done.stderr) == (137, "checked\n")
    added, *kept = done.stdout.splitlines()
    assert added == "1"
    assert [text.partition("=")[0] for text in kept] == ["PET_SHUTDOWN_TIMEOUT", "PET_SIGNALS_TO_HANDLE"]
    done = supervised("exit 2", "echo started")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_request_that_comes_before_there_are_handlers_waits_where_the_parent_blocks_signals():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as Ray's actor does
    try:
        launcher = subprocess.Popen([sys.executable, "-c", COMMANDS, "exec sleep 60"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    launcher.terminate()
    assert launcher.wait(30) == os.EX_TEMPFAIL


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None max_split_size_mb:64"),
    ],
)
def test_torch_is_imported_with_expandable_segments_unless_the_user_says_otherwise(given, seen, tmp_path):
    torch = "print(*map(os.environ.get, ['PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF']), flush=True)\nos._exit(0)\n"
    (tmp_path / "torch.py").write_text(f"import os\n{torch}")
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-m", "verl_ext.fsdp_sft_trainer"]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": str(tmp_path), **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == seen


@pytest.mark.parametrize(
    ("environment", "things"),
    [
        ({"NNODES": "two"}, ("NNODES", 1, "'two'")),
        ({"NPROC_PER_NODE": "0"}, ("NPROC_PER_NODE", 1, "'0'")),
        ({"MAX_RESTARTS": "no"}, ("MAX_RESTARTS", 0, "'no'")),
        ({"NNODES": "2", "NODE_RANK": "0"}, ("MASTER_ADDR (or master_ip)", "NNODES=2")),
        ({"NNODES": "2", "MASTER_ADDR": "host0", "RANK": "1"}, ("NODE_RANK", "0 to 1", "NNODES=2", "''")),
        ({"NNODES": "2", "MASTER_ADDR": "host0", "NODE_RANK": "2"}, ("NODE_RANK", "0 to 1", "NNODES=2", "'2'")),
        ({"NNODES": "9", "MASTER_ADDR": "h", "NODE_RANK": "08"}, ("NODE_RANK", "0 to 8", "NNODES=9", "'08'")),
        ({"MASTER_PORT": "http"}, ("MASTER_PORT", 65535, "'http'")),
        ({"MASTER_PORT": "65536"}, ("MASTER_PORT", 65535, "'65536'")),
    ],
)
def test_a_topology_that_cannot_be_is_refused_in_one_line(environment, things):
    code, output, errors = launch(**environment)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert names(errors, *things)


def test_every_launcher_is_valid_bash_and_executable():
    scripts = [path for path in LAUNCH.iterdir() if path.suffix != ".yaml"]
    assert all(os.access(script, os.X_OK) for script in scripts)
    subprocess.run(["bash", "-c", 'for script; do bash -n "$script" || exit 1; done', "", *scripts], check=True)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> tuple[list[list[str]], list[str], list[str]]:
    """Run slurm.sbatch on two nodes, and once more as after a requeue; return the lines of the first run, the arguments
    of srun and the folders of logs. scontrol and srun are small scripts, and srun runs its command once a node."""
    folder = tmp_path_factory.mktemp("slurm")
    once_a_node = 'while [[ $1 == --* ]]; do shift; done\nfor i in 0 1; do SLURM_NODEID=$i "$@"; done'
    srun = f'echo "$*" >>"$SRUN_ARGUMENTS"\n{once_a_node}'
    for name, body in {"scontrol": 'printf "%s\\n" node-a node-b', "srun": srun}.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\nset -e\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "repo").mkdir()
    (folder / "repo" / "launch").symlink_to(LAUNCH)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "DRY_RUN": "1", "SLURM_SUBMIT_DIR": str(folder / "repo")}
    environment |= {"SLURM_JOB_ID": "40007", "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "node-[a-b]"}
    environment |= {"SLURM_GPUS_ON_NODE": "8", "SRUN_ARGUMENTS": str(folder / "srun_arguments")}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), *OVERRIDES[:2]]
    outputs = [
        subprocess.check_output(command, env=environment | {"SLURM_RESTART_COUNT": attempt}, text=True)
        for attempt in ("0", "1")
    ]
    lines = [shlex.split(text) for text in outputs[0].splitlines()[-2:]]
    logs = sorted(path.name for path in (folder / "repo" / "logs" / "job-40007").iterdir())
    return lines, (folder / "srun_arguments").read_text().splitlines(), logs


def test_slurm_runs_the_line_once_a_node_and_a_requeued_job_logs_into_a_folder_of_its_own(slurm):
    lines, arguments, logs = slurm
    shared = ["--master_addr=node-a", "--master_port=24007", "--nproc_per_node=8", *MODULE, *OVERRIDES[:2]]
    assert lines == [["torchrun", "--nnodes=2", f"--node_rank={node}", *shared] for node in (0, 1)]
    for attempt, words in enumerate(arguments):
        assert "--kill-on-bad-exit=1" in words
        assert f"job-40007/attempt-{attempt}/node-%n.log" in words
    assert logs == ["attempt-0", "attempt-1"]


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


def test_other_nodes_join_the_head_one_node_needs_none_and_a_head_without_overrides_waits_for_jobs():
    two = {"NNODES": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "7000"}
    start = ["ray", "start", "--block", "--disable-usage-stats"]
    assert ray_lines("node", "a=1", **two, NODE_RANK="1") == [[*start, "--address=host0:7000"]]
    assert ray_lines("node", **two, NODE_RANK="0") == [[*start, "--head", "--port=7000", "--dashboard-host=0.0.0.0"]]
    (run,) = ray_lines("node", "a=1", NPROC_PER_NODE="2", RAY_AUTH_MODE="")
    assert run == ["env", "-u", "RAY_ADDRESS", *RAY, "trainer.n_gpus_per_node=2", "ray.max_restarts=0", "a=1"]


def test_a_ray_job_has_the_overrides_as_they_are():
    assert ray_lines("submit", *OVERRIDES) == [["ray", "job", "submit", "--", *RAY, *OVERRIDES]]
    environment = {"NNODES": "2", "NPROC_PER_NODE": "8", "MAX_RESTARTS": "1", "WORKING_DIR": "."}
    environment["RUNTIME_ENV"] = '{"env_vars": {"NCCL_DEBUG": "INFO"}}'
    (words,) = ray_lines("submit", "a=1", **environment)
    at = f"--runtime-env-json={environment['RUNTIME_ENV']}"
    assert words == [
        *("ray", "job", "submit", "--working-dir=.", at, "--", *RAY),
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=8", "ray.max_restarts=1", "a=1"),
    ]


@pytest.mark.parametrize(
    ("words", "environment", "things"),
    [
        ([], {}, ("node or submit", "''")),
        (["a=1"], {}, ("node or submit", "'a=1'")),
        (["node"], {}, ("RAY_AUTH_MODE", "token or disabled", "''")),
        (["node"], {"NNODES": "2"}, ("MASTER_ADDR (or master_ip)", "NNODES=2", "nothing")),
    ],
)
def test_a_ray_line_that_cannot_be_is_refused_in_one_line(words, environment, things):
    code, output, errors = launch(*words, command="launch-ray", **environment)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert names(errors, "error", *things)
