"""The training loop with an exact loss; hooks do the rest.

verl's ``TrainingWorker`` holds the engine, the profiler and the configuration dataclasses. The loop is our own, because
verl's loop drops validation batches, averages means, and waits for the device after every micro-batch.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.workers.engine_workers import TrainingWorker

from verl_ext.attention.packed import set_backend
from verl_ext.checkpoint.layout import FLIGHT_RECORDER, Manifest, lock_folder, remove_run_files, remove_unfinished
from verl_ext.checkpoint.save import Checkpoints
from verl_ext.config.run import worker_config
from verl_ext.engines.step import StepEngine
from verl_ext.layers.dropout import switch_dropout_off
from verl_ext.losses import HEADS
from verl_ext.plugin import select_engine
from verl_ext.progress import StepProgress
from verl_ext.trainer.answers import Answers
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.distributed import at_exit, limit_collectives, user_errors_end_the_run
from verl_ext.trainer.evaluation import Evaluation, write_evaluation
from verl_ext.trainer.hang import watch
from verl_ext.trainer.hooks import Hook, StepOutcome, hook_classes
from verl_ext.trainer.loader import DataParallelRank, loader_deaths_reported
from verl_ext.trainer.loss import StepLoss
from verl_ext.trainer.reference import add_reference, begins_with_reference, check_first_step
from verl_ext.trainer.run import Run
from verl_ext.trainer.signals import requests


class StopAgreed(Exception):
    """The ranks' agreement to end before a step, after a request."""


class UpcomingStep:
    """A rank's next batch, and the sums of Z and stop requests.

    The batch is loaded while the device still computes the previous step. The hosts sum while the hooks of that step
    run, so no device waits for the sums and none is read for them.

    Args:
        batch: this rank's packs.
        counts: whether Z counts this rank's targets, which is so on one rank of a sequence-parallel group.
        hosts: the gloo group of all ranks.
    """

    def __init__(self, batch: StepBatch, counts: bool, hosts: dist.ProcessGroup) -> None:
        self.batch = batch
        terms = batch.normalisers * counts
        self._sums = torch.cat([terms, terms.new_full((1,), bool(requests.pending))])
        self._work = dist.all_reduce(self._sums, group=hosts, async_op=True)

    def normalisers(self) -> list[float]:
        """Return Z, of each term of the loss; raise StopAgreed, on every rank, after a stop request."""
        self.wait()
        *normalisers, stops = self._sums.tolist()
        if stops:
            raise StopAgreed
        return normalisers

    def wait(self) -> None:
        """Wait for the sums."""
        self._work.get_future().wait()


class SFTTrainer:
    """One rank of a run that :func:`verl_ext.trainer.setup.prepare` has checked."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.is_rank0 = dist.get_rank() == 0
        locks = self.is_rank0 and not self.config.trainer.eval_only  # a measurement may run beside a training run
        with user_errors_end_the_run():  # before the weights are read
            if locks:
                at_exit.callback(lock_folder(run.output))
        # What follows needs the built engine, which knows this rank's place in the layout.
        self.client = self._build_client()
        assert isinstance(self.client.engine, StepEngine)
        self.engine: StepEngine = self.client.engine
        self.rank = DataParallelRank(run, self.engine)
        self.evaluation = None
        if run.validation is not None:
            self.evaluation = Evaluation(run, run.validation, self.engine, self.rank)
        self.answers = None if run.prompts is None else Answers(run, run.prompts, self.engine)
        if self.is_rank0:
            self._say_which_head()
        if run.replaces_output and self.is_rank0:
            remove_run_files(run.output)  # after the weights are read, so that a failure there costs no earlier run
        if locks:
            remove_unfinished(run.output)
        dist.barrier()
        # Saving threads are joined through the watch, which would else take the wait for a hang.
        self.run_state = run.run_state()
        self.checkpoints = Checkpoints(self.config, self.engine, self.run_state, run.checkpoint, watch.join, run.chats)
        self.first_step, self._at_reference = 0, False
        # One host group serves all steps, so it has the longest of their limits.
        limit = max(map(self.config.trainer.collective_timeout, (True, False)))
        self.hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        self._batches: Iterator[StepBatch] = iter(())
        self._next_batch: StepBatch | None = None
        self._upcoming: UpcomingStep | None = None
        self.hooks: list[Hook] = []
        # Watch from here on: reading the weights may take longer than any step.
        self.limit_collectives(first_step=True)
        if not self.config.trainer.eval_only:
            limits, folder = self.config.trainer.progress_limits, run.output / FLIGHT_RECORDER
            watch.start(limits, "the start of the run", "trainer.first_step_timeout", folder)

    def _build_client(self) -> TrainingWorker:
        """Build verl's worker around the engine of the model."""
        select_engine(self.run.model.kind.engine_vendor)
        set_backend(self.config.attention.backend)
        torch.manual_seed(self.config.trainer.seed)  # new adapters start from it, equally on every rank
        client = self._build_worker(self.config.values)
        self._switch_dropout_off(client.engine)
        if self.config.engine.full_determinism and self.run.model.backend == "varlen":
            torch.use_deterministic_algorithms(True)  # after verl's, whose warn_only leaves varlen's backward as it is
        return client

    def _build_worker(self, values: Mapping[str, Any]) -> TrainingWorker:
        """Build a worker by the values of a configuration, with the weights of its model."""
        with _upstream_quiet():
            worker = TrainingWorker(worker_config(values, self.run.schedule_steps))
            worker.reset()
        return worker

    def _switch_dropout_off(self, engine: Any) -> None:
        """Switch dropout off where the objective does without, and say so."""
        if self.run.objective.has_dropout:
            return
        if (names := switch_dropout_off(engine.module)) and self.is_rank0:
            why = "two answers would be compared under different masks"
            print(f"note: dropout is off ({', '.join(names)}): {why}", file=sys.stderr, flush=True)

    def _say_which_head(self) -> None:
        """Print a note if the head needs more memory than printed before.

        Adapters, remote code and patched kernels cause this, and only the built module shows them.
        """
        said, runs = self.run.model.head, getattr(self.engine, "cheapest_head", "fused")
        if HEADS.index(runs) > HEADS.index(said):
            why = "the module has no linear head whose logits it gives as they are"
            print(f"note: loss.head={self.config.loss.head} is {runs} here: {why}", file=sys.stderr, flush=True)

    def limit_collectives(self, first_step: bool) -> None:
        """Limit collectives of training by `trainer.nccl_timeout` or the limit of a hang."""
        meshes = (self.engine.device_mesh, self.engine.ulysses_device_mesh, self.engine.context_device_mesh)
        limit_collectives(self.config.trainer.collective_timeout(first_step), filter(None, meshes))

    def resume(self) -> None:
        """Continue from the checkpoint that `trainer.resume_mode` selects, if there is one.

        Before it, answers get the sums of their reference, which needs the weights that the run begins with.
        """
        run, state = self.run, self.run.run_state()
        if run.checkpoint is not None and not self.config.trainer.eval_only:  # its packs are in the groups of that run
            state.load_state_dict(Manifest.from_folder(run.checkpoint).run_state)
            run = run.grouped(state.grouping)
        add_reference(run, self.engine, lambda values: self._build_worker(values).engine)
        with user_errors_end_the_run():
            self.first_step = self.checkpoints.resume()
        self._at_reference = self.first_step == 0 and begins_with_reference(self.run)

    def fit(self) -> bool:
        """Train to the last step; return False if stopped earlier by a request."""
        self.progress = StepProgress(self.first_step, self.run.total_steps, self.is_rank0)
        grouping = self.run_state.grouping
        if grouping != self.run.grouping:  # the checkpoint's grouping, from another layout of ranks
            self.progress.say(f"packs stay grouped as the run began: {grouping['group_size']} of like cost")
        self.run = self.run.grouped(grouping)
        self.last_step = self.run.total_steps  # a hook may lower it to the step that is done
        try:
            self.hooks = [hook(self) for hook in hook_classes(self.config.trainer.hooks)]
            with user_errors_end_the_run():  # such as a tracker without a login, or a full disk
                for hook in self.hooks:
                    hook.pre_train()
            with loader_deaths_reported(files=self.run.files):
                is_complete = self._train()
        finally:
            watch.end()
        for hook in self.hooks:
            hook.close()
        return is_complete

    def _train(self) -> bool:
        run = self.run
        self._batches = iter(self.rank.batches(run.train_set, run.plan, self.first_step, self.last_step))
        requests.in_training = True
        self._next_batch = next(self._batches, None)
        self.ask_ranks()
        step = self.first_step
        while step < self.last_step:
            step += 1
            assert self._upcoming is not None, "the loader has a batch for every step"
            for hook in self.hooks:
                hook.pre_step(step)
            self._seed_step(step)
            logged = self.run.is_due(step, self.config.trainer.log_freq)
            try:
                outcome = self.train_step(self._upcoming, logged or self.config.trainer.watches_loss)
            except StopAgreed:
                for hook in self.hooks:
                    hook.stop(step - 1)
                return False
            self.ask_ranks()
            for hook in self.hooks:
                hook.post_step(step, outcome)
        if self._upcoming is not None:
            self._upcoming.wait()  # of a step that an early end leaves out
        for hook in self.hooks:
            hook.post_train()
        return True

    def _seed_step(self, step: int) -> None:
        """Seed dropout for one step, from `trainer.seed`, the step and this rank.

        A resumed run draws the masks that it would have drawn, whatever was drawn before. No two ranks draw the same
        masks: data-parallel ranks hold different documents; the ranks of a sequence-parallel group hold different
        tokens of one pack outside attention, and different heads inside it.
        """
        seed = np.random.SeedSequence([self.config.trainer.seed, step, dist.get_rank()])
        torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))

    def ask_ranks(self) -> None:
        """Start the next step's sums of Z and stop requests; collective.

        Call it after a step, and again after any long phase, so that a request in it does not wait for another step.
        """
        if self._next_batch is not None:
            counts = self.engine.is_mp_src_rank_with_outputs()
            self._upcoming = UpcomingStep(self._next_batch, counts, self.hosts)

    def train_step(self, upcoming: UpcomingStep, summed: bool) -> StepOutcome:
        """Run one optimizer step over this rank's share of the packs.

        Args:
            upcoming: this rank's packs and Z.
            summed: whether to sum the loss and the counts over all ranks.

        Raises:
            StopAgreed: on every rank, before anything is computed, if any rank was asked to stop.
        """
        lr, batch = float(self.engine.lr_scheduler.get_last_lr()[0]), upcoming.batch
        normalisers = upcoming.normalisers()
        if self.run.objective.learns(normalisers):
            checks, self._at_reference = self._at_reference, False
            sums = self.rank.sums(batch) if summed or checks else None
            nll: list[torch.Tensor] | None = None if self.config.trainer.spike_factor is None else []
            grad_norm, loss = self._update(batch, (normalisers, self.rank.size, sums, nll))
            if checks:
                check_first_step(self.run, batch, loss)
            sums = sums and sums.reduced(self.rank.all_reduce)
        else:  # every target has weight 0: nothing to learn, and no momentum or decay to apply either
            self._next_batch = next(self._batches, None)
            sums, grad_norm, nll = None, math.nan, None
        self.engine.lr_scheduler_step()  # the schedule counts all steps, including skipped ones
        return StepOutcome(batch, grad_norm, lr, sums, nll)

    def _update(self, batch: StepBatch, of_loss: tuple[Any, ...]) -> tuple[float, StepLoss]:
        """Compute gradients and run the optimizer; return the gradient norm before clipping, and the loss.

        of_loss: the arguments of :meth:`Objective.loss`.
        """
        size, flags = self.config.data.micro_batch_size_per_gpu, self.config.loss.head_flags
        with self.engine.train_mode():
            self.run.objective.measure([batch], self.engine, self.rank.all_reduce, size)
            loss = self.run.objective.loss(*of_loss)
            micro_batches = list(batch.micro_batches(size, token_stats=loss.sums is not None, **flags, **loss.flags))
            self.engine.optimizer_zero_grad()
            self.engine.accumulate(micro_batches, loss)
            self._next_batch = next(self._batches, None)  # while the device computes; the optimizer's step waits for it
            return self.engine.optimizer_step(), loss

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass metrics to the hooks that log them."""
        for hook in self.hooks:
            hook.log(metrics, step)

    def validate(self) -> dict[str, float]:
        """Measure the whole validation set; return the metrics of :class:`Evaluation`."""
        assert self.evaluation is not None
        return self.evaluation.measure()

    def evaluate_only(self) -> None:
        """Measure the validation set and any answers; print and write both."""
        with loader_deaths_reported(files=self.run.files):
            metrics = self.validate()
            if self.answers is not None:
                with user_errors_end_the_run():
                    metrics |= self.answers.measure(self.first_step)[0]
        if self.is_rank0:
            path = write_evaluation(metrics, self.first_step, self.config)
            width = max(map(len, metrics))
            lines = (f"{name:<{width}}  {value:,.6g}" for name, value in metrics.items())
            print(*lines, f"written to {path}", sep="\n")


@contextlib.contextmanager
def _upstream_quiet() -> Iterator[None]:
    """Hide verl's lines about NUMA, memory and patches; exceptions still pass."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
