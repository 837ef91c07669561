"""An output folder that appears only when it is complete.

Whether a command may write its output folder, told before anything is computed.

Whether a folder that does not exist yet can be made, told before anything is computed.

A JSON file of a run that is written whole or not at all.

A folder made once, by one process, and opened by all others.

    ROOT/<name>/                what `make` wrote, and
        contents.json           the sizes of its files, which tell a damaged folder
    ROOT/<name>.lock            held by the process that makes it
    ROOT/<name>.failed          why the last attempt ended, for those that waited for it

The folder appears whole, by one rename. One whose files have other sizes than contents.json says is made anew. The name
should be a digest of everything that the content follows from, so that nothing is ever stale.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from verl_ext.values import DataError, file_of, reason_of

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: more than a file system, or a limit, lets a file have


class OutputFolder:
    """A context whose `path` is a hidden sibling of `output_dir`, renamed to it by `publish()` and removed otherwise.

    A run that is killed leaves only the hidden folder, `.NAME.unfinished-HOST-PID`; the next run for the same
    `output_dir` on that host removes it. What cannot be written there, as where the disk is full, is a `DataError` of
    one line.
    """

    def __init__(self, output_dir: str, overwrite: bool, key: str = "output_dir", named: str | None = None) -> None:
        """`key` and `named`: the option that errors name, and its value (None: output_dir)."""
        self.output = Path(os.path.realpath(output_dir))
        self.key, self.named = key, named or output_dir
        self.overwrite = overwrite
        host = re.sub(r"[^\w.]", "_", socket.gethostname())
        self._prefixes = {kind: f".{self.output.name}.{kind}-{host}-" for kind in ("unfinished", "replaced")}
        self.path = self.output.parent / f"{self._prefixes['unfinished']}{os.getpid()}"

    def __enter__(self) -> "OutputFolder":
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._clean_up_after_killed_runs()
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise self._not_written(error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError) and self.is_cause_of(error):
            raise self._not_written(error) from error

    def is_cause_of(self, error: OSError) -> bool:
        """Whether an error is of writing here, or of a full disk: a write that fails names no file."""
        file = file_of(error)
        return error.errno in DISK_FULL if file is None else Path(file).is_relative_to(self.path)

    def _not_written(self, error: OSError) -> DataError:
        return DataError(f"{self.key} must be a folder that can be written; got {self.named}: {reason_of(error)}")

    def publish(self) -> None:
        """Put the folder in its place. What was there, under `overwrite`, is moved aside first and deleted last."""
        is_full = self.output.is_dir() and any(self.output.iterdir())
        if is_full and not self.overwrite:
            raise DataError(f"output_dir was filled by another run meanwhile, overwrite=true not given: {self.named}")
        if not is_full:
            os.replace(self.path, self.output)  # also over an empty folder
            return
        aside = self.output.parent / f"{self._prefixes['replaced']}{os.getpid()}"
        os.replace(self.output, aside)
        try:
            os.replace(self.path, self.output)
        except OSError:
            os.replace(aside, self.output)
            raise
        shutil.rmtree(aside)

    def _clean_up_after_killed_runs(self) -> None:
        for sibling in self.output.parent.iterdir():
            for kind, prefix in self._prefixes.items():
                pid = sibling.name.removeprefix(prefix)
                if pid == sibling.name or not pid.isdigit() or _is_running(int(pid)):
                    continue
                if kind == "replaced" and not self.output.exists():
                    os.replace(sibling, self.output)  # killed between the two renames
                else:
                    shutil.rmtree(sibling, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def output_problems(
    output_dir: str, overwrite: bool, marker: str, keep: Iterable[str | os.PathLike[str] | None], kept: str
) -> list[str]:
    """One line where `output_dir` must not be written, none where it may.

    Args:
        marker: file by which a folder that the command wrote is known; only such a one is replaced.
        keep: paths that the folder must not hold beside the working folder; None is none.
        kept: what those are, in words.
    """
    if output_dir in ("", MISSING):
        return ["output_dir must name the folder to write; got nothing"]
    if problem := writable_problem("output_dir", output_dir):
        return [problem]
    output = Path(output_dir)
    is_full = output.is_dir() and any(output.iterdir())
    if not overwrite and is_full:
        return [f"output_dir must be empty or new, or overwrite=true given to replace it; got {output_dir}"]
    kept_paths = [Path(path).resolve() for path in (".", *keep) if path]
    if overwrite and any(output.resolve() in (path, *path.parents) for path in kept_paths):
        return [f"output_dir must not hold {kept} or the working folder; got {output_dir}"]
    if is_full and not (output / marker).is_file():
        return [f"output_dir must be of this command to be replaced; got {output_dir}, which holds other files"]
    return []


def writable_problem(key: str, folder: str) -> str | None:
    """One line when ``folder`` cannot be made or written to; ``key`` is the config key that names it."""
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"{key} must be a folder that can be made; got {folder}, but {existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith("/proc"):
        return f"{key} must be a folder that can be made; got {folder}, but {existing} cannot be written to"
    return None


def write_json(path: Path, value: Any) -> None:
    """`value` at `path`, whose folder is made; what was there stays until all of it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


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
