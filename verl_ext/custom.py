"""Classes and functions of the user, given by file and name: `data.custom_cls`, `loss.custom_cls`, `eval.score`."""

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from verl_ext.values import first_line, nearest_name, show

_PACKAGE = "pkg://"


def custom_object(node: str, path: str | None, name: str | None) -> Any:
    """Return the object that `node`.path and `node`.name refer to.

    path: a Python file, or pkg://module for an installed module. A process executes a file only once.

    Raises:
        ValueError: If one of the two is missing, if the file or the name does not exist, or if the file raises.
    """
    for key, value, other in (("path", path, "name"), ("name", name, "path")):
        if not value:
            raise ValueError(f"{node}.{key} is required with {node}.{other}; got {show(value)}")
    return _member(f"{node}.name", _module(f"{node}.path", str(path)), str(path), str(name))


def named_object(key: str, value: str) -> Any:
    """Return the object that an option refers to by `module:name` or `file.py:name`.

    Raises:
        ValueError: In the same cases as :func:`custom_object`.
    """
    path, _, name = value.rpartition(":")
    return _member(key, _module(key, path if path.endswith(".py") else f"{_PACKAGE}{path}"), path, name)


def _member(key: str, module: ModuleType, path: str, name: str) -> Any:
    if not hasattr(module, name):
        nearest = nearest_name(name, [known for known in vars(module) if not known.startswith("_")])
        hint = f" (nearest: {nearest})" if nearest else ""
        raise ValueError(f"{key} must be a name in {path}; got {name}{hint}")
    return getattr(module, name)


@functools.cache
def _module(key: str, path: str) -> ModuleType:
    file = path.removeprefix("file://")
    if not path.startswith(_PACKAGE) and not os.path.isfile(file):
        raise ValueError(f"{key} must be an existing file or {_PACKAGE}module; got {path}")
    try:
        if path.startswith(_PACKAGE):
            return importlib.import_module(path.removeprefix(_PACKAGE).replace("/", "."))
        name = f"verl_ext_custom_{abs(hash(os.path.abspath(file)))}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError("its name must end in .py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        at = f" in line {line}" if line else ""
        raise ValueError(
            f"{key} must be Python code that can be imported; got {path}, {type(error).__name__}{at}: "
            f"{first_line(error)}"
        ) from error
