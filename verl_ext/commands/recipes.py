"""The command `verl-ext recipes`: the recipes of the package, to list, to read and to copy."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_ext.commands.command_line import command
from verl_ext.config.key_table import conf_folder
from verl_ext.options import Options, UsageError, choice_problem, must, option

_LINE = 120  # letters of a purpose from which the list has its first clause alone
_LEFT_OUT = ("__pycache__", "*.pyc")
# What the list has below each heading, of a recipe's folder and that of all.
_PARTS: dict[str, Callable[[Path, Path], bool]] = {
    "Whole runs, to copy and change (verl-ext train run.yaml):": lambda folder, root: (folder / "run.yaml").is_file(),
    "Small runs on two CPU cores:": lambda folder, root: folder.parent == root and not (folder / "run.yaml").is_file(),
    "After papers and other projects (recipe=NAME):": lambda folder, root: folder.parent != root,
}


@dataclass(frozen=True)
class RecipesOptions(Options):
    """List the recipes; show one, or copy it with everything that it needs.

    `verl-ext recipes` lists them, `verl-ext recipes NAME` prints the README and the YAML of one, and
    `verl-ext recipes NAME to=FOLDER` copies its folder to FOLDER/NAME (one that follows a paper to FOLDER/papers/NAME),
    with the scripts that it shares in FOLDER.
    """

    name: str | None = option(None, "the recipe; also as the first word; null: list them")
    to: str | None = option(None, "folder that gets the copy; null: print the recipe")

    def problems(self) -> Iterator[str]:
        """Yield a line for a folder without a recipe."""
        if self.to is not None and self.name is None:
            yield f"name is required with to={self.to}: the recipe to copy; got null"


def recipes(options: RecipesOptions) -> str:
    """Return the list or a recipe's text, or copy it."""
    root = conf_folder() / "recipe"
    files = [*root.glob("*/*.yaml"), *root.glob("papers/*/*.yaml")]
    folders = {path.parent.name: path.parent for path in files}
    if options.name is None:
        width = max(map(len, folders))
        lines = []
        for title, are_of_it in _PARTS.items():
            names = sorted(name for name, folder in folders.items() if are_of_it(folder, root))
            lines += [title, *(f"  {name:<{width}}  {_purpose(folders[name])}" for name in names), ""]
        return "\n".join([*lines, "verl-ext recipes NAME shows one, verl-ext recipes NAME to=FOLDER copies it."])
    if options.name not in folders:
        raise UsageError(choice_problem("name", options.name, sorted(folders)))
    folder = folders[options.name]
    if options.to is None:
        parts = [path.read_text(encoding="utf-8") for path in (folder / "README.md", *sorted(folder.glob("*.yaml")))]
        return "\n".join(parts)
    place = Path(options.to).expanduser()
    copy = place / folder.relative_to(root)  # a script finds what it shares by the same relative path
    if copy.exists():
        raise UsageError(must("to", f"be a folder without {copy.relative_to(place)}", options.to))
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for script in _shared_scripts(root, folder):
        if not (place / script.name).exists():
            shutil.copy(script, place)
    return f"copied to {copy}"


def _shared_scripts(root: Path, folder: Path) -> set[Path]:
    """Return the scripts beside the recipes that the files of one name, and those that these name."""
    scripts = {path for path in root.iterdir() if path.suffix in (".sh", ".py")}
    needed: set[Path] = set()
    new = {path for path in folder.rglob("*") if path.suffix in (".sh", ".py", ".md", ".yaml")}
    while new:
        texts = [path.read_text(encoding="utf-8") for path in new]
        new = {script for script in scripts - needed if any(script.name in text for text in texts)}
        needed |= new
    return needed


def _purpose(folder: Path) -> str:
    """Return the first sentence of the purpose in a recipe's heading."""
    first = next((path for path in (folder / "run.yaml", folder / "config.yaml") if path.is_file()), None)
    text = (first or min(folder.glob("*.yaml"))).read_text(encoding="utf-8")
    found = re.search(r"^# Purpose:\s*(.*?)(?=^# \w+:|^[^#])", text, re.M | re.S)
    words = " ".join(re.sub(r"^#\s*", "", found[1], flags=re.M).split()) if found else ""
    return re.split(r"[;:.](?=\s|$)" if len(words) > _LINE else r"[;.](?=\s|$)", words)[0]


main = command("recipes", RecipesOptions, recipes, example="[NAME] [to=FOLDER]", first="name", needs_words=False)
