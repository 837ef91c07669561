"""The reference of a loss of preferences: one sum of log-probabilities an answer, computed once.

    weights of the reference ──► forward over the run's packs ──► Σ s_t·log π of each row, float64[N]
                                                                  in the cache of `datasets`, and below the run's folder

The reference is the model that the run begins with, unless `reference.path` names another. The packs are those of the
run, so that at step 1 of a new run every reward is 0 to the bit; a check ends the run where one is not near 0. Without
these sums, a second model would take memory, or a second forward pass time, in every step.
"""

import gc
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.cache import Arrays, fingerprint
from verl_ext.checkpoint.identity import model_shape
from verl_ext.checkpoint.layout import REFERENCE
from verl_ext.config.check import read_hf_config
from verl_ext.data.families.preference import PreferenceDataSet
from verl_ext.data.tokenized.files_in_use import DataFiles
from verl_ext.data.tokenized.ranks import arrays_of_ranks
from verl_ext.engines.step import StepEngine
from verl_ext.environment import versions
from verl_ext.launch.protocol import Ending
from verl_ext.progress import terminal_bar
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.distributed import RunRanks
from verl_ext.trainer.loader import run_batches
from verl_ext.trainer.loss import StepLoss
from verl_ext.trainer.rank import DataParallelRank
from verl_ext.trainer.run import Run
from verl_ext.trainer.step_plan import StepPlan

_LEAST_SCALE = 1e-12  # of an answer whose targets all have weight 0
FORMAT = 1  # of cached sums; raise it when their meaning changes


@dataclass(frozen=True)
class ScoredSet:
    """A dataset whose answers need sums of the reference, and the packs that the run reads."""

    name: str
    dataset: PreferenceDataSet
    plan: StepPlan
    steps: int

    @cached_property
    def packs(self) -> NDArray[np.int64]:
        """The packs that the run reads, ascending."""
        return np.unique(np.concatenate([self.plan.packs(step) for step in range(self.steps)]))

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """int64[N]: the first pack that the run reads with each row; -1 without one."""
        owner = np.full(len(self.dataset.units.answer), -1)
        for pack in self.packs[::-1].tolist():
            owner[self.dataset.rows_of(pack)] = pack
        return owner


def scored_sets(run: Run) -> list[ScoredSet]:
    """Return the sets of a run with a reference; none without one."""
    sets: list[ScoredSet] = []
    if not run.objective.has_reference:
        return sets
    # The checks of the config left only datasets of preferences.
    if not run.config.trainer.eval_only:
        plan, steps = run.plan, run.total_steps
        if steps >= plan.steps_per_epoch:  # all packs: an epoch reads what another leaves out
            plan = replace(plan, drop_last=False)
            steps = plan.steps_per_epoch
        sets.append(ScoredSet("train", cast(PreferenceDataSet, run.train_set), plan, steps))
    if (validation := run.validation) is not None:
        plan = validation.plan
        sets.append(ScoredSet("val", cast(PreferenceDataSet, validation.dataset), plan, plan.steps_per_epoch))
    return sets


class ReferenceScorer:
    """The reference of a run, which scores its datasets before a checkpoint is loaded.

    policy: the engine with the weights that the run begins with. build: makes verl's worker of other values of the
    config, for `reference.path`; :meth:`close` frees it, before the optimizer has a state.
    """

    def __init__(self, run: Run, policy: StepEngine, build: Callable[[Mapping[str, Any]], Any]) -> None:
        self._run, self._policy, self._build, self._ranks = run, policy, build, RunRanks()

    @cached_property
    def engine(self) -> StepEngine:
        """The engine with the weights of the reference."""
        path = self._run.config.reference.path
        return self._policy if path is None else self._build(_values_of_reference(self._run, path)).engine

    def close(self) -> None:
        """Free the weights of `reference.path`."""
        vars(self).pop("engine", None)
        gc.collect()

    def score(self, scored: ScoredSet) -> None:
        """Give a dataset the sums of the reference; collective."""
        known = self._known(scored)
        if len(wrong := np.flatnonzero((scored.owner >= 0) & ~np.isfinite(known["sums"]))):
            raise Ending(f"the reference must give finite sums; row {wrong[0]} of {scored.dataset.key} has none")
        scored.dataset.reference = known["sums"]
        if self._run.objective.mismatched:
            scored.dataset.mismatched_reference = known["mismatched"]

    def _known(self, scored: ScoredSet) -> Arrays:
        """Return a set's sums from the run's folder, from the cache of `datasets`, or from :meth:`measured`."""
        run, ranks = self._run, self._ranks
        facts, root = _facts(run, scored, ranks), run.output / REFERENCE
        shared = f"reference-{fingerprint(facts, _layout(run, scored))}"
        cached = partial(arrays_of_ranks, ranks, shared, partial(self.measured, scored))
        if run.config.trainer.eval_only:
            return cached()
        # A resumed run keeps its sums on other ranks too. A new run recomputes them: they match its packs bit for bit.
        name = f"{scored.name}-{fingerprint(facts)}"
        if run.checkpoint is None and ranks.rank == 0:
            shutil.rmtree(root / name, ignore_errors=True)
        return arrays_of_ranks(ranks, name, cached, root)

    def measured(self, scored: ScoredSet) -> Arrays:
        """Compute the sums of a set's rows, float64[N], and of its packs' mismatched answers, float64[P]; collective.

        Rows and packs that the run does not read have NaN.
        """
        run, engine, dataset, owner = self._run, self.engine, scored.dataset, scored.owner
        rank = DataParallelRank(engine, run.config.data.micro_batch_size_per_gpu, run.config.loss.head_flags)
        of_rows, of_packs = (np.zeros((2, number)) for number in (len(owner), len(dataset)))  # sums, and 1 where known
        counts = engine.is_mp_src_rank_with_outputs()
        dataset.reference = dataset.mismatched_reference = None
        batches = zip(range(scored.steps), run_batches(run, rank, dataset, scored.plan, 0, scored.steps), strict=True)
        what = f"reference of {dataset.key}"
        bar = terminal_bar(what, rank.rank == 0, batches, total=scored.steps, unit="step", leave=False)
        # Every rank scores its packs; a row that several packs have is taken from its owner.
        with engine.eval_mode():
            for step, batch in bar:
                loss = run.objective.begin((), rank, sums=rank.sums(batch))
                engine.evaluate(rank.micro_batches(batch, loss), loss)
                others = run.objective.mismatched_sums(batch, rank)
                packs = [pack for pack in scored.plan.rank_packs(step, rank.rank, rank.size) if pack is not None]
                if not packs or not counts:
                    continue
                rows = [dataset.rows_of(pack) for pack in packs]
                owns = np.concatenate([owner[of_pack] == pack for of_pack, pack in zip(rows, packs, strict=True)])
                of_rows[0, np.concatenate(rows)[owns]] = torch.cat(loss.answer_sums).cpu().numpy()[owns]
                of_rows[1, np.concatenate(rows)[owns]] = 1
                if others:
                    of_packs[0, packs] = torch.stack([x.sum() for x in others[: len(packs)]]).cpu().numpy()
                    of_packs[1, packs] = 1
        # One rank of those that share a pack has put its sums in.
        for values in (of_rows, of_packs):
            self._ranks.all_reduce(values)
        both = {"sums": of_rows, "mismatched": of_packs}
        return {name: np.where(is_known > 0, sums, np.nan) for name, (sums, is_known) in both.items()}


def _values_of_reference(run: Run, path: str) -> dict[str, Any]:
    """Return the run's configuration with the reference as its model.

    It has no adapters, nor options that name parts of the policy, and nothing of it is trained.
    """
    values = run.config.values
    own: dict[str, Any] = {"path": path, "hf_config_path": None, "lora_rank": 0, "lora_adapter_path": None}
    return {**values, "model": {**values["model"], **own, "freeze": ["*"]}, "optim": {**values["optim"], "lr_of": {}}}


def _facts(run: Run, scored: ScoredSet, ranks: RunRanks) -> str:
    """Return a digest of the data, the weights and the settings that decide a set's sums; collective."""
    config = run.config
    content = DataFiles(scored.dataset.data_files, scored.dataset.key).digest(ranks)
    data = [FORMAT, content, scored.dataset.digest, *run.objective.answer_facts]
    if run.objective.mismatched:  # answers of a pack are paired with prompts of the same pack
        data += [_digest_of_packs(scored), scored.packs.tolist()]
    path = config.reference.path
    own = run.model.hf_config if path is None else read_hf_config(path, bool(config.model_options.trust_remote_code))
    dtypes = [config.engine.model_dtype, config.engine.mixed_precision]
    model = [run.reference or run.base, model_shape(own), config.model_options.override_config, dtypes, versions()]
    model += [each for each in (config.model_options.new_tokens, config.model_options.new_special_tokens) if each]
    if config.model_options.quantization:
        model.append([config.model_options.quantization, config.model_options.quantization_nested])
    rows = np.flatnonzero(scored.owner >= 0)
    return fingerprint(json.loads(json.dumps([data, model], default=str)), rows.tobytes())


def _layout(run: Run, scored: ScoredSet) -> list[Any]:
    """Return what decides the last bits of the sums, beside their facts."""
    config, plan = run.config, scored.plan
    order = [
        _digest_of_packs(scored),
        plan.batch_size,
        plan.seed,
        plan.shuffle,
        plan.costs is not None,
        plan.group_size,
    ]
    sizes = [config.machine.world_size, config.sequence_parallel_size, config.data.micro_batch_size_per_gpu]
    sizes += [config.parallel.expert_parallel] * (config.parallel.expert_parallel > 1)
    own = [getattr(config.dataset, "share_prefixes", False), run.model.backend, config.loss.head_flags]
    return [order, sizes, own, scored.steps]


def _digest_of_packs(scored: ScoredSet) -> str:
    """Return a digest of the documents in each pack, and of what they share."""
    plan = scored.dataset.plan()
    index, begins = plan.document_index.astype(np.int64), np.zeros(0) if plan.begins is None else plan.begins
    return fingerprint(iter([index.tobytes(), plan.pack_offsets.tobytes(), begins.tobytes()]))


def begins_with_reference(run: Run) -> bool:
    """Tell whether a new run begins with the weights of its reference."""
    return run.config.reference.path is None and bool(scored_sets(run))


def check_first_step(run: Run, batch: StepBatch, loss: StepLoss) -> None:
    """Raise Ending if the first step's rewards are not near 0; collective.

    batch, loss: this rank's of step 1 in a run that begins with its reference.
    """
    columns = batch.documents
    worst, tolerance = (0.0, ""), run.config.reference.tolerance_of(run.config.param_dtype)
    if len(columns["answer"]):
        gap = np.abs(torch.cat(loss.answer_sums).cpu().numpy() - columns["reference"])
        by_target = np.where(columns["answer"] != 0, gap / np.maximum(columns["scales"], _LEAST_SCALE), 0.0)
        at = int(np.nan_to_num(by_target, nan=np.inf).argmax())
        found = (
            f"answer {at + 1} of a rank's step, of {int(columns['targets'][at])} targets, is off by {gap[at]:.3g} nats"
        )
        worst = float(by_target[at]), found
    value, line = max(RunRanks().gather(worst), key=lambda each: np.nan_to_num(each[0], nan=np.inf))
    if not value <= tolerance:
        raise Ending(
            f"reference.tolerance: step 1 must have rewards of 0, because the run begins with its reference; {line}, "
            f"and {tolerance:g} a target are allowed: dropout, kernels that are not deterministic, or other packs "
            "than those that were scored cause this"
        )
