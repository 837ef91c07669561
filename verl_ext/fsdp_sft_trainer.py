"""The training program for packed SFT on verl's FSDP engine.

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer data.train_dir=DIR model.path=MODEL parallel=ulysses8

It also starts by file path, like the ``fsdp_sft_trainer.py`` of verl ≤ 0.6, whose option names still work.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        # After a start by file path, this folder would hide other modules with the same names (data, models).
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Packs differ in length, so segments of a fixed size would leave gaps. torch reads this during its import.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from verl_ext.progress import announce  # before the imports below, which take seconds

    announce(f"starting, ranks {os.environ.get('WORLD_SIZE', 1)}; importing torch and verl")

import torch.distributed as dist
from omegaconf import DictConfig

from verl_ext.checkpoint.layout import RUN, RUN_FILE
from verl_ext.config.run_file import run_file
from verl_ext.files import write_json, write_text
from verl_ext.launch.protocol import Launcher
from verl_ext.redaction import redacted
from verl_ext.trainer.distributed import end, print_on_rank0, process_group, user_errors_end_the_run
from verl_ext.trainer.setup import prepare
from verl_ext.trainer.signals import requests
from verl_ext.trainer.start import await_data, compose_and_run


def train_composed(composed: DictConfig, words: Sequence[str] = ()) -> None:
    """Prepare the run of a composed configuration, then train or evaluate it.

    words: the command line, for the file in the run's folder that starts the run again.
    """
    from verl_ext.trainer.report import write_report
    from verl_ext.trainer.report_lines import report_lines
    from verl_ext.trainer.trainer import SFTTrainer

    run = prepare(composed)
    if (caller := Launcher.from_environment().caller) and dist.get_rank() == 0:  # verl_ext.train
        Path(caller).write_text(str(run.output.absolute()), encoding="utf-8")
    print_on_rank0((f"note: {notice}" for notice in run.notices), sys.stderr)
    report = run.data_report() if dist.get_rank() == 0 else {}
    print_on_rank0(report_lines(report))
    print_on_rank0([f"reading the weights of {run.config.model_options.path} …"])
    trainer = SFTTrainer(run)
    with user_errors_end_the_run():
        trainer.resume()  # before anything is written, because it refuses a run with other packs
        if report and not run.config.trainer.eval_only:
            write_report(report, run.output)
            write_json(run.output / RUN, redacted(run.facts()))
            if words:
                _write_run_file(words, run.output)
    if run.config.trainer.eval_only:
        trainer.evaluate_only()
    elif not trainer.fit():
        end(requests.ending)


def _write_run_file(words: Sequence[str], folder: Path) -> None:
    """Write the file that starts the run again, or say why there is none."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # of one machine
    try:
        write_text(folder / RUN_FILE, run_file(words, ranks, folder))
    except ValueError as reason:
        print(f"note: {RUN_FILE} is not written: {reason}", file=sys.stderr, flush=True)


def main() -> None:
    """Join the process group, and train by the command line."""
    requests.listen()
    with process_group():
        await_data(sys.argv[1:])
        compose_and_run(sys.argv[1:], partial(train_composed, words=Launcher.from_environment().words or sys.argv[1:]))


if __name__ == "__main__":
    main()
