"""Packed SFT on verl's FSDP engine: compose, prepare, build, fit.

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer data.train_dir=DIR model.path=MODEL parallel=ulysses8

Also started by file path, as the ``fsdp_sft_trainer.py`` of verl ≤ 0.6 was; that trainer's option names still work.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        # Started by file path: this folder would hide modules of the same names elsewhere (data, models).
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Every pack has another length: segments of fixed size would leave gaps. torch reads this while it is imported.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from verl_ext.progress import announce

    # Before the imports below, which take seconds.
    announce(f"starting, ranks {os.environ.get('WORLD_SIZE', 1)}; importing torch and verl")

import hydra
import torch.distributed as dist
from omegaconf import DictConfig

from verl_ext.config.compose import prepare_overrides
from verl_ext.redaction import redacted_text
from verl_ext.trainer.distributed import (
    TRAINING_FAILED,
    code_of_rank,
    exit_all_ranks,
    exit_this_rank,
    failures_reported,
    process_group,
    user_errors_end_the_run,
)
from verl_ext.trainer.signals import requests

if TYPE_CHECKING:
    from verl_ext.trainer.setup import Run


@hydra.main(version_base="1.3", config_path="pkg://verl_ext.conf", config_name="sft")
@failures_reported()
def train(config: DictConfig) -> None:
    """Check the composed configuration, build the run and fit it."""
    from verl_ext.checkpoint.layout import REPORT, saved_folders
    from verl_ext.checkpoint.save import NotWritten
    from verl_ext.trainer.loader import LoadingFailed, loader_deaths_reported
    from verl_ext.trainer.report import report_lines, write_report
    from verl_ext.trainer.setup import prepare
    from verl_ext.trainer.trainer import SFTTrainer, TooManySkippedSteps

    run = prepare(config)
    print_on_rank0((f"note: {notice}" for notice in run.notices), sys.stderr)
    report = run.data_report() if dist.get_rank() == 0 else {}
    print_on_rank0(report_lines(report))
    if report and run.config.trainer.plan_only:
        report |= predicted_memory(run)
    trainer = None
    if not run.config.trainer.plan_only:
        print_on_rank0([f"reading the weights of {run.config.values['model']['path']} …"])
        trainer = SFTTrainer(run)
    with user_errors_end_the_run():
        if trainer is not None:
            trainer.resume()  # before anything is written: it refuses other packs
        of_another_run = trainer is None and bool(saved_folders(run.output))
        if report and not (of_another_run or run.config.trainer.eval_only):
            write_report(report, run.output)
    if trainer is None:
        print_on_rank0([f"{run.output} holds a run: its {REPORT} is left as it is"] if of_another_run else [])
        return
    try:
        with loader_deaths_reported():
            if run.config.trainer.eval_only:
                trainer.evaluate_only()
            elif not trainer.fit():
                dist.barrier()  # no rank leaves, and has torchrun stop the others, before rank 0 is done
                raise SystemExit(code_of_rank(requests.exit_code))
    except TooManySkippedSteps as error:  # on every rank: all see the same norms
        exit_all_ranks(str(error), TRAINING_FAILED)
    except NotWritten as error:  # on every rank: all know of a failed write
        exit_all_ranks(f"the end of the run is not saved: {error}", TRAINING_FAILED)
    except LoadingFailed as error:  # on this rank alone
        changed = run.files.changed()  # a file that is cut short under its map is a bus error
        exit_this_rank(f"{error}; {changed}" if changed and changed not in str(error) else str(error), TRAINING_FAILED)


def predicted_memory(run: "Run") -> dict[str, Any]:
    """What a plan's report says of memory, printed as it is predicted; rank 0 only."""
    from verl_ext.memory_plan.report import memory_facts, memory_lines, remedy_line

    facts: dict[str, Any] = {}
    for facts in memory_facts(run):
        print_on_rank0([remedy_line(facts)] if facts["remedies"] else memory_lines(facts))
    return {"memory": facts} if facts else {}


def print_on_rank0(lines: Iterable[str], stream: object = None) -> None:
    """Print lines, each once for the whole run."""
    if dist.get_rank() == 0:
        for line in lines:
            print(redacted_text(line), file=stream or sys.stdout, flush=True)  # type: ignore[arg-type]


def main() -> None:
    """Join the ranks, translate the command line, hand over to Hydra."""
    requests.listen()
    with process_group():
        with user_errors_end_the_run():
            overrides, notices = prepare_overrides(sys.argv[1:])
        print_on_rank0((f"note: {notice}" for notice in notices), sys.stderr)
        sys.argv[1:] = overrides
        train()


if __name__ == "__main__":
    main()
