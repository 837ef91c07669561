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
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from verl.workers.engine_workers import TrainingWorker

from verl_ext.attention.packed import set_backend
from verl_ext.checkpoint.layout import FLIGHT_RECORDER, lock_folder, remove_run_files, remove_unfinished
from verl_ext.checkpoint.resume import OutputAction
from verl_ext.checkpoint.save import Checkpoints
from verl_ext.config.resolve import worker_config
from verl_ext.engines.step import StepEngine
from verl_ext.launch.protocol import Ending
from verl_ext.layers.dropout import no_draws, switch_noise_off
from verl_ext.losses import HEADS
from verl_ext.plugin import select_engine
from verl_ext.progress import StepProgress
from verl_ext.trainer.answers import Answers
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.distributed import at_exit, limit_collectives, user_errors_end_the_run
from verl_ext.trainer.evaluation import Evaluation, write_evaluation
from verl_ext.trainer.hang import watch
from verl_ext.trainer.hooks import Hook, StepOutcome, closing, hook_classes, load_states, states_of
from verl_ext.trainer.loader import PackLoader, loader_deaths_reported, run_batches
from verl_ext.trainer.rank import DataParallelRank
from verl_ext.trainer.reference import ReferenceScorer, begins_with_reference, check_first_step, scored_sets
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
        packs, head_flags = self.config.data.micro_batch_size_per_gpu, self.config.loss.head_flags
        self.rank = DataParallelRank(self.engine, packs, head_flags)
        self.evaluation = None
        if run.validation is not None:
            self.evaluation = Evaluation(run, run.validation, self.engine, self.rank)
        self.answers = None if run.prompts is None else Answers(run, run.prompts, self.engine)
        if self.is_rank0:
            self._say_which_head()
        self._hook_classes = hook_classes([*self.config.trainer.hooks, *run.model.kind.hooks])
        files = [name for hook in self._hook_classes for name in hook.files]
        if run.action is OutputAction.REPLACE and self.is_rank0:
            remove_run_files(
                run.output, files
            )  # after the weights are read, so that a failure there costs no earlier run
        if locks:
            remove_unfinished(run.output, files)
        dist.barrier()
        # Saving threads are joined through the watch, which would else take the wait for a hang.
        self.checkpoints = Checkpoints(self.config, self.engine, run.identity, run.checkpoint, watch.join, run.chats)
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
        select_engine(self.run.model.kind.engine_vendor, self.run.model.kind.engine_module)
        set_backend(self.config.attention.backend)
        torch.manual_seed(self.config.trainer.seed)  # new adapters start from it, equally on every rank
        client = self._build_worker(self.config.values)
        if not self.run.objective.has_noise:
            switch_noise_off(cast(Any, client.engine).module)
            if self.is_rank0:
                note = "answers are compared as in evaluation: dropout and other noise of training are off"
                print(f"note: {note}", file=sys.stderr, flush=True)
        if self.config.engine.full_determinism and self.run.model.backend == "varlen":
            torch.use_deterministic_algorithms(True)  # after verl's, whose warn_only leaves varlen's backward as it is
        return client

    def _build_worker(self, values: Mapping[str, Any]) -> TrainingWorker:
        """Build a worker by the values of a configuration, with the weights of its model."""
        with _upstream_quiet():
            worker = TrainingWorker(worker_config(values, self.run.schedule_steps))
            worker.reset()
        return worker

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
        with contextlib.closing(ReferenceScorer(self.run, self.engine, self._build_worker)) as reference:
            for scored in scored_sets(self.run):
                reference.score(scored)
        with user_errors_end_the_run():
            self.first_step = self.checkpoints.resume()
        self._at_reference = self.first_step == 0 and begins_with_reference(self.run)

    def fit(self) -> bool:
        """Train to the last step; return False if stopped earlier by a request."""
        run = self.run
        self.progress = StepProgress(self.first_step, run.total_steps, self.is_rank0)
        self.last_step = run.total_steps  # a hook may lower it to the step that is done
        with closing(at_exit) as begun:
            try:
                self.hooks = [hook(self) for hook in self._hook_classes]
                with user_errors_end_the_run():  # such as a tracker without a login, or a full disk
                    for hook in self.hooks:
                        hook.pre_train()
                        begun.append(hook)
                    if run.checkpoint is not None:
                        for line in load_states(self.hooks, run.checkpoint.manifest.hooks):
                            self.progress.say(line)
                    states_of(self.hooks)  # a state that cannot be saved is found before the first step
                with loader_deaths_reported(files=run.files):
                    return self._train()
            finally:
                watch.end()

    def _train(self) -> bool:
        self._batches = iter(self.batches(self.first_step, self.last_step))
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

    def batches(self, first_step: int, last_step: int) -> PackLoader:
        """Load this rank's batches from ``first_step`` to ``last_step - 1``."""
        return run_batches(self.run, self.rank, self.run.train_set, self.run.plan, first_step, last_step)

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
            with self.engine.train_mode():
                loss = self.run.objective.begin([batch], self.rank, normalisers, sums, nll)
                micro_batches = self.rank.micro_batches(batch, loss, token_stats=sums is not None)
                self.engine.optimizer_zero_grad()
                noise = f"loss.mode={self.config.loss.mode} must compare answers without noise; the model draws some"
                with contextlib.nullcontext() if self.run.objective.has_noise else no_draws(Ending(noise)):
                    self.engine.accumulate(micro_batches, loss)
                self._next_batch = next(self._batches, None)  # while the device computes, before the optimizer waits
                grad_norm = self.engine.optimizer_step()
            if checks:
                check_first_step(self.run, batch, loss)
            sums = sums and sums.reduced(self.rank.all_reduce)
        else:  # every target has weight 0: nothing to learn, and no momentum or decay to apply either
            self._next_batch = next(self._batches, None)
            sums, grad_norm, nll = None, math.nan, None
        self.engine.lr_scheduler_step()  # the schedule counts all steps, including skipped ones
        return StepOutcome(batch, grad_norm, lr, sums, nll)

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
