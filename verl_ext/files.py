"""Files and folders that appear whole or not at all, and folders that one process makes and all processes open.

    ROOT/<name>/                what `make` wrote, and
        contents.json           the sizes of its files, by which a damaged folder is known
    ROOT/<name>.lock            held by the process that makes it
    ROOT/<name>.failed          why the last attempt failed, for those that waited for it

The name of a cached folder should be a digest of everything that its content follows from, so that none is ever stale.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from verl_ext.values import MISSING, DataError, file_of, first_line, reason_of

CONTENTS = "contents.json"
# Beside what a command writes: what became of the records, and {number: name} of their categories.
REPORT, CATEGORIES = "report.json", "categories.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: more than a file system, or a limit, lets a file have
_CHUNK = 1 << 23
_WRITERS = ("PytorchStreamWriter", "inline_container", "os error")  # words of torch's and safetensors' errors
_LEAST_FREE = 1 << 20  # bytes; a disk with less is full

BLOCK = 1 << 30  # bytes of a file that readers who share it take at once
_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` when the block ends well and is removed otherwise."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


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


def checksum(path: str | os.PathLike[str], begin: int = 0, most: int | None = None) -> str:
    """xxh3_128, 32 hex digits, of a file's bytes from `begin` on, of at most so many."""
    found, left = xxhash.xxh3_128(), most
    with open(path, "rb") as file:
        file.seek(begin)
        while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
            found.update(chunk)
            left = None if left is None else left - len(chunk)
    return found.hexdigest()


def checksum_by_blocks(path: str | os.PathLike[str]) -> str:
    """:func:`checksum` of a file of up to 1 GiB; of a longer one, :func:`joined` ones of its blocks of 1 GiB."""
    return joined([checksum(path, begin, BLOCK) for begin in range(0, max(os.path.getsize(path), 1), BLOCK)])


def joined(blocks: Sequence[str]) -> str:
    """A file's checksum of those of its blocks."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_hexdigest("".join(blocks).encode())


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file that a folder's own files name lies in it, links followed.

    The Hub's cache is one place: its `snapshots/REVISION` hold links to `blobs` beside them.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    hubs = (above.parent.parent for above in (root, *root.parents) if above.parent.name == "snapshots")
    return real.is_relative_to(root) or any(real.is_relative_to(hub / "blobs") for hub in hubs)


def follow_umask(folder: Path) -> None:
    """Give a folder's files the mode of new ones: safetensors writes them for their owner alone."""
    new = folder / f".mode-{os.getpid()}"
    new.touch()
    for path in folder.glob("*.safetensors"):
        shutil.copymode(new, path)
    new.unlink()


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk before anything that follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """`value` as JSON at `path`, whose folder is made; what was there stays until all of it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class OutputFolder:
    """A context whose `path` is a hidden sibling of `output_dir`, renamed to it by `publish()` and removed otherwise.

    A run that is killed leaves only the hidden folder, `.NAME.unfinished-HOST-PID`; the next run for the same
    `output_dir` on that host removes it. What cannot be written there, as where the disk is full, is a `DataError` of
    one line.
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
        """Whether an error is of writing here, or of a full disk: a write that fails names no file."""
        file = file_of(error)
        return error.errno in DISK_FULL if file is None else Path(file).is_relative_to(self.path)

    def _not_written(self, error: OSError) -> DataError:
        return DataError(f"{self.key} must be a folder that can be written; got {self.named}: {reason_of(error)}")

    def publish(self) -> None:
        """Put the folder in its place. What was there, under `overwrite`, is moved aside first and deleted last."""
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
                if pid == sibling.name or not pid.isdigit() or _is_running(int(pid)):
                    continue
                if kind == "replaced" and not self.output.exists():
                    os.replace(sibling, self.output)  # killed between the two renames
                else:
                    shutil.rmtree(sibling, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def output_problems(
    output_dir: str, overwrite: bool, marker: str, keep: Iterable[str | os.PathLike[str] | None], kept: str
) -> list[str]:
    """One line where `output_dir` must not be written, none where it may; checked before anything is computed.

    Args:
        marker: file by which a folder that the command wrote is known; only such a one is replaced.
        keep: paths that the folder must not hold beside the working folder; None is none.
        kept: what those are, in words.
    """
    if output_dir in ("", MISSING):
        return ["output_dir must name the folder to write; got nothing"]
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
    """One line when `folder` cannot be made or written to; `key` is the config key that names it."""
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"{key} must be a folder that can be made; got {folder}, but {existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith("/proc"):
        return f"{key} must be a folder that can be made; got {folder}, but {existing} cannot be written to"
    return None


def default_root(name: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    """`cache_dir` with ~ expanded, absolute; where it is None, the folder `name` in the cache of `datasets`."""
    if cache_dir is not None:
        return Path(os.path.abspath(os.path.expanduser(cache_dir)))
    from datasets.config import HF_DATASETS_CACHE  # here, because importing it takes a second

    return Path(HF_DATASETS_CACHE) / name


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

    # The same input fails in the same way, and ranks would otherwise fail one after another: those that waited for an
    # attempt raise its error. A note of an older attempt is known by its time of change, as clocks need not agree.
    note = root / f"{name}.failed"
    before = _changed(note)
    try:
        if folder.exists():  # every process that sees it logs it; of a run's ranks, rank 0 alone prints
            _logger.warning("%s is made anew: %s", folder, wrong)
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if damage(folder) is None:
                return folder
            if _changed(note) not in (None, before):
                raise ValueError(note.read_text(encoding="utf-8"))
            try:
                _make(folder, make, key)
            except ValueError as error:
                try:
                    note.write_text(str(error), encoding="utf-8")
                except OSError:  # those that waited try again, where the disk has no room for a note
                    note.unlink(missing_ok=True)
                raise
            note.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{key} must be a folder that can be written; got {root}: {reason_of(error)}") from error
    return folder


def _changed(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def damage(folder: Path) -> str | None:
    """How `folder` differs from what was made, in a few words; None: it does not."""
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
