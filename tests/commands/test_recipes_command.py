"""`verl-ext recipes`: the list, a recipe's text, and a copy with the scripts that it needs and no other."""

import re

import pytest

from tests.lib.project import ROOT
from verl_ext.__main__ import main

RECIPES = ROOT / "recipes"
FOLDERS = {
    path.parent.name: path.parent for path in (*RECIPES.glob("*/README.md"), *RECIPES.glob("papers/*/README.md"))
}
NAMES = sorted(FOLDERS)
SHARED = sorted(path.name for path in RECIPES.iterdir() if path.suffix in (".sh", ".py"))


def test_every_recipe_is_listed_with_its_purpose(capsys):
    assert main(["recipes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert sorted(lines) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_the_recipe_and_the_scripts_that_its_files_name(tmp_path, name):
    assert main(["recipes", name, f"to={tmp_path}/mine"]) == 0
    folder = tmp_path / "mine" / FOLDERS[name].relative_to(RECIPES)
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {
        path.relative_to(FOLDERS[name]) for path in FOLDERS[name].rglob("*") if "__pycache__" not in path.parts
    }
    texts = [path.read_text() for path in (tmp_path / "mine").rglob("*") if path.suffix in (".sh", ".py", ".md")]
    named = {script for script in SHARED if any(re.search(rf"\b{script}\b", text) for text in texts)}
    assert {path.name for path in (tmp_path / "mine").iterdir() if path.is_file()} == named
    assert named or not (folder / "run.sh").is_file() or "small_run" not in (folder / "run.sh").read_text()


def paths_named_by(file, root):
    """Yield the files that a script or YAML of a recipe names to be there when it runs; root: of the recipes."""
    text = file.read_text()
    if file.suffix == ".sh":
        for base, path in re.findall(r"(\$here|\$recipes|\$\(dirname [^)]*\))/([\w./]+\.\w+)", text):
            yield (root if base == "$recipes" else file.parent) / path
        yield from (root / script for script in re.findall(r"start_server (\w+\.py)", text))
    elif file.suffix == ".py":
        for level, path in re.findall(r"Path\(__file__\)\.parents\[(\d)\] / \"([\w./]+)\"", text):
            yield file.parents[int(level)] / path
    else:
        yield from (file.parent / path for path in re.findall(r"^(?:base|chat_template): (\S+\.\w+)", text, re.M))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_that_a_copied_recipe_names_is_in_the_copy(tmp_path, name):
    assert main(["recipes", name, f"to={tmp_path}"]) == 0
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".sh", ".py", ".yaml")]
    named = [path for file in files for path in paths_named_by(file, tmp_path)]
    assert [path for path in named if not path.is_file()] == []
    assert named or "small_run.sh" not in "".join(file.read_text() for file in files)


@pytest.mark.parametrize("words", [["quickstrat"], ["to=x"], ["quickstart", "to={folder}"]])
def test_a_mistake_is_one_line_and_copies_nothing(tmp_path, capsys, words):
    (tmp_path / "quickstart").mkdir()
    assert main(["recipes", *(word.format(folder=tmp_path) for word in words)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [*tmp_path.rglob("*")] == [tmp_path / "quickstart"]
