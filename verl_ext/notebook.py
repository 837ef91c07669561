"""Training and export from Python and notebooks, in processes of their own.

    verl_ext.train({…})  ─►  verl-ext train …  ─►  torchrun  ─►  the ranks
    TrainedRun           ◄───────────────────────  the run's folder, in the caller's file (launch/protocol.py)

The calling process imports no torch, keeps its signal handlers and folder, and prints what the command prints. When it
ends, the kernel of the system asks the command to end too.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.checkpoint.curves import read_curves
from verl_ext.checkpoint.layout import BEST, METRICS, saved_folders
from verl_ext.launch.protocol import USER_ERROR, Launcher
from verl_ext.options import UsageError
from verl_ext.overrides import override_words

if TYPE_CHECKING:
    from pandas import DataFrame

_COMMAND = (sys.executable, "-c", "from verl_ext.notebook import run_command; run_command()")
_ERROR = "error: "
_SECONDS = 0.1  # between looks at what the command printed


class CommandError(RuntimeError):
    """A command that failed; the message is its own line.

    Attributes:
        code: the command's exit code.
    """

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the line alone, as the output above has the rest."""
        return [f"{type(self).__name__}: {self}"]


class CommandMistake(CommandError, UsageError):
    """A command that the user's options ended before it began."""


class TrainedRun:
    """A run, by the files of its folder.

    Attributes:
        folder: the run's folder, absolute.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    @property
    def metrics(self) -> "DataFrame":
        """The metrics so far, a row for each step; NaN where a step lacks one.

        Raises UsageError for a run that wrote none (`trainer.logger`).
        """
        import pandas as pd  # here, because importing it takes a second

        curves, _ = read_curves(self.folder / METRICS)
        columns = {name: dict(zip(curve.steps, curve.values, strict=True)) for name, curve in curves.items()}
        table = pd.DataFrame({name: pd.Series(column, dtype=float) for name, column in columns.items()})
        return table.sort_index().rename_axis("step")

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints, the earliest step first."""
        return saved_folders(self.folder)

    @property
    def newest(self) -> Path | None:
        """The last checkpoint, if there is one."""
        return next(reversed(self.checkpoints), None)

    @property
    def best(self) -> Path | None:
        """The checkpoint that `checkpoint.keep_best` links, if it does."""
        link = self.folder / BEST
        return link.resolve() if link.exists() else None

    def export(self, output_dir: str | os.PathLike[str], **options: Any) -> Path:
        """Export the last checkpoint as `verl-ext export` does; return its folder.

        options: those of the command, such as `dtype="bfloat16"` or `checkpoint=run.best`. Raises like :func:`train`.
        """
        _run(["export"], {"checkpoint": self.folder, "output_dir": output_dir, **options})
        return Path(output_dir).absolute()


def train(options: Mapping[str, Any] | Sequence[str]) -> TrainedRun:
    """Train like `verl-ext train`; return the run when it has ended.

    It also writes metrics.jsonl, whatever `trainer.logger` says.

    Args:
        options: those of the command, `nproc` included, as a dict of dotted or nested keys, whose values stay as they
            are; or the command's words, which Hydra reads.

    Raises:
        CommandMistake: The options are wrong; it is a ValueError.
        CommandError: The run failed, or was asked by others to stop (code 75: the same call resumes it).
        KeyboardInterrupt: This process was interrupted, and the ranks have saved their step and ended.
    """
    with tempfile.TemporaryDirectory(prefix="verl-ext-") as folder:
        caller = Path(folder, "run")
        _run(["train"], options, caller=str(caller))
        return TrainedRun(caller.read_text(encoding="utf-8"))


def _run(command: Sequence[str], options: Mapping[str, Any] | Sequence[str], caller: str | None = None) -> None:
    """Run a command of `verl-ext` to its end, and print what it prints."""
    try:
        words = override_words(options) if isinstance(options, Mapping) else [*map(str, options)]
    except ValueError as error:
        raise CommandMistake(str(error), USER_ERROR) from None
    ours = {"PYTHONUNBUFFERED": "1", **Launcher.from_environment().environment(pid=os.getpid(), caller=caller)}
    error_line, is_interrupted = "", False
    # A file, unlike a pipe, can still be written when this process is gone and the ranks save.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*_COMMAND, *command, *words],
            env={**os.environ, **ours},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a notebook interrupts the kernel's whole group; it is passed on here, once
        )
        code, printed = None, 0
        try:
            while code is None:
                try:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(_SECONDS)
                    # The last error is the one that ended the command.
                    size = os.fstat(output.fileno()).st_size
                    lines = os.pread(output.fileno(), size - printed, printed).splitlines(keepends=True)
                    if code is None and lines and not lines[-1].endswith(b"\n"):
                        del lines[-1]  # which is not whole yet
                    for line in lines:
                        printed += len(line)
                        text = line.decode(errors="replace")
                        print(text, end="", flush=True)
                        error_line = text.removeprefix(_ERROR).strip() if text.startswith(_ERROR) else error_line
                except KeyboardInterrupt:
                    is_interrupted = True
                    process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:  # nothing is left to print to
                process.terminate()
    if is_interrupted:
        raise KeyboardInterrupt("the command has ended; the same call goes on from what it saved")
    if code:
        kind = CommandMistake if code == USER_ERROR else CommandError
        raise kind(error_line or f"verl-ext {command[0]} ended with exit code {code}", code)


def run_command() -> None:
    """Run the command that `sys.argv` names, until its caller ends."""
    Launcher.from_environment().end_with_it()
    try:
        from verl_ext.__main__ import main  # here, because an interrupt may come meanwhile

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
