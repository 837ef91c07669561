"""Hold the line budgets of pyproject.toml: `python -m tests.line_budgets`, part of `make lint`.

A room is a package of verl_ext, the modules beside the packages ("modules"), a tool, `tests` or `benchmarks`. A room
has a target, and the present size while that is larger. It may not grow above the larger of the two, and a present size
that could be lower is lowered by `--lower`. A feature that needs more raises its room's number in a commit of its own,
which states the benefit of the lines.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # mypy requires it there

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = "verl_ext"


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

    budgets: `module`, the most lines of a module; `rooms`, {room: {target, present}}, where `present` is left out once
    the target is reached.
    """
    rooms, modules = sizes(project)
    for room, count in sorted(rooms.items()):
        key = f"tool.line-budgets.rooms.{room}"
        if (budget := budgets["rooms"].get(room)) is None:
            yield f"{key} must state a target; the room has {count:,} lines"
            continue
        present = budget.get("present", 0)
        if count > (most := max(budget["target"], present)):
            yield f"{key} allows {most:,} lines; the room has {count:,}"
        elif present > max(count, budget["target"]) or (present and present <= budget["target"]):
            yield f"{key}.present can be lowered from {present:,}; the room has {count:,} lines (--lower does it)"
    for room in sorted(set(budgets["rooms"]) - set(rooms)):
        yield f"tool.line-budgets.rooms.{room} names no room"
    for path, count in sorted(modules.items()):
        if count > budgets["module"]:
            yield f"{PACKAGE}/{path} may have {budgets['module']} lines; it has {count}"


def lowered(text: str, rooms: Mapping[str, int]) -> str:
    """Return pyproject.toml's text with every present size that can be lower."""

    def line(found: re.Match[str]) -> str:
        room, target, present = found[2].strip('"'), int(found[3]), int(found[4])
        count = min(rooms.get(room, 0), present)
        return f"{found[1]}target = {target}" + (f", present = {count} }}" if count > target else " }")

    return re.sub(r'(?m)^(("?[\w/]+"?) = \{ )target = (\d+), present = (\d+) \}', line, text)


def main() -> int:
    """Print the problems of this project, and return the exit code."""
    file = PROJECT / "pyproject.toml"
    if "--lower" in sys.argv[1:]:
        file.write_text(lowered(file.read_text(encoding="utf-8"), sizes(PROJECT)[0]), encoding="utf-8")
    budgets = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["line-budgets"]
    found = list(problems(PROJECT, budgets))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
