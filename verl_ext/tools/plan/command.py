"""The command `verl-ext plan`: a run on GPUs, possibly absent.

    the trainer's overrides, word for word     plan.gpu=H100-80G plan.world_size=64
                  └────────────┬────────────────────────────┘
    prepared as for training   →   the data report   →   memory and time on a fake GPU (`report`)

The command is one process. It reads no weights and no checkpoint, and asks no server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.commands.command_line import command, read_options, words_of
from verl_ext.config.run_file import expanded, is_run_file
from verl_ext.options import Options, option
from verl_ext.overrides import quoted
from verl_ext.tools.plan.options import PlanOptions


@dataclass(frozen=True)
class PlanCommand(Options):
    """Print the packs, steps, memory and time that a run would have.

    Besides the keys below, the command takes the words of `verl-ext train`, first a run's YAML file or the model: what
    data.sources names is tokenized, once, and nproc is plan.world_size. The plan is written as data_report.json into
    trainer.default_local_dir, unless that holds a run.
    """

    plan: PlanOptions = option(PlanOptions, "the machine of the run")


def run_plan(words: Sequence[str]) -> str:
    """Plan a command line's run; mistakes end the process with code 2."""
    from verl_ext.commands.train import split  # imports the readers of data

    if "=" not in words[0] and not words[0].startswith("-") and not is_run_file(words[0]):
        words = [f"model.path={quoted(words[0])}", *words[1:]]
    words = expanded(words)
    own = words_of(words, [PlanOptions.prefix])
    options = read_options(PlanCommand, own).plan
    parts = split([word for word in words if word not in own], needs_torch=True, trains=False)
    if parts.options.nproc and not words_of(own, ["plan.world_size"]):
        options = replace(options, world_size=parts.options.nproc)
    from verl_ext.trainer.distributed import process_group
    from verl_ext.trainer.start import compose_and_run  # before a tokenizer is loaded without torch

    for texts in parts.texts.values():
        texts.tokenize()
    with process_group():
        compose_and_run(parts.trainer_words, lambda composed: plan(composed, options))
    return ""


def plan(composed: Any, options: PlanOptions) -> dict[str, Any]:
    """Print a composed run's plan, write it, and return its facts."""
    from verl_ext.checkpoint.layout import saved_folders
    from verl_ext.tools.plan.lines import plan_lines
    from verl_ext.tools.plan.machine import planned_run
    from verl_ext.tools.plan.report import memory_facts
    from verl_ext.trainer.distributed import print_on_rank0, user_errors_end_the_run
    from verl_ext.trainer.report import write_report
    from verl_ext.trainer.report_lines import report_lines

    run, options = planned_run(composed, options)
    report: dict[str, Any] = run.data_report()
    print_on_rank0(report_lines(report))
    printed = 0
    for facts in memory_facts(run, options):
        lines = list(plan_lines(facts))
        print_on_rank0(lines[printed:])
        report["memory"], printed = facts, len(lines)
    with user_errors_end_the_run():
        if saved_folders(run.output):
            print_on_rank0([f"{run.output} holds a run: its data_report.json is left as it is"])
        elif not run.config.trainer.eval_only:
            write_report(report, run.output)
    return report


main = command(
    "plan",
    PlanCommand,
    run_plan,
    example="FILE.yaml|MODEL data.train_dir=DIR plan.gpu=H100-80G plan.world_size=8 [key=value …]",
    read=list,
)
