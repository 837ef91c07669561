"""The wait of the ranks for data that `verl-ext train` tokenizes while they start."""

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from verl_ext.checkpoint.resume import check_output
from verl_ext.config.check import check_categories, check_run, check_weight_files
from verl_ext.config.compose import compose_run, prepare_overrides
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine, dataset_class
from verl_ext.data.sft import SFTOptions
from verl_ext.trainer.distributed import user_errors_end_the_run
from verl_ext.trainer.setup import this_machine


def await_data(words: Sequence[str]) -> None:
    """Check a command line whose data is not there yet, and wait for the data; do nothing without such data.

    A mistake ends all ranks. Collective.
    """
    if (awaited := os.environ.get("VERL_EXT_AWAITED")) is None:
        return
    import verl_ext.trainer.trainer  # noqa: F401  verl's engines, whose import takes seconds

    machine = this_machine()
    with user_errors_end_the_run():
        if dist.get_rank() == 0:
            check_before_data(words, machine, **json.loads(awaited))
    with user_errors_end_the_run():  # the other ranks wait at its end
        ready = Path(os.environ["VERL_EXT_REQUESTS"], "ready")
        while dist.get_rank() == 0 and not ready.exists():
            time.sleep(0.02)


def check_before_data(words: Sequence[str], machine: Machine, keys: Iterable[str], categories: Sequence[str]) -> None:
    """Raise ValueError for the mistakes of a command line that need no data to find.

    keys: the options of the folders that are not there yet. categories: those of the training data; empty if unknown.
    """
    if any(word.startswith("-") for word in words):  # flags, which only Hydra's main function reads
        prepare_overrides(words)
        return
    there = {f"{key}=." for key in keys}  # an existing folder stands for the one to come
    given = [word for word in words if f"{word.partition('=')[0]}=." not in there]
    config, _ = compose_run([*sorted(there), *given])
    if (reads := dataset_class(config).Options.reads) != SFTOptions.reads:
        raise ValueError(f"data.sources must be none with a dataset that reads {reads}: data.train_dir names them")
    typed = resolve_run(config, machine)
    check_run(typed)
    check_weight_files(typed)
    check_output(config, machine.world_size)
    if categories:
        check_categories(typed.loss, categories)
