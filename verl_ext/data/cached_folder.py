"""A folder made once, by one process, and opened by all others.

    ROOT/<name>/                what `make` wrote, and
        contents.json           the sizes of its files, which tell a damaged folder
    ROOT/<name>.lock            held by the process that makes it
    ROOT/<name>.failed          why the last attempt ended, for those that waited for it

The folder appears whole, by one rename. One whose files have other sizes than contents.json says is made anew. The name
should be a digest of everything that the content follows from, so that nothing is ever stale.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl_ext.commands.errors import file_of, reason_of

CONTENTS = "contents.json"

_logger = logging.getLogger(__name__)


def default_root(name: str, cache_dir: str | None) -> Path:
    """`cache_dir` with ~ expanded, absolute; where it is None, the folder `name` in the cache of `datasets`."""
    if cache_dir is not None:
        return Path(os.path.abspath(os.path.expanduser(cache_dir)))
    from datasets.config import HF_DATASETS_CACHE  # here, because importing it takes a second

    return Path(HF_DATASETS_CACHE) / name


def check_cache_dir(cache_dir: Any) -> None:
    """ValueError for a data.cache_dir that is neither null nor a path."""
    if cache_dir is not None and not (isinstance(cache_dir, (str, os.PathLike)) and str(cache_dir)):
        raise ValueError(f"data.cache_dir must be a folder or null; got {cache_dir!r}")


def cached_folder(root: Path, name: str, make: Callable[[Path], None], *, key: str = "data.cache_dir") -> Path:
    """`root`/`name`, filled by `make(an empty folder)` unless it is complete. Processes may call it at the same time.

    One of them makes the folder; the others wait, and raise what it raised. One that was killed is followed by the
    next that waits. Nothing is written where the folder is complete.

    Raises:
        ValueError: what `make` raises, an OSError as one line with the file and the reason; a root that cannot be
            written, also where only `make` finds that out or fills the disk, in one line that names `key`.
    """
    folder = root / name
    wrong = damage(folder)
    if wrong is None:
        return folder
    from filelock import FileLock

    failed = _Failure(root / f"{name}.failed")
    try:
        if folder.exists():  # told by all that see it: of a run's ranks, only the first is heard
            _logger.warning("%s is made anew: %s", folder, wrong)
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if damage(folder) is not None:
                failed.tell_those_that_waited()
                with failed.noted():
                    _make(folder, make, key)
    except OSError as error:
        raise ValueError(f"{key} must be a folder that can be written; got {root}: {reason_of(error)}") from error
    return folder


def damage(folder: Path) -> str | None:
    """What differs from what `folder` was when it was made, in a few words; None: nothing does."""
    try:
        sizes = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))["sizes"]
        expected = {str(file): int(size) for file, size in sizes.items()}
    except FileNotFoundError:
        return f"it has no {CONTENTS}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"its {CONTENTS} cannot be read"
    for file, size in expected.items():
        try:
            found = (folder / file).stat().st_size
        except OSError:
            return f"it has no {file}"
        if found != size:
            return f"its {file} has {found:,} bytes and had {size:,}"
    return None


def _make(folder: Path, make: Callable[[Path], None], key: str) -> None:
    from verl_ext.commands.output_folder import OutputFolder

    with OutputFolder(str(folder), overwrite=True, key=key, named=str(folder.parent)) as staging:
        try:
            make(staging.path)
        except OSError as error:
            if staging.is_cause_of(error):
                raise
            raise ValueError(f"{file_of(error) or f'{folder} cannot be made'}: {reason_of(error)}") from error
        files = sorted(entry for entry in staging.path.rglob("*") if entry.is_file())
        sizes = {entry.relative_to(staging.path).as_posix(): entry.stat().st_size for entry in files}
        (staging.path / CONTENTS).write_text(json.dumps({"sizes": sizes}, indent=2), encoding="utf-8")
        staging.publish()


class _Failure:
    """The note of an attempt that failed. Processes that waited for it raise what it did: the same input fails in the
    same way, and ranks would otherwise fail one after another. One that comes later tries again."""

    def __init__(self, note: Path) -> None:
        """Before the lock is asked for: a note that changes from here on is of an attempt that this process waited
        for. Its own time of change is compared, so that clocks of several machines need not agree."""
        self._note = note
        self._before = self._changed()

    def tell_those_that_waited(self) -> None:
        """ValueError of the attempt that ended since; to be called under the lock."""
        changed = self._changed()
        if changed is not None and changed != self._before:
            raise ValueError(self._note.read_text(encoding="utf-8"))

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Writes the note where the body raises ValueError, and removes it where it ends well."""
        try:
            yield
        except ValueError as error:
            try:
                self._note.write_text(str(error), encoding="utf-8")
            except OSError:  # those that waited try again, where the disk has no room for a note
                self._note.unlink(missing_ok=True)
            raise
        self._note.unlink(missing_ok=True)

    def _changed(self) -> int | None:
        try:
            return self._note.stat().st_mtime_ns
        except OSError:
            return None
