"""The checks of sentences: what `python docs/prose.py` finds too long."""

import sys

import pytest

from tests.lib.project import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from prose import Page, problems, substitutions

LONG = (
    "This sentence has so many words, one after another, that a reader has lost its beginning before the end of it.\n"
)
CODE = "```bash\n" + LONG * 3 + "```\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Short sentences are read easily. They stay below the limit.\n", []),
        (LONG, ["sentences have 21.0 words"]),
        (f"# {LONG}\n{CODE}\nIt is short.\n", []),
        (f"Short.\n\n- {LONG}- It is short.\n- So is this.\n", []),
        (f"| a | b |\n|---|---|\n| `x` | {LONG.strip()} |\n", ["a cell has 21 words"]),
        ("The run starts anew.\n", ["'anew': again"]),
        ("The option `anew` is code.\n", []),
        ("It is no folder.\n", ["'is no folder': is not a …"]),
        ("There is no folder, and it is no longer there.\n", []),
    ],
)
def test_long_sentences_long_cells_and_stumbling_words_are_found_outside_of_code(text, expected):
    found = list(problems(Page(text)))
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


def test_a_page_counts_its_headings_code_and_words():
    page = Page(f"# One\n\n{CODE}\n## Two\n\nThree `four five` [six](seven.md).\n")
    assert (page.headings, page.code_blocks, page.words) == (2, 1, 5)


def test_a_guide_is_one_task_under_headings():
    text = "# One\n\n" + "It is short.\n" * 301
    assert [line.split()[2] for line in problems(Page(text, is_guide=True))] == ["904", "have"]
    assert not list(problems(Page(text)))


def test_house_words_have_a_plainer_one():
    assert list(substitutions("all but for the likeliest kin")) == [
        "'likeliest': most likely",
        "'kin': and similar",
        "'but for': except",
    ]
