"""Measure: `python -m benchmarks [NAME …] [key=value …]`.

Without a name every benchmark of README.md runs, each in a process of its own; `gpu` only by its name, or with
`--quick`. `--quick` takes the smallest shapes, to see that all of them run; its figures mean nothing.
`python -m benchmarks NAME --help` explains one, with its options.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from verl_ext.options import UsageError, choice_problem


def main() -> int:
    """Run the benchmarks that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, add_help=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="*", metavar="NAME", help=", ".join(harness.NAMES))
    parser.add_argument("--quick", action="store_true", help="smallest shapes")
    parser.add_argument("--table", action="append", default=[], help="only this table; may be repeated")
    parser.add_argument("--output", type=Path, help="every figure as JSON, or the tables if it ends in .md")
    parser.add_argument("--help", "-h", action="store_true", help="with a name, what it measures and its options")
    arguments = parser.parse_intermixed_args()
    words = [word for word in arguments.words if "=" in word]
    names = [word for word in arguments.words if "=" not in word]
    try:
        for name in names:
            if problem := choice_problem("NAME", name, harness.NAMES):
                raise UsageError(problem)
        if arguments.help:
            print(harness.help_of(names[0]) if names else parser.format_help())
            return 0
        if len(names) == 1:
            found = {names[0]: harness.run(names[0], words, arguments.table, arguments.quick)}
        elif words or arguments.table:
            raise UsageError(f"options and --table need one NAME; got {len(names)}")
        else:
            everything = harness.NAMES if arguments.quick else harness.NAMES[:-1]  # all but gpu
            # Figures of smallest shapes mean nothing, so two run at a time.
            with ThreadPoolExecutor(2 if arguments.quick else 1) as pool:
                results = pool.map(partial(in_its_process, quick=arguments.quick), names or everything)
                found = dict(zip(names or everything, results, strict=True))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.output:
        command = f"    python -m benchmarks {shlex.join(sys.argv[1:])}"
        as_text = "\n\n".join([command, *(of_one["text"] for of_one in found.values())]) + "\n"
        as_json = json.dumps(found, indent=1, default=str) + "\n"
        arguments.output.write_text(as_text if arguments.output.suffix == ".md" else as_json, encoding="utf-8")
    failures = [f"error: {name}: {reason}\n" for name, of_one in found.items() for reason in of_one["failures"]]
    print(*failures, sep="", end="", file=sys.stderr)
    return 1 if failures else 0


def in_its_process(name: str, quick: bool) -> dict[str, Any]:
    """Run a benchmark apart from others' imports and settings."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks", name, "--output", file.name, *["--quick"] * quick]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        written = file.read()
    print(done.stdout, flush=True)
    return json.loads(written)[name] if written else {"text": "", "failures": [f"ended with {done.returncode}"]}


if __name__ == "__main__":
    os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")  # in all processes
    if "index" not in sys.argv:  # which compares megatron-core; verl imports it for seconds, with pages of warnings
        sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    sys.exit(main())
