"""The frame of a benchmark: options, tables, turns of contestants, figures.

A benchmark is a module of this package:

    class Options(Sizes, heads=HEADS):             its sizes, as key=value on the command line
        heads: list[str] = option([…], "…")        of the names in HEADS
    QUICK = ["tokens=[64]"]                        its smallest shape

    @table("tokens {tokens:,} | seconds {seconds:.2f}")
    def heads(options, folder):                    one table; a benchmark's tables share the temporary folder
        yield {"tokens": 1024, "seconds": 0.5}     one row

A column is a heading and the format of a row's figures. A row that lacks a figure shows –, or why it failed.
"""

import importlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from verl_ext import options
from verl_ext.commands.command_line import help_text, read_options
from verl_ext.options import Options, UsageError, choice_problem, spell

NAMES = (
    *("packing", "loading", "training", "head", "activations", "memory", "scaling", "checkpointing", "leaks"),
    *("titans", "tokenizing", "index", "sharing", "preferences", "gpu"),
)
VERSIONS = ("torch", "transformers", "datasets", "numpy", "verl", "flash-attn", "liger-kernel", "trl", "megatron-core")

Row = dict[str, Any]


def option(default: Any, meaning: str, **checks: Any) -> Any:
    """Return an option's field; an unchecked whole number is at least 1."""
    is_size = isinstance(default, int) and not checks
    return options.option(default, meaning, **({"least": 1} if is_size else checks))


class Sizes(Options):
    """The base class of a benchmark's options, all frozen dataclasses.

    Keywords of a subclass give the names that a list may have: `heads=HEADS`.
    """

    _names: ClassVar[Mapping[str, Iterable[str]]] = {}

    def __init_subclass__(cls, **names: Iterable[str]) -> None:
        cls._names = names
        dataclass(frozen=True)(cls)

    def problems(self) -> Iterable[str | None]:
        for key, names in self._names.items():
            yield from (choice_problem(key, value, names) for value in getattr(self, key))


class Turns(list[float]):
    """A figure of each turn, printed with its range: 2.33 [2.31, 2.38].

    A ratio is taken turn by turn, so that a drift of the machine cancels out.
    """

    @property
    def median(self) -> float:
        return statistics.median(self)

    def __truediv__(self, other: Sequence[float]) -> "Turns":
        return Turns(mine / theirs for mine, theirs in zip(self, other, strict=True))

    def __format__(self, form: str) -> str:
        median = format(self.median, form)
        return median if len(self) == 1 else f"{median} [{min(self):{form}}, {max(self):{form}}]"


def take_turns(contestants: Mapping[str, Callable[[], Any]], turns: int, warm_up: int = 0) -> dict[str, list[Any]]:
    """Call every contestant once a turn; return the results by name.

    The contestant that begins rotates, so that a drift of the machine favours nobody. The results of the first
    `warm_up` turns are dropped.
    """
    names, results = list(contestants), {name: [] for name in contestants}
    with tqdm(total=(warm_up + turns) * len(names), unit="turn", file=sys.stderr) as bar:
        for turn in range(warm_up + turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                bar.set_postfix_str(name)
                result = contestants[name]()
                if turn >= warm_up:
                    results[name].append(result)
                bar.update()
    return results


@dataclass(frozen=True)
class Table:
    """A table of a benchmark; `rows(options, folder)` measures it.

    columns: headings, each with the format of a row's figures, with " | " between them. on_request: made only if
    --table names it. may_fail: a row may fail for other reasons than a missing package.
    """

    rows: Callable[[Any, Path], Iterable[Row]]
    columns: str
    on_request: bool = False
    may_fail: bool = False

    def text(self, rows: Sequence[Row]) -> str:
        parts = [column.partition("{") for column in self.columns.split(" | ")]
        lines = [[head.strip() for head, _, _ in parts], ["---"] * len(parts)]
        for row in rows:
            line = [_cell(brace + form, row) for _, brace, form in parts]
            if "failed" in row:  # the reason stands in the last empty column
                line[max((at for at, cell in enumerate(line) if cell == "–"), default=-1)] = row["failed"]
            lines.append(line)
        title = f"## {self.rows.__name__}: {(self.rows.__doc__ or '').splitlines()[0]}"
        return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)])

    def failures(self, rows: Sequence[Row]) -> list[str]:
        reasons = [row["failed"] for row in rows if "failed" in row and not self.may_fail]
        return [reason for reason in reasons if "No module named" not in reason]


def _cell(form: str, row: Row) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):  # a figure that is absent, or None
        return "–"


def table(columns: str, **more: Any) -> Callable[[Callable[..., Iterable[Row]]], Table]:
    return lambda rows: Table(rows, columns, **more)


def equal(rows: Sequence[Row], figures: Iterable[str], tolerance: float) -> None:
    """Raise RuntimeError if a figure, or a turn's, differs between rows.

    tolerance: the difference that is allowed, relative to the first row.
    """
    for figure in figures:
        values = np.array([row[figure] for row in rows if figure in row])
        if len(values) and not (np.ptp(values, axis=0) <= tolerance * np.abs(values[0])).all():  # also if one is NaN
            raise RuntimeError(f"the contestants differ in {figure}: {values.tolist()}")


def relative(rows: Sequence[Row], *figures: str) -> Iterable[Row]:
    """Yield rows with `× figure` over the first row's, where measured."""
    for row in rows:
        known = [name for name in figures if name in row and rows[0].get(name)]
        yield row | {f"× {name}": row[name] / rows[0][name] for name in known}


def tables_of(module: ModuleType) -> dict[str, Table]:
    return {name: each for name, each in vars(module).items() if isinstance(each, Table)}


def run(name: str, words: Sequence[str], tables: Sequence[str] = (), quick: bool = False) -> dict[str, Any]:
    """Measure and print the tables of a benchmark; return every figure.

    Raises UsageError if a table or an option does not exist, or a value is not allowed.
    """
    module = importlib.import_module(f"benchmarks.{name}")
    known = tables_of(module)
    if unknown := set(tables) - set(known):
        raise UsageError(f"--table must be of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    sizes = read_options(module.Options, [*(module.QUICK if quick else ()), *words])
    machine = describe_machine()
    found: dict[str, Any] = {"machine": machine, "options": vars(sizes), "failures": []}
    texts = [f"# {name}", ", ".join(f"{key} {value}" for key, value in machine.items())]
    print(*texts, sep="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for title, each in known.items():
            if title in tables or not (tables or each.on_request):
                rows = found[title] = list(each.rows(sizes, Path(folder)))
                found["failures"] += each.failures(rows)
                texts.append(each.text(rows))
                print(f"\n{texts[-1]}", flush=True)
    return {**found, "text": "\n\n".join(texts)}


def words_of(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides as on the trainer's command line."""
    return tuple(f"{key}={spell(value)}" for key, value in overrides.items())


def help_of(name: str) -> str:
    """Return a benchmark's method, with its sections of README.md, and its options."""
    module = importlib.import_module(f"benchmarks.{name}")
    options = help_text("", module.Options, "").rpartition("\n\n")[2]
    _, _, *sections = (Path(__file__).parent / "README.md").read_text(encoding="utf-8").split("\n## ")
    found = "\n".join(f"{section}\n" for section in sections if f"python -m benchmarks {name}" in section)
    return f"{module.__doc__}\n{found}tables: {', '.join(tables_of(module))}\n\n{options}"


def describe_machine() -> dict[str, Any]:
    """Return processor or GPU, its load, and the versions of packages."""
    found: dict[str, Any] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    found["load"] = f"{os.getloadavg()[0]:.2f}"
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
        found |= {"GPU": torch.cuda.get_device_name(), "driver": driver[0] if driver else "unknown", **allocator()}
    for package in VERSIONS:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def allocator() -> dict[str, str]:
    """Return the GPU allocator's setting: the user's, else a run's default."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    own = {name: os.environ[name] for name in names if name in os.environ}
    return own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
