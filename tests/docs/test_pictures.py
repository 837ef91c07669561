"""docs/pictures/: what docs/make_pictures.py draws today, and each with words for those who do not see it."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.lib.project import ROOT

PICTURES = ROOT / "docs" / "pictures"


@pytest.mark.slow
def test_the_pictures_are_those_that_the_package_draws_today(tmp_path):
    command = [sys.executable, ROOT / "docs" / "make_pictures.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in PICTURES.glob("*.svg"))
    for name in drawn:
        assert (tmp_path / name).read_text() == (PICTURES / name).read_text(), f"python docs/make_pictures.py: {name}"


def test_each_picture_stands_on_a_page_with_a_text_for_those_who_do_not_see_it():
    shown: dict[str, list[str]] = {}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for words, link in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text(encoding="utf-8")):
            path = os.path.normpath(page.parent / link)
            assert len(words.split()) >= 8, (page, link)
            shown.setdefault(path, []).append(words)
    for path in PICTURES.iterdir():
        assert str(path) in shown, path
        if path.suffix == ".svg":
            title = ElementTree.parse(path).getroot()[0]
            assert title.tag.endswith("title")
            assert set(shown[str(path)]) == {title.text}
            assert "prefers-color-scheme:dark" in path.read_text()
