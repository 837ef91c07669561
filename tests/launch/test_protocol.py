"""What processes of a run tell each other, and the codes with which they end."""

import os
import pickle
import re

from tests.lib.project import ROOT
from verl_ext.launch import protocol
from verl_ext.launch.protocol import SIGNALS, STOPPED, TRAINING_FAILED, USER_ERROR, Ending, Launcher


def rows_of_the_docs() -> list[list[str]]:
    """Return the cells of the table below "Of a rank" without its heading and links."""
    section = (
        (ROOT / "docs" / "reference" / "exit_codes.md").read_text().partition("## Of a rank")[2].partition("\n## ")[0]
    )
    lines = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_of_the_protocol() -> list[list[str]]:
    paragraph = (protocol.__doc__ or "").split("\n\n")[1]
    return [re.split(r"\s{2,}", line.strip()) for line in paragraph.splitlines()]


def test_the_exit_codes_of_the_docs_are_those_of_the_protocol():
    heading, _, *rows = rows_of_the_docs()
    assert [heading, *rows] == rows_of_the_protocol()
    codes = {int(code) for row in rows for code in row[0].split(",")}
    assert codes == {0, 1, USER_ERROR, TRAINING_FAILED, STOPPED, *(128 + number for number in SIGNALS)}


def test_a_process_tells_those_below_it_what_it_was_told_and_more(monkeypatch):
    monkeypatch.delenv("VERL_EXT_LAUNCHER", raising=False)
    assert Launcher.from_environment() == Launcher()
    for facts in ({"pid": 7, "caller": "a file"}, {"pid": 8, "folder": "a folder", "awaited": ["data.train_dir"]}):
        for name, value in Launcher.from_environment().environment(**facts).items():
            monkeypatch.setenv(name, value)
    assert [name for name in os.environ if name.startswith("VERL_EXT_L")] == ["VERL_EXT_LAUNCHER"]
    assert Launcher.from_environment() == Launcher(8, None, "a folder", ["data.train_dir"], [], [], caller="a file")


def test_an_ending_leaves_a_loader_process_as_it_was():
    ending = pickle.loads(pickle.dumps(Ending("no such file", scope="rank")))
    assert (str(ending), ending.code, ending.scope, ending.is_final) == ("no such file", 3, "rank", False)
    assert [Ending(code=code).is_final for code in (0, 1, 2, 75, 137)] == [True, False, True, True, False]
