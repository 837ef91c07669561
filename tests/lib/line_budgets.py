"""Hold the line budgets of pyproject.toml: `python -m tests.lib.line_budgets`, part of `make lint`.

A room is a package of verl_ext, the modules beside the packages ("modules"), a tool, `tests` or `benchmarks`. A room
has a ceiling. One that was larger when it got the ceiling also has its present size, which may only fall until the
ceiling is reached: `--lower` lowers it, and a number above that of an earlier commit is a problem. Only a feature that
was agreed on raises a ceiling, by the lines that it needs.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.lib.project import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # mypy requires it there

PACKAGE = "verl_ext"
COMMITS = 40  # earlier versions of pyproject.toml with which present sizes are compared


def sizes(project: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the lines of each room and of each module of the package."""
    modules: dict[str, int] = {}
    rooms: Counter[str] = Counter()
    for folder in (PACKAGE, "tests", "benchmarks"):
        for path in sorted((project / folder).rglob("*.py")):
            *packages, name = path.relative_to(project / folder).parts
            lines = len(path.read_text(encoding="utf-8").splitlines())
            room = folder
            if folder == PACKAGE:
                modules["/".join((*packages, name))] = lines
                room = "/".join(packages[: 2 if packages[:1] == ["tools"] else 1]) or "modules"
            rooms[room] += lines
    return dict(rooms), modules


def problems(project: Path, budgets: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each room or module that exceeds its budget, and for each budget that is too large.

    budgets: `module`, the most lines of a module; `rooms`, {room: {ceiling, present}}, where `present` is left out once
    the ceiling is reached.
    """
    rooms, modules = sizes(project)
    for room, count in sorted(rooms.items()):
        key = f"tool.line-budgets.rooms.{room}"
        if (budget := budgets["rooms"].get(room)) is None:
            yield f"{key} must state a ceiling; the room has {count:,} lines"
            continue
        present = budget.get("present", 0)
        if count > (most := max(budget["ceiling"], present)):
            yield f"{key} allows {most:,} lines; the room has {count:,}"
        elif present > max(count, budget["ceiling"]) or (present and present <= budget["ceiling"]):
            yield f"{key}.present can be lowered from {present:,}; the room has {count:,} lines (--lower does it)"
    for room in sorted(set(budgets["rooms"]) - set(rooms)):
        yield f"tool.line-budgets.rooms.{room} names no room"
    for path, count in sorted(modules.items()):
        if count > budgets["module"]:
            yield f"{PACKAGE}/{path} may have {budgets['module']} lines; it has {count}"


def raised(budgets: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each present size above an earlier one that stood under the same ceiling."""
    for room, budget in budgets["rooms"].items():
        before = earlier["rooms"].get(room, {})
        if "present" in budget and before.get("ceiling") == budget["ceiling"]:
            least = before.get("present", before["ceiling"])
            if budget["present"] > least:
                yield f"tool.line-budgets.rooms.{room}.present may only fall from {least:,}; got {budget['present']:,}"


def earlier_budgets(project: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the budgets of earlier commits; none where there is no repository of git."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=project, capture_output=True, text=True).stdout

    for commit in git("log", f"-{COMMITS}", "--format=%H", "--", "pyproject.toml").split():
        table = tomllib.loads(git("show", f"{commit}:./pyproject.toml"))["tool"].get("line-budgets")
        if table is not None:
            yield table


def lowered(text: str, rooms: Mapping[str, int]) -> str:
    """Return pyproject.toml's text with every present size that can be lower."""

    def line(found: re.Match[str]) -> str:
        room, ceiling, present = found[2].strip('"'), int(found[3]), int(found[4])
        count = min(rooms.get(room, 0), present)
        return f"{found[1]}ceiling = {ceiling}" + (f", present = {count} }}" if count > ceiling else " }")

    return re.sub(r'(?m)^(("?[\w/]+"?) = \{ )ceiling = (\d+), present = (\d+) \}', line, text)


def main() -> int:
    """Print the problems of this project, and return the exit code."""
    file = ROOT / "pyproject.toml"
    if "--lower" in sys.argv[1:]:
        file.write_text(lowered(file.read_text(encoding="utf-8"), sizes(ROOT)[0]), encoding="utf-8")
    budgets = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["line-budgets"]
    found = list(problems(ROOT, budgets))
    found += sorted({line for earlier in earlier_budgets(ROOT) for line in raised(budgets, earlier)})
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
