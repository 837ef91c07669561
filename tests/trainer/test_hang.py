"""A rank that hangs or stops answering ends the run on every rank, and is named."""

import contextlib
import dataclasses
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig

from tests.lib.errors import names
from tests.lib.ranks import run_ranks, started_ranks
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import build, into, small_run
from verl_ext.checkpoint.save import Snapshot
from verl_ext.config.run import TrainerOptions
from verl_ext.launch.protocol import TRAINING_FAILED
from verl_ext.trainer.distributed import failures_reported
from verl_ext.trainer.hang import RankState, diagnosis, watch

pytestmark = pytest.mark.slow

SECONDS = 6  # trainer.hang_timeout; a busy machine may delay a tiny model's step
TWO_A_STEP = ("data.strategy=none", "data.train_batch_size=2")


def hang(overrides: list[str], how: str, folder: Path, step: int = 3) -> None:
    """Execute a run whose rank 1 hangs in a step, or while it writes a checkpoint."""
    os.dup2(os.open(folder / f"{how}-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    trainer = build(overrides)
    train_step, steps = trainer.train_step, iter(range(1, 5))

    def hanging_step(*given):
        if next(steps) == step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else threading.Event().wait()
        return train_step(*given)

    if how.startswith("save"):
        if dist.get_rank() == 1:
            Snapshot.write = lambda *given: threading.Event().wait()
    else:
        trainer.train_step = hanging_step
    with contextlib.redirect_stdout(open(os.devnull, "w")), failures_reported():
        trainer.fit()


def test_a_rank_that_hangs_and_one_that_is_stopped_are_named(tiny_model, tmp_path):
    common = small_run(tmp_path, tiny_model, [20] * 8, *TWO_A_STEP, f"trainer.hang_timeout={SECONDS}")
    with contextlib.ExitStack() as both:  # at the same time
        ranks = {}
        for how in ("hung", "stopped"):
            overrides = [*common, into(tmp_path / how / "run")]
            ranks[how], _ = both.enter_context(started_ranks(hang, 2, overrides, how, tmp_path))
        ending = (*ranks["hung"], ranks["stopped"][0])
        for rank in ending:
            rank.join(60)
        ranks["stopped"][1].kill()  # no other signal reaches it
        assert [rank.exitcode for rank in ending] == [TRAINING_FAILED] * 3
    told = errors(tmp_path / "hung-0") + errors(tmp_path / "hung-1")
    limit = f"{SECONDS} s (trainer.hang_timeout)"
    assert len(told) == 1  # one line for both ranks, which share a node
    assert names(told[0], limit, f"rank 1 (process {ranks['hung'][1].pid}", "hangs in step 3")
    assert "tests/trainer/test_hang.py" not in told[0].split(", from ")[1]
    (told_of_stopped,) = errors(tmp_path / "stopped-0")
    assert names(told_of_stopped, limit, f"rank 1 (process {ranks['stopped'][1].pid}", "answer")


def errors(file: Path) -> list[str]:
    lines = [line for line in file.read_text().splitlines() if line.startswith("error: ")]
    return [line for line in lines if "a collective failed" not in line]  # printed if the other rank ended first


def test_a_first_step_and_a_save_that_hang_are_named_under_limits_of_their_own(tiny_model, tmp_path):
    common = small_run(tmp_path, tiny_model, [20] * 8, *TWO_A_STEP)
    first, save = ("trainer.first_step_timeout", "step 1"), ("trainer.save_timeout", "the checkpoint of step 2")
    for both in ({"first": first, "save": save}, {"save-aside": save, "save-at-the-end": save}):
        with contextlib.ExitStack() as runs:  # at the same time
            ranks = {}
            for how, (option, _) in both.items():
                overrides = [*common, into(tmp_path / how / "run"), f"{option}={SECONDS}"]
                overrides += ["trainer.hang_timeout=5" if how == "first" else "trainer.hang_timeout=60"]
                overrides += ["trainer.save_freq=2"] if how != "save-at-the-end" else ["trainer.total_training_steps=2"]
                overrides += [f"checkpoint.async_save={str('-' in how).lower()}"]
                ranks[how], _ = runs.enter_context(started_ranks(hang, 2, overrides, how, tmp_path, 1))
            for how, (option, phase) in both.items():
                for rank in ranks[how]:
                    rank.join(90)
                assert [rank.exitcode for rank in ranks[how]] == [TRAINING_FAILED] * 2
                (told,) = [*errors(tmp_path / f"{how}-0"), *errors(tmp_path / f"{how}-1")]
                run = tmp_path / how / "run"
                assert not (run / "run.lock").exists()
                recorded = [pickle.loads((run / "flight_recorder" / f"rank_{rank}").read_bytes()) for rank in range(2)]
                assert all("all_" in str(facts["entries"][-1]["profiling_name"]) for facts in recorded)
                who = f"rank 1 (process {ranks[how][1].pid}"
                assert names(told, f"{SECONDS} s ({option})", who, f"hangs in {phase}", run / "flight_recorder")


def end_in_exchange(overrides: list[str], number: signal.Signals, folder: Path) -> None:
    """Execute a run whose rank 1 gets a signal while rows of its second step travel to experts."""
    os.dup2(os.open(folder / f"{number.name}-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    trainer = build(overrides)
    train_step, steps, exchange = trainer.train_step, iter(range(1, 5)), dist.all_to_all_single

    def ending(arriving, leaving, *given, **named):
        if leaving.is_floating_point():  # rows, not their counts
            os.kill(os.getpid(), number)
        return exchange(arriving, leaving, *given, **named)

    def step(*given):
        if next(steps) == 2 and dist.get_rank() == 1:
            dist.all_to_all_single = ending
        return train_step(*given)

    trainer.train_step = step
    with contextlib.redirect_stdout(open(os.devnull, "w")), failures_reported():
        trainer.fit()


def test_a_rank_that_is_lost_inside_an_exchange_of_rows_ends_the_run_and_a_stopped_one_is_named(tmp_path):
    model = write_tiny_model(tmp_path / "model", 0, MixtralConfig, num_local_experts=4, intermediate_size=24)
    shared = ("parallel.expert_parallel=2", f"trainer.hang_timeout={SECONDS}")
    common = small_run(tmp_path, model, [20] * 8, *TWO_A_STEP, *shared)
    with contextlib.ExitStack() as both:  # at the same time
        ranks = {}
        for number in (signal.SIGKILL, signal.SIGSTOP):
            overrides = [*common, into(tmp_path / number.name / "run")]
            ranks[number], _ = both.enter_context(started_ranks(end_in_exchange, 2, overrides, number, tmp_path))
        for first, _ in ranks.values():
            first.join(60)
        assert [first.exitcode for first, _ in ranks.values()] == [TRAINING_FAILED] * 2
        stopped = ranks[signal.SIGSTOP][1].pid
    (told,) = [line for line in (tmp_path / "SIGKILL-0").read_text().splitlines() if line.startswith("error: ")]
    assert names(told, "error: rank 0", "collective", "trainer.nccl_timeout", "ended")
    (told,) = errors(tmp_path / "SIGSTOP-0")
    assert names(told, f"{SECONDS} s (trainer.hang_timeout)", f"rank 1 (process {stopped}", "answer")


def save_slowly(folder: Path) -> bool:
    watch.start({"trainer.hang_timeout": 1, "trainer.save_timeout": 60}, "step 1", "trainer.hang_timeout", folder)
    with watch.within("trainer.save_timeout", "the checkpoint of step 1"):
        time.sleep(1.6)  # longer than a step may pass without progress
    watch.end()
    return True


def test_a_checkpoint_may_take_longer_than_a_step(tmp_path):
    assert run_ranks(save_slowly, 2, tmp_path) == [True, True]


def test_of_ranks_that_wait_for_the_device_the_one_with_the_fewest_collectives_is_named():
    counts = (12, 9, 12)
    states = [RankState(False, 7, "step 7", False, "here", count) for count in counts]
    told = diagnosis(states, ["process 0", "process 1", "process 2"])
    assert told == "rank 1 (process 1) hangs in step 7 at here"
    unknown = dataclasses.replace(states[1], collectives=None)
    assert "no rank is behind" in str(diagnosis([states[0], unknown, states[2]], ["process"] * 3))


STATES = st.builds(RankState, st.just(False), st.integers(0, 2), st.just("step 7"), st.booleans(), st.just("here"))


@given(st.lists(st.none() | STATES, min_size=2, max_size=5))
def test_named_are_the_ranks_that_the_others_wait_for(states):
    told = diagnosis(states, [f"process {rank}" for rank in range(len(states))])
    named = {rank for rank in range(len(states)) if f"rank {rank} (process {rank})" in told}
    silent = {rank for rank, state in enumerate(states) if state is None}
    if silent:
        assert "does not answer" in told
        assert (named == silent) if len(silent) <= 4 else (named < silent and told.count("1 more") == 1)
        return
    least = min(state.marks for state in states)
    last = {rank for rank, state in enumerate(states) if state.marks == least}
    free = {rank for rank in last if not states[rank].waits}
    culprits = free or last
    assert told is not None
    if culprits == set(range(len(states))):
        assert "no rank is behind the others in step 7; rank 0 is at here" in told
    elif len(culprits) <= 4:
        assert named == culprits
        assert "hangs in step 7 at here" in told


@given(st.lists(STATES, min_size=1, max_size=5), st.booleans())
def test_a_rank_that_is_in_time_is_waited_for_but_none_that_does_not_answer(states, silent):
    busy = RankState(True, 7, "step 7", False, "here")
    processes = [f"process {rank}" for rank in range(7)]
    told = diagnosis([*states, busy, *([None] if silent else [])], processes)
    assert (told is None) if not silent else told.startswith(f"rank {len(states) + 1} (process")


def test_a_collective_may_take_longer_than_a_hang_so_that_the_rank_is_named_first():
    assert TrainerOptions().collective_timeout() == 1800
    assert TrainerOptions().collective_timeout(first_step=True) == 3000
    assert TrainerOptions(hang_timeout=3600).collective_timeout() == 4200
    assert TrainerOptions(hang_timeout=3600).collective_timeout(first_step=True) == 4200
    assert TrainerOptions(hang_timeout=0).collective_timeout() == 1800
    assert TrainerOptions(hang_timeout=0).collective_timeout(first_step=True) == 1800
    assert TrainerOptions(nccl_timeout=15).collective_timeout(first_step=True) == 15
