"""Paths, modules, classes and members that docstrings, comments and pages name exist."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import verl_ext
from tests.lib.project import ROOT

PACKAGE = ROOT / "verl_ext"
# Nodes of a configuration, and names of arguments and of packages, which modules here have too.
OTHERS = {
    *("attention", "checkpoint", "data", "endpoint", "engine", "eval", "loss", "model", "optim", "parallel", "plan")
}
OTHERS |= {"options", "ray", "reference", "text", "torchrun", "trainer", "verl"}
PUBLIC = {*verl_ext.__all__}  # imported when they are used
SUFFIXES = {"json", "jsonl", "yaml", "html", "py", "lock"}
MODULES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def members(node: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names that a module or a class defines, fields that methods set included."""
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.attr)
        elif isinstance(child, ast.alias):
            names.add((child.asname or child.name).split(".")[0])
    return names


def owners() -> dict[str, set[str]]:
    """Return the members by class, those of its bases in the package included, and by the last name of a module."""
    classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
    found: dict[str, set[str]] = defaultdict(set)
    for path, module in MODULES.items():
        found[path.parent.name if path.stem == "__init__" else path.stem] |= members(module)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(node)
    for path in MODULES:
        found[path.parent.name] |= {path.stem}

    def of_class(name: str) -> set[str]:
        names: set[str] = set()
        for node in classes.get(name, []):
            names |= members(node)
            for base in node.bases:
                base_name = ast.unparse(base).split("[")[0].rpartition(".")[2]
                names |= of_class(base_name) if base_name in classes else {"*"}  # a base of another package
        return names

    return {**found, **{name: of_class(name) for name in classes}}


def texts() -> Iterator[tuple[str, str]]:
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line.partition("#")[2] for line in lines if "#" in line]
        strings = [
            ast.get_docstring(node) or ""
            for node in ast.walk(MODULES[path])
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        yield path.relative_to(ROOT).as_posix(), "\n".join([*comments, *strings])
    for page in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")


def test_members_that_are_named_in_backquotes_exist():
    known = owners()
    missing = []
    for place, text in texts():
        for owner, member in re.findall(r"`(\w+)\.(\w+)(?:\([^`]*\))?`", text):
            is_ours = owner in known and owner not in {*OTHERS, "verl_ext"} and member not in SUFFIXES
            in_code = place.startswith("verl_ext/") or owner[0].isupper()  # pages name keys of a configuration too
            if is_ours and in_code and not {member, "*"} & known[owner]:
                missing.append(f"{place}: {owner}.{member}")
    assert not missing, "\n".join(missing)


def test_modules_that_are_named_by_their_path_exist():
    missing = []
    for place, text in texts():
        for name in re.findall(r"\b((?:verl_ext|tests|benchmarks)(?:/[a-z_0-9]+)+\.py)\b", text):
            missing += [f"{place}: {name}"] * (not (ROOT / name).exists())
        for name in re.findall(r"\bverl_ext(?:\.[a-z_]+)+\b", text):
            parts = name.split(".")[1:]
            path = PACKAGE.joinpath(*parts)
            is_module = path.is_dir() or path.with_suffix(".py").exists()
            parent = Path(PACKAGE.joinpath(*parts[:-1]))
            in_module = parent.with_suffix(".py") if parts[:-1] and not parent.is_dir() else parent / "__init__.py"
            is_member = in_module in MODULES and parts[-1] in members(MODULES[in_module]) | PUBLIC
            missing += [f"{place}: {name}"] * (not is_module and not is_member)
    assert not missing, "\n".join(missing)
