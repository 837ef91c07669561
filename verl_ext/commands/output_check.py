"""Whether a command may write its output folder, told before anything is computed."""

import os
from collections.abc import Iterable
from pathlib import Path

from omegaconf import MISSING

from verl_ext.config.writable import writable_problem


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
