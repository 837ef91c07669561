"""launch/slurm.sbatch under slurm's own daemons, two nodes on this machine. Run by `make cluster`.

Debian: apt install slurmctld slurmd slurm-client munge
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lib.project import ROOT
from tests.lib.training import SMALL, into, metrics, small_run, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=1
GresTypes=gpu
NodeName={host} NodeHostname={host} Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=localhost NodeHostname={host} Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Start a cluster of two nodes; return a function that runs one of slurm's programs and returns its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"slurm needs {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("slurm's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=free_ports(3)))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "VERL", "PYTEST"))},
        **{"PATH": path, "SLURM_CONF": str(folder / "slurm.conf"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    }
    named = {f"--{kind}-file={folder / kind}" for kind in ("pid", "log", "seed")}
    munge = ["munged", "--foreground", "--force", f"--key-file={folder / 'key'}", f"--socket={folder / 'munge.socket'}"]

    def run(*words: str) -> str:
        return subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout

    with contextlib.ExitStack() as daemons:
        nodes = [["slurmd", "-D", "-N", name] for name in (host, "localhost")]
        for command in ([*munge, *named], ["slurmctld", "-D", "-i"], *nodes):
            output = daemons.enter_context((folder / f"{command[0]}.out").open("ab"))
            daemon = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            daemons.callback(daemon.wait, 30)
            daemons.callback(daemon.terminate)
            if command[0] == "munged":
                wait((folder / "munge.socket").exists)
        wait(lambda: _idle_nodes(run) == 2)
        yield run


def _idle_nodes(run: Callable[..., str]) -> int:
    with contextlib.suppress(subprocess.CalledProcessError):
        return run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").count("\n")
    return 0


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as open_sockets:
        probes = [open_sockets.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [probe.getsockname()[1] for probe in probes]


def wait(what: Callable[[], object]) -> None:
    wait_for(what, 300)


def state(run: Callable[..., str], job: str) -> str:
    facts = dict(word.split("=", 1) for word in run("scontrol", "show", "job", job).split() if "=" in word)
    return f"{facts['JobState']} after {facts['Restarts']} restarts"


@pytest.fixture
def submit(slurm, tiny_model, tmp_path) -> Iterator[Callable[..., str]]:
    """Submit launch/slurm.sbatch with these overrides on both nodes, and return the job's number. Removes its logs."""
    run = small_run(tmp_path, tiny_model, range(2, 60), into(tmp_path / "run"), "trainer.logger=[file]")
    jobs = []

    def sbatch(*overrides: str) -> str:
        options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--job-name=test-run"]
        words = [f"--output={tmp_path / 'job.log'}", "launch/slurm.sbatch", *SMALL, *run, *overrides]
        jobs.append(slurm("sbatch", *options, *words).strip())
        return jobs[-1]

    yield sbatch
    for job in jobs:
        shutil.rmtree(ROOT / "logs" / f"test-run-{job}", ignore_errors=True)
    with contextlib.suppress(OSError):
        (ROOT / "logs").rmdir()


def test_a_job_that_is_preempted_is_queued_again_and_resumes(slurm, submit, tmp_path):
    job = submit("trainer.total_training_steps=80", "trainer.save_freq=4", "trainer.max_ckpt_to_keep=2")
    wait((tmp_path / "run" / "latest_checkpointed_iteration.txt").is_file)
    slurm("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait(lambda: state(slurm, job) == "PENDING after 1 restarts")
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # slurm holds a requeued job back for two minutes
    wait(lambda: state(slurm, job) == "COMPLETED after 1 restarts")
    logs = ROOT / "logs" / f"test-run-{job}"
    assert sorted(str(path.relative_to(logs)) for path in logs.glob("*/*")) == [
        f"attempt-{attempt}/node-{node}.log" for attempt in (0, 1) for node in (0, 1)
    ]
    assert "resumed after step " in (logs / "attempt-1" / "node-0.log").read_text(errors="replace")
    assert "resumed after step " not in (logs / "attempt-0" / "node-0.log").read_text(errors="replace")
    assert [step for step, name in metrics(tmp_path / "run") if name == "train/loss"] == list(range(1, 81))
    assert "DUE TO PREEMPTION" in (tmp_path / "job.log").read_text()


def test_a_job_that_is_told_of_its_end_saves_and_is_queued_again(slurm, submit, tmp_path):
    job = submit("trainer.total_training_steps=60", "data.num_workers=1")
    wait(lambda: (tmp_path / "run" / "metrics.jsonl").is_file() and metrics(tmp_path / "run"))
    slurm("scancel", "--batch", "--signal=USR1", job)  # as the script's --signal=B:USR1@600 does
    wait(lambda: state(slurm, job) == "PENDING after 1 restarts")
    saved = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    assert max(step for step, _ in metrics(tmp_path / "run")) == saved < 60  # nothing is lost
    wait(lambda: _idle_nodes(slurm) == 2)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")  # not in the second in which it was requeued
    wait(lambda: state(slurm, job) == "COMPLETED after 1 restarts")
    logs = ROOT / "logs" / f"test-run-{job}"
    said = f"SIGUSR1: stopping after step {saved} of 60"
    assert sum(said in path.read_text(errors="replace") for path in logs.glob("*/*")) == 1
    assert f"resumed after step {saved} of 60" in (logs / "attempt-1" / "node-0.log").read_text(errors="replace")
    assert [step for step, name in metrics(tmp_path / "run") if name == "train/loss"] == list(range(1, 61))
    assert "stopped by a signal before its last step; queued again" in (tmp_path / "job.log").read_text()


def test_a_node_that_fails_ends_the_job_on_the_other(slurm, submit, tmp_path):
    job = submit("trainer.total_training_steps=100000")
    wait((tmp_path / "run" / "metrics.jsonl").is_file)
    words = f"trainer.default_local_dir={tmp_path / 'run'}".encode()
    agents = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if words in (command := read(path).split(b"\0")) and b"torchrun" in command[2]
    ]
    assert len(agents) == 2
    os.kill(agents[0], 9)
    wait(lambda: state(slurm, job) == "FAILED after 0 restarts")


def read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
