"""What the nodes of a run must have in common, and a line for each difference.

Facts are compared as they were gathered, one mapping of texts from each node:

    differences({"node 0 (a)": {"torch": "2.13.0"}, "node 1 (b)": {"torch": "2.12.1"}})
    torch must be the same on every node; got 2.13.0 on node 0 (a), 2.12.1 on node 1 (b)
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("verl-ext", "verl", "torch", "transformers", "numpy", "datasets")
_SAMPLE = 1 << 16  # bytes of a file's begin and end that are compared
_NAMED = 4  # nodes of a kind that a message names


def versions() -> dict[str, str]:
    """Name -> version of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def content(path: str, endings: tuple[str, ...] = ("",)) -> str:
    """What a file or folder holds, for comparison with another copy: number of files, bytes and a digest.

    The digest is of names below `path`, sizes and the first and last 64 KiB of each file; a copy that is cut short,
    older or of other data has another one. Hidden files and what `datasets` caches beside its files, and files whose
    names have none of the `endings`, do not count.
    """
    if not os.path.exists(path):
        return "nothing"
    digest, count, total = hashlib.sha256(), 0, 0
    for file in _files(Path(path), endings):
        size = file.stat().st_size
        count, total = count + 1, total + size
        digest.update(f"{'' if file == Path(path) else file.relative_to(path)}\0{size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE))
            opened.seek(max(0, size - _SAMPLE))
            digest.update(opened.read(_SAMPLE))
    return f"{count} file{'s' * (count != 1)} of {total:,} bytes ({digest.hexdigest()[:8]})"


def _files(path: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(endings) and not name.startswith((".", "cache-", "tmp")) and not name.endswith(".lock"):
                yield Path(folder, name)


def differences(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each fact that is not the same on every node; facts: who -> {what: value}."""
    lines = []
    for what in dict.fromkeys(what for values in facts.values() for what in values):
        holders: dict[str, list[str]] = {}
        for who, values in facts.items():
            holders.setdefault(values.get(what, "nothing"), []).append(who)
        if len(holders) > 1:
            got = ", ".join(f"{value} on {_listed(names)}" for value, names in holders.items())
            lines.append(f"{what} must be the same on every node; got {got}")
    return lines


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
