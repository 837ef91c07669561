"""The second storage of a run: copies of its whole checkpoints.

It is the folder or URL in `trainer.default_hdfs_dir`; each copy has a folder of its own.

hdfs://host/runs       Hadoop's client, the command hdfs
s3://bucket/runs       fsspec; also any other URL
/mnt/nas/runs          a folder; each copy appears under its name only when it is complete
"""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.layout import PARTIAL
from verl_ext.files import writable_problem
from verl_ext.options import first_line, must, reason_of
from verl_ext.text.read.sources import is_url, local_path

_KEY = "trainer.default_hdfs_dir"
_PROBE = ".verl_ext_write_test"


class SecondStorage:
    """A folder or URL that keeps copies of checkpoints as DIR/global_step_N."""

    def __init__(self, place: str) -> None:
        """Take the value of `trainer.default_hdfs_dir`; nothing is read or written."""
        self.place = place.rstrip("/") if is_url(place) else os.path.expanduser(local_path(place))

    def check(self, own: Path) -> None:
        """Try to write there, before hours of training rely on it.

        own: the run's own folder, which must be another.

        Raises:
            ValueError: If the place cannot be written, or its client or package is missing.
        """
        if not is_url(self.place):
            if Path(self.place).resolve() == own.resolve():
                raise ValueError(must(_KEY, "be another folder than trainer.default_local_dir", self.place))
            if problem := writable_problem(_KEY, self.place):
                raise ValueError(problem)
            return
        try:
            if self._is_hdfs:
                _hdfs("-mkdir", "-p", self.place)
                _hdfs("-test", "-w", self.place)
            else:
                system, path = self._file_system()
                system.makedirs(path, exist_ok=True)
                system.pipe_file(f"{path}/{_PROBE}", b"")
                system.rm_file(f"{path}/{_PROBE}")
        except Exception as error:  # each file system has its own
            raise ValueError(must(_KEY, "be a folder that can be written", f"{self.place}: {_why(error)}")) from error

    def put(self, checkpoint: Path) -> None:
        """Copy a whole checkpoint over an earlier copy, or raise OSError."""
        try:
            if self._is_hdfs:
                with suppress(OSError):  # usually there is none, and the copy itself says what is wrong
                    _hdfs("-test", "-e", f"{self.place}/{checkpoint.name}")
                    _hdfs("-rm", "-r", f"{self.place}/{checkpoint.name}")
                _hdfs("-put", "-f", str(checkpoint), self.place)
            elif is_url(self.place):
                system, path = self._file_system()
                if system.exists(f"{path}/{checkpoint.name}"):
                    system.rm(f"{path}/{checkpoint.name}", recursive=True)
                system.put(f"{checkpoint}/", f"{path}/{checkpoint.name}/", recursive=True)
            else:
                target = Path(self.place) / checkpoint.name
                partial = target.with_name(f"{target.name}{PARTIAL}")
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(checkpoint, partial)
                shutil.rmtree(target, ignore_errors=True)
                os.replace(partial, target)
        except Exception as error:
            raise OSError(_why(error)) from error

    @property
    def _is_hdfs(self) -> bool:
        return self.place.startswith("hdfs://")

    def _file_system(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # here, because few runs need it

        return url_to_fs(self.place)


def _hdfs(*arguments: str) -> None:
    """Run `hdfs dfs`; raise OSError with its last line if it fails."""
    client = shutil.which("hdfs")
    if client is None:
        raise OSError("the command hdfs of Hadoop's client is not on PATH")
    done = subprocess.run([client, "dfs", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise OSError(lines[-1] if lines else f"hdfs dfs {arguments[0]} ended with {done.returncode}")


def _why(error: Exception) -> str:
    if isinstance(error, shutil.Error):  # a list of (source, target, reason)
        return str(error.args[0][0][2])
    return reason_of(error) if isinstance(error, OSError) else first_line(error)
