"""Packed SFT on verl's FSDP engine: compose, validate, build, fit.

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer data.train_dir=DIR model.path=MODEL parallel=ulysses8

Also started by file path, as the ``fsdp_sft_trainer.py`` of verl ≤ 0.6 was; that trainer's option names still work.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if __name__ == "__main__" and sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # Started by file path: this folder would hide Python's own modules of the same names (tokenize).
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
import torch.distributed as dist
from omegaconf import DictConfig

from verl_ext.config.overrides import prepare_overrides
from verl_ext.trainer.distributed import TRAINING_FAILED, errors_told_once, leave_alone, leave_together, process_group


@hydra.main(version_base="1.3", config_path="pkg://verl_ext.conf", config_name="sft")
def train(config: DictConfig) -> None:
    """Validate the composed configuration, build the run and fit it."""
    from verl_ext.config.output import REPORT
    from verl_ext.trainer.checkpoint import saved_folders
    from verl_ext.trainer.loader import LoadingFailed
    from verl_ext.trainer.report import report_lines, write_report
    from verl_ext.trainer.setup import prepare
    from verl_ext.trainer.trainer import SFTTrainer, TooManySkippedSteps

    run = prepare(config)
    say(run.notices)
    facts = run.data_report() if dist.get_rank() == 0 else {}
    report(report_lines(facts))
    trainer = None if config.trainer.plan_only else SFTTrainer(run)
    with errors_told_once():
        if trainer is not None:
            trainer.resume()  # before anything is written: it refuses other packs
        holds_run = trainer is None and bool(saved_folders(run.output))
        if facts and not (holds_run or config.trainer.eval_only):
            write_report(facts, run.output)
    if trainer is None:
        if holds_run:
            report([f"{run.output} holds a run: its {REPORT} is left as it is"])
        return
    try:
        work = trainer.evaluate_only if config.trainer.eval_only else trainer.fit
        work()
    except TooManySkippedSteps as error:  # on every rank: all see the same norms
        leave_together(str(error), TRAINING_FAILED)
    except LoadingFailed as error:  # on this rank alone
        leave_alone(str(error), TRAINING_FAILED)


def say(notices: Sequence[str]) -> None:
    """Tell, on rank 0, what was read differently from how it was written."""
    if dist.get_rank() == 0:
        for notice in notices:
            print(f"note: {notice}", file=sys.stderr)


def report(lines: Iterable[str]) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def main() -> None:
    """Join the ranks, translate the command line, hand over to Hydra."""
    with process_group():
        with errors_told_once():
            overrides, notices = prepare_overrides(sys.argv[1:])
        say(notices)
        sys.argv[1:] = overrides
        try:
            train()
        except KeyboardInterrupt:
            report(["interrupted; the same command resumes from the last checkpoint"])
            raise SystemExit(130) from None


if __name__ == "__main__":
    main()
