"""The training loop: packs in, exact loss, category loss, validation, checkpoints.

verl's ``TrainingWorker`` carries the engine, the profiler and the configuration dataclasses; the loop is our own,
because verl's drops validation batches, averages means, and waits for the device after every micro-batch.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_torch_device
from verl.workers.engine_workers import TrainingWorker

from verl_ext.attention.packed import set_backend
from verl_ext.config.output import FLIGHT_RECORDER
from verl_ext.config.run import AFTER_EACH_EPOCH, worker_config
from verl_ext.engines.saving import NotWritten
from verl_ext.engines.step import StepEngine
from verl_ext.losses import HEADS
from verl_ext.metrics import StepSums
from verl_ext.plugin import select_engine
from verl_ext.progress import StepProgress
from verl_ext.redaction import redacted_text
from verl_ext.trainer.batch import StepBatch, StepLoss
from verl_ext.trainer.checkpoint import Checkpoints, remove_run_files, remove_unfinished, save_final_memory
from verl_ext.trainer.distributed import RunRanks, limit_collectives, user_errors_end_the_run
from verl_ext.trainer.evaluation import Evaluation, write_evaluation
from verl_ext.trainer.hang import watch
from verl_ext.trainer.loader import DataParallelRank
from verl_ext.trainer.run_lock import lock_folder
from verl_ext.trainer.setup import Run
from verl_ext.trainer.signals import requests
from verl_ext.trainer.spikes import SpikeWatch
from verl_ext.trainer.tracking import open_tracking
from verl_ext.values import reason_of


@contextlib.contextmanager
def _upstream_quiet() -> Iterator[None]:
    """Hide what verl prints while it builds: NUMA, memory and patch lines. Errors are exceptions and pass."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _tracker_may_fail(what: str) -> Iterator[None]:
    """A full disk, or a server that does not answer, ends no run: it is said what that costs."""
    try:
        yield
    except OSError as error:
        print(f"warning: {what}: {redacted_text(reason_of(error))}", file=sys.stderr, flush=True)


class StopAgreed(Exception):
    """The ranks agree to end before a step, because one of them was asked to."""


class TooManySkippedSteps(RuntimeError):
    """More steps in a row than `trainer.max_skipped_steps` were skipped."""


@dataclass
class StepOutcome:
    """What one optimizer step gave: its gradient norm before clipping, its learning rate, its sums over all ranks if
    they are wanted, and ℓ_t of this rank's micro-batches where spikes are watched."""

    grad_norm: float
    lr: float
    sums: StepSums | None
    nll: list[torch.Tensor] | None = None

    @property
    def skipped(self) -> bool:
        """Whether the engine left the parameters as they were."""
        return not math.isfinite(self.grad_norm)


class SFTTrainer:
    """One rank of a run that :func:`verl_ext.trainer.setup.prepare` has checked."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.is_rank0 = dist.get_rank() == 0
        with user_errors_end_the_run():  # before the weights are read; a measurement alone may go on beside a run
            if locks := self.is_rank0 and not self.config.trainer.eval_only:
                lock_folder(run.output)
        self.client = self._build_client()
        assert isinstance(self.client.engine, StepEngine)
        self.engine: StepEngine = self.client.engine
        self.rank = DataParallelRank(run, self.engine)
        self.evaluation = None
        if run.validation is not None:
            self.evaluation = Evaluation(run, run.validation, self.engine, self.rank)
        with _upstream_quiet():
            self.client.reset()
        if self.is_rank0:
            self._say_which_head()
        if run.replaces_output and self.is_rank0:
            remove_run_files(run.output)  # not before the weights are read: a failure there costs no earlier run
        if locks:
            remove_unfinished(run.output)
        dist.barrier()
        self.run_state = run.run_state()
        self.checkpoints = Checkpoints(self.config, self.engine, self.run_state, run.checkpoint)
        self.first_step = 0
        self.spikes: SpikeWatch | None = None
        self._pack_tokens = run.train_set.pack_tokens()
        self._limit_collectives(first_step=True)
        if not self.config.trainer.eval_only:
            limits, folder = self.config.trainer.progress_limits, run.output / FLIGHT_RECORDER
            watch.start(limits, "the start of the run", "trainer.first_step_timeout", folder)

    def _build_client(self) -> TrainingWorker:
        """verl's worker around the engine of the model."""
        select_engine(self.config.model.engine_vendor)
        set_backend(self.config.attention.backend)
        torch.manual_seed(self.config.trainer.seed)  # new adapters start from it, on every rank alike
        with _upstream_quiet():
            client = TrainingWorker(worker_config(self.config.values, self.run.total_steps))
        if self.config.values["engine"]["full_determinism"] and self.run.backend == "varlen":
            torch.use_deterministic_algorithms(True)  # after verl's, whose warn_only leaves varlen's backward as it is
        return client

    def _say_which_head(self) -> None:
        """Say that the head needs more memory than `loss.head` asks for, unless the model's class has told already.

        Adapters, remote code and patched kernels are seen on the module alone.
        """
        asked, runs = self.config.loss.head, getattr(self.engine, "head_use", "fused")
        told = any(notice.startswith(f"loss.head={asked} is ") for notice in self.run.notices)
        if HEADS.index(runs) > HEADS.index(asked) and not told:
            why = "the module has no linear head whose logits it gives as they are"
            print(f"note: loss.head={asked} is {runs} here: {why}", file=sys.stderr, flush=True)

    def _limit_collectives(self, first_step: bool) -> None:
        meshes = (self.engine.device_mesh, self.engine.ulysses_device_mesh, self.engine.context_device_mesh)
        limit_collectives(self.config.trainer.collective_timeout(first_step), filter(None, meshes))

    def resume(self) -> None:
        """Continue from the checkpoint that `trainer.resume_mode` means, if there is one."""
        self.first_step = self.checkpoints.resume()

    def fit(self) -> bool:
        """Train to the last step, validating and saving as `trainer` says; the last step always does both.

        True at the last step; False where the run was asked to stop and has saved a checkpoint.
        """
        try:
            return self._fit()
        finally:
            watch.end()

    def _fit(self) -> bool:
        with user_errors_end_the_run():  # a tracker without a login ends every rank
            self.tracking = open_tracking(self.config, self.first_step) if self.is_rank0 else None
        self.progress = StepProgress(self.first_step, self.run.total_steps, self.is_rank0)
        loggers: dict[str, Any] = {} if self.tracking is None else self.tracking.logger
        if "console" in loggers:
            loggers["console"] = self.progress  # verl's prints every number with 17 digits
        self._regroup()
        if self.config.trainer.spike_factor is not None:
            with user_errors_end_the_run():  # its file may be on a full disk
                self.spikes = SpikeWatch(self.run, self.rank, self.run_state, self.first_step)
        if self.first_step >= self.run.total_steps:
            self.progress.say(f"nothing to train: step {self.first_step} of {self.run.total_steps} is done")
        elif self.first_step:
            self.progress.say(f"resumed after step {self.first_step} of {self.run.total_steps}")
        batches = self.rank.batches(self.run.train_set, self.run.plan, self.first_step, self.run.total_steps)
        is_complete, requests.in_training = False, True
        watch.mark(f"step {self.first_step + 1}")
        for step, batch in enumerate(batches, start=self.first_step + 1):
            self._profile(step, "start")
            self._seed_step(step)
            logged = self.run.is_due(step, self.config.trainer.log_freq)
            try:
                outcome = self.train_step(batch, logged or self.spikes is not None)
            except StopAgreed:
                self._stop(step - 1)
                break
            self._profile(step, "stop")
            self.progress.step(int(self._pack_tokens[self.run.plan.packs(step - 1)].sum()))
            if self.spikes is not None:
                loss = math.nan if outcome.sums is None else outcome.sums.loss
                if line := self.spikes.see(step, batch, loss, outcome.nll, outcome.skipped):
                    self.progress.say(line)
            self._count_skipped(step, outcome)
            if logged and outcome.sums is not None:
                self._log_step(step, outcome)
            self._validate_and_save(step)
            if step == self.first_step + 1:  # The first step compiles and may take minutes: the others may not.
                self._limit_collectives(first_step=False)
            watch.mark(f"step {step + 1}", "trainer.hang_timeout")
        else:
            watch.mark("the end of the run", "trainer.save_timeout")
            done = max(self.first_step, self.run.total_steps)  # an earlier run may have gone further
            save_final_memory(self.engine, self.run.output, done, self.run.memory)
            is_complete = True
        watch.end()
        self.progress.close()
        if self.tracking is not None:
            with _tracker_may_fail("trainer.logger did not end in order"):
                self.tracking.finish()
        return is_complete

    def _regroup(self) -> None:
        """Keep a resumed run's groups of packs, whatever the layout of ranks is now."""
        grouping = self.run_state.grouping
        if grouping != self.run.grouping:
            self.progress.say(f"packs stay grouped as the run began: {grouping['group_size']} of like cost")
        self.run = self.run.grouped(grouping)

    def _seed_step(self, step: int) -> None:
        """Seed dropout for one step, from `trainer.seed`, the step and this rank.

        A resumed run draws the masks that it would have drawn, whatever was drawn before. No two ranks draw the same
        ones: data-parallel ranks hold different documents; the ranks of a sequence-parallel group hold different tokens
        of one pack outside attention, and different heads inside it.
        """
        seed = np.random.SeedSequence([self.config.trainer.seed, step, dist.get_rank()])
        torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))

    def train_step(self, batch: StepBatch, summed: bool) -> StepOutcome:
        """One optimizer step over this rank's share of the packs; its loss and counts over all ranks if `summed`."""
        lr = self.engine.lr_scheduler.get_last_lr()[0]
        normaliser = self._normaliser(batch)
        if normaliser > 0:
            sums = self.rank.sums(batch) if summed else None
            nll: list[torch.Tensor] | None = None if self.spikes is None else []
            grad_norm = self._update(batch, StepLoss(normaliser, self.rank.size, sums, nll))
            sums = sums and sums.reduced(self.rank.all_reduce)
        else:  # every target weighs 0: nothing to learn, and no momentum or decay to apply either
            sums, grad_norm, nll = None, math.nan, None
        self.engine.lr_scheduler_step()  # the schedule counts steps, skipped ones included
        return StepOutcome(grad_norm, lr, sums, nll)

    def _update(self, batch: StepBatch, loss: StepLoss) -> float:
        """Gradients and the optimizer's step; the gradient norm before clipping."""
        size, flags = self.config.data.micro_batch_size_per_gpu, self.config.loss.head_flags
        micro_batches = list(batch.micro_batches(size, **flags))
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.accumulate(micro_batches, loss)
            return self.engine.optimizer_step()

    def _normaliser(self, batch: StepBatch) -> float:
        """Z of the global step. Read while the device is idle: the step before ended with its gradient norm.

        Raises:
            StopAgreed: on every rank, where any was asked to stop.
        """
        device: Any = get_device_id()
        of_packs = batch.normaliser if self.engine.is_mp_src_rank_with_outputs() else torch.zeros_like(batch.normaliser)
        asked = torch.full_like(of_packs, requests.pending is not None)
        both = torch.cat([of_packs, asked]).to(device)
        dist.all_reduce(both)  # of all ranks: any one may have been asked
        normaliser, stops = both.tolist()
        if stops:
            raise StopAgreed
        return normaliser

    def _stop(self, step: int) -> None:
        """Save a checkpoint of the last completed step, unless there is one."""
        requests.leave_word()
        why = "a signal" if requests.pending is None else requests.pending
        self.progress.say(f"{why}: the run ends after step {step} of {self.run.total_steps}; the same command goes on")
        with self._training_waits(step), self._going_on(True, "the run ends"):
            with self._going_on(True):
                self.checkpoints.finish()
            if self.checkpoints.last != step:
                self._refuse_changed_data()
                self.checkpoints.save(step)
                self.checkpoints.finish()

    def validate(self) -> dict[str, float]:
        """What `Evaluation` measures on the whole validation set."""
        assert self.evaluation is not None
        return self.evaluation.measure()

    def evaluate_only(self) -> None:
        """Measure the validation set with the weights as they are, print the metrics and write them."""
        metrics = self.validate()
        if self.is_rank0:
            path = write_evaluation(metrics, self.first_step, self.config)
            width = max(map(len, metrics))
            print(
                *(f"{name:<{width}}  {value:,.6g}" for name, value in metrics.items()), f"written to {path}", sep="\n"
            )

    def _log_step(self, step: int, outcome: StepOutcome) -> None:
        assert outcome.sums is not None
        if self.tracking is None:
            return
        metrics = outcome.sums.report("train", self.run.train_set.categories.names)
        metrics["train/pack_fill"] = metrics["train/tokens"] / (metrics["train/packs"] * self.run.train_set.max_tokens)
        metrics["train/grad_norm"] = outcome.grad_norm
        metrics["train/lr"] = outcome.lr
        if self.engine.scaler is not None:
            metrics["train/loss_scale"] = self.engine.scaler.get_scale()
        if self.engine.router_loss is not None:
            metrics["train/router_loss"] = self.engine.router_loss.value.item()
        metrics["train/epoch"] = step / self.run.steps_per_epoch
        metrics["train/skipped_steps"] = self.run_state.skipped_steps
        if self.spikes is not None:
            metrics["train/spikes"] = self.run_state.spikes
        metrics["train/tokens_per_second"] = self.progress.tokens_per_second()
        metrics["train/memory_gib"] = get_torch_device().max_memory_reserved() / 2**30  # rank 0's peak
        self.progress.show(metrics)
        self._track(metrics, step)

    def _track(self, metrics: dict[str, float], step: int) -> None:
        if self.tracking is not None:
            with self.progress.aside(), _tracker_may_fail(f"metrics of step {step} are lost"):
                self.tracking.log(metrics, step)

    def _count_skipped(self, step: int, outcome: StepOutcome) -> None:
        state = self.run_state
        if not outcome.skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        self.progress.say(
            f"step {step} skipped: no finite gradient, or no target of a weight above 0 ({state.skipped_steps} so far)"
        )
        limit = self.config.trainer.max_skipped_steps
        if state.skipped_in_a_row > limit:
            self.checkpoints.finish()
            raise TooManySkippedSteps(
                f"{state.skipped_in_a_row} steps in a row were skipped, up to step {step}, for want of a finite "
                f"gradient or of a target of a weight above 0; trainer.max_skipped_steps allows {limit}"
            )

    def _validate_and_save(self, step: int) -> None:
        paused = self.progress.pause()
        if self.evaluation is not None and self.run.is_due(step, self.config.trainer.test_freq):
            self._track(self.validate(), step)
        saves = self.run.is_due(step, self.config.trainer.save_freq)
        if saves or self.run.is_due(step, AFTER_EACH_EPOCH):
            with self._training_waits(step):
                self._refuse_changed_data()
                if saves:
                    self._save(step)
        self.progress.resume(paused)

    @contextlib.contextmanager
    def _training_waits(self, step: int) -> Iterator[None]:
        """Watch what training waits for as the checkpoint of a step; what it prints stands above the bar."""
        with self.progress.aside(), watch.within("trainer.save_timeout", f"the checkpoint of step {step}"):
            yield

    def _refuse_changed_data(self) -> None:
        """End the run, before a checkpoint is made of it, where the files that it is trained on have changed."""
        if self.run.content is None:
            return
        if changed := next(filter(None, RunRanks().gather(self.run.files.changed())), None):
            with self._going_on(True):
                self.checkpoints.finish()  # of the data as it was
            self.run.files.verify_content(self.run.content, changed, RunRanks())

    def _save(self, step: int) -> None:
        """Save a checkpoint; one before the last step that cannot be written does not end the run."""
        is_last, since = step == self.run.total_steps, time.perf_counter()
        with self._going_on(True):  # the one before, which threads wrote
            self.checkpoints.finish()
        with self._going_on(not is_last):
            self.checkpoints.save(step)
            if is_last:
                self.checkpoints.finish()
        self._track({"train/save_pause": time.perf_counter() - since}, step)

    @contextlib.contextmanager
    def _going_on(self, goes_on: bool, what: str = "training goes on") -> Iterator[None]:
        """Whether the run goes on where a checkpoint cannot be written; what it does is said."""
        try:
            yield
        except NotWritten as error:
            if not goes_on:
                raise
            if self.is_rank0:
                print(f"warning: {what} without a checkpoint: {error}", file=sys.stderr, flush=True)

    def _profile(self, step: int, moment: str) -> None:
        """verl's profiler between the two steps of `trainer.profile_interval`."""
        first, last = self.config.trainer.profile_interval
        if moment == "start" and step == first:
            self.client.start_profile()
        if moment == "stop":
            if first <= step <= last:
                self.client.step_profile()
            if step == last:
                self.client.stop_profile()
