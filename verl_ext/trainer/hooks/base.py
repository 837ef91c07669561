"""The base class of hooks, what they see of the trainer, and the outcome of a step."""

import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from verl_ext.checkpoint.save import Checkpoints
from verl_ext.config.run import RunConfig
from verl_ext.engines.step import StepEngine
from verl_ext.metrics import StepSums
from verl_ext.options import first_line, must, spell
from verl_ext.progress import StepProgress
from verl_ext.redaction import redacted_text
from verl_ext.trainer.answers import Answers
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.loader import DataParallelRank
from verl_ext.trainer.run import Run

_CLOSE_SECONDS = 5.0


@dataclass
class StepOutcome:
    """The outcome of one optimizer step.

    Attributes:
        batch: this rank's share of the step.
        grad_norm: the gradient norm over all ranks, before clipping; NaN if nothing was computed.
        lr: the learning rate that the step used.
        sums: the loss and the counts of all ranks; None if they were not requested or nothing was computed.
        nll: ℓ_t of this rank's micro-batches if spikes are watched and something was computed.
        metrics: what hooks that come before the trackers add to the step's metrics.
    """

    batch: StepBatch
    grad_norm: float
    lr: float
    sums: StepSums | None
    nll: list[torch.Tensor] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Whether the step changed no parameter: its gradient norm is not finite."""
        return not math.isfinite(self.grad_norm)


class Training(Protocol):
    """What hooks see of the trainer.

    Attributes:
        first_step: the step from which the run resumed; 0 for a new run.
        last_step: the step after which the run ends, which a hook may lower to the step that is done.
        rank: the rank among those with different packs.
        hosts: the gloo group of all ranks.
        answers: the evaluation by `eval.prompts`; None without them.
    """

    run: Run
    config: RunConfig
    is_rank0: bool
    first_step: int
    last_step: int
    progress: StepProgress
    engine: StepEngine
    client: Any
    rank: DataParallelRank
    hosts: dist.ProcessGroup
    checkpoints: Checkpoints
    answers: Answers | None
    hooks: list["Hook"]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass metrics to all hooks."""

    def validate(self) -> dict[str, float]:
        """Return the metrics of the whole validation set; collective."""

    def ask_ranks(self) -> None:
        """Start the next step's sums again, after a long phase; collective."""

    def limit_collectives(self, first_step: bool) -> None:
        """Limit the time of training's collectives."""


class Hook:
    """A watcher of the training loop.

    Every rank has the same hooks and calls them in the same order, so that a hook may use collectives, except in
    `close`. A file that a hook writes into the run's folder before the first checkpoint must be in `NOTES` of
    verl_ext.checkpoint.layout. A checkpoint knows a hook's state by the name of its class.

    Args:
        trainer: the trainer, with a built model and a loaded checkpoint.

    Attributes:
        state_names: the attributes that are its state, beside those of the classes that it derives from.
        files: the results that it writes into the run's folder, which `trainer.overwrite` removes.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ()

    def __init__(self, trainer: Training) -> None:
        self.trainer, self.run, self.options = trainer, trainer.run, trainer.config.trainer

    def state(self) -> dict[str, Any]:
        """Return what each checkpoint holds of this hook, as plain values of JSON; rank 0's is saved."""
        return {name: getattr(self, name) for name in self._names()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state in the run's checkpoint, after :meth:`pre_train`.

        Raises ValueError for a state of another form.
        """
        if state.keys() != set(self._names()):
            names = f"{type(self).__name__} must have a state of {spell([*self._names()])} in the checkpoint"
            raise ValueError(f"trainer.hooks: {names}, or a method `load` that takes another; got {spell([*state])}")
        vars(self).update(state)

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        """Return the attributes of the state, which this class and its bases name."""
        of_classes = [vars(base).get("state_names", ()) for base in reversed(cls.__mro__)]
        return tuple(dict.fromkeys(name for names in of_classes for name in names))

    def pre_train(self) -> None:
        """Act before this process's first step; ValueError and OSError end the run."""

    def pre_step(self, step: int) -> None:
        """Act before a step, counted from 1.

        After a stop request `stop` follows, not `post_step`, and a resumed run calls this again for the same step.
        """

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Act after a step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Receive the metrics of :meth:`SFTTrainer.log`."""

    def stop(self, step: int) -> None:
        """Act after a stop request; `step` was the last step."""

    def post_train(self) -> None:
        """Act after the last step of the run."""

    def close(self) -> None:
        """Act at the end of training, complete, stopped or failed, if `pre_train` has succeeded.

        After a failure it has seconds, and other ranks may be gone.
        """


def states_of(hooks: Sequence[Hook]) -> dict[str, dict[str, Any]]:
    """Return copies of the hooks' states, by name; raise ValueError for one that is not JSON."""
    states: dict[str, dict[str, Any]] = {}
    for hook in hooks:
        if state := hook.state():
            name = type(hook).__name__
            try:
                states[name] = json.loads(json.dumps(state))
            except (TypeError, ValueError):
                states[name] = {}
            if repr(states[name]) != repr(state):  # unlike ==, it compares NaN, and the types of numbers
                needed = "return plain values of JSON, which come back as they were"
                raise ValueError(must(f"trainer.hooks: {name}.state", needed, repr(state)))
    return states


def load_states(hooks: Sequence[Hook], saved: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Give the hooks their states of a checkpoint; yield a line for each that has no counterpart."""
    own, by_name = states_of(hooks), {type(hook).__name__: hook for hook in hooks}
    for name, state in saved.items():
        if name in by_name:
            by_name[name].load(state)
        else:
            yield f"trainer.hooks has no {name}: its state in the checkpoint is not loaded"
    for name in [name for name in own if name not in saved]:
        yield f"trainer.hooks: {name} begins at this step: the checkpoint has no state of it"


@contextmanager
def closing(at_exit: ExitStack, seconds: float = _CLOSE_SECONDS) -> Iterator[list[Hook]]:
    """Close the hooks that are put into the list, each once, when the block or the process ends.

    After a failure they have so many seconds, because a server or another rank may be lost, and an error of theirs is a
    warning beside the failure.
    """
    hooks: list[Hook] = []

    def close_each() -> None:
        while hooks:
            hook = hooks.pop(0)
            try:
                hook.close()
            except Exception as error:
                told = f"warning: {type(hook).__name__} did not close: {first_line(error)}"
                print(redacted_text(told), file=sys.stderr, flush=True)

    def close_in_time() -> None:
        thread = threading.Thread(target=close_each, name="the end of the hooks", daemon=True)
        thread.start()
        thread.join(seconds)

    at_exit.callback(close_in_time)
    try:
        yield hooks
    except BaseException:
        close_in_time()
        raise
    while hooks:
        hooks.pop(0).close()
