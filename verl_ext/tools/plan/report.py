"""The memory and time of a planned run, and overrides that help.

The heaviest packs of the run go through the real engine on a fake GPU (:mod:`verl_ext.tools.plan.run`), in a separate
process. For a named GPU (`plan.gpu`), trials with other numbers of ranks that share a pack follow. If the run does not
fit, trials of each of the remedies follow, then of those that save most together, until one trial fits.
"""

import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import IO, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.config.check import check_run
from verl_ext.config.run import RunConfig
from verl_ext.config.schema import is_known
from verl_ext.config.support import CP, SP
from verl_ext.config.upstream import select
from verl_ext.options import spell
from verl_ext.parallel.shards import SequenceShards
from verl_ext.progress import progress_bar
from verl_ext.tools.plan.caching_allocator import reserved
from verl_ext.tools.plan.experts import break_even
from verl_ext.tools.plan.machine import gpu_memory
from verl_ext.tools.plan.options import PlanOptions, num_bytes
from verl_ext.tools.plan.remedies import REMEDIES, SHARED_EXPERTS, SHARED_PACKS, Remedy
from verl_ext.tools.plan.run import Job, Layers, Prediction
from verl_ext.tools.plan.time import time_facts
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.inputs import open_data
from verl_ext.trainer.run import Checked, Opened

REPLAYED = 40  # steps that the model of PyTorch's allocator replays
OTHERS = 2  # steps beside the heaviest that are replayed on the model of PyTorch's allocator; each takes seconds


def memory_facts(run: Opened, plan: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield the facts about a run on GPUs, growing each time.

    First come its own, then `sizes`, then `remedies`. Yields nothing if the plan has no GPU. `failed` is a line with
    the reason why there is no prediction.
    """
    memory = gpu_memory(run, plan)
    if memory is None:
        return
    world_size = run.config.machine.world_size
    reserve = num_bytes(plan.reserve) or 0
    facts: dict[str, Any] = {"world_size": world_size, "gpu_memory": memory, "reserve": reserve, "remedies": []}
    if failed := run.model.kind.memory_not_predicted:
        yield facts | {"failed": failed}
        return
    with Predictor() as predictor:
        # The run alone comes first, so that its facts are printed while the trials still run.
        job = job_of(run, run.config.values, plan)
        tokens = max(len(batch.input_ids) for step in job.steps for batch in step)
        facts |= {"micro_batch_tokens": tokens, "sequence_parallel_rank": job.rank, "backend": job.backend}
        try:
            prediction = predictor.predict(job, others=other_steps(run))
        except PredictionFailed as error:
            yield facts | {"failed": str(error)}
            return
        facts |= {"host_memory": num_bytes(plan.host_memory), "ranks_of_node": min(world_size, plan.ranks_per_node)}
        facts |= {"kinds": prediction.kinds, "peak": prediction.peak, "host": prediction.host}
        facts |= {"reserved_by_allocator": prediction.reserved, "replayed_steps": REPLAYED}
        facts |= {"gaps": max(prediction.reserved["expandable"] / prediction.peak, 1) if prediction.reserved else 1}
        facts |= {"needed": needed(prediction, facts), "fits": _fits(prediction, facts)}
        if plan.gpu is not None:
            facts["time"] = time_facts(run, run.config, plan, job, prediction)
        yield facts
        # Other numbers of ranks a pack are compared by time, which needs a named GPU.
        if plan.gpu is not None and "failed" not in facts["time"] and world_size > 1:
            facts["sizes"] = sizes(run, plan, predictor, facts)
            yield facts
            if compared := shared_experts(run, plan, predictor, facts):
                facts["experts"] = compared
                yield facts
        if facts["fits"]:
            return
        # A trial costs time, so the first that fits is the last; one that fails is a fact and ends nothing.
        saved: list[tuple[int, Trial]] = []
        for trial in _trials(run, saved):
            tried: dict[str, Any] = {"override": trial.override, "costs": trial.costs}
            facts["remedies"].append(tried)
            try:
                found = predictor.predict(job_of(trial.run, trial.values, plan), trial.override)
            except PredictionFailed as error:
                tried["failed"] = str(error)
            else:
                tried |= {"peak": found.peak, "host": found.host, "fits": _fits(found, facts)}
                saved.append((prediction.peak - found.peak, trial))
            yield facts
            if tried.get("fits"):
                return


def sizes(run: Opened, plan: PlanOptions, predictor: "Predictor", facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each number of ranks a pack.

    Those that fit come first, by the time of a step. Each row has the most Ulysses ranks inside a node that the checks
    accept; context parallelism covers the rest.
    """
    ulysses, context = run.config.engine.ulysses_sequence_parallel_size, run.config.parallel.context_parallel_size
    own: dict[str, Any] = {"ulysses": ulysses, "context": context, "own": True}
    rows = [own | {name: facts[name] for name in ("peak", "fits")} | facts["time"]]
    for ranks in (2**power for power in range(run.config.machine.world_size.bit_length())):
        widest = min(ranks, 1 << (plan.ranks_per_node.bit_length() - 1))
        shapes = [(u, ranks // u) for u in (widest >> halved for halved in range(widest.bit_length()))]
        trials = (
            (shape, trial) for shape in shapes for trial in _trial(run, tuple(zip(SHARED_PACKS, shape, strict=True)))
        )
        shape, trial = next(trials, ((ulysses, context), None))
        if trial is None or shape == (ulysses, context):
            continue
        row: dict[str, Any] = {"ulysses": shape[0], "context": shape[1], "own": False}
        job = job_of(run, trial.values, plan)
        try:
            found = predictor.predict(job, f"{shape[0]} × {shape[1]} ranks a pack")
        except PredictionFailed as error:
            rows.append(row | {"failed": str(error)})
        else:
            time = time_facts(run, trial.run.config, plan, job, found)
            rows.append(row | {"peak": found.peak, "fits": _fits(found, facts)} | time)
    kept = ("ulysses", "context", "own", "peak", "fits", "failed", "step_seconds", "hours")
    rows = [{name: row[name] for name in kept if name in row} for row in rows]
    return sorted(rows, key=lambda row: ("failed" in row, not row.get("fits"), row.get("step_seconds", 0)))


def shared_experts(run: Opened, plan: PlanOptions, predictor: "Predictor", facts: Mapping[str, Any]) -> dict[str, Any]:
    """Compare ranks that share experts with ranks that gather all; {} for a model whose experts cannot be shared.

    The other run has the most ranks of a node that divide the experts; beside a run that shares them, none.
    """
    own, world_size = run.config.parallel.expert_parallel, run.config.machine.world_size
    counts = [1] if own > 1 else [n for n in range(plan.ranks_per_node, 1, -1) if world_size % n == 0]
    trial = next((trial for count in counts for trial in _trial(run, ((SHARED_EXPERTS, count),))), None)
    if trial is None:
        return {}
    compared = break_even(run, facts["micro_batch_tokens"]) | {"imbalance": plan.expert_imbalance}
    rows = [{"ranks": own, "peak": facts["peak"], "fits": facts["fits"], **facts["time"]}]
    other: dict[str, Any] = {"ranks": trial.run.config.parallel.expert_parallel}
    job = job_of(trial.run, trial.values, plan)
    try:
        found = predictor.predict(job, trial.override)
    except PredictionFailed as error:
        rows.append(other | {"failed": str(error)})
    else:
        time = time_facts(run, trial.run.config, plan, job, found)
        rows.append(other | {"peak": found.peak, "fits": _fits(found, facts)} | time)
    kept = ("ranks", "peak", "fits", "failed", "step_seconds", "received")
    rows = [{name: row[name] for name in kept if name in row} for row in rows]
    return compared | {"rows": sorted(rows, key=itemgetter("ranks"))}


def needed(prediction: Prediction, facts: Mapping[str, Any]) -> int:
    """Return the bytes of a GPU that a step takes.

    This is what PyTorch's allocator reserves, and `reserve` outside PyTorch. The allocator is replayed for the run
    itself; `gaps`, its share above the peak there, counts for trials too.
    """
    return round(prediction.peak * facts["gaps"]) + facts["reserve"]


def _fits(prediction: Prediction, facts: Mapping[str, Any]) -> bool:
    """Tell whether a step fits the GPU and the node's host memory."""
    on_node = prediction.host * facts["ranks_of_node"]
    return needed(prediction, facts) <= facts["gpu_memory"] and on_node <= (facts["host_memory"] or on_node)


def job_of(run: Opened, values: Mapping[str, Any], plan: PlanOptions) -> Job:
    """Return the heaviest micro-batches that a rank of a run meets.

    These are the packs with the most tokens and, if others have more targets, those as well, because an epoch may put
    them together; and those of documents with the most tokens, if documents share tokens. The heaviest of several
    micro-batches come last, when gradients are already in memory.
    """
    packs, data = run.packs, values["data"]
    context, ulysses = values["parallel"]["context_parallel_size"], values["engine"]["ulysses_sequence_parallel_size"]
    size, world_size = data["micro_batch_size_per_gpu"], run.config.machine.world_size
    micro_steps = data["train_batch_size"] * ulysses * context // world_size // size
    longest = _micro_batch(run, np.lexsort((packs.targets, packs.tokens))[::-1][:size])
    widest = _micro_batch(run, np.lexsort((packs.tokens, packs.targets))[::-1][:size])
    others = [widest] if _is_target(widest).sum() > _is_target(longest).sum() else []
    if packs.shared is not None:  # attention holds the keys of whole documents
        others.append(_micro_batch(run, np.lexsort((packs.tokens, packs.document_tokens))[::-1][:size]))
    alone = [[batch] for batch in (longest, *others)]
    steps = alone if micro_steps == 1 else [[*others, longest, *(others or [longest])]]
    shards, is_target = SequenceShards(ulysses, context), _is_target(longest)
    padded = torch.nn.functional.pad(is_target, (0, -len(is_target) % shards.multiple))
    rank = int(shards.by_rank(padded).view(shards.ranks, -1).sum(1).argmax())  # the first rank with the most targets
    of_machine = plan.ranks_per_node, plan.expert_imbalance
    return Job(values, steps, world_size, rank, run.model.backend, run.model.kind.engine_vendor, *of_machine)


def other_steps(run: Opened) -> list[list[StepBatch]]:
    """Return :data:`OTHERS` steps of one micro-batch, of increasing length."""
    order, size = np.argsort(run.packs.tokens), run.config.data.micro_batch_size_per_gpu
    spread = order[np.linspace(0, len(order) - 1, OTHERS * size, endpoint=False).round().astype(int)].reshape(
        OTHERS, size
    )
    return [[_micro_batch(run, step)] for step in spread]


def _micro_batch(run: Opened, packs: np.ndarray) -> StepBatch:
    dataset = run.train_set
    return StepCollator.of_dataset(run.objective, dataset)([dataset[int(index)] for index in packs])


def _is_target(batch: StepBatch) -> torch.Tensor:
    is_target = torch.zeros(len(batch.input_ids), dtype=torch.bool)
    is_target[batch.targets["row"]] = True
    return is_target


@dataclass(frozen=True)
class Trial:
    """Remedies with their values, and the resulting run."""

    chosen: tuple[tuple[Remedy, Any], ...]
    run: Opened

    @property
    def values(self) -> Mapping[str, Any]:
        """The resulting configuration."""
        return self.run.config.values

    @property
    def override(self) -> str:
        """The overrides as on the command line."""
        return " ".join(f"{remedy.key}={spell(value)}" for remedy, value in self.chosen)

    @property
    def costs(self) -> str:
        """The cost of each remedy."""
        return "; ".join(remedy.costs for remedy, _ in self.chosen)


def _trials(run: Opened, saved: list[tuple[int, Trial]]) -> Iterator[Trial]:
    """Yield each remedy's values alone, then the best ones together.

    These grow by one remedy at a time. The caller appends to `saved` the bytes that each trial saves. Trials that the
    checks refuse are left out.
    """
    for remedy in REMEDIES:
        if not (is_known(remedy.key) and remedy.applies(run.config)):
            continue
        own = select(run.config.values, remedy.key)
        for value in remedy.values(run) if callable(remedy.values) else remedy.values:
            if value != own and not (remedy.key in (SP, CP) and value < own):
                yield from _trial(run, ((remedy, value),))
    chosen: tuple[tuple[Remedy, Any], ...] = ()
    for gain, trial in sorted(saved, key=lambda one: -one[0]):
        ((remedy, value),) = trial.chosen
        if gain > 0 and remedy not in [other for other, _ in chosen]:
            for together in _trial(run, (*chosen, (remedy, value))):
                chosen = together.chosen
                if len(chosen) > 1:
                    yield together


def _trial(run: Opened, chosen: tuple[tuple[Remedy, Any], ...]) -> Iterator[Trial]:
    """Yield the trial unless the checks refuse it."""
    config = OmegaConf.create(dict(run.config.values))
    for remedy, value in chosen:
        OmegaConf.update(config, remedy.key, value)
    with suppress(ValueError):
        tried = RunConfig.from_composed(config, run.config.machine)
        check_run(tried)
        of_other_packs = tried.max_tokens != run.config.max_tokens
        checked = Checked(config=tried, model=run.model, notices=())
        yield Trial(chosen, open_data(checked) if of_other_packs else replace(run, config=tried))


class PredictionFailed(RuntimeError):
    """A failed prediction; its message is the reason in one line."""


class Predictor:
    """Processes that run jobs on a fake GPU until the context ends."""

    def __enter__(self) -> "Predictor":
        self._stack = ExitStack()
        self._processes: list[_Process] = []
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def predict(self, job: Job, name: str = "this run", others: Sequence[Sequence[StepBatch]] = ()) -> Prediction:
        """Return the prediction, after a bar over its layers.

        With `others`, steps of other packs that a second process runs meanwhile, it has what PyTorch's allocator
        reserves over :data:`REPLAYED` steps of all packs.

        Raises PredictionFailed if the engine fails on the fake GPU or a process ends.
        """
        jobs = [job, replace(job, steps=others)] if others else [job]
        while len(self._processes) < len(jobs):
            self._processes.append(self._stack.enter_context(_Process()))
        with progress_bar(f"plan {name}", None, unit=" layers", leave=False) as bar, ThreadPoolExecutor() as threads:
            seen = [Layers(0, 0) for _ in jobs]

            def see(index: int, layers: Layers) -> None:
                seen[index] = layers
                bar.total = sum(one.of for one in seen)
                bar.update(sum(one.done for one in seen) - bar.n)

            answers = [
                threads.submit(process.run, job, partial(see, index))
                for index, (process, job) in enumerate(zip(self._processes, jobs, strict=False))
            ]
        prediction, *rest = (answer.result() for answer in answers)
        if not rest:
            return prediction
        # Blocks have equal numbers in both processes until their steps begin, and a step leaves none of its own.
        (before, *steps), (_, *more) = prediction.events, rest[0].events
        steps += more
        steps += random.Random(0).choices(steps, k=REPLAYED - len(steps))
        segments = {name: reserved(before, steps, name == "expandable") for name in ("expandable", "fixed")}
        return replace(prediction, reserved=segments)


class _Process:
    """A process that runs one job after another."""

    def __enter__(self) -> "_Process":
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, "-c", f"from {Job.__module__} import main; main()"]
        # The process must not touch an accelerator, and must not join the ranks that torchrun has started.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | hidden
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *error: Any) -> None:
        with suppress(OSError):
            self._jobs.close()
        if error[0] is not None:
            self._process.kill()
        self._process.wait()
        self._errors.close()

    def run(self, job: Job, see: Callable[[Layers], None]) -> Prediction:
        """Return the prediction, after calls of `see`. Raises PredictionFailed."""
        try:
            pickle.dump(job, self._jobs)
            self._jobs.flush()
            while isinstance(answer := pickle.load(self._answers), Layers):
                see(answer)
        except (OSError, EOFError):
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise PredictionFailed(f"its process ended; last line: {' '.join(last)}") from None
        if isinstance(answer, Prediction):
            return answer
        raise PredictionFailed(str(answer).splitlines()[0])
