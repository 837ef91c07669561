"""accelerate: its file of ranks, sharding and precision.

It stands alone, or in `accelerate launch --config_file FILE …` before a trainer.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.tools.migrate import hf_trainer
from verl_ext.tools.migrate.line import Moved, mapping, number, shell_word
from verl_ext.tools.migrate.reading import file_below, read_yaml


def read_launcher(moved: Moved) -> None:
    """Translate the file alone: words for the command of a training."""
    moved.take("accelerate")
    moved.ranks = moved.ranks or int(number(moved.get("num_processes"))) or None
    moved.nodes = max(int(number(moved.get("num_machines"), 1)), 1)
    groups = _groups(moved.values)
    hf_trainer.put_split(moved, max((groups.get(name, 1) for name in ("sp_size", "cp_size")), key=number))
    hf_trainer.read_sharding(moved, ("deepspeed_config", "fsdp_config"))
    words = [f"nproc={moved.nproc}"] * bool(moved.nproc) + [shell_word(word) for word in moved.overrides()]
    moved.become(" ".join(["verl-ext train", *words]), "words for the command of a training, whose file is another one")


def launched_by(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the keys of a command's `--config_file` by the Trainer's names, and its `topology`."""
    flags = [number for number, word in enumerate(words) if word.partition("=")[0] == "--config_file"]
    if not flags:
        return {}
    name = words[flags[0]].partition("=")[2] or next(iter(words[flags[0] + 1 :]), "")
    path = file_below(folder, name)
    if path is None:
        print(f"note: {name} of --config_file is not here: its ranks and its sharding are not read", file=sys.stderr)
        return {}
    values = read_yaml(path)
    topology = {"ranks": values.get("num_processes"), "nodes": values.get("num_machines")}
    found: dict[str, Any] = {"topology": {name: str(value) for name, value in topology.items() if value}}
    found |= {"deepspeed": values.get("deepspeed_config"), "fsdp_config": values.get("fsdp_config")}
    found |= {"parallelism_config": _groups(values)}
    return {key: value for key, value in found.items() if value}


def _groups(values: Any) -> dict[str, Any]:
    given = mapping("parallelism_config", values.get("parallelism_config"))
    return {key.removeprefix("parallelism_config_"): size for key, size in given.items()}
