"""Other trainers' configurations in small, and what `verl-ext migrate` makes of their keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_ext.tools.migrate.command import READERS
from verl_ext.tools.migrate.line import Moved

# For each trainer, what a training needs; RICH has keys with which every other one has something to change.
SMALL: dict[str, dict[str, Any]] = {
    "axolotl": {"base_model": "M", "datasets": ["o/a"]},
    "llamafactory": {"model_name_or_path": "M", "dataset": "own"},
    "llamafactory_v1": {"model": "M", "train_dataset": "o/a"},
    "swift": {"model": "M", "dataset": ["o/a"]},
    "megatron": {"model": "M", "dataset": ["o/a"], "lr": 1e-4},
    **{name: {"model_name_or_path": "M", "dataset_name": "o/a"} for name in ("trl", "trl_dpo", "trl_kto")},
}
ADAPTED = {**SMALL["trl"], "eval_strategy": "steps", "use_peft": True}
RICH: dict[str, dict[str, Any]] = {
    "axolotl": {**SMALL["axolotl"], "test_datasets": ["o/v"], "adapter": "lora"},
    "llamafactory": {"model_name_or_path": "M", "dataset": "sums", "eval_dataset": "chats", "eval_strategy": "steps"},
    "llamafactory_v1": SMALL["llamafactory_v1"],
    "swift": {**SMALL["swift"], "val_dataset": ["o/v"]},
    "megatron": {"model": "M", "dataset": ["o/a"], "val_dataset": ["o/v"], "tuner_type": "lora"},
    "trl": {**ADAPTED, "packing": True},
    "trl_dpo": ADAPTED,
    "trl_kto": ADAPTED,
}
DATASETS = {
    "chats": {"hf_hub_url": "owner/chats", "formatting": "sharegpt", "columns": {"messages": "turns"}},
    "sums": {"file_name": "sums.json", "num_samples": 100},
    "asked": {"file_name": "a.json", "columns": {"prompt": "instruction", "query": "q", "images": "c"}},
    "own": {
        "file_name": "own.json",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "kto_tag": "label"},
        "tags": {"role_tag": "speaker", "content_tag": "says", "user_tag": "Customer", "assistant_tag": "gpt"},
    },
}
FILES: dict[str, object] = {
    "data/dataset_info.json": DATASETS,
    "zero3.json": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "split.json": {"tensor_parallel": {"autotp_size": 2}},
    "tokens.txt": "<a>\n\n <c d>\n",
    "pairs.yaml": {name: {"path": f"o/{name}", "converter": "pair"} for name in "pq"},
    "local.yaml": {"a": {"converter": "alpaca"}, "b": {"converter": "own", "source": "local", "size": 5}},
}


def write(folder: Path, name: str, content: object) -> str:
    """Write a text, JSON or YAML; return its path."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    dump = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(content if isinstance(content, str) else dump(content))
    return str(path)


def write_files(folder: Path) -> Path:
    """Write the files that values name; return the folder."""
    for name, content in FILES.items():
        write(folder, name, content)
    return folder


def moved(trainer: str, values: Mapping[str, Any], folder: Path, ranks: int | None = None) -> Moved:
    """Return what becomes of a trainer's keys; a key of None is left out."""
    found = Moved("T", {key: value for key, value in values.items() if value is not None}, ranks, folder)
    READERS[trainer].read(found)
    return found
