"""Model types in the order and the shares in which tests take them."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import transformers
from packaging.version import Version

from tests.lib.project import ROOT
from tests.lib.small_models import KINDS

IS_NEWER = Version(transformers.__version__) >= Version("5.11")
PAGE = ROOT / "docs" / "reference" / ("newer_models.md" if IS_NEWER else "models.md")


def named(part):
    """Return the model types that a part of the page names."""
    text = PAGE.read_text(encoding="utf-8").split("\n## ")
    (found,) = (body for body in text if body.startswith(part))
    return [kind for kind in re.findall(r"`([^`]+)`", found) if kind in KINDS]


def parts(kinds: list[str], size: int = 40) -> list[list[str]]:
    """Split the types into parts whose ranks answer within the limit of `run_ranks` on a busy machine."""
    return [kinds[first : first + size] for first in range(0, len(kinds), size)]


def each_tried(measure: Callable[[str], Any], kinds: Iterable[str]) -> dict[str, Any]:
    """Return what a function finds of each model type, or its failure in words."""
    found = {}
    for kind in kinds:
        try:
            found[kind] = measure(kind)
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"
    return found
