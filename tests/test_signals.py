"""Requests to stop: the first saves a checkpoint after the current step on all ranks, a second ends a rank at once."""

import contextlib
import filecmp
import io
import itertools
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks, started_ranks
from tests.test_launch import LAUNCH
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import build, differences, metrics, train_alone, wait_for
from verl_ext.checkpoint.layout import saved_folders
from verl_ext.trainer.distributed import TRAINING_FAILED
from verl_ext.trainer.signals import SIGNALS, STOPPED, requests

pytestmark = pytest.mark.slow

SECONDS = 120  # the limit of every wait
STEPS = 5


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """Return overrides of a run on two sequence-parallel ranks, without its folder."""
    documents = random_documents(np.random.default_rng(0), [20] * 40, VOCABULARY, 1)
    folder = write_tokenized(tmp_path_factory.mktemp("data") / "train", documents)
    run = (f"data.train_dir={folder}", f"model.path={tiny_model}", "engine.ulysses_sequence_parallel_size=2")
    return [*run, "data.train_batch_size=2", f"trainer.total_training_steps={STEPS}"]


def asked(overrides: list[str], at: int) -> tuple[bool, int, str]:
    """Execute a run whose rank 1 gets signals during step `at`, if there is one; return whether it is complete, its
    exit code, and this rank's output."""
    requests.listen()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        trainer = build(overrides)
        trainer.resume()
        step, numbers = trainer.train_step, itertools.count(1)

        def signalled(*given):
            outcome = step(*given)
            if next(numbers) == at and dist.get_rank() == 1:
                for number in SIGNALS:  # at once, as a scheduler, torchrun and a launcher may send them
                    os.kill(os.getpid(), number)
                wait_for(lambda: requests.pending)
            return outcome

        trainer.train_step = signalled
        return trainer.fit(), requests.exit_code, said.getvalue()


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """Return the folder of the run without a signal."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(train_alone, 2, [*options, f"trainer.default_local_dir={folder}"])
    return folder


def test_one_rank_that_is_asked_ends_all_with_one_checkpoint_and_the_resumed_run_is_the_same(options, whole, tmp_path):
    run = [*options, "trainer.save_freq=2", f"trainer.default_local_dir={tmp_path}"]
    (complete, code, said), (other_complete, _, _) = run_ranks(asked, 2, run, 3)
    assert not complete
    assert not other_complete
    assert code == STOPPED
    assert said.count("stopping after step 3 of 5. Run the same command") == 1
    assert [path.name for path in saved_folders(tmp_path)] == ["global_step_2", "global_step_3"]
    run_ranks(train_alone, 2, run)
    assert not differences(tmp_path, whole, STEPS)


def test_a_checkpoint_that_is_there_is_not_written_again_and_one_that_is_being_written_is_waited_for(options, tmp_path):
    run = [*options, "trainer.save_freq=2", "checkpoint.async_save=true", f"trainer.default_local_dir={tmp_path}"]
    (complete, _, said), _ = run_ranks(asked, 2, run, 2)
    assert not complete
    assert said.count("Saving checkpoint to") == 1
    assert [path.name for path in tmp_path.glob("global_step*")] == ["global_step_2"]


def test_an_export_that_threads_write_is_waited_for_also_after_a_signal(options, tmp_path):
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    for at, last, later in ((2, 2, "true"), (0, STEPS, "true"), (0, STEPS, "false")):
        folder = tmp_path / f"{at} {later}"
        run = [*options, contents, f"checkpoint.async_save={later}", f"trainer.default_local_dir={folder}"]
        (complete, _, said), _ = run_ranks(asked, 2, run, at)
        assert complete == (at == 0)
        assert (folder / f"global_step_{last}" / "huggingface" / "model.safetensors").is_file()
        assert "Writing model shards" not in said
        assert metrics(folder).get((STEPS, "train/save_pause"), 0) >= 0
        assert ((STEPS, "train/save_pause") in metrics(folder)) == complete
    exports = [tmp_path / f"0 {later}" / f"global_step_{STEPS}" / "huggingface" for later in ("true", "false")]
    different = filecmp.cmpfiles(*exports, [path.name for path in exports[0].iterdir()], shallow=False)[1:]
    assert different == ([], [])


def test_a_request_during_the_last_step_leaves_a_complete_run(options, tmp_path):
    (complete, _, _), _ = run_ranks(asked, 2, [*options, f"trainer.default_local_dir={tmp_path}"], STEPS)
    assert complete
    assert {step for step, _ in metrics(tmp_path)} == set(range(1, STEPS + 1))


def wait_in_a_collective(folder: Path, in_training: bool) -> None:
    """Rank 0 waits for a sum that rank 1 never joins: no handler of Python's runs there."""
    os.dup2(os.open(folder / f"stderr-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ.update(VERL_EXT_REQUESTS=str(folder), VERL_EXT_LAUNCHER=str(os.getpid()))
    requests.listen()
    requests.in_training = in_training
    (folder / f"ready-{dist.get_rank()}").touch()
    dist.all_reduce(torch.zeros(1)) if dist.get_rank() == 0 else threading.Event().wait()


def test_before_the_first_step_a_request_ends_a_rank_at_once_also_inside_a_collective(tmp_path):
    with started_ranks(wait_in_a_collective, 2, tmp_path, False) as (ranks, _):
        wait_for((tmp_path / "ready-0").exists)
        os.kill(ranks[0].pid, signal.SIGTERM)
        ranks[0].join(SECONDS)
        assert ranks[0].exitcode == 128 + signal.SIGTERM
    assert "error: rank 0: SIGTERM: ended before the first step\n" in (tmp_path / "stderr-0").read_text()
    assert (tmp_path / "unfinished").exists()


def test_the_second_request_of_the_launcher_ends_every_rank_at_once_and_the_same_signal_again_is_none(tmp_path):
    with started_ranks(wait_in_a_collective, 2, tmp_path, True) as (ranks, _):
        wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
        for signals, move in (("SIGTERM\nSIGTERM\n", "read"), ("SIGTERM\nSIGTERM\nSIGINT\n", "ended")):
            (tmp_path / "told").write_text(signals)
            (tmp_path / "told").rename(tmp_path / "stop")
            for rank in ranks:
                rank.join(1.25 if move == "read" else SECONDS)
                assert rank.exitcode == (None if move == "read" else 128 + signal.SIGINT)
    assert "a second signal (SIGINT): ended at once" in (tmp_path / "stderr-0").read_text()


def listen_below(torchrun: int, folder: Path) -> None:
    """Listen as a rank that the torchrun of this id has started, then wait."""
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    os.environ.update(TORCHELASTIC_RUN_ID="run", VERL_EXT_TORCHRUN=str(torchrun))
    requests.listen()
    (folder / "ready").touch()
    threading.Event().wait()


def test_a_rank_whose_torchrun_was_killed_before_it_listened_ends(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    with started_ranks(listen_below, 1, gone.pid, tmp_path) as ((rank,), _):
        rank.join(SECONDS)
        assert rank.exitcode == TRAINING_FAILED
    assert f"torchrun (process {gone.pid}) is gone" in (tmp_path / "stderr").read_text()


def test_a_script_between_torchrun_and_a_rank_is_no_sign_that_torchrun_is_gone(tmp_path):
    with started_ranks(listen_below, 1, os.getpid(), tmp_path) as ((rank,), _):  # a server lies between them
        wait_for((tmp_path / "ready").exists)
        rank.join(2.5)  # the watch checks every second
        assert rank.exitcode is None


TORCHRUN = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
out, requests = pathlib.Path(os.environ["OUT"]), pathlib.Path(os.environ["VERL_EXT_REQUESTS"])
for number in {[number.value for number in SIGNALS]}:
    signal.signal(number, lambda *_: out.write_text("signalled"))
rank = os.fork() or signal.pause()
out.write_text("started")
while not (requests / "stop").exists() or (requests / "stop").read_text().count("SIG") < int(os.environ["ENDS_AFTER"]):
    time.sleep(0.02)
if os.environ["ENDS_WITH"] != "0":
    (requests / "unfinished").touch()
os.kill(rank, signal.SIGKILL)
sys.exit(int(os.environ["ENDS_WITH"]))
"""


@pytest.mark.parametrize(
    ("sent", "ends_with", "code"),
    [
        ([signal.SIGTERM], 143, STOPPED),  # it is not finished, whatever code torchrun returns
        ([signal.SIGUSR1], 0, 0),  # it was in its last step
        (["Ctrl-C", "Ctrl-C"], 1, STOPPED),
        ([], 3, 3),
    ],
)
def test_the_launcher_passes_requests_on_past_torchrun_and_says_whether_to_run_again(sent, ends_with, code, tmp_path):
    torchrun, out = tmp_path / "torchrun", tmp_path / "out"
    torchrun.write_text(TORCHRUN if sent else "#!/bin/sh\nexit 3\n")
    torchrun.chmod(0o755)
    ends = {"OUT": str(out), "ENDS_AFTER": str(len(sent)), "ENDS_WITH": str(ends_with), "TMPDIR": str(tmp_path)}
    pid, terminal = pty.fork()
    if pid == 0:
        supervised = "import sys; from verl_ext.launch.run import supervise; sys.exit(supervise([sys.argv[1:]], {}))"
        os.execve(sys.executable, [sys.executable, "-c", supervised, str(torchrun)], {**os.environ, **ends})
    for number, what in enumerate(sent, start=1):
        wait_for(out.exists)
        os.write(terminal, b"\x03") if what == "Ctrl-C" else os.kill(pid, what)
        wait_for(lambda number=number: number == len(sent) or any(tmp_path.glob("verl-ext-*/stop")))
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == code
    assert not sent or out.read_text() == "started"  # only the launcher got the signal, even Ctrl-C
    assert not list(tmp_path.glob("verl-ext-*"))


@contextlib.contextmanager
def node(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start launch/node.sh of the second of two nodes for the block; node 0 never comes."""
    port = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    command = [str(LAUNCH / "node.sh"), "data.train_dir=nowhere"]
    everything = {**os.environ, **path, **port, "CUDA_VISIBLE_DEVICES": "", **environment}
    with subprocess.Popen(
        command, env=everything, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        children: list[psutil.Process] = []
        try:
            children += child_of(launcher)
            yield launcher
        finally:
            for process in (launcher, *children):
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    process.kill()


def child_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the process that the launcher waits for, once it runs."""
    found: list[psutil.Process] = []

    def look() -> bool:
        with contextlib.suppress(psutil.Error):
            found[:] = [
                each for each in psutil.Process(launcher.pid).children() if "VERL_EXT_REQUESTS" in each.environ()
            ]
        return bool(found)

    wait_for(look)
    return found


@pytest.mark.parametrize(("preflight", "number"), zip("010", SIGNALS, strict=True))
def test_a_signal_before_there_are_ranks_ends_the_launcher_and_what_it_waits_for(
    preflight, number, free_port, tmp_path
):
    with node(tmp_path, PREFLIGHT=preflight, MASTER_PORT=free_port) as launcher:
        (child,) = child_of(launcher)
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=SECONDS)
        assert not child.is_running()
    assert launcher.returncode == STOPPED
    assert f"{number.name}: ended before the first step\n" in said


def test_torchrun_ends_with_a_launcher_that_is_killed_also_while_it_waits_for_other_nodes(free_port, tmp_path):
    with node(tmp_path, PREFLIGHT="0", MASTER_PORT=free_port) as launcher:
        (torchrun,) = child_of(launcher)
        launcher.kill()
        assert not psutil.wait_procs([torchrun], SECONDS)[1]


RANK = """
import signal, sys, time
def stop(*_):
    time.sleep(0.1)
    sys.exit("the last line")
signal.signal(signal.SIGINT, stop)
print("started", flush=True)
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("package", "has_traceback"), [("verl_ext", False), ("another", True)])
def test_the_last_line_after_ctrl_c_is_that_of_our_ranks_and_not_torchruns_traceback(package, has_traceback, tmp_path):
    program = tmp_path / package / "fsdp_sft_trainer.py"
    program.parent.mkdir()
    program.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program)]
    torchrun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert torchrun.stdout is not None
    heard = ""
    while heard.count("started") < 2:  # two ranks may write into one line
        heard += torchrun.stdout.readline()
    torchrun.send_signal(signal.SIGINT)
    _, said = torchrun.communicate(timeout=SECONDS)
    assert torchrun.returncode == 1
    assert ("Traceback" in said) == has_traceback
    assert said.rstrip().endswith("the last line") != has_traceback
