"""An output folder that appears only when it is complete."""

import errno
import os
import re
import shutil
import socket
from pathlib import Path

from verl_ext.commands.errors import DataError, file_of, reason_of

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
