"""Whether a folder that does not exist yet can be made, told before anything is computed."""

import os
from pathlib import Path


def writable_problem(key: str, folder: str) -> str | None:
    """One line when ``folder`` cannot be made or written to; ``key`` is the config key that names it."""
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"{key} must be a folder that can be made; got {folder}, but {existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith("/proc"):
        return f"{key} must be a folder that can be made; got {folder}, but {existing} cannot be written to"
    return None
