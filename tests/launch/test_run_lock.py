"""One run at a time in a folder: the lock, its messages, and the end of ranks whose torchrun was killed."""

import contextlib
import errno
import fcntl
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from tests.lib.errors import names, refused
from tests.lib.project import ROOT
from tests.lib.ranks import run_ranks
from tests.lib.training import build, into, small_run, wait_for
from verl_ext.checkpoint.layout import RUN_LOCK, lock_folder, refuse_locked
from verl_ext.launch.protocol import USER_ERROR
from verl_ext.trainer.distributed import at_exit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """Return overrides of a run of two packs a step, without its folder."""
    two_a_step = ("data.strategy=none", "data.train_batch_size=2")
    return small_run(tmp_path_factory.mktemp("data"), tiny_model, [20] * 4, *two_a_step)


def hold_until_killed(folder: Path, held: Connection) -> None:
    lock_folder(folder)
    held.send(True)
    signal.pause()


@pytest.fixture
def other_run(tmp_path):
    """Return (folder, the process that holds it)."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=hold_until_killed, args=(tmp_path / "run", sender))
    process.start()
    receiver.recv()
    yield tmp_path / "run", process
    process.kill()
    process.join()


def test_a_folder_in_use_is_refused_with_who_holds_it_and_free_when_that_process_is_killed(other_run):
    folder, process = other_run

    for attempt in (lock_folder, refuse_locked, lock_folder):  # an attempt keeps the holder's text
        with refused("trainer.default_local_dir", folder, f"process {process.pid}", socket.gethostname()):
            attempt(folder)
    process.kill()
    process.join()
    refuse_locked(folder)
    refuse_locked(folder / "new")
    assert not (folder / "new").exists()  # looking makes nothing
    at_exit.callback(lock_folder(folder))
    at_exit.close()
    assert not (folder / RUN_LOCK).exists()


def test_a_lock_that_its_holder_removes_meanwhile_is_not_taken_for_the_folders(tmp_path, monkeypatch):
    lockf, path = fcntl.lockf, tmp_path / RUN_LOCK
    monkeypatch.setattr(fcntl, "lockf", lambda *given: (monkeypatch.undo(), path.unlink(), lockf(*given)))
    at_exit.callback(lock_folder(tmp_path))
    assert str(os.getpid()) in path.read_text()
    at_exit.close()
    assert not path.exists()


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    def no_locks(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    at_exit.callback(lock_folder(tmp_path / "run"))
    at_exit.close()
    refuse_locked(tmp_path / "run")
    assert capsys.readouterr().err == (f"note: {tmp_path / 'run'} cannot be locked (its file system has no locks)\n")


def starts(runs: list[list[str]]) -> list[tuple[object, str, bool]]:
    """Return the exit code, the error and whether data is read of each start; (None, "", True) if it builds a model."""
    ends: list[tuple[object, str, bool]] = []
    for overrides in runs:
        words, code = io.StringIO(), None
        try:
            with contextlib.redirect_stderr(words), contextlib.redirect_stdout(words):
                build(overrides)
        except SystemExit as ended:
            code = ended.code
        errors = [line for line in words.getvalue().splitlines() if line.startswith("error: ")]
        ends.append((code, "\n".join(errors), "reading the data" in words.getvalue()))
    return ends


def test_a_start_in_a_folder_in_use_is_refused_and_a_measurement_is_not(other_run, options):
    folder, process = other_run
    measure = ("trainer.eval_only=true", options[0].replace("train_dir", "val_dir"))
    changes = [(), ("trainer.overwrite=true",), measure]
    *others, measured = run_ranks(starts, 2, [[*options, into(folder), *change] for change in changes])[0]
    for code, error, reads in others:
        assert (code, reads) == (USER_ERROR, False)
        assert names(error, "trainer.default_local_dir", f"process {process.pid}")
    assert measured == (None, "", True)
    assert [path.name for path in folder.iterdir()] == [RUN_LOCK]


def is_free(folder: Path) -> bool:
    with contextlib.suppress(ValueError):
        refuse_locked(folder)
        return True
    return False


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its exit code is not collected yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_and_loaders_end_when_their_torchrun_is_killed_and_leave_the_folder_free(options, tmp_path, free_port):
    run, said = tmp_path / "run", tmp_path / "stderr"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port}"),
        *("-m", "verl_ext.fsdp_sft_trainer", *options, into(run), "data.num_workers=1"),
        *("data.max_tokens=64", "optim.lr=1e-3", "parallel=cpu"),
        *("trainer.logger=[file]", "trainer.total_training_steps=1000000000"),
    ]
    kept = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "VERL_ENGINE_VENDOR")}
    with said.open("w") as stderr:
        torchrun = subprocess.Popen(
            command, cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=stderr
        )
    started: list[psutil.Process] = []
    try:
        metrics = run / "metrics.jsonl"
        wait_for(lambda: torchrun.poll() is not None or (metrics.is_file() and metrics.stat().st_size))
        started = psutil.Process(torchrun.pid).children(recursive=True)
        assert len(started) >= 4, said.read_text()  # two ranks with a loader process each
        with refused("trainer.default_local_dir", run):
            refuse_locked(run)
        torchrun.kill()
        torchrun.wait()
        wait_for(lambda: all(has_ended(process) for process in started))
        wait_for(lambda: is_free(run))  # a zombie's last threads may hold its files for a moment
        assert f"torchrun (process {torchrun.pid}) is gone, which ends its ranks" in said.read_text()
    finally:
        torchrun.kill()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
