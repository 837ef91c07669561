"""The plan of a run, `trainer.plan_only=true`: its memory and time, printed and written beside its data report."""

from typing import Any

from verl_ext.checkpoint.layout import saved_folders
from verl_ext.tools.plan.report import memory_facts
from verl_ext.tools.plan_lines import plan_lines
from verl_ext.trainer.distributed import print_on_rank0, user_errors_end_the_run
from verl_ext.trainer.report import write_report
from verl_ext.trainer.setup import Run


def plan(run: Run, report: dict[str, Any]) -> None:
    """Predict a run's memory and time on rank 0, and write them with the data report."""
    printed = 0
    for facts in memory_facts(run) if report else ():
        lines = list(plan_lines(facts))
        print_on_rank0(lines[printed:])
        report["memory"], printed = facts, len(lines)
    with user_errors_end_the_run():
        if saved_folders(run.output):
            print_on_rank0([f"{run.output} holds a run: its data_report.json is left as it is"])
        elif report and not run.config.trainer.eval_only:
            write_report(report, run.output)
