"""The sentences of pages and docstrings: how long they are, what stands in table cells, and words that stumble.

`python docs/prose.py [FILE…]` prints what a page has too much of; without files all pages and docstrings.
`--table` prints the sizes of the pages. (vale's wheel fetches the program from the network at first use.)
"""

import ast
import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SENTENCE, CELL = 16, 12  # words: the mean of a page, and the most of a cell
GUIDE, HEADING = 900, 125  # words: the most of a guide, which is one task, and the mean below each of its headings
# What is said otherwise, and how. Backquoted words, code and titles are not read.
SUBSTITUTIONS = {
    r"\bgone on with\b": "continued",
    r"\banew\b": "again",
    r"\b(given|packed|counted|lie|lies) apart\b": "separately",
    r"\bdearest\b": "most expensive, slowest",
    r"\blikeliest\b": "most likely",
    r"\bkin\b": "and similar",
    r"(?<!there )\b(is|are) no (?!longer|more|less)(?:\w+ ){0,2}\w+": "is not a …",
    r"\b(those|that) of (those|that)\b": "name the thing",
    r"\bof which (those|that) of\b": "name the thing",
    r"\bbut for\b": "except",
    r"\bby hundred\b": "by the hundred",
}
# What no person wrote: tables of model types with the messages of their classes, and one of verl's commands.
MADE = ("docs/reference/models.md", "docs/reference/newer_models.md")


@dataclass(frozen=True)
class Page:
    """What a page of Markdown is made of; a guide is a page of docs/guides/."""

    text: str
    is_guide: bool = False

    @property
    def without_code(self) -> str:
        text = re.sub(r"^( *)(`{3,})[^\n]*\n.*?^ *\2 *$", "", self.text, flags=re.DOTALL | re.MULTILINE)
        return re.sub(r"<!--.*?-->|^:::.*$|^ {4}options:.*$", "", text, flags=re.DOTALL | re.MULTILINE)

    @property
    def code_blocks(self) -> int:
        return len(re.findall(r"^ *`{3,}", self.text, re.MULTILINE)) // 2

    @property
    def headings(self) -> int:
        return len(re.findall(r"^#+ ", self.without_code, re.MULTILINE))

    @property
    def words(self) -> int:
        return len(plain(self.without_code).split())

    @property
    def cells(self) -> list[str]:
        rows = [line for line in self.without_code.splitlines() if line.lstrip().startswith("|")]
        return [plain(cell).strip() for row in rows for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]

    @property
    def sentences(self) -> list[str]:
        """The sentences of paragraphs and of items of lists; titles and tables have none."""
        found: list[str] = []
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", self.without_code):
            lines = [line for line in part.splitlines() if not re.match(r"\s*(\||#|!!!|\?\?\?|===)", line)]
            text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", " ".join(" ".join(lines).split()))
            found += [sentence for sentence in re.split(r"(?<=[.!?:])\s+(?=[^a-z])", plain(text)) if sentence.strip()]
        return found

    @property
    def mean(self) -> float:
        lengths = [len(sentence.split()) for sentence in self.sentences]
        return statistics.fmean(lengths) if lengths else 0


def plain(text: str) -> str:
    """Return Markdown without links' targets and marks; a backquoted text is one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return re.sub(r"[*#|]|:?---+:?", " ", text)


def problems(page: Page) -> Iterator[str]:
    """What a page has too much of, a line each."""
    if (mean := page.mean) > SENTENCE:
        yield f"its sentences have {mean:.1f} words in the mean, at most {SENTENCE} are read easily"
    for cell in page.cells:
        if (words := len(cell.split())) > CELL:
            yield f"a cell has {words} words, at most {CELL} stay a table: {cell[:60]}…"
    if page.is_guide and page.words > GUIDE:
        yield f"it has {page.words} words, at most {GUIDE} are one task"
    if page.is_guide and page.words > HEADING * max(page.headings, 1):
        mean = page.words / max(page.headings, 1)
        yield f"its headings have {mean:.0f} words in the mean, at most {HEADING} are found again"
    yield from substitutions(" ".join(plain(page.without_code).split()))


def substitutions(text: str) -> Iterator[str]:
    for pattern, better in SUBSTITUTIONS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{match[0]!r}: {better}"


def pages(names: list[str]) -> dict[str, Page]:
    """The pages of these names below the repository; without names all that people wrote."""
    every = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    paths = [Path(name).resolve() for name in names] or [
        path for path in every if path.relative_to(ROOT).as_posix() not in MADE
    ]
    guides = ROOT / "docs" / "guides"
    return {
        os.path.relpath(path, ROOT): Page(path.read_text(encoding="utf-8"), path.is_relative_to(guides))
        for path in paths
    }


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "verl_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)}", text


def main(words: list[str]) -> int:
    """Print what is too much, and return the exit code."""
    if "--table" in words:
        for name, page in pages([]).items():
            widest = max((len(cell.split()) for cell in page.cells), default=0)
            a_heading = page.words / max(page.headings, 1)
            print(f"{name}\t{page.words}\t{a_heading:.0f}\t{page.mean:.1f}\t{page.code_blocks}\t{widest}")
        return 0
    lines = [f"{name}: {line}" for name, page in pages(words).items() for line in problems(page)]
    for place, text in () if words else docstrings():
        lines += [f"{place}: {line}" for line in substitutions(plain(text))]
    print(*lines, sep="\n", end="\n" * bool(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
