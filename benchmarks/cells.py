"""Cells of a table in their own process, or on ranks.

A cell is a function of a module, called with picklable arguments. It returns its figures, or yields them in parts: what
it yielded before it failed is kept.
"""

import json
import logging
import os
import pickle
import pkgutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from inspect import isgenerator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Figures = dict[str, Any]


def in_own_process(
    function: Callable[..., Any] | str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    group: bool = False,
    packages: str | None = None,
) -> Figures:
    """Return the figures of a cell, with `failed`: why, if it failed.

    function: the cell, or "module:name" if only its process can import the module. environment: variables beside this
    process's. group: whether it runs as the only rank of a process group. packages: a folder of packages that only its
    process can import.
    """
    environment = {**(environment or {})}
    if packages:
        paths = str(Path(packages).absolute()), os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryFile("w+") as errors:
        process = _start(function, arguments, environment, group, errors)
        found = _figures(process)
        errors.seek(0)
        text = errors.read().strip()
    if process.returncode:
        reason = (text.splitlines() or [f"exit code {process.returncode}"])[-1]
        found["failed"] = "out of memory" if "out of memory" in text else reason[:160]
    return found


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, threads: int = 1, **environment: str
) -> list[Figures]:
    """Return the figures of every rank of a process group.

    Raises RuntimeError if a rank fails; its error stands on stderr.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}
    places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
    processes = [_start(function, arguments, environment | place, True, None) for place in places]
    found = [_figures(process) for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {function.__name__} failed; its error stands above")
    return found


def _start(function: Any, arguments: Any, environment: Mapping[str, str], group: bool, errors: Any) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cells", *["group"] * group],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors},
        **{"cwd": ROOT, "env": {**os.environ, **environment}},
    )
    process.stdin.write(pickle.dumps((function, arguments)))
    process.stdin.close()
    return process


def _figures(process: Any) -> Figures:
    with process:
        parts = [json.loads(line) or {} for line in process.stdout]
    return {name: figure for part in parts for name, figure in part.items()}


def main() -> None:
    """Call the function that stdin names; print its figures, alone on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever else prints, as verl does while it builds an engine
    logging.disable(logging.WARNING)
    if "group" in sys.argv:
        from verl_ext.trainer.distributed import process_group
    with process_group() if "group" in sys.argv else nullcontext():
        function, arguments = pickle.load(sys.stdin.buffer)
        function = pkgutil.resolve_name(function) if isinstance(function, str) else function
        result = function(*arguments)
        for part in result if isgenerator(result) else [result]:
            print(json.dumps(part, default=float), file=answers, flush=True)


if __name__ == "__main__":
    main()
