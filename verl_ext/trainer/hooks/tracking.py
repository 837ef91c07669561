"""The hook for verl's tracking on rank 0, which a resume continues.

    run_ids.json    {"wandb": "dz5g909n"}    the ids of the runs, beside the checkpoints

wandb and swanlab read the id and the permission to continue its run from the environment. An id set by the user wins.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_torch_device
from verl.utils.tracking import FileLogger, Tracking

from verl_ext.checkpoint.layout import METRICS, RUN_IDS
from verl_ext.config.run import RunConfig
from verl_ext.files import atomic_write, json_lines, write_json
from verl_ext.flops import peak_flops
from verl_ext.launch.protocol import Launcher
from verl_ext.options import first_line, must, reason_of
from verl_ext.redaction import redacted, redacted_text
from verl_ext.trainer.hooks.base import Hook, StepOutcome

# tracker: (the variable of its run's id, the variable that allows it to continue that run)
_VARIABLES = {"wandb": ("WANDB_RUN_ID", "WANDB_RESUME"), "swanlab": ("SWANLAB_RUN_ID", "SWANLAB_RESUME")}


class TrackingHook(Hook):
    """The hook that logs metrics, every `trainer.log_freq` steps and for others."""

    def pre_train(self) -> None:
        """Open the loggers."""
        trainer = self.trainer
        self.tracking = open_tracking(trainer.config, trainer.first_step) if trainer.is_rank0 else None
        given = self.options.gpu_peak_tflops
        self.peak_flops = given and given * 1e12
        if given is None and self.options.device == "cuda":
            self.peak_flops = peak_flops(get_torch_device().get_device_name())
        loggers: dict[str, Any] = {} if self.tracking is None else self.tracking.logger
        if "console" in loggers:
            loggers["console"] = trainer.progress  # verl's logger prints every number with 17 digits

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Log the metrics of a step that is due."""
        if outcome.sums is None or not self.run.is_due(step, self.options.log_freq):
            return
        engine, train_set = self.trainer.engine, self.run.train_set
        metrics = outcome.sums.report("train", train_set.categories.names)
        computed = metrics.get("train/computed_tokens", metrics["train/tokens"])
        metrics["train/pack_fill"] = computed / (metrics["train/packs"] * train_set.max_tokens)
        metrics["train/grad_norm"] = outcome.grad_norm
        metrics["train/lr"] = outcome.lr
        # A feature that this run does not use has no metric, rather than a constant one.
        if engine.scaler is not None:
            metrics["train/loss_scale"] = engine.scaler.get_scale()
        if engine.router_loss is not None:
            metrics["train/router_loss"] = engine.router_loss.value.item()
        metrics["train/epoch"] = step / self.run.steps_per_epoch
        metrics |= outcome.metrics
        # Rates leave out validations and checkpoints, which say nothing about a step's speed.
        tokens_per_second, flops_per_second = self.trainer.progress.rates()
        metrics["train/tokens_per_second"] = tokens_per_second
        metrics["train/memory_gib"] = get_torch_device().max_memory_reserved() / 2**30  # rank 0's peak
        metrics["perf/tokens_per_second_per_gpu"] = tokens_per_second / self.run.config.machine.world_size
        if self.peak_flops is not None and flops_per_second is not None:
            metrics["perf/mfu"] = flops_per_second / (self.peak_flops * self.run.config.machine.world_size)
        metrics |= _peaks_of_memory()
        if self.trainer.is_rank0:
            self.trainer.progress.show(metrics)
        self.trainer.log(metrics, step)  # on every rank, whose hooks may watch them

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass metrics to verl's tracking."""
        if self.tracking is not None:
            with self.trainer.progress.aside(), log_tracker_errors(f"metrics of step {step} are lost"):
                self.tracking.log(metrics, step)

    def close(self) -> None:
        """End the tracked runs."""
        if self.tracking is not None:
            with log_tracker_errors("trainer.logger did not end in order"):
                self.tracking.finish()


def _peaks_of_memory() -> dict[str, float]:
    """Return the peak memory over all ranks in GiB; collective."""
    device: Any = get_device_id()
    peaks = [get_torch_device().max_memory_allocated(), get_torch_device().max_memory_reserved()]
    largest = torch.tensor(peaks, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    names = (f"perf/max_memory_{kind}_gb" for kind in ("allocated", "reserved"))
    return {name: peak / 2**30 for name, peak in zip(names, largest.tolist(), strict=True) if peak}


@contextmanager
def log_tracker_errors(loss: str) -> Iterator[None]:
    """Turn a tracker's OSError (full disk, lost server) into a warning."""
    try:
        yield
    except OSError as error:
        print(f"warning: {loss}: {redacted_text(reason_of(error))}", file=sys.stderr, flush=True)


class MetricsFile(FileLogger):
    """verl's `file` logger, which appends instead of emptying the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"Creating file logger at {path.absolute()}")
        self.fp = path.open("ab", buffering=0)


def open_tracking(config: RunConfig, first_step: int) -> Tracking:
    """Open the loggers of `trainer.logger`.

    The ``file`` logger appends to its lines up to ``first_step``. Its file is ``VERL_FILE_LOGGER_PATH``, or
    ``metrics.jsonl`` beside the checkpoints. wandb and swanlab continue the run that they began before ``first_step``;
    at step 0 they begin a new run.

    Raises:
        ValueError: If a logger cannot begin, because it lacks a login, a package or a server.
    """
    # A new run in the folder of an earlier one must not continue what that one tracked.
    folder, loggers = Path(config.trainer.default_local_dir), config.trainer.loggers
    ids = read_run_ids(folder) if first_step else {}
    sys.argv[1:] = map(redacted_text, sys.argv[1:])  # Hydra has read it, and trackers upload it
    try:
        with continued_runs(ids, loggers), _without_terminal():
            tracking = Tracking(
                config.trainer.project_name,
                config.trainer.experiment_name,
                default_backend=[name for name in loggers if name != "file"],
                config=redacted(config.values),
            )
    except Exception as error:  # each tracker has its own exceptions
        hint = "without a login there are WANDB_MODE=offline and SWANLAB_MODE=offline"
        got = f"{loggers} ({first_line(error)}); {hint}"
        raise ValueError(must("trainer.logger", "name trackers that can begin", got)) from error
    # Keep the ids beside the checkpoints, where a resume on any machine finds them.
    keep_run_ids(folder, ids, tracking.logger)
    # Open our own file logger, because verl's would empty the file.
    if "file" in loggers or Launcher.from_environment().caller:  # verl_ext.train returns the metrics
        path = Path(os.environ.get("VERL_FILE_LOGGER_PATH", folder / METRICS))
        continued_lines(path, first_step)
        tracking.logger["file"] = MetricsFile(path)  # type: ignore[assignment]
    return tracking


def read_run_ids(folder: Path) -> dict[str, str]:
    """Read a run's ids, written by :func:`keep_run_ids`; {} without a file.

    Raises:
        ValueError: If the file is not a JSON object.
    """
    path = folder / RUN_IDS
    if not path.is_file():
        return {}
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, dict):
        raise ValueError(must(f"trainer.default_local_dir: {RUN_IDS}", "be a JSON object of run ids", path))
    return ids


def keep_run_ids(folder: Path, earlier: Mapping[str, str], loggers: Mapping[str, Any]) -> None:
    """Write the ids of the loggers' runs, and `earlier` ids of others."""
    runs = {"wandb": lambda wandb: wandb.run, "swanlab": lambda swanlab: swanlab.get_run()}
    begun = {name: getattr(runs[name](loggers[name]), "id", None) for name in _VARIABLES if name in loggers}
    ids = {**earlier, **{name: run_id for name, run_id in begun.items() if run_id}}
    if ids:
        write_json(folder / RUN_IDS, ids)
    else:
        (folder / RUN_IDS).unlink(missing_ok=True)  # from a run that ended before its first checkpoint


@contextmanager
def continued_runs(ids: Mapping[str, str], loggers: Sequence[str]) -> Iterator[None]:
    """Let `loggers` continue these runs in the block, through the environment."""
    variables: dict[str, str] = {}
    for name in _VARIABLES.keys() & ids.keys() & set(loggers):
        run_id, resume = _VARIABLES[name]
        variables |= {run_id: ids[name], resume: "allow"}
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _without_terminal() -> Iterator[None]:
    """Make a tracker without a login raise, not ask while ranks wait."""
    terminal = sys.stdin
    with open(os.devnull) as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = terminal


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]], loss: str) -> None:
    """Append rows to a JSONL file; warn of `loss` if it fails."""
    with log_tracker_errors(loss), path.open("a", encoding="utf-8") as file:
        file.writelines(json_lines(rows))


def continued_lines(path: Path, first_step: int) -> None:
    """Keep a JSONL file's lines up to `first_step`; 0: move it aside."""
    if not path.is_file():
        return
    if not first_step:  # from a run that ended before its first checkpoint
        os.replace(path, path.with_name(f"{path.name}.before_restart"))
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(orjson.JSONDecodeError, LookupError, TypeError):
            if orjson.loads(line)["step"] <= first_step:
                kept.append(line)
    with atomic_write(path) as partial:
        partial.write_bytes(b"".join(kept))
