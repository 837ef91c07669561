"""Files and folders that appear whole or not at all, their fingerprints, and the cache.

    ROOT/<name>/                the files of `make`, with contents.json: their sizes
    ROOT/<name>.lock            held by the process that makes it
    ROOT/<name>.failed          why the last attempt failed, for the processes that waited for it

A cached folder is named by the fingerprint of everything that its content follows from, so that none is ever stale.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from verl_ext.launcher import is_running
from verl_ext.values import DataError, file_of, first_line, reason_of

CONTENTS = "contents.json"
# Files of a folder that a command writes: the report of its records, and {number: name} of their categories.
REPORT, CATEGORIES = "report.json", "categories.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: a file system or a limit allows no larger file
BLOCK = 1 << 30  # bytes of a file that ranks who share its checksum take at once
_CHUNK = 1 << 23
_WRITERS = ("PytorchStreamWriter", "inline_container", "os error")  # words of torch's and safetensors' errors
_LEAST_FREE = 1 << 20  # bytes; a disk with less is full

_logger = logging.getLogger(__name__)


def fingerprint(*facts: Any, digits: int = 32) -> str:
    """Return hex digits of the sha256 of texts, JSON values, buffers such as arrays, and iterators of these."""
    digest = hashlib.sha256()
    for fact in chain.from_iterable(fact if isinstance(fact, Iterator) else (fact,) for fact in facts):
        text = json.dumps(fact) if isinstance(fact, (list, tuple, dict)) else fact
        digest.update(text.encode() if isinstance(text, str) else text)
    return digest.hexdigest()[:digits]


def file_state(path: str | os.PathLike[str]) -> tuple[str, int, int]:
    """Return the real path, size and time of change in ns of a file. No content is read."""
    status = os.stat(path)
    return os.path.realpath(path), status.st_size, status.st_mtime_ns


def checksum(path: str | os.PathLike[str], begin: int = 0, most: int | None = None) -> str:
    """Return the xxh3_128, 32 hex digits, of at most `most` bytes of a file from byte `begin` on."""
    found, left = xxhash.xxh3_128(), most
    with open(path, "rb") as file:
        file.seek(begin)
        while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
            found.update(chunk)
            left = None if left is None else left - len(chunk)
    return found.hexdigest()


def checksum_by_blocks(path: str | os.PathLike[str]) -> str:
    """Return :func:`checksum` of a file of up to 1 GiB, of a longer one :func:`joined` ones of its blocks of 1 GiB."""
    return joined([checksum(path, begin, BLOCK) for begin in range(0, max(os.path.getsize(path), 1), BLOCK)])


def joined(blocks: Sequence[str]) -> str:
    """Return a file's checksum from those of its blocks."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_hexdigest("".join(blocks).encode())


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file that a folder's own files name lies in it, links followed.

    The Hub's cache is one place: its `snapshots/REVISION` hold links to `blobs` beside them.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    hubs = (above.parent.parent for above in (root, *root.parents) if above.parent.name == "snapshots")
    return real.is_relative_to(root) or any(real.is_relative_to(hub / "blobs") for hub in hubs)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` on success, delete it on error."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, whose folder is made; the old content stays until all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Raise a failed write inside as an OSError with its reason.

    torch and safetensors have errors of their own for it, and torch's has often lost the reason.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or not any(name in str(error) for name in _WRITERS):
            raise
        known, before = re.search(r"\(os error (\d+)\)", str(error)), error.__context__
        number = int(known[1]) if known else before.errno if isinstance(before, OSError) else None
        if number is None and shutil.disk_usage(folder).free < _LEAST_FREE:
            number = errno.ENOSPC
        reason = first_line(error) if number is None else os.strerror(number)
        raise OSError(number or errno.EIO, reason, str(folder)) from error


def follow_umask(folder: Path) -> None:
    """Give a folder's files the mode of new ones: safetensors writes them for their owner alone."""
    new = folder / f".mode-{os.getpid()}"
    new.touch()
    for path in folder.glob("*.safetensors"):
        shutil.copymode(new, path)
    new.unlink()


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OutputFolder:
    """A context whose `path` is a hidden sibling of `output_dir`, renamed to it by `publish()` and removed otherwise.

    A run that is killed leaves only the hidden folder, `.NAME.unfinished-HOST-PID`; the next run for the same
    `output_dir` on that host removes it. A write that fails there, as on a full disk, is a `DataError` of one line.
    """

    def __init__(self, output_dir: str, overwrite: bool, key: str = "output_dir", named: str | None = None) -> None:
        """`key` and `named`: the option that errors name, and its value (None: output_dir)."""
        self.output = Path(os.path.realpath(output_dir))
        self.key, self.named, self.overwrite = key, named or output_dir, overwrite
        host = re.sub(r"[^\w.]", "_", socket.gethostname())
        self._prefixes = {kind: f".{self.output.name}.{kind}-{host}-" for kind in ("unfinished", "replaced")}
        self.path, self._aside = (self.output.parent / f"{prefix}{os.getpid()}" for prefix in self._prefixes.values())

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
        """Return whether an error is of writing here, or of a full disk: a write that fails names no file."""
        file = file_of(error)
        return error.errno in DISK_FULL if file is None else Path(file).is_relative_to(self.path)

    def _not_written(self, error: OSError) -> DataError:
        return DataError(f"{self.key} must be a folder that can be written; got {self.named}: {reason_of(error)}")

    def publish(self) -> None:
        """Put the folder in its place. With `overwrite`, the old one is moved aside first and deleted last."""
        is_full = _has_files(self.output)
        if is_full and not self.overwrite:
            raise DataError(f"output_dir was filled by another run meanwhile, overwrite=true not given: {self.named}")
        if not is_full:
            os.replace(self.path, self.output)  # also over an empty folder
            return
        os.replace(self.output, self._aside)
        try:
            os.replace(self.path, self.output)
        except OSError:
            os.replace(self._aside, self.output)
            raise
        shutil.rmtree(self._aside)

    def _clean_up_after_killed_runs(self) -> None:
        for sibling in self.output.parent.iterdir():
            for kind, prefix in self._prefixes.items():
                pid = sibling.name.removeprefix(prefix)
                if pid == sibling.name or not pid.isdigit() or is_running(pid):
                    continue
                if kind == "replaced" and not self.output.exists():
                    os.replace(sibling, self.output)  # killed between the two renames
                else:
                    shutil.rmtree(sibling, ignore_errors=True)


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def output_problems(
    output_dir: str, overwrite: bool, marker: str, keep: Iterable[str | os.PathLike[str] | None], kept: str
) -> list[str]:
    """Return one line if `output_dir` must not be written, an empty list otherwise.

    marker: file by which a folder that the command wrote is known; only such a one is replaced. keep: paths that the
    folder must not hold beside the working folder; None is none. kept: a name for these paths.
    """
    if problem := writable_problem("output_dir", output_dir):
        return [problem]
    output, is_full = Path(output_dir), _has_files(Path(output_dir))
    if not overwrite and is_full:
        return [f"output_dir must be empty or new, or overwrite=true given to replace it; got {output_dir}"]
    kept_paths = [Path(path).resolve() for path in (".", *keep) if path]
    if overwrite and any(output.resolve() in (path, *path.parents) for path in kept_paths):
        return [f"output_dir must not hold {kept} or the working folder; got {output_dir}"]
    if is_full and not (output / marker).is_file():
        return [f"output_dir must be of this command to be replaced; got {output_dir}, which holds other files"]
    return []


def writable_problem(key: str, folder: str) -> str | None:
    """Return one line if `folder` cannot be made or written to; `key` is the config key that names it."""
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    problem = None
    if not existing.is_dir():
        problem = "is a file"
    elif not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith("/proc"):
        problem = "cannot be written to"
    return problem and f"{key} must be a folder that can be made; got {folder}, but {existing} {problem}"


def default_root(name: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return `cache_dir`, absolute with ~ expanded, or the folder `name` in the cache of `datasets` if it is None."""
    if cache_dir is not None:
        return Path(os.path.abspath(os.path.expanduser(cache_dir)))
    from datasets.config import HF_DATASETS_CACHE  # here, because importing it takes a second

    return Path(HF_DATASETS_CACHE) / name


def is_complete(folder: Path) -> bool:
    """Return whether a cached folder has every file that was made, in its size."""
    try:
        sizes = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))["sizes"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def cached_folder(root: Path, name: str, make: Callable[[Path], None], *, key: str = "data.cache_dir") -> Path:
    """Return `root`/`name`, filled by `make(an empty folder)` unless it is complete.

    Of processes that call it at the same time one makes the folder; the others wait, and raise what it raised. If it
    is killed, the next one that waits takes over. Nothing is written if the folder is complete.

    Raises:
        ValueError: what `make` raises, an OSError as one line with the file and the reason; a root that cannot be
            written, also if only `make` finds that out or fills the disk, in one line that names `key`.
    """
    folder = root / name
    if is_complete(folder):
        return folder
    from filelock import FileLock

    # The same input fails in the same way, and ranks would otherwise fail one after another: those that waited for an
    # attempt raise its error. A note of an older attempt is known by its time of change, as clocks need not agree.
    note = root / f"{name}.failed"
    before = _changed(note)
    try:
        if folder.exists():  # every process that sees it logs it; of a run's ranks, rank 0 alone prints
            _logger.warning("%s is made anew: files of it are missing or have another size", folder)
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if is_complete(folder):
                return folder
            if _changed(note) not in (None, before):
                raise ValueError(note.read_text(encoding="utf-8"))
            try:
                _make(folder, make, key)
            except ValueError as error:
                # Without room for a note, the processes that waited try again.
                with contextlib.suppress(OSError), atomic_write(note) as partial:
                    partial.write_text(str(error), encoding="utf-8")
                raise
            note.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{key} must be a folder that can be written; got {root}: {reason_of(error)}") from error
    return folder


def _changed(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _make(folder: Path, make: Callable[[Path], None], key: str) -> None:
    with OutputFolder(str(folder), overwrite=True, key=key, named=str(folder.parent)) as output:
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
