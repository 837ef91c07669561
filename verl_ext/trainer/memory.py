"""The memory that each GPU of a run would need, predicted before there is a GPU, and what would make it fit.

The heaviest packs of the plan go through the real engine on a fake GPU (:mod:`verl_ext.trainer.memory_run`), in a
process of its own; then each of :data:`REMEDIES` does, and those that save most together, until one trial fits.
"""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.attention import SequenceShards
from verl_ext.config.check import check_run
from verl_ext.config.run import Machine, RunConfig, num_bytes, sequence_parallel_size
from verl_ext.config.support import CP as _CP
from verl_ext.config.support import SP as _SP
from verl_ext.trainer.batch import StepBatch, StepCollator
from verl_ext.trainer.memory_run import REPLAYED, Job, Prediction
from verl_ext.trainer.setup import Run
from verl_ext.values import show

_GIB = 2**30
_MIB = 2**20
OTHERS = 3  # steps beside the heaviest that a plan gives to the model of PyTorch's allocator; each costs seconds


@dataclass(frozen=True)
class Remedy:
    """An override that lowers the peak: its values are tried in order, those of a run's own left out."""

    key: str
    values: tuple[Any, ...]
    costs: str


# In the order of what they cost a step.
REMEDIES = (
    Remedy("loss.head", ("fused",), "nothing"),
    Remedy("model.tile_tokens", (4096,), "about a tenth of what a step costs without attention"),
    Remedy("engine.use_no_sync_for_gradient_accumulation", (False,), "a reduction of gradients every micro-batch"),
    Remedy("data.micro_batch_size_per_gpu", (1,), "smaller forwards, more of them"),
    Remedy("model.enable_gradient_checkpointing", (True,), "every layer's forward once more"),
    Remedy("model.activation_offload", (True,), "copies of each layer's hidden state beside the computation"),
    Remedy(_SP, (2, 4, 8, 16, 32, 64), "all-to-alls over more ranks, fewer packs at a time"),
    Remedy(_CP, (2, 4, 8), "keys and values between groups of ranks, fewer packs at a time"),
    Remedy("engine.offload_policy", (True,), "parameters, gradients and optimizer on the host: copies every step"),
)


def memory_facts(run: Run) -> Iterator[dict[str, Any]]:
    """What is known so far of the memory of a run on GPUs, each time there is more: the run as it is, then remedies.

    Gives nothing where no GPU is planned for. `failed` says in one line why there is no prediction.
    """
    memory = gpu_memory(run)
    if memory is None:
        return
    reserve = num_bytes(run.config.plan.reserve) or 0
    facts: dict[str, Any] = {"world_size": run.world_size, "gpu_memory": memory, "reserve": reserve, "remedies": []}
    why = run.config.model.memory_not_predicted
    if run.config.values["engine"]["strategy"] != "fsdp2":
        why = f"engine.strategy must be fsdp2; got {run.config.values['engine']['strategy']}"
    if why:
        yield facts | {"failed": why}
        return
    with Predictor() as predictor:
        job = job_of(run, run.config.values)
        facts |= {"micro_batch_tokens": _tokens(job), "sequence_parallel_rank": job.rank, "backend": job.backend}
        try:
            prediction = predictor.predict(replace(job, others=other_steps(run)))
        except PredictionFailed as error:
            yield facts | {"failed": str(error)}
            return
        facts |= {"host_memory": num_bytes(run.config.plan.host_memory)}
        facts |= {"ranks_of_node": min(run.world_size, run.config.plan.ranks_per_node)}
        facts |= {"kinds": prediction.kinds, "peak": prediction.peak, "host": prediction.host}
        facts |= {"reserved_by_allocator": prediction.reserved}
        facts["fits"] = fits = _fits(prediction, facts)
        yield facts
        if fits:
            return
        saved: list[tuple[int, Trial]] = []
        for trial in _trials(run, saved):
            tried: dict[str, Any] = {"override": trial.override, "costs": trial.costs}
            facts["remedies"].append(tried)
            try:
                tried_one = predictor.predict(job_of(run, trial.values))
            except PredictionFailed as error:
                tried["failed"] = str(error)
            else:
                tried |= {"peak": tried_one.peak, "host": tried_one.host, "fits": _fits(tried_one, facts)}
                saved.append((prediction.peak - tried_one.peak, trial))
            yield facts
            if tried.get("fits"):
                return


def _fits(prediction: Prediction, facts: Mapping[str, Any]) -> bool:
    """Whether the peak fits a GPU beside the reserve, and what the ranks of a node keep on the host that node."""
    on_node = prediction.host * facts["ranks_of_node"]
    on_gpu = prediction.peak + facts["reserve"]
    return on_gpu <= facts["gpu_memory"] and on_node <= (facts["host_memory"] or on_node)


def gpu_memory(run: Run) -> int | None:
    """Bytes of `plan.gpu_memory`, else of the GPU that is visible; None for a run on the CPU."""
    if run.config.plan.gpu_memory is not None:
        return num_bytes(run.config.plan.gpu_memory)
    if run.config.trainer.device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def job_of(run: Run, values: Mapping[str, Any]) -> Job:
    """The heaviest micro-batches that a rank of the run may meet, under `values`.

    Those are the packs with the most tokens and, where others have more targets, these as well: any epoch may put them
    together. Of several micro-batches the heaviest come last, when there are gradients already.
    """
    dataset, data = run.train_set, values["data"]
    sp, context = sequence_parallel_size(values), values["parallel"]["context_parallel_size"]
    size = data["micro_batch_size_per_gpu"]
    micro_steps = data["train_batch_size"] * sp // run.world_size // size
    collate = _collator(run)
    tokens, targets = dataset.pack_tokens(), dataset.pack_targets()

    def micro_batch(order: Any) -> StepBatch:
        return collate([dataset[int(index)] for index in order[::-1][:size]])

    longest = micro_batch(np.lexsort((targets, tokens)))
    widest = micro_batch(np.lexsort((tokens, targets)))
    others = [widest] if _targets(widest) > _targets(longest) else []
    alone = [[batch] for batch in (longest, *others)]
    steps = alone if micro_steps == 1 else [[*others, longest, *(others or [longest])]]
    rank = _rank_with_most_targets(longest, SequenceShards(sp // context, context))
    return Job(values, steps, run.world_size, rank, run.backend, run.config.model.engine_vendor)


def other_steps(run: Run) -> list[list[StepBatch]]:
    """:data:`OTHERS` steps of one micro-batch, of packs from the shortest to the longest."""
    order, size = np.argsort(run.train_set.pack_tokens()), run.config.values["data"]["micro_batch_size_per_gpu"]
    spread = order[np.linspace(0, len(order) - 1, OTHERS * size).round().astype(int)].reshape(OTHERS, size)
    return [[_collator(run)([run.train_set[int(index)] for index in step])] for step in spread]


def _collator(run: Run) -> StepCollator:
    dataset = run.train_set
    return StepCollator(run.loss_for(dataset), dataset.categories, last_is_label=dataset.last_is_label)


def _targets(batch: StepBatch) -> int:
    return int((batch.category_index >= 0).sum())


def _rank_with_most_targets(batch: StepBatch, shards: SequenceShards) -> int:
    """Of the ranks that share a micro-batch, the one that holds most of its targets, the first of several."""
    is_target = batch.category_index >= 0
    padded = torch.nn.functional.pad(is_target, (0, -len(is_target) % shards.multiple))
    return int(shards.by_rank(padded).view(shards.ranks, -1).sum(1).argmax())


def _tokens(job: Job) -> int:
    return max(len(batch.input_ids) for step in job.steps for batch in step)


@dataclass(frozen=True)
class Trial:
    """Remedies with the value of each, and the configuration that they give."""

    chosen: tuple[tuple[Remedy, Any], ...]
    values: dict[str, Any]

    @property
    def override(self) -> str:
        return " ".join(f"{remedy.key}={show(value)}" for remedy, value in self.chosen)

    @property
    def costs(self) -> str:
        return "; ".join(remedy.costs for remedy, _ in self.chosen)


def _trials(run: Run, saved: list[tuple[int, Trial]]) -> Iterator[Trial]:
    """Each value of each remedy alone; then the best values of those that `saved` names by then, one more at a time.

    saved: (bytes that it saves, a trial) of all trials so far. Those that the checks refuse are left out."""
    for remedy in REMEDIES:
        own = _select(run.config.values, remedy.key)
        for value in remedy.values:
            if value != own and not (remedy.key in (_SP, _CP) and value < own):
                yield from _trial(run, ((remedy, value),))
    chosen: tuple[tuple[Remedy, Any], ...] = ()
    for gain, trial in sorted(saved, key=lambda one: -one[0]):
        ((remedy, value),) = trial.chosen
        if gain > 0 and remedy not in [other for other, _ in chosen]:
            for together in _trial(run, (*chosen, (remedy, value))):
                chosen = together.chosen
                if len(chosen) > 1:
                    yield together


def _trial(run: Run, chosen: tuple[tuple[Remedy, Any], ...]) -> Iterator[Trial]:
    """The trial, where the checks allow it."""
    config = OmegaConf.create(copy.deepcopy(dict(run.config.values)))
    for remedy, value in chosen:
        OmegaConf.update(config, remedy.key, value)
    with suppress(ValueError):
        trial = RunConfig.from_composed(config, Machine(run.world_size, "cuda"))
        check_run(trial)
        yield Trial(chosen, dict(trial.values))


def _select(values: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        values = values[name]
    return values


class PredictionFailed(RuntimeError):
    """There is no prediction; says why in one line."""


class Predictor:
    """The process that runs jobs on a fake GPU, from its first job on."""

    def __enter__(self) -> "Predictor":
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, "-c", "from verl_ext.trainer.memory_run import main; main()"]
        # The accelerator is not this process's to touch, and the ranks of a run that torchrun started are not its.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | hidden
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if error[0] is not None:
            self._process.kill()
        self._process.wait()
        self._errors.close()

    def predict(self, job: Job) -> Prediction:
        """Raises PredictionFailed where the engine fails on the fake GPU, or the process ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError):
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise PredictionFailed(f"the process ended; {' '.join(last) or 'it said nothing'}") from None
        if isinstance(answer, Prediction):
            return answer
        raise PredictionFailed(str(answer).splitlines()[0])


def memory_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The table of the run as it is."""
    if "failed" in facts:
        yield f"memory: not predicted: {facts['failed']}"
        return
    sp_rank = facts["sequence_parallel_rank"]
    who = "every rank" if sp_rank == 0 else f"rank {sp_rank} of those that share a pack, which holds the most targets"
    yield (
        f"memory: a step of {facts['world_size']} rank{'s' * (facts['world_size'] > 1)} on a fake GPU; {who}; "
        f"a micro-batch of {facts['micro_batch_tokens']:,} tokens; GiB:"
    )
    width = max(map(len, facts["kinds"]))
    for kind, size in facts["kinds"].items():
        yield f"  {kind:<{width}} {size / _GIB:9.2f}"
    yield f"  {'peak':<{width}} {facts['peak'] / _GIB:9.2f}"
    if facts["host"] >= (_MIB if facts["host_memory"] is None else 1):
        yield f"  {'on the host':<{width}} {facts['host'] / _GIB:9.2f}"
        on_node, ranks, given = facts["host"] * facts["ranks_of_node"], facts["ranks_of_node"], facts["host_memory"]
        compared = "" if given is None else f" of {given / _GIB:.2f} (plan.host_memory)"
        over = ", which does not fit" if given is not None and on_node > given else ""
        yield f"  {'of a node':<{width}} {on_node / _GIB:9.2f}{compared}, its {ranks} ranks'{over}"
    expandable, fixed = (
        f"{size / _GIB:.2f} ({size / facts['peak']:.3f} ×)" for size in facts["reserved_by_allocator"].values()
    )
    yield (
        f"memory: over {REPLAYED} steps, the heaviest and {OTHERS} others in random order, PyTorch's "
        f"allocator reserves {expandable} with expandable segments, {fixed} with segments of fixed size"
    )
    left = (facts["gpu_memory"] - facts["reserve"] - facts["peak"]) / _GIB
    of = f"of {facts['gpu_memory'] / _GIB:.2f}, {facts['reserve'] / _GIB:.2f} of it reserved (plan.reserve)"
    verdict = "fits" if facts["fits"] else "does not fit"
    yield f"memory: it {verdict}, {abs(left):.2f} {'left' if left >= 0 else 'over'} {of}"


def remedy_line(facts: Mapping[str, Any]) -> str:
    """The last remedy that was tried."""
    remedy = facts["remedies"][-1]
    if "failed" in remedy:
        return f"memory: {remedy['override']} is not predicted: {remedy['failed']}"
    fits = "fits" if remedy["fits"] else "does not fit"
    return f"memory: {remedy['override']} {fits}: peak {remedy['peak'] / _GIB:.2f}; costs {remedy['costs']}"
