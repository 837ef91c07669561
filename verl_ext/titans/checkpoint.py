"""The file of a trained memory, without the base model.

    {"memory_state_dict": {name: tensor}, "global_step": int}

The names are those in the model, each with ``long_term_memory.`` or ``memory_gate.`` in it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl_ext.files import atomic_write
from verl_ext.options import must

_KEYS = {"memory_state_dict", "global_step"}


def save_memory_checkpoint(path: str | Path, memory_state_dict: Mapping[str, torch.Tensor], global_step: int) -> None:
    """Write the file atomically, its data before its name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().clone() for name, tensor in memory_state_dict.items()}
    with atomic_write(path) as partial, open(partial, "wb") as file:
        torch.save({"memory_state_dict": state, "global_step": int(global_step)}, file)
        file.flush()
        os.fsync(file.fileno())


def read_memory_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; raise ValueError for another file."""
    if not Path(path).is_file():
        raise ValueError(must("a memory checkpoint", "be a file", path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler can raise any exception
        raise ValueError(must("a memory checkpoint", "be a file of torch.save, whole", path)) from error
    if not isinstance(content, dict) or set(content) != _KEYS:
        keys = ", ".join(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"a memory checkpoint must hold memory_state_dict and global_step; {path} holds {keys}")
    state = content["memory_state_dict"]
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise ValueError(f"memory_state_dict of a memory checkpoint must be tensors by name; {path} holds others")
    if not isinstance(step := content["global_step"], int):
        raise ValueError(f"global_step of a memory checkpoint must be a whole number; {path} holds {step!r}")
    return content


def load_memory_checkpoint(model: Any, path: str | Path) -> int:
    """Copy a checkpoint's parameters into a model; return its global step.

    Raises ValueError, before it copies anything, if parameters are missing, unknown or of another shape.
    """
    content = read_memory_checkpoint(path)
    saved, memory = content["memory_state_dict"], model.memory_state_dict()
    for problem, names in (("lacks", memory.keys() - saved.keys()), ("has the unknown", saved.keys() - memory.keys())):
        if names:
            raise ValueError(
                f"a memory checkpoint must fit model.memory; {path} {problem} {min(names)}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )
    for name, tensor in memory.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"a memory checkpoint must fit model.memory; {path} has {name} of shape {list(saved[name].shape)}, "
                f"the model {list(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in memory.items():
            tensor.copy_(saved[name])
    return content["global_step"]
