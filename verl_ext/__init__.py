"""A verl plugin and recipes for long-context SFT.

From Python, `verl_ext.train({…})` trains in processes of its own and returns a `verl_ext.TrainedRun`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["CommandError", "TrainedRun", "__version__", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # when it is used, because every process of a run imports this package
        return getattr(importlib.import_module("verl_ext.notebook"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
