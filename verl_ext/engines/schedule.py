"""Schedules of the learning rate: factors of `optim.lr` by step; and the optim node.

    constant               1 after the warm-up
    linear                 1 → m over all steps after the warm-up
    cosine_with_restarts   1 → m as half a cosine, `optim.num_cycles` times, each beginning at 1 again
    wsd                    1, and 1 → m over the last `optim.lr_wsd_decay_steps` steps (warm-up, stable, decay)

m is `optim.min_lr_ratio`. A warm-up rises from 0 to 1 first, as in verl's schedules. A factor follows from the step and
the options alone, so that a resumed run has the rates of one that was not interrupted.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.optimizer import OptimizerConfig

from verl_ext.options import Options, must, option, spell

OF_VERL = ("constant", "cosine")
STABLE_SHARE = 0.9  # of the steps after the warm-up, if `optim.lr_wsd_decay_steps` is null; as in verl ≤ 0.6
_ONE_DECAY = 0.5  # verl's default of `optim.num_cycles`: half a wave
# The share of the decay that is left after a part of it, from (0, 1) to (1, 0); Megatron's names and formulas.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}
SCHEDULES = (*OF_VERL, "linear", "cosine_with_restarts", "wsd")
USUAL_RATES = "1e-5 to 5e-5 for all weights, 1e-4 to 2e-4 for adapters, 5e-7 to 5e-6 with preferences"


@dataclass  # not frozen: a base of verl's own dataclass of the optim node
class OptimOptions(Options):
    """The keys of the optim node that verl lacks."""

    prefix: ClassVar[str] = "optim"

    lr: float | None = option(
        None,
        f"learning rate, without a default here (verl's is 0.001); usual: {USUAL_RATES}",
        above=0,
        resume="same",
    )
    decay: str = option(
        "all",
        "parameters that optim.weight_decay shrinks: all: every one, as in verl; matrices: those of two dimensions or "
        "more, without norms and biases",
        choices=("all", "matrices"),
        resume="same",
    )
    lr_of: dict[str, float] = option(
        {},
        "factor of optim.lr by a glob of modules or parameters, by names or ends of names ({embed_tokens: 0.1, "
        "lora_B: 16}); the longest glob that names a parameter counts",
        resume="same",
    )
    split_fused: bool = option(
        False,
        "with optimizer=Muon: true: each part of a fused projection (qkv_proj, gate_up_proj, also of experts, "
        "in_proj_qkv) becomes orthogonal alone, as if it were a matrix of its own",
        resume="same",
    )
    lr_scheduler_type: str = option("constant", "schedule after the warm-up", choices=SCHEDULES, resume="same")
    lr_wsd_decay_steps: int | None = option(
        None,
        "with wsd: number of last steps in which the rate falls to min_lr_ratio; null: a tenth of the steps after "
        "the warm-up. A resumed run may change it, and the length of the run, if the decay has not begun",
        least=0,
        resume="ahead",
    )
    lr_wsd_decay_style: str = option("cosine", "with wsd: form of the decay", choices=DECAYS, resume="ahead")
    lr_schedule_span: str = option(
        "run",
        "steps of the schedule: run: trainer.total_training_steps, or else those of the epochs; epochs: those of "
        "trainer.total_epochs, also if trainer.total_training_steps ends the run before, as in verl ≤ 0.6",
        choices=("run", "epochs"),
    )

    def problems(self) -> Iterator[str]:
        """Yield a line for each rate that is not a valid one."""
        for pattern, factor in self.lr_of.items():
            is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not isinstance(pattern, str):
                yield must("optim.lr_of", "have globs of names as keys", pattern)
            elif not is_number or not 0 < factor < math.inf:
                yield must(f"optim.lr_of.{pattern}", "be a number above 0", factor)


@dataclass
class StepOptimizerConfig(FSDPOptimizerConfig, OptimOptions):
    """verl's configuration of the optimizer with our keys."""

    lr: Any = None  # as in our keys; verl has a default

    def __post_init__(self) -> None:
        if self.lr_scheduler_type in OF_VERL:
            super().__post_init__()
        else:
            OptimizerConfig.__post_init__(self)


def schedule_problems(optim: Any, total_steps: int | None = None) -> Iterator[str]:
    """Yield a line for unread options, or ones `total_steps` exclude."""
    if getattr(optim, "split_fused", False) and optim.optimizer != "Muon":  # verl's own config lacks it
        yield f"optim.split_fused needs optim.optimizer=Muon; got true with {optim.optimizer}"
    kind, cycles, steps = optim.lr_scheduler_type, optim.num_cycles, optim.lr_wsd_decay_steps
    if kind == "cosine_with_restarts" and (cycles < 1 or cycles != int(cycles)):
        yield must("optim.num_cycles", f"be a whole number from 1 with optim.lr_scheduler_type={kind}", cycles)
    if kind in ("linear", "wsd") and cycles != _ONE_DECAY:
        yield must("optim.num_cycles", f"be {_ONE_DECAY} with optim.lr_scheduler_type={kind}", cycles)
    if kind != "wsd":
        for name, default in (("steps", None), ("style", "cosine")):
            if (value := getattr(optim, f"lr_wsd_decay_{name}")) != default:
                yield f"optim.lr_wsd_decay_{name} needs optim.lr_scheduler_type=wsd; got {spell(value)} with {kind}"
    elif steps is not None and total_steps is not None and steps > (room := total_steps - _warmup(optim, total_steps)):
        yield must("optim.lr_wsd_decay_steps", f"be at most {room}, the steps of the run after the warm-up", steps)


def rate_factor(optim: Any, total_steps: int) -> Callable[[int], float]:
    """Return the factor of `optim.lr` by the number of steps done.

    optim: the values of its node, as attributes. verl's cosine is not among the schedules here.
    """
    floor, warmup = optim.min_lr_ratio or 0.0, _warmup(optim, total_steps)
    length = max(total_steps - warmup, 0)
    shift = 0 if optim.zero_indexed_step else 1
    # One formula serves all schedules: 1 while stable, then a decay that runs in `cycles`.
    style, cycles = "linear", 1
    if optim.lr_scheduler_type == "cosine_with_restarts":
        style, cycles = "cosine", int(optim.num_cycles)
    stable: float = 0
    if optim.lr_scheduler_type == "wsd":
        style, decay = optim.lr_wsd_decay_style, optim.lr_wsd_decay_steps
        stable = int(length * STABLE_SHARE) if decay is None else length - decay
    elif optim.lr_scheduler_type == "constant":
        stable = math.inf

    def factor(steps_done: int) -> float:
        step = steps_done + shift
        if step < warmup:
            return step / warmup
        if step < warmup + stable:
            return 1.0
        # A finished run stays at its floor, where a cycle would begin again.
        if step >= total_steps:
            return floor
        done = cycles * (step - warmup - stable) / (length - stable) % 1.0
        return floor + (1.0 - floor) * DECAYS[style](done)

    return factor


def keeps_rates(optim: Any, total_steps: int, saved: Mapping[str, Any], saved_total: Any, steps_done: int) -> bool:
    """Return whether a run's steps so far had these options' rates.

    Args:
        optim: the values of its node, as attributes.
        total_steps: the steps of the run as it is now.
        saved: the options of the run's checkpoint, by dotted key.
        saved_total: the total steps in the checkpoint.
        steps_done: the step of the checkpoint.
    """
    before = SimpleNamespace(**{name: saved.get(f"optim.{name}", value) for name, value in vars(optim).items()})
    if not (optim.lr_scheduler_type == before.lr_scheduler_type == "wsd" and isinstance(saved_total, int)):
        return False
    now, then = rate_factor(optim, total_steps), rate_factor(before, saved_total)
    return all(now(step) == then(step) for step in range(steps_done))


def _warmup(optim: Any, total_steps: int) -> int:
    """Return the steps of the warm-up by verl's rule."""
    steps = optim.lr_warmup_steps
    return steps if steps is not None and steps > 0 else int(optim.lr_warmup_steps_ratio * total_steps)
