"""Folders and arrays that one process makes, named by a fingerprint.

    ROOT/<name>/                the files that `make` wrote, and contents.json with their sizes
    ROOT/<name>.lock            held by the process that makes the folder
    ROOT/<name>.failed          the error of the last attempt, for the processes that waited for it

The name of a cached folder is a fingerprint of everything that determines its content, so no folder is ever stale.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.files import OutputFolder, atomic_write, checksum, write_json
from verl_ext.options import file_of, must, reason_of

CONTENTS, ARRAYS = "contents.json", "arrays.json"
_HEADER = 128  # bytes of an array's file, with its type and shape
Arrays = Mapping[str, NDArray[Any]]

_logger = logging.getLogger(__name__)


def fingerprint(*facts: Any, digits: int = 32) -> str:
    """Return the first hex `digits` of the SHA-256 of texts, buffers, JSON values, and iterators of these."""
    digest = hashlib.sha256()
    for fact in chain.from_iterable(fact if isinstance(fact, Iterator) else (fact,) for fact in facts):
        text = json.dumps(fact) if isinstance(fact, (list, tuple, dict)) else fact
        digest.update(text.encode() if isinstance(text, str) else text)
    return digest.hexdigest()[:digits]


def default_root(name: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return `cache_dir`, absolute, or folder `name` in the cache of `datasets`."""
    if cache_dir is not None:
        return Path(os.path.abspath(os.path.expanduser(cache_dir)))
    from datasets.config import HF_DATASETS_CACHE  # here, because importing it takes a second

    return Path(HF_DATASETS_CACHE) / name


def is_complete(folder: Path) -> bool:
    """Tell whether a cached folder holds every file with its size."""
    try:
        sizes = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))["sizes"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def cached_folder(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `root`/`name`, filled by `make` unless it is complete.

    If several processes call this at the same time, one makes the folder, by `make(empty_folder)`; the others wait, and
    raise its error if it fails. If it is killed, the next waiting process takes over. Nothing is written if the folder
    is complete.

    Raises:
        ValueError: If `make` raises it or an OSError (one line then gives the file and the reason), or if `root` cannot
            be written, even if only `make` finds this out or fills the disk (one line then names data.cache_dir).
    """
    folder = root / name
    if is_complete(folder):
        return folder
    from filelock import FileLock

    # The same input fails in the same way, so the processes that waited for an attempt raise its error; otherwise the
    # ranks would fail one after another. The modification time identifies an older note, because clocks may disagree.
    note = root / f"{name}.failed"
    before = _changed(note)
    try:
        if folder.exists():  # every process logs this, but only rank 0 of a run prints it
            _logger.warning("%s is made again: files of it are missing or have another size", folder)
        root.mkdir(parents=True, exist_ok=True)
        # Whoever waited for the lock finds the folder complete or a new note, unless the maker was killed.
        with FileLock(root / f"{name}.lock"):
            if is_complete(folder):
                return folder
            if _changed(note) not in (None, before):
                raise ValueError(note.read_text(encoding="utf-8"))
            try:
                _make(folder, make)
            except ValueError as error:
                # If the disk has no room for the note, the waiting processes try again.
                with contextlib.suppress(OSError), atomic_write(note) as partial:
                    partial.write_text(str(error), encoding="utf-8")
                raise
            note.unlink(missing_ok=True)
    except OSError as error:
        needed = "be a folder that can be written"
        raise ValueError(must("data.cache_dir", needed, f"{root}: {reason_of(error)}")) from error
    return folder


def _changed(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    with OutputFolder(str(folder), overwrite=True, key="data.cache_dir", named=str(folder.parent)) as output:
        try:
            make(output.path)
        except OSError as error:
            if output.is_cause_of(error):
                raise
            raise ValueError(f"{file_of(error) or f'{folder} cannot be made'}: {reason_of(error)}") from error
        files = sorted(entry for entry in output.path.rglob("*") if entry.is_file())
        sizes = {entry.relative_to(output.path).as_posix(): entry.stat().st_size for entry in files}
        write_json(output.path / CONTENTS, {"sizes": sizes})
        output.publish()


def cached_arrays(root: Path, name: str, make: Callable[[], Arrays]) -> dict[str, NDArray[Any]]:
    """Return the arrays of `make` as :func:`cached_folder` and :func:`stored_arrays` do."""

    def write(folder: Path) -> None:
        checksums = {}
        for name, array in make().items():
            flat, path = np.ascontiguousarray(array), folder / f"{name}.npy"
            # Plain writes on a full disk raise an OSError with its number. np.save raises one without a number, and a
            # memory map ends the process.
            with path.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(flat))
                file.write(flat.data)
            checksums[name] = [checksum(path, 0, most) for most in (_HEADER, None)]
        write_json(folder / ARRAYS, checksums)

    return stored_arrays(cached_folder(root, name, write))


def stored_arrays(folder: Path, in_memory: bool = False) -> dict[str, NDArray[Any]]:
    """Return the arrays in a cached folder: mapped, or read into memory.

    Raises ValueError if the header of a mapped one, or any byte of one in memory, has changed.
    """
    arrays = {}
    for name, checksums in json.loads((folder / ARRAYS).read_text(encoding="utf-8")).items():
        path = folder / f"{name}.npy"
        if checksum(path, 0, None if in_memory else _HEADER) != checksums[in_memory]:
            raise ValueError(
                f"data.cache_dir must hold the arrays that were written there; {path} has changed: remove it"
            )
        mode: Any = None if in_memory else "r"
        arrays[name] = np.asarray(np.load(path, mmap_mode=mode, allow_pickle=False))  # np.memmap is slower to access
    return arrays
