"""Measure: `python -m benchmarks [NAME …] [--quick] [--table NAME …] [--output FILE] [key=value …]`.

Without a name every benchmark of README.md runs, each in a process of its own. `--quick` takes the smallest shapes, to
see that all of them run; its figures mean nothing. `python -m benchmarks NAME --help` explains one, with its options.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from verl_ext.options import UsageError, choice_problem


def main() -> int:
    """Run the benchmarks that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, add_help=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="*", metavar="NAME", help=", ".join((*harness.NAMES, *harness.APART)))
    parser.add_argument("--quick", action="store_true", help="smallest shapes")
    parser.add_argument("--table", action="append", default=[], help="only this table; may be repeated")
    parser.add_argument("--output", type=Path, help="every figure as JSON, or the tables if it ends in .md")
    parser.add_argument("--help", "-h", action="store_true", help="with a name, what it measures and its options")
    given = parser.parse_intermixed_args()
    words = [word for word in given.words if "=" in word]
    names = [word for word in given.words if "=" not in word]
    try:
        for name in names:
            if problem := choice_problem("NAME", name, (*harness.NAMES, *harness.APART)):
                raise UsageError(problem)
        if given.help:
            print(harness.help_of(names[0]) if names else parser.format_help())
            return 0
        if len(names) == 1:
            found = {names[0]: harness.run(names[0], words, given.table, given.quick)}
        elif words or given.table:
            raise UsageError(f"options and --table need one NAME; got {len(names)}")
        else:
            found = each_alone(names or all_names(given.quick), given.quick)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.output:
        texts = [of_one["text"] for of_one in found.values()]
        command = f"    python -m benchmarks {shlex.join(sys.argv[1:])}"
        as_text = "\n\n".join([command, *texts]) + "\n"
        as_json = json.dumps(found, indent=1, default=str) + "\n"
        given.output.write_text(as_text if given.output.suffix == ".md" else as_json, encoding="utf-8")
    failures = [f"{name}: {reason}" for name, of_one in found.items() for reason in of_one["failures"]]
    print(*(f"error: {failure}" for failure in failures), sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


def all_names(quick: bool) -> tuple[str, ...]:
    """Return the benchmarks that a machine without a GPU can run; on smallest shapes that is also `gpu`."""
    return (*harness.NAMES, "gpu") if quick else harness.NAMES


def each_alone(names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Run each benchmark in a process of its own, so that no import or setting of one reaches another.

    On smallest shapes two run at a time, as their figures mean nothing.
    """
    with ThreadPoolExecutor(2 if quick else 1) as pool:
        return dict(zip(names, pool.map(partial(alone, quick=quick), names), strict=True))


def alone(name: str, quick: bool) -> dict[str, Any]:
    """Run a benchmark, print its tables and return its figures."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks", name, "--output", file.name, *["--quick"] * quick]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        written = file.read()
    print(done.stdout, flush=True)
    return json.loads(written)[name] if written else {"text": "", "failures": [f"ended with {done.returncode}"]}


if __name__ == "__main__":
    if "index" not in sys.argv:  # which compares megatron-core; verl imports it for seconds, with pages of warnings
        sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    sys.exit(main())
