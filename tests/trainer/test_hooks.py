"""Hooks by themselves: the profiler's interval, the end after skipped steps, their close after a failure."""

import math
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.errors import names, refused
from verl_ext.checkpoint.save import NotWritten
from verl_ext.config.run import AFTER_EACH_EPOCH, is_due
from verl_ext.data.families.measure import AnswerMeasure
from verl_ext.launch.protocol import Ending
from verl_ext.trainer.answers import mean_scores
from verl_ext.trainer.hooks.base import Hook, StepOutcome, closing
from verl_ext.trainer.hooks.profile import ProfileHook
from verl_ext.trainer.hooks.saving import dist
from verl_ext.trainer.hooks.stop import HighLossHook, SkippedStepsHook, Watched

OUTCOME = StepOutcome(batch=None, grad_norm=math.nan, lr=0.0, sums=None)  # type: ignore[arg-type]


def trainer_of(first_step: int = 0, total: int = 6, **options: Any) -> Any:
    said: list[str] = []
    return SimpleNamespace(
        run=SimpleNamespace(total_steps=total),
        config=SimpleNamespace(trainer=SimpleNamespace(device="cpu", gpu_peak_tflops=None, **options)),
        first_step=first_step,
        is_rank0=True,
        said=said,
        progress=SimpleNamespace(say=said.append),
    )


def steps_of(hook: Hook, first: int, last: int, stops: bool) -> None:
    hook.pre_train()
    for step in range(first + 1, last + 1):
        hook.pre_step(step)
        hook.post_step(step, OUTCOME)
    hook.stop(last) if stops else hook.post_train()


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 4), st.integers(0, 6), st.booleans())
def test_the_profile_of_an_interval_is_written_wherever_a_run_begins_and_ends(first, more, done, ended, stops):
    """It holds the interval's steps of this process; without any, the run says so or does nothing."""
    calls: list[Any] = []
    trainer = trainer_of(done, max(done, ended), profile_interval=[first, first + more])
    trainer.client = SimpleNamespace(
        start_profile=lambda: calls.append("start"),
        step_profile=lambda: calls.append("step"),
        stop_profile=lambda: calls.append("stop"),
    )
    steps_of(ProfileHook(trainer), done, ended, stops)
    inside = [step for step in range(done + 1, ended + 1) if first <= step <= first + more]
    assert calls == (["start", *["step"] * len(inside), "stop"] if inside else [])
    planned = set(range(done + 1, max(done, ended) + 1))
    assert bool(trainer.said) == planned.isdisjoint(range(first, first + more + 1))
    by_default = trainer_of(profile_interval=[-1, -1])
    steps_of(ProfileHook(by_default), 0, 6, stops=False)
    assert by_default.said == []


@given(st.lists(st.one_of(st.integers(-1, 9), st.just(AFTER_EACH_EPOCH)), min_size=1), st.floats(0.3, 20))
def test_a_frequency_is_due_at_multiples_and_at_the_step_in_which_an_epoch_ends(frequency, steps_per_epoch):
    ends = {math.ceil(round(epoch * steps_per_epoch, 9)) for epoch in range(1, 200)}
    for step in range(1, 40):
        due = [step in ends if every == AFTER_EACH_EPOCH else every > 0 and step % every == 0 for every in frequency]
        assert is_due(frequency, step, steps_per_epoch) == any(due)
        assert is_due(frequency[0], step, steps_per_epoch) == due[0]


@given(st.integers(1, 7), st.floats(0.3, 20))
def test_so_many_times_an_epoch_is_due_at_the_steps_in_which_its_equal_parts_end(times, steps_per_epoch):
    ends = {math.ceil(round(part * steps_per_epoch / times, 9)) for part in range(1, 2000)}
    for step in range(1, 40):
        assert is_due(-1, step, steps_per_epoch, times) == (step in ends)
        assert not is_due(-1, step, steps_per_epoch)


def test_a_score_improves_upwards_and_a_loss_downwards_by_more_than_the_least_change_and_nan_never():
    values = [0.5, 0.6, math.nan, 0.3, 0.65]
    found = []
    for metric in ("val/answer/qa1", "val/answer_loss"):
        best = Watched(metric)
        for step, value in enumerate(values, start=1):
            best.measure(value, step, least=0.06)
        found.append((best.value, best.step, best.waited))
    assert found == [(0.6, 2, 3), (0.3, 4, 1)]


def test_a_validation_set_without_an_answer_has_no_mean_of_scores():
    assert mean_scores([]) == {}
    table = SimpleNamespace(ids=[1], names=["qa1"])
    dataset: Any = SimpleNamespace(facts=lambda: SimpleNamespace(targets=[0]), categories=table)
    measure = AnswerMeasure(dataset, "cpu")
    assert (len(measure), measure.report()) == (0, {"answers": 0})


def test_too_many_skipped_steps_are_the_reason_even_if_the_checkpoint_before_is_not_written(monkeypatch, capsys):
    def finish() -> None:
        raise NotWritten("rank 0: No space left on device")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    trainer = trainer_of(max_skipped_steps=1)
    trainer.checkpoints = SimpleNamespace(finish=finish)
    hook = SkippedStepsHook(trainer)
    hook.post_step(1, OUTCOME)
    with refused("2 consecutive steps", "non-finite", error=Ending):
        hook.post_step(2, OUTCOME)
    assert names(capsys.readouterr().err, "without a checkpoint", "rank 0: No space left on device")


def test_losses_above_the_limit_end_a_run_once_there_are_as_many_in_a_row():
    trainer = trainer_of(max_loss=5.0, max_loss_steps=2)
    trainer.checkpoints = SimpleNamespace(finish=lambda: None)
    hook = HighLossHook(trainer)
    for step, loss in enumerate((6.0, 5.0, math.nan), start=1):  # a limit is no loss above it; NaN is above any
        hook.post_step(step, replace(OUTCOME, sums=SimpleNamespace(loss=loss)))
    hook.post_step(4, OUTCOME)  # a step without a loss counts for neither
    with refused("step 5", "2 consecutive steps", "trainer.max_loss=5", error=Ending):
        hook.post_step(5, replace(OUTCOME, sums=SimpleNamespace(loss=5.5)))


class Closing(Hook):
    """A hook that notes its end, which fails, or takes long."""

    def __init__(self, ended: list[str], name: str, seconds: float = 0, error: Exception | None = None) -> None:
        self.act = lambda: (ended.append(name), time.sleep(seconds))
        self.error = error

    def close(self) -> None:
        self.act()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("end", ["complete", "failure", "exit"])
def test_hooks_are_closed_once_and_in_order_however_a_run_ends(end, capsys):
    ended: list[str] = []
    with ExitStack() as at_exit, suppress(Ending), closing(at_exit) as hooks:
        error = None if end == "complete" else RuntimeError("no server")
        hooks += [Closing(ended, "first", error=error), Closing(ended, "second")]
        if end == "exit":
            at_exit.close()
            assert ended == ["first", "second"]
        elif end == "failure":
            raise Ending
    assert ended == ["first", "second"]
    assert ("warning: Closing did not close: no server" in capsys.readouterr().err) == (end != "complete")


def test_a_hook_that_takes_long_to_close_does_not_hold_a_run_that_failed():
    ended: list[str] = []
    with suppress(Ending), closing(ExitStack(), seconds=0.1) as hooks:
        hooks.append(Closing(ended, "lost", seconds=60))
        raise Ending
    assert ended == ["lost"]
