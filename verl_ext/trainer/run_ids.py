"""The ids under which trackers know a run, kept beside its checkpoints so that a resumed run goes on with them.

{"wandb": "dz5g909n"}

wandb and swanlab read an id, and whether it may be gone on with, from the environment; one that is set there wins.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.config.output import RUN_IDS
from verl_ext.trainer.whole_json import write_json

# tracker: (variable of its run's id, variable that lets a run of that id be gone on with)
_VARIABLES = {"wandb": ("WANDB_RUN_ID", "WANDB_RESUME"), "swanlab": ("SWANLAB_RUN_ID", "SWANLAB_RESUME")}


def read_run_ids(folder: Path) -> dict[str, str]:
    """What :func:`keep_run_ids` wrote into a run's folder; nothing where it wrote nothing.

    Raises:
        ValueError: the file is no JSON object.
    """
    path = folder / RUN_IDS
    if not path.is_file():
        return {}
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, dict):
        raise ValueError(f"trainer.default_local_dir: {RUN_IDS} must be a JSON object of run ids; got {path}")
    return ids


def keep_run_ids(folder: Path, earlier: Mapping[str, str], loggers: Mapping[str, Any]) -> None:
    """Write the ids of the runs that verl's ``Tracking.logger`` has begun, and of `earlier` ones that it has not."""
    runs = {
        "wandb": lambda wandb: wandb.run,
        "swanlab": lambda swanlab: swanlab.get_run(),
    }
    begun = {name: getattr(runs[name](loggers[name]), "id", None) for name in _VARIABLES if name in loggers}
    ids = {**earlier, **{name: run_id for name, run_id in begun.items() if run_id}}
    if ids:
        write_json(folder / RUN_IDS, ids)
    else:
        (folder / RUN_IDS).unlink(missing_ok=True)  # of a run that ended before its first checkpoint


@contextmanager
def going_on_with(ids: Mapping[str, str], loggers: Sequence[str]) -> Iterator[None]:
    """The environment in which `loggers` begin their runs with these ids; as it was afterwards."""
    variables: dict[str, str] = {}
    for name in _VARIABLES.keys() & ids.keys() & set(loggers):
        run_id, resume = _VARIABLES[name]
        variables |= {run_id: ids[name], resume: "allow"}
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
