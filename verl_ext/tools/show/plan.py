"""`verl-ext show plan`: the numbers of a plan again, from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from verl_ext.checkpoint.curves import read_facts
from verl_ext.checkpoint.layout import REPORT
from verl_ext.files import write_json
from verl_ext.options import DataError, Options, UsageError, one_line, option
from verl_ext.tools.plan_lines import plan_lines
from verl_ext.tools.show.runs import is_run
from verl_ext.tools.show.terminal import terminal
from verl_ext.trainer.report_lines import report_lines


@dataclass(frozen=True)
class ShowPlanOptions(Options):
    """Show PLAN, a plan's folder: data, packs, steps, memory and time."""

    paths: list[str] = option([], "PLAN: a list of folders; words without `=` are paths too", required=True)
    json: str | None = option(None, "file for the numbers as JSON")


def show_plans(options: ShowPlanOptions) -> str:
    """Show the plans on the terminal."""
    reports = {path: read_plan(path) for path in options.paths}
    console = terminal()
    for path, report in reports.items():
        try:
            lines = [*report_lines(report), *plan_lines(report.get("memory", {}))]
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} must hold a plan of this version; its report lacks {error}") from error
        console.print(Text("\n".join([one_line(f"plan {path}"), *lines])), soft_wrap=True)
    if options.json:
        write_json(Path(options.json), reports)
    return ""


def is_plan(path: str) -> bool:
    """Return whether a folder has a report and no run."""
    return (Path(path) / REPORT).is_file() and not is_run(path)


def read_plan(path: str) -> dict[str, Any]:
    """Return a plan's report; raise UsageError without one, DataError if malformed."""
    if not is_plan(path):
        raise UsageError(f"{path} must be the folder of a plan, as the other paths are")
    report = read_facts(Path(path) / REPORT)
    if not report.keys() & {"train", "val"}:
        raise DataError(f"{Path(path) / REPORT} must be the report of a plan, a JSON object; got another file")
    return report
