"""Users' objects by file and name: `data.custom_cls`, `loss.custom_cls`, `eval.score`, `trainer.hooks`."""

import importlib
import importlib.util
import os
import re
import sys
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verl_ext.options import first_line, must, nearest_hint, spell

_PACKAGE = "pkg://"


def custom_object(node: str, path: str | None, name: str | None) -> Any:
    """Return the object that `node`.path and `node`.name refer to.

    path: a Python file, or pkg://module for an installed module. A process executes a file only once, whatever options
    name it, and the name of its module is the same in all processes.

    Raises:
        ValueError: If one of the two is missing, if the file or the name does not exist, or if the file raises.
    """
    for key, value, other in (("path", path, "name"), ("name", name, "path")):
        if not value:
            raise ValueError(f"{node}.{key} is required with {node}.{other}; got {spell(value)}")
    return _member(f"{node}.name", _module(f"{node}.path", str(path)), str(path), str(name))


def names_own_class(path: Any, name: Any) -> bool:
    """Tell whether `data.custom_cls` names a user's class, which may have keys of its own and any name.

    A missing file stands for our SFTDataSet, which verl's scripts name so.
    """
    place, name = (str(value or "").strip("'\"") for value in (path, name))
    if name in ("", "null") or re.match(rf"{_PACKAGE}verl_ext\b", place):
        return False
    return name != "SFTDataSet" or place.startswith(_PACKAGE) or os.path.isfile(_file(place))


def named_object(key: str, value: str) -> Any:
    """Return the object that an option refers to by `module:name` or `file.py:name`.

    Raises:
        ValueError: In the same cases as :func:`custom_object`.
    """
    path, _, name = value.rpartition(":")
    return _member(key, _module(key, path if path.endswith(".py") else f"{_PACKAGE}{path}"), path, name)


def _member(key: str, module: ModuleType, path: str, name: str) -> Any:
    if not hasattr(module, name):
        hint = nearest_hint(name, [known for known in vars(module) if not known.startswith("_")])
        raise ValueError(must(key, f"be a name in {path}", name) + hint)
    return getattr(module, name)


class _FileFinder(MetaPathFinder):
    """The finder of users' files by module name, for unpickling elsewhere."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module of a file; None for other names."""
        below = name.removeprefix(f"{__name__}.")
        if below == name or not re.fullmatch("([0-9a-f]{2})+", below):
            return None
        return importlib.util.spec_from_file_location(name, bytes.fromhex(below).decode())


__path__: list[str] = []  # so that modules may have names below this one
sys.meta_path.append(_FileFinder())


def _file(path: str) -> str:
    return os.path.expanduser(path.removeprefix("file://"))


def _module(key: str, path: str) -> ModuleType:
    file = _file(path)
    if not path.startswith(_PACKAGE) and not os.path.isfile(file):
        raise ValueError(must(key, f"be an existing file or {_PACKAGE}module", path))
    try:
        if path.startswith(_PACKAGE):
            return importlib.import_module(path.removeprefix(_PACKAGE).replace("/", "."))
        if not file.endswith(".py"):
            raise ImportError("its name must end in .py")
        return importlib.import_module(f"{__name__}.{os.path.abspath(file).encode().hex()}")
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f" in line {line}" if line else ""
        got = f"{path}, {type(error).__name__}{where}: {first_line(error)}"
        raise ValueError(must(key, "be Python code that can be imported", got)) from error
