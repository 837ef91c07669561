"""The facts that a run's nodes must share, and their differences.

differences({"node 0 (a)": {"torch": "2.13.0"}, "node 1 (b)": {"torch": "2.12.1"}})
torch must be the same on every node; got 2.13.0 on node 0 (a), 2.12.1 on node 1 (b)
"""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_ext.cache import fingerprint
from verl_ext.options import must, shortened

PACKAGES = ("verl-ext", "verl", "torch", "transformers", "numpy", "datasets")
UNKNOWN = "nothing"  # the content of a path that does not exist
_SAMPLE = 1 << 16  # bytes that are compared at the start and at the end of a file
_NAMED = 4  # nodes that a message names for each value


def versions() -> dict[str, str]:
    """Return the versions, by name, of Python and packages that affect results."""
    by_name = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def folder_digest(path: str, endings: tuple[str, ...] = ("",)) -> str:
    """Describe a file or folder by its file count, bytes and digest.

    The digest covers the names below `path`, the sizes, and the first and last 64 KiB of each file. A truncated, older
    or different copy has another digest. Hidden files, files that `datasets` caches beside its own, and files whose
    names have none of the `endings` do not count.
    """
    if not os.path.exists(path):
        return UNKNOWN
    return files_digest([Path(path)] if os.path.isfile(path) else _files(path, endings), path)


def files_digest(files: Iterable[Path], folder: str | Path) -> str:
    """Describe files of a folder as :func:`folder_digest` describes the folder."""
    sizes: list[int] = []

    def facts() -> Iterator[str | bytes]:
        for file in files:
            sizes.append(file.stat().st_size)
            yield f"{'' if file == Path(folder) else file.relative_to(folder)}\0{sizes[-1]}\0"
            with file.open("rb") as opened:
                yield opened.read(_SAMPLE)
                opened.seek(max(0, sizes[-1] - _SAMPLE))
                yield opened.read(_SAMPLE)

    digest = fingerprint(facts(), digits=8)
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)} of {sum(sizes):,} bytes ({digest})"


def _files(path: str, endings: tuple[str, ...]) -> Iterator[Path]:
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(endings) and not name.startswith((".", "cache-", "tmp")) and not name.endswith(".lock"):
                yield Path(folder, name)


def differences(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line per difference in `facts`, {node: {fact: value}}."""
    lines = []
    for what in dict.fromkeys(what for values in facts.values() for what in values):
        holders: dict[str, list[str]] = {}
        for node, values in facts.items():
            holders.setdefault(values.get(what, "nothing"), []).append(node)
        if len(holders) > 1:
            got = ", ".join(f"{value} on {shortened(nodes, _NAMED)}" for value, nodes in holders.items())
            lines.append(must(what, "be the same on every node", got))
    return lines
