"""Kill -9 a random rank of a run that saves every step, again and again, until the run is complete.

    python -m tests.chaos.kills --kills 50 --seconds 1200

Every restart must go on from a whole checkpoint that is no older than the one that the killed run's tracker named, and
the final parameters, optimizer and metrics must equal those of an uninterrupted run to the last bit. A rank's death
ends the other ranks, as under torchrun; a run that completes before enough kills starts again in another folder. Half
of the kills wait until a checkpoint is being written.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.lib.ranks import run_ranks, started_ranks
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import differences, into, small_run, tracked_step, train_alone
from verl_ext.checkpoint.layout import saved_folders, step_of, whole_checkpoints

_PATIENCE = 120  # seconds that an attempt may take if nothing kills it


@dataclass
class Chaos:
    """The counts so far.

    Attributes:
        kills: killed ranks; while_saving: those that were killed while a checkpoint was being written.
        resumed: the steps from which restarts went on; torn: partial folders that kills left behind.
        completed: runs that reached their end, each equal to the uninterrupted one.
    """

    kills: int = 0
    while_saving: int = 0
    torn: int = 0
    completed: int = 0
    resumed: list[int] = field(default_factory=list)


def survive(
    options: list[str], whole: Path, folder: Path, kills: int, ranks: int, seed: int, life: float, seconds: float
) -> Chaos:
    """Kill a run of `options` until `kills` are done, and let the run after them complete.

    Args:
        whole: folder of the uninterrupted run.
        life: seconds within which a rank is killed; 0 kills it while the first checkpoint is being written.
        seconds: the time after which there are no more kills.

    Raises:
        AssertionError: If a checkpoint is torn, steps were lost, or a completed run differs.
    """
    chance, chaos, until = random.Random(seed), Chaos(), time.monotonic() + seconds
    run, attempt = folder / "run0", 0
    last = max(map(step_of, saved_folders(whole)))
    while True:
        more, killed = chaos.kills < kills and time.monotonic() < until, False
        with started_ranks(train_alone, ranks, [*options, into(run)]) as (processes, _):
            if more:
                killed = _kill(chance.choice(processes), run, chance, life)
            _end(processes, at_once=killed)
        if killed:
            chaos.kills += 1
            chaos.torn += any(run.glob("global_step_*.partial"))
            chaos.while_saving += any(run.glob("global_step_*.partial"))
            chaos.resumed.append(_newest_whole(run))
        elif tracked_step(run) == last:
            different = differences(run, whole, last)
            assert not different, f"{run} differs from the uninterrupted run: {different[:3]}"
            chaos.completed += 1
            if not more:
                return chaos
            shutil.rmtree(run)
            attempt += 1
            run = folder / f"run{attempt}"
        else:
            raise AssertionError(f"the ranks of {run} ended by themselves after step {tracked_step(run)}")


def _kill(victim: Any, run: Path, chance: random.Random, life: float) -> bool:
    """Kill a rank, and return whether it was still running."""
    _wait(victim, lambda: False, chance.uniform(0, life))
    if not life or chance.random() < 0.5:
        _wait(victim, lambda: any(run.glob("global_step_*.partial")), _PATIENCE)
        _wait(victim, lambda: False, chance.uniform(0, 0.1))
    alive = victim.is_alive()
    victim.kill()
    return alive


def _wait(victim: Any, until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until() and victim.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)


def _end(processes: list[Any], at_once: bool) -> None:
    """Wait for the ranks, or end them as torchrun does once one has died."""
    for process in processes:
        if at_once:
            process.kill()
        process.join(_PATIENCE)
        assert process.exitcode is not None, "a rank hangs"


def _newest_whole(run: Path) -> int:
    """Return the step from which a restart goes on; visible checkpoints must be whole, the tracked one visible."""
    tracked = tracked_step(run) or 0
    whole, wrong = whole_checkpoints(run)
    assert not wrong, wrong
    assert not [changed for checkpoint in whole if (changed := checkpoint.changed_file())]
    newest = whole[0].manifest.step if whole else 0
    assert newest >= tracked, f"{run}: the tracker names {tracked}, the newest whole checkpoint is {newest}"
    return newest


def options_of(folder: Path, steps: int) -> list[str]:
    """Write data and a tiny model, and return the overrides of a run that saves at each of its steps."""
    lengths = np.random.default_rng(0).integers(5, 60, 40).tolist()
    saves = (f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3")
    return small_run(folder, write_tiny_model(folder / "model"), lengths, *saves, categories=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1800, help="no more kills after so long (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="of a run (default %(default)s)")
    parser.add_argument("--async", dest="later", action="store_true", help="checkpoint.async_save")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options, whole = options_of(folder, given.steps), folder / "whole"
        options.append(f"checkpoint.async_save={str(given.later).lower()}")
        run_ranks(train_alone, given.ranks, [*options, into(whole)])
        life = time.monotonic() - began
        print(f"uninterrupted: {given.steps} steps, {given.ranks} ranks, {life:.0f} s", flush=True)
        chaos = survive(options, whole, folder, given.kills, given.ranks, given.seed, life, given.seconds)
    print(
        f"{chaos.kills} kills survived, {chaos.while_saving} of them while a checkpoint was being written; "
        f"{chaos.completed} completed runs, each equal to the uninterrupted one to the last bit; "
        f"{time.monotonic() - began:.0f} s\nrestarts went on from steps {chaos.resumed}"
    )
    sys.exit(0 if chaos.kills >= given.kills else f"only {chaos.kills} of {given.kills} kills in {given.seconds:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    main()
