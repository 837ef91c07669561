"""Cells of a table, each measured in a process of its own, so that its peak memory is its own.

A script's ``measure(*cell)`` returns a cell's figures. Its plain command line calls :func:`in_own_process` for each
cell, which starts the same script with ``--cell``.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def parsed(parser: argparse.ArgumentParser, measure: Callable[..., dict[str, Any]]) -> argparse.Namespace:
    """Parse the command line, with ``--output``; a cell's process prints its figures here and exits."""
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(*json.loads(arguments.cell))))
        raise SystemExit
    return arguments


def in_own_process(script: str, *cell: Any) -> dict[str, Any]:
    """Return the figures of a cell of the script, or ``{"failed": why}``."""
    done = subprocess.run([sys.executable, script, "--cell", json.dumps(cell)], capture_output=True, text=True)
    if done.returncode:
        return {"failed": " ".join(done.stderr.strip().splitlines()[-1:])}
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Measure the block's processor seconds and the MiB by which it raises this process's peak."""
    figures: dict[str, float] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    yield figures
    figures["seconds"] = time.process_time() - began
    figures["peak_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
