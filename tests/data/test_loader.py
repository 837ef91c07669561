"""The loader gives the same batches with any number of processes, and failures end the run in one line."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from tests.lib.errors import names, refused
from tests.lib.project import ROOT
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import SFTDataSet
from verl_ext.launch.protocol import SIGNALS, TRAINING_FAILED, Ending
from verl_ext.losses import LossSpec
from verl_ext.trainer import loader as loader_module
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loader import PackLoader, loader_deaths_reported, pack_loader
from verl_ext.trainer.step_plan import StepPlan

pytestmark = pytest.mark.slow


# A dataset whose pack 3 makes the loader's process suffer the fate in VERL_EXT_TEST_FATE.
BROKEN = """
import os, signal
from verl_ext.data import SFTDataSet

class Broken(SFTDataSet):
    def __getitem__(self, pack):
        if pack == 3:
            fate = os.environ["VERL_EXT_TEST_FATE"]
            if fate == "raise":
                raise OSError(5, "Input/output error")
            if fate == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(pack)
"""


@pytest.fixture(autouse=True)
def _no_dead_processes():
    """Free the loaders of the test before, whose dead processes torch would report again."""
    gc.collect()


@pytest.fixture
def folder(tmp_path):
    documents = random_documents(np.random.default_rng(0), range(10, 30), VOCABULARY, 2)
    return write_tokenized(tmp_path / "data", documents, {1: "maths", 2: "code"})


@pytest.fixture
def broken(tmp_path, folder):
    """Make the dataset of the class above, and the file that defines it."""
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    names: dict = {}
    exec(BROKEN, names)
    return names["Broken"](folder, 64, strategy="none"), path


def loader_of(dataset, first_step=0, **options):
    collate = StepCollator(LossSpec("token", np.ones(len(dataset.categories) + 1), 30), dataset.categories)
    plan = StepPlan(len(dataset), 2, seed=0, shuffle=False)
    return pack_loader(dataset, plan, first_step, plan.steps_per_epoch, 0, 1, collate, **options)


def test_batches_do_not_depend_on_processes_or_prefetch_or_on_where_a_run_goes_on(folder):
    dataset = SFTDataSet(folder, 64, strategy="none")
    alone = list(loader_of(dataset, num_workers=0, prefetch_factor=3))
    assert len(alone) == len(loader_of(dataset, num_workers=0)) == 10
    for first_step, options in (
        (0, {"num_workers": 1}),
        (4, {"num_workers": 0}),
        (7, {"num_workers": 3, "prefetch_factor": 1}),
    ):
        for ours, theirs in zip(alone[first_step:], loader_of(dataset, first_step, **options), strict=True):
            assert torch.equal(ours.input_ids, theirs.input_ids)
            assert torch.equal(ours.counts.values, theirs.counts.values)
            assert ours.pack_lengths == theirs.pack_lengths


def test_prefetch_and_pinned_memory_are_torchs(folder, monkeypatch):
    given = {}
    monkeypatch.setattr(loader_module, "DataLoader", lambda *args, **options: given.update(options))
    dataset = SFTDataSet(folder, 64)
    loader_of(dataset, num_workers=2, prefetch_factor=5, pin_memory=True)
    assert (given["num_workers"], given["prefetch_factor"], given["pin_memory"]) == (2, 5, True)
    loader_of(dataset, num_workers=0, prefetch_factor=5)
    assert (given["prefetch_factor"], given["pin_memory"]) == (None, torch.cuda.is_available())


def test_a_loader_draws_nothing_from_the_generator_of_dropout(folder):
    before = torch.get_rng_state()
    list(loader_of(SFTDataSet(folder, 64, strategy="none"), num_workers=0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_pack_is_one_line_with_its_number(broken, num_workers, monkeypatch):
    monkeypatch.setenv("VERL_EXT_TEST_FATE", "raise")

    with refused("data.train_dir", "pack 2, 3", "OSError: [Errno 5] Input/output error", error=Ending):
        list(loader_of(broken[0], num_workers=num_workers))


def test_the_full_error_is_there_for_who_asks(broken, monkeypatch):
    monkeypatch.setenv("VERL_EXT_TEST_FATE", "raise")
    monkeypatch.setenv("VERL_EXT_FULL_ERROR", "1")
    with pytest.raises(OSError, match="Input/output error"):
        list(loader_of(broken[0], num_workers=0))


def test_a_killed_process_is_told_and_what_to_lower(broken, monkeypatch):
    monkeypatch.setenv("VERL_EXT_TEST_FATE", "kill")
    with refused("a loader process", "data.num_workers", error=Ending):
        list(loader_of(broken[0], num_workers=1))


@pytest.mark.parametrize(
    ("notice", "things"),
    [
        ("DataLoader worker (pid(s) 7, 9) exited unexpectedly", ("pid(s) 7, 9", "exited", "memory")),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details", ("pid 7", "exited", "memory")),
        (
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible",
            ("pid 7", "Bus error", "/dev/shm"),
        ),
    ],
)
def test_every_notice_of_torch_is_read(notice, things):
    with refused(*things, "data.num_workers", error=Ending), loader_deaths_reported():
        raise RuntimeError(notice)


def test_a_notice_that_became_another_error_is_still_told():
    def lookup():
        try:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
        except RuntimeError:
            raise AttributeError("no such attribute") from None

    with refused("pid 7", error=Ending), loader_deaths_reported():
        lookup()


def test_a_death_between_two_batches_is_told(folder):
    batches = iter(loader_of(SFTDataSet(folder, 64, strategy="none"), num_workers=1, prefetch_factor=1))
    next(batches)
    (process,) = multiprocessing.active_children()

    @loader_deaths_reported()
    def train_on():
        os.kill(process.pid, signal.SIGKILL)
        connection.wait([process.sentinel])  # the process dies while nothing waits for a batch
        list(batches)

    with refused("a loader process", "data.num_workers", error=Ending):
        train_on()


def test_a_death_raises_in_no_operator_of_a_step(folder):
    next(iter(DataLoader(range(2), num_workers=1)))  # torch's handler for all loaders of the process
    batches = iter(loader_of(SFTDataSet(folder, 64, strategy="none"), num_workers=1, prefetch_factor=1))
    next(batches)
    (process,) = multiprocessing.active_children()
    with FakeTensorMode():  # as in DTensor's operators, where an exception of a signal's handler aborts the process
        os.kill(process.pid, signal.SIGKILL)
        connection.wait([process.sentinel])
        torch.zeros(1)
    with refused("a loader process", "data.num_workers", error=Ending):
        next(batches)


def test_signals_that_a_scheduler_sends_to_all_processes_leave_the_loaders_to_their_rank(folder):
    loader = loader_of(SFTDataSet(folder, 32), num_workers=1)
    batches = iter(loader)
    seen = [next(batches)]
    (process,) = multiprocessing.active_children()
    kills = " && ".join(f"kill -{number.value} {process.pid}" for number in SIGNALS)
    subprocess.run(["bash", "-c", kills], check=True)
    seen += batches
    assert len(seen) == len(loader)


def test_a_loader_process_ends_where_its_rank_asks_it_to(folder):
    batches = iter(loader_of(SFTDataSet(folder, 32), num_workers=1))
    next(batches)
    (process,) = multiprocessing.active_children()
    process.terminate()  # as multiprocessing does if a rank exits with its loader
    process.join(60)
    assert process.exitcode == 0


def test_a_file_that_is_cut_short_is_told_before_its_map_is_read(folder):
    batches = iter(loader_of(SFTDataSet(folder, 32), num_workers=0))
    next(batches)
    (path,) = Path(folder).glob("*.arrow")
    os.truncate(path, 1000)
    with refused("data.train_dir", f"{path} has 1,000 bytes", error=Ending):
        next(batches)


def test_a_death_while_the_processes_start_is_told():
    class Starting:
        def __iter__(self):
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    with refused("pid 7", "Killed", "data.num_workers", error=Ending):
        list(PackLoader(Starting()))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), FileNotFoundError("of a checkpoint's folder")])
def test_other_errors_pass_through(error):
    with pytest.raises(type(error), match=f"^{error}$"), loader_deaths_reported():
        raise error


def run(folder, tiny_model, output, broken, launcher):
    """Start the trainer as a user does, on a dataset whose pack 3 kills the process that reads it."""
    command = [
        *(sys.executable, *launcher, "-m", "verl_ext.fsdp_sft_trainer", f"data.train_dir={folder}"),
        *(f"model.path={tiny_model}", f"trainer.default_local_dir={output}", "parallel=cpu", "trainer.logger=[file]"),
        *("data.max_tokens=64", "data.strategy=none", "data.train_batch_size=2", "data.num_workers=2", "optim.lr=1e-3"),
        *(f"data.custom_cls.path={broken[1]}", "data.custom_cls.name=Broken"),
    ]
    kept = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "VERL_ENGINE_VENDOR")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "VERL_EXT_TEST_FATE": "kill"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_loader_process_ends_the_run_with_one_line(folder, tiny_model, tmp_path, broken, free_port, ranks):
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port}"]
    done = run(folder, tiny_model, tmp_path / "out", broken, torchrun if ranks > 1 else [])
    assert done.returncode == TRAINING_FAILED, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr  # the rank that misses the ended one is silent
    assert "ChildFailedError" not in done.stderr  # of torchrun
    assert names(told[0], "a loader process", "data.num_workers")
    assert names(told[0], "Killed") or names(told[0], "exited")  # torch may see the closed pipe first
