"""Cells of a table that have a process, or the ranks of a process group, of their own.

A cell is a function of a module, called with picklable arguments. It returns its figures, or yields them in parts: what
it yielded before it failed is kept.
"""

import json
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
) -> Figures:
    """Return the figures of a cell, with `failed`: why, if it failed.

    Args:
        function: the cell, or "module:name" if only its process can import the module.
        arguments: its arguments.
        environment: variables of the process beside this one's.
        group: whether it runs as the only rank of a process group.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = _start(function, arguments, environment or {}, group, errors)
        lines, code = process.communicate()[0].splitlines(), process.returncode
        errors.seek(0)
        said = errors.read()
    found: Figures = {}
    for line in lines:
        found |= json.loads(line)
    if code:
        reason = (said.strip().splitlines() or [f"exit code {code}"])[-1]
        found["failed"] = "out of memory" if "out of memory" in said else reason[:160]
    return found


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, copies: int = 1, **environment: str
) -> list[list[Figures]]:
    """Return the figures of every rank, for each of `copies` process groups that run side by side.

    Raises:
        RuntimeError: If a rank fails; its error stands on stderr.
    """
    processes = []
    for _ in range(copies):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        for rank in range(ranks):
            own = {**shared, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            processes.append(_start(function, arguments, own, True, None))
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {function.__name__} failed; its error stands above")
    figures = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return [figures[first : first + ranks] for first in range(0, len(figures), ranks)]


def _start(function: Any, arguments: Any, environment: Mapping[str, str], group: bool, errors: Any) -> Any:
    command = [sys.executable, "-m", "benchmarks.cells", *["group"] * group]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((function, arguments)))
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def main() -> None:
    """Call the function that stdin names, and print its figures as lines of JSON, alone on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
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
