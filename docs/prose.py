"""The sentences of pages and docstrings: how long they are, what stands in table cells, and words that stumble.

`python docs/prose.py [FILE…]` prints what a page has too much of; without files all pages and docstrings.
`--table` prints the sizes of the pages. (vale's wheel fetches the program from the network at first use.)
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SENTENCE, CELL = 16, 12  # words: the mean of a page, and the most of a cell
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
# Pages that still have too much, and docstrings with a word that stumbles: how often. They only shrink.
ALLOWED = {"CONTRIBUTING.md": 5, "README.md": 4, "docs/guides/plan.md": 8}


@dataclass(frozen=True)
class Page:
    """What a page of Markdown is made of."""

    text: str

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
    yield from substitutions(" ".join(plain(page.without_code).split()))


def substitutions(text: str) -> Iterator[str]:
    for pattern, better in SUBSTITUTIONS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{match[0]!r}: {better}"


def pages() -> dict[str, Page]:
    paths = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = {path.relative_to(ROOT).as_posix(): Page(path.read_text(encoding="utf-8")) for path in paths}
    return {name: page for name, page in found.items() if name not in MADE}


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "verl_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)}", text


def excess(found: dict[str, list[str]], allowed: dict[str, int]) -> Iterator[str]:
    """Yield the lines of a file that has more of them than it may, and a line for one that may have fewer now."""
    for name, lines in found.items():
        if len(lines) > allowed.get(name, 0):
            yield from (f"{name}: {line}" for line in lines)
    for name, most in allowed.items():
        if (now := len(found.get(name, []))) < most:
            yield f"docs/prose.py: ALLOWED[{name!r}] can be lowered from {most} to {now}"


def main(words: list[str]) -> int:
    """Print what is too much, and return the exit code."""
    if "--table" in words:
        for name, page in pages().items():
            widest = max((len(cell.split()) for cell in page.cells), default=0)
            a_heading = page.words / max(page.headings, 1)
            print(f"{name}\t{page.words}\t{a_heading:.0f}\t{page.mean:.1f}\t{page.code_blocks}\t{widest}")
        return 0
    named = {name: Page(Path(name).read_text(encoding="utf-8")) for name in words}
    found = {name: list(problems(page)) for name, page in (named or pages()).items()}
    for place, text in () if named else docstrings():
        lines = [f"{place.partition(':')[2]}: {line}" for line in substitutions(plain(text))]
        found.setdefault(place.partition(":")[0], []).extend(lines)
    lines = list(excess(found, {} if named else ALLOWED))
    print(*lines, sep="\n", end="\n" * bool(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
