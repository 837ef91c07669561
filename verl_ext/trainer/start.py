"""The start of a run: the wait for data, then Hydra's composition."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from verl_ext.attention import gpu_capability
from verl_ext.checkpoint.resume import check_output
from verl_ext.config.check import check_categories, check_run, check_weight_files
from verl_ext.config.compose import PRIMARY, complete, compose_run, prepare_overrides
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine, dataset_class
from verl_ext.config.run_file import trainer_words
from verl_ext.config.schema import CONF
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.launch.protocol import READY, Launcher
from verl_ext.options import UsageError, must
from verl_ext.redaction import redacted
from verl_ext.trainer.distributed import accelerator, failures_reported, print_on_rank0, user_errors_end_the_run
from verl_ext.trainer.setup import this_machine


def compose_and_run(words: Sequence[str], act: Callable[[DictConfig], Any]) -> None:
    """Call `act` with a command line's completed config; a mistake ends all ranks."""
    with user_errors_end_the_run():
        overrides, notices = prepare_overrides(trainer_words(words))
    print_on_rank0((f"note: {notice}" for notice in notices), sys.stderr)
    sys.argv[1:] = overrides

    def completed(config: DictConfig) -> None:
        with user_errors_end_the_run():
            found = complete(config)
        print_on_rank0((f"note: {notice}" for notice in found), sys.stderr)
        act(config)

    hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name=PRIMARY)(failures_reported()(completed))()


def await_data(words: Sequence[str]) -> None:
    """Check a command line whose data is to come, and await it.

    It does nothing without such data. A mistake ends all ranks. Collective.
    """
    launcher = Launcher.from_environment()
    if not launcher.awaited or launcher.folder is None:
        return
    import verl_ext.trainer.trainer  # noqa: F401  verl's engines, whose import takes seconds

    machine = this_machine()
    with user_errors_end_the_run():
        if dist.get_rank() == 0:
            check_before_data(words, machine, launcher.awaited, launcher.categories)
    with user_errors_end_the_run():  # the other ranks wait at its end
        ready = Path(launcher.folder, READY)
        while dist.get_rank() == 0 and not ready.exists():
            time.sleep(0.02)


def check_without_data(words: Sequence[str], ranks: int, keys: Iterable[str], categories: Sequence[str]) -> str:
    """Return the YAML of the configuration that `ranks` ranks of this machine would run; they are not started.

    Raises ValueError as :func:`check_before_data`, and UsageError beside flags, which only Hydra's own program reads.
    """
    if flags := [word for word in words if word.startswith("-")]:
        raise UsageError(must("dry_run", "be false beside flags of Hydra", flags[0]))
    found = accelerator()
    name = torch.cuda.get_device_name() if found == "cuda" else None
    config = check_before_data(words, Machine(ranks, found, gpu_capability(), name), keys, categories)
    return OmegaConf.to_yaml(OmegaConf.create(redacted(config)))


def check_before_data(
    words: Sequence[str], machine: Machine, keys: Iterable[str], categories: Sequence[str]
) -> Mapping[str, Any]:
    """Return the resolved configuration; raise ValueError for mistakes that need no data to be found.

    keys: the options of the folders that are not there yet. categories: those of the training data; empty if unknown.
    """
    if any(word.startswith("-") for word in words):  # flags, which only Hydra's main function reads
        prepare_overrides(words)
        return {}
    there = {f"{key}=." for key in keys}  # an existing folder stands for the one to come
    others = [word for word in words if f"{word.partition('=')[0]}=." not in there]
    config, _ = compose_run([*sorted(there), *others])
    if there and (reads := dataset_class(config).Options.reads) != SFTOptions.reads:
        raise ValueError(f"data.sources must be none with a dataset that reads {reads}: data.train_dir names them")
    typed = resolve_run(config, machine)
    check_run(typed)
    check_weight_files(typed)
    check_output(typed)
    if categories:
        check_categories(typed.loss, categories)
    return typed.values
