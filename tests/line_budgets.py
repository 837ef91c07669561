"""Hold the line budgets that pyproject.toml states: `python -m tests.line_budgets`, part of `make lint`.

A room is a package of verl_ext, or the modules beside the packages ("modules"); each tool is a room of its own. A
change that needs more than its room's budget raises the number in a commit of its own, which states the benefit of the
lines.
"""

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


def problems(package: Path, budgets: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each room or module of a package that exceeds its budget.

    Args:
        package: the folder of the package.
        budgets: `module`, the most lines of a module; `rooms`, the most lines of each room; `long_modules`, the most
            lines of modules that are still longer than `module`.
    """
    lines = {path.relative_to(package): len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    rooms: Counter[str] = Counter()
    for path, count in lines.items():
        rooms["/".join(path.parts[: 2 if path.parts[0] == "tools" else 1][: len(path.parts) - 1]) or "modules"] += count
    for room, count in sorted(rooms.items()):
        budget = budgets["rooms"].get(room)
        if budget is None:
            yield f"tool.line-budgets.rooms must name every room; {room} with {count:,} lines is missing"
        elif count > budget:
            yield f"tool.line-budgets.rooms.{room} allows {budget:,} lines; the room has {count:,}"
    for room in sorted(set(budgets["rooms"]) - set(rooms)):
        yield f"tool.line-budgets.rooms.{room} names no room of {package.name}"
    for path, count in sorted(lines.items()):
        budget = budgets["long_modules"].get(str(path), budgets["module"])
        if count > budget:
            yield f"{package.name}/{path} may have {budget} lines; it has {count}"
    for name, budget in budgets["long_modules"].items():
        if lines.get(Path(name), 0) <= budgets["module"]:
            yield f"tool.line-budgets.long_modules.{name}: no longer needed (budget {budget}); remove the entry"


def main() -> int:
    """Print the problems of this project, and return the exit code."""
    budgets = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["line-budgets"]
    found = list(problems(PROJECT / "verl_ext", budgets))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
