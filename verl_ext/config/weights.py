"""Whether a local model folder has weights that can be opened: headers alone, no tensor is read."""

import os
from glob import glob

_PICKLED = ("pytorch_model*.bin", "model*.bin")


def weight_problems(folder: str) -> list[str]:
    """One line when ``folder`` (model.path) holds no weights, or a safetensors file that was cut short."""
    from safetensors import SafetensorError, safe_open

    files = sorted(glob(os.path.join(folder, "*.safetensors")))
    if not files and not any(glob(os.path.join(folder, pattern)) for pattern in _PICKLED):
        return [f"model.path must hold weights (*.safetensors or pytorch_model*.bin); got {folder}"]
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return [f"model.path must hold weights that can be read; got {file}: {error}"]
    return []
