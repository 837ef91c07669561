"""Files and output folders, written whole or not at all, and checksums."""

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from verl_ext.launch.protocol import is_running
from verl_ext.options import DataError, file_of, first_line, must, reason_of

# Files in the output folder of a command: the report on its records, and the categories as {number: name}.
REPORT, CATEGORIES = "report.json", "categories.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: the file system or a limit allows no larger file
BLOCK = 1 << 30  # bytes of a file that a rank reads when ranks compute its checksum together
_CHUNK = 1 << 23
_WRITERS = ("PytorchStreamWriter", "inline_container", "os error")  # words in the write errors of torch and safetensors
_LEAST_FREE = 1 << 20  # bytes; a disk with less free space counts as full


def file_state(path: str | os.PathLike[str]) -> tuple[str, int, int]:
    """Return a file's real path, size and modification time in ns."""
    status = os.stat(path)
    return os.path.realpath(path), status.st_size, status.st_mtime_ns


def checksum(path: str | os.PathLike[str], begin: int = 0, most: int | None = None) -> str:
    """Return the xxh3_128, 32 hex digits, of a part of a file."""
    found, left = xxhash.xxh3_128(), most
    with open(path, "rb") as file:
        file.seek(begin)
        while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
            found.update(chunk)
            left = None if left is None else left - len(chunk)
    return found.hexdigest()


class ChecksumFile(io.FileIO):
    """A new file with the checksum of its blocks of 1 GiB."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "wb")
        self.size = 0
        self._blocks = [xxhash.xxh3_128()]

    def write(self, data: Any) -> int:
        """Write all bytes of `data`."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if self.size and self.size % BLOCK == 0:
                self._blocks.append(xxhash.xxh3_128())
            written = super().write(view[done : done + BLOCK - self.size % BLOCK])
            self._blocks[-1].update(view[done : done + written])
            self.size, done = self.size + written, done + written
        return done

    @property
    def checksum(self) -> str:
        """The checksum of what was written."""
        return combine_checksums([block.hexdigest() for block in self._blocks])


def combine_checksums(blocks: Sequence[str]) -> str:
    """Combine the checksums of a file's blocks into that of the file."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_hexdigest("".join(blocks).encode())


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether `path` lies in `folder` after links are resolved.

    The Hub's cache counts as one folder, because its `snapshots/REVISION` hold links to `blobs` beside them.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    hubs = (above.parent.parent for above in (root, *root.parents) if above.parent.name == "snapshots")
    return real.is_relative_to(root) or any(real.is_relative_to(hub / "blobs") for hub in hubs)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which becomes `path` unless the block fails."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each row as a line of JSON, with its line end."""
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path` atomically; create a missing folder."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text to `path` atomically; create a missing folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn the error of a failed write into OSError with its reason.

    torch and safetensors raise their own errors for it, and torch's error has often lost the reason.
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
    """Give safetensors files the mode of new files."""
    new = folder / f".mode-{os.getpid()}"
    new.touch()
    for path in folder.glob("*.safetensors"):
        shutil.copymode(new, path)  # safetensors lets only the owner read them
    new.unlink()


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def working_in(folder: str | None) -> Iterator[None]:
    """Work in `folder`, if it exists, where a report's relative paths hold."""
    before = os.getcwd()
    if folder and os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class OutputFolder:
    """A hidden sibling of `output_dir`, which `publish()` renames to it.

    A killed run leaves only the hidden folder, `.NAME.unfinished-HOST-PID`; the next run for the same `output_dir` on
    that host, and in the same container, removes it. A failed write in the folder, as on a full disk, raises
    `DataError` with one line.
    """

    def __init__(self, output_dir: str, overwrite: bool, key: str = "output_dir", named: str | None = None) -> None:
        """Name the folders; errors name `key` and its value `named`."""
        self.output = Path(os.path.realpath(output_dir))
        self.key, self.named, self.overwrite = key, named or output_dir, overwrite
        host = re.sub(r"[^\w.]", "_", f"{socket.gethostname()}.{_process_space()}")
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
        """Tell whether the folder, or a full disk, caused an error."""
        file = file_of(error)  # None for a failed write
        return error.errno in DISK_FULL if file is None else Path(file).is_relative_to(self.path)

    def _not_written(self, error: OSError) -> DataError:
        return DataError(must(self.key, "be a folder that can be written", f"{self.named}: {reason_of(error)}"))

    def publish(self) -> None:
        """Rename the folder to `output_dir`, and delete an old one last."""
        is_full = _has_files(self.output)
        if is_full and not self.overwrite:
            raise DataError(f"output_dir was filled by another run meanwhile, overwrite=true not given: {self.named}")
        if not is_full:
            os.replace(self.path, self.output)  # this also replaces an empty folder
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
                    os.replace(sibling, self.output)  # the run was killed between the two renames
                else:
                    shutil.rmtree(sibling, ignore_errors=True)


@functools.cache
def _process_space() -> str:
    """Return a word for the boot and container of a process number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return hashlib.sha256((boot + os.readlink("/proc/self/ns/pid")).encode()).hexdigest()[:8]
    except OSError:  # no /proc, as on macOS
        return ""


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def output_problems(
    output_dir: str, overwrite: bool, marker: str, keep: Iterable[str | os.PathLike[str] | None], kept: str
) -> list[str]:
    """List the reason why `output_dir` must not be written, if any.

    marker: the file that marks a folder of this command; only such a folder may be replaced. keep: paths that the
    folder must not contain, in addition to the working folder; None entries are ignored. kept: words for these paths.
    """
    if problem := writable_problem("output_dir", output_dir):
        return [problem]
    output, is_full = Path(output_dir), _has_files(Path(output_dir))
    if not overwrite and is_full:
        return [must("output_dir", "be empty or new, or overwrite=true given to replace it", output_dir)]
    kept_paths = [Path(path).resolve() for path in (".", *keep) if path]
    if overwrite and any(output.resolve() in (path, *path.parents) for path in kept_paths):
        return [must("output_dir", f"not hold {kept} or the working folder", output_dir)]
    if is_full and not (output / marker).is_file():
        needed = "be a folder that this command wrote, to be replaced"
        return [must("output_dir", needed, f"{output_dir}, which holds other files")]
    return []


def writable_problem(key: str, folder: str) -> str | None:
    """Return a line that names `key` if `folder` cannot be written."""
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    problem = None
    if not existing.is_dir():
        problem = "is a file"
    elif not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith("/proc"):
        problem = "cannot be written to"
    return problem and must(key, "be a folder that can be made", f"{folder}, but {existing} {problem}")
