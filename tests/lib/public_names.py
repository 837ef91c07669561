"""Hold that public classes and functions of verl_ext have names of their own: `python -m tests.lib.public_names`."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.lib.project import ROOT

PACKAGE = ROOT / "verl_ext"
ENTRIES = ("main",)  # of programs and commands


def repeated(package: Path) -> Iterator[str]:
    """Yield a line for each public name that modules of a package define more than once."""
    places = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                places[node.name].append(path.relative_to(package).as_posix())
    for name, files in sorted(places.items()):
        if len(files) > 1 and name not in ENTRIES:
            yield f"{name} must be defined once; got {', '.join(files)}"


def main() -> int:
    """Print the lines, and return the exit code."""
    found = list(repeated(PACKAGE))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
