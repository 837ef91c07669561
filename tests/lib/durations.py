"""Keep how long each test file takes: `python -m tests.lib.durations REPORT.xml` writes tests/DURATIONS.md.

REPORT.xml is pytest's of a whole run on a quiet machine: `make durations`. Without a report, as in `make lint`, it
holds the table: a file whose quick tests take more than LIMIT seconds is marked slow, or says in KEPT why it is not.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.lib.project import ROOT

TESTS = ROOT / "tests"
TABLE = TESTS / "DURATIONS.md"
LIMIT = 10.0
KEPT = {"losses/test_parity.py": "the invariant of the project, which every change runs"}
_ROW = re.compile(r"\| (?P<file>\S+\.py) \| (?P<all>[\d.]+) \| (?P<quick>[\d.]+) \|")
_SLOW = re.compile(r"^pytestmark = .*\bslow\b", re.MULTILINE)


def measured(report: str) -> dict[str, tuple[float, float]]:
    """Return {test file: (seconds of its tests, seconds of those without the slow mark)} of a report's text."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for case in ElementTree.fromstring(report).iter("testcase"):
        module = case.attrib["classname"].rpartition("tests.")[2]
        is_slow = any(each.attrib["name"] == "slow" for each in case.iter("property"))  # by tests/conftest.py
        for column in (0,) if is_slow else (0, 1):
            seconds[f"{module.replace('.', '/')}.py"][column] += float(case.attrib["time"])
    return {name: (whole, quick) for name, (whole, quick) in seconds.items()}


def table(seconds: Mapping[str, tuple[float, float]]) -> str:
    """Return the page: the longest files first, and the sum."""
    rows = sorted(seconds.items(), key=lambda row: (-row[1][0], row[0]))
    whole, quick = (sum(columns) for columns in zip(*seconds.values(), strict=True))
    return "\n".join(
        [
            "# Seconds of test files",
            "",
            "Made by `make durations` on a quiet machine, in two processes. `make lint` holds the last column at",
            f"{LIMIT:g} seconds a file (tests/lib/durations.py).",
            "",
            "| file | seconds | of quick tests |",
            "|---|---|---|",
            *(f"| {name} | {both[0]:.1f} | {both[1]:.1f} |" for name, both in rows),
            f"| all | {whole:.0f} | {quick:.0f} |",
            "",
        ]
    )


def problems(page: str, folder: Path) -> Iterator[str]:
    """Yield a line for each file of the table that is gone, or takes too long for a quick one."""
    for row in _ROW.finditer(page):
        file, quick = folder / row["file"], float(row["quick"])
        if not file.is_file():
            yield f"tests/DURATIONS.md names {row['file']}, which does not exist: remove the row"
        elif quick > LIMIT and row["file"] not in KEPT and not _SLOW.search(file.read_text()):
            yield f"tests/{row['file']} must be marked slow or take at most {LIMIT:g} seconds; it takes {quick:g}"


def main(arguments: list[str]) -> int:
    """Write the table from a report, or print the problems of the one that is there."""
    if arguments:
        TABLE.write_text(table(measured(Path(arguments[0]).read_text())))
    found = list(problems(TABLE.read_text(), TESTS)) if TABLE.exists() else []
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
