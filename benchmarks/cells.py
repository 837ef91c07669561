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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    ended = _run(function, arguments, environment, group, subprocess.PIPE)
    found = _figures(ended)
    if ended.returncode:
        text = ended.stderr.decode().strip()
        reason = (text.splitlines() or [f"exit code {ended.returncode}"])[-1]
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
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        ended = list(pool.map(lambda place: _run(function, arguments, environment | place, True), places))
    if any(rank.returncode for rank in ended):
        raise RuntimeError(f"a rank of {function.__name__} failed; its error stands above")
    return list(map(_figures, ended))


def _run(function: Any, arguments: Any, environment: Mapping[str, str], group: bool, errors: Any = None) -> Any:
    command = [sys.executable, "-m", "benchmarks.cells", *["group"] * group]
    place = {"cwd": ROOT, "env": {**os.environ, **environment}}
    return subprocess.run(
        command, input=pickle.dumps((function, arguments)), stdout=subprocess.PIPE, stderr=errors, **place
    )


def _figures(ended: Any) -> Figures:
    parts = [json.loads(line) or {} for line in ended.stdout.splitlines()]
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
