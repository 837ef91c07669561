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

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.lib.launchers import LAUNCH
from tests.lib.ranks import run_cases, started_ranks
from tests.lib.training import build, differences, into, metrics, small_run, stopped_at, wait_for
from verl_ext.checkpoint.layout import saved_folders
from verl_ext.launch.protocol import SIGNALS, STOPPED, TRAINING_FAILED, Launcher
from verl_ext.trainer.signals import requests

pytestmark = pytest.mark.slow

SECONDS = 120  # the limit of every wait
STEPS = 5


EXPORT = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
ASIDE = "checkpoint.async_save=true"
RUNS = {  # name: (step during which rank 1 gets signals, overrides)
    "whole": (0, ()),
    "asked": (3, ("trainer.save_freq=2",)),
    "asked_while_it_saves": (2, ("trainer.save_freq=2", ASIDE)),
    "asked_in_the_last_step": (STEPS, ()),
    "export": (0, (EXPORT,)),
    "export_aside": (0, (EXPORT, ASIDE)),
    "asked_while_it_exports": (2, (EXPORT, ASIDE)),
}


def listen() -> None:
    requests.listen()


def asked(overrides: list[str], at: int) -> tuple[bool, int, str]:
    """Execute a run whose rank 1 gets signals during step `at`, if there is one; return whether it is complete, its
    exit code, and this rank's output."""
    requests.pending = None  # of the run before
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
        return trainer.fit(), requests.ending.code, said.getvalue()


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory):
    """Execute all runs on two sequence-parallel ranks; return their folder, and what `asked` returned on each rank."""
    folder = tmp_path_factory.mktemp("runs")
    more = ("engine.ulysses_sequence_parallel_size=2", "data.train_batch_size=2")
    options = small_run(folder, tiny_model, [20] * 40, *more, f"trainer.total_training_steps={STEPS}")
    cases = {"listen": (2, listen)}
    cases |= {name: (2, asked, [*options, *words, into(folder / name)], at) for name, (at, words) in RUNS.items()}
    cases["stopped"] = (2, stopped_at, folder / "asked", folder / "resumed", STEPS)
    cases["resumed"] = (2, asked, [*options, "trainer.save_freq=2", into(folder / "resumed")], 0)
    return folder, run_cases(cases)


def test_one_rank_that_is_asked_ends_all_with_one_checkpoint_and_the_resumed_run_is_the_same(done):
    folder, ends = done
    (complete, code, said), (other_complete, _, _) = ends["asked"]
    assert not complete
    assert not other_complete
    assert code == STOPPED
    assert said.count("stopping after step 3 of 5. Run the same command") == 1
    assert [path.name for path in saved_folders(folder / "asked")] == ["global_step_2", "global_step_3"]
    assert not differences(folder / "resumed", folder / "whole", STEPS)


def test_a_checkpoint_that_is_there_is_not_written_again_and_one_that_is_being_written_is_waited_for(done):
    folder, ends = done
    (complete, _, said), _ = ends["asked_while_it_saves"]
    assert not complete
    assert said.count("Saving checkpoint to") == 1
    assert [path.name for path in (folder / "asked_while_it_saves").glob("global_step*")] == ["global_step_2"]


def test_an_export_that_threads_write_is_waited_for_also_after_a_signal(done):
    folder, ends = done
    exports = {}
    for name, last in (("export", STEPS), ("export_aside", STEPS), ("asked_while_it_exports", 2)):
        (complete, _, said), _ = ends[name]
        assert complete == (last == STEPS)
        exports[name] = folder / name / f"global_step_{last}" / "huggingface"
        assert (exports[name] / "model.safetensors").is_file()
        assert "Writing model shards" not in said
        assert metrics(folder / name).get((STEPS, "train/save_pause"), 0) >= 0
        assert ((STEPS, "train/save_pause") in metrics(folder / name)) == complete
    names = [path.name for path in exports["export"].iterdir()]
    assert filecmp.cmpfiles(exports["export"], exports["export_aside"], names, shallow=False)[1:] == ([], [])


def test_a_request_during_the_last_step_leaves_a_complete_run(done):
    folder, ends = done
    assert ends["asked_in_the_last_step"][0][0]
    assert {step for step, _ in metrics(folder / "asked_in_the_last_step")} == set(range(1, STEPS + 1))


def wait_in_a_collective(folder: Path, in_training: bool) -> None:
    """Rank 0 waits for a sum that rank 1 never joins: no handler of Python's runs there."""
    os.dup2(os.open(folder / f"stderr-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ |= Launcher(pid=os.getpid(), folder=str(folder)).environment()
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
    os.environ |= {"TORCHELASTIC_RUN_ID": "run", **Launcher(torchrun=torchrun).environment()}
    requests.listen()
    (folder / "ready").touch()
    threading.Event().wait()


def test_a_rank_whose_torchrun_was_killed_before_it_listened_ends_and_one_below_a_script_does_not(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "below").mkdir()
    with (
        started_ranks(listen_below, 1, os.getpid(), tmp_path / "below") as ((below,), _),  # a server lies between them
        started_ranks(listen_below, 1, gone.pid, tmp_path) as ((orphan,), _),
    ):
        wait_for((tmp_path / "below" / "ready").exists)
        orphan.join(SECONDS)
        assert orphan.exitcode == TRAINING_FAILED
        below.join(2.5)  # the watch checks every second
        assert below.exitcode is None
    assert f"torchrun (process {gone.pid}) is gone" in (tmp_path / "stderr").read_text()


TORCHRUN = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
out, requests = pathlib.Path(os.environ["OUT"]), pathlib.Path(json.loads(os.environ["VERL_EXT_LAUNCHER"])["folder"])
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
def node(folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Start launch/node.sh of a second node, whose node 0 never comes; yield it and the process that it waits for."""
    port = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    command = [str(LAUNCH / "node.sh"), "data.train_dir=nowhere", "optim.lr=1"]
    everything = {**os.environ, **path, **port, "CUDA_VISIBLE_DEVICES": "", **environment}
    children: list[psutil.Process] = []
    with subprocess.Popen(
        command, env=everything, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:

        def look() -> bool:
            with contextlib.suppress(psutil.Error):
                found = psutil.Process(launcher.pid).children()
                children[:] = [each for each in found if "VERL_EXT_LAUNCHER" in each.environ()]
            return bool(children)

        try:
            wait_for(look)
            yield launcher, children[0]
        finally:
            for process in (launcher, *children):
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    process.kill()


@pytest.mark.parametrize(("preflight", "number"), [("0", signal.SIGINT), ("1", signal.SIGUSR1)])
def test_a_signal_before_there_are_ranks_ends_the_launcher_and_its_child(preflight, number, free_port, tmp_path):
    with node(tmp_path, PREFLIGHT=preflight, MASTER_PORT=free_port) as (launcher, child):
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=SECONDS)
        assert not child.is_running()
    assert launcher.returncode == STOPPED
    assert f"{number.name}: ended before the first step\n" in said


def test_torchrun_ends_with_a_launcher_that_is_killed_also_while_it_waits_for_other_nodes(free_port, tmp_path):
    with node(tmp_path, PREFLIGHT="0", MASTER_PORT=free_port) as (launcher, torchrun):
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
