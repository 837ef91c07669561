"""Opening a tokenised folder: a memory-mapped Arrow table, or one line that says why not."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

MANDATORY_COLUMNS = ("input_ids", "loss_mask", "category_ids", "length")


def open_folder(folder: str, key: str) -> Any:
    """The `datasets.Dataset` in `folder`, memory-mapped, with the four mandatory columns and at least one row.

    Raises:
        ValueError: no folder, no single dataset in it, a column missing, no document. `key` is named in the message.
    """
    path = Path(folder)
    _check_is_dataset(path, key)
    from datasets import load_from_disk  # here, because importing it takes a second

    try:
        # save_to_disk writes an empty dataset as no file, which load_from_disk cannot read
        dataset = load_from_disk(str(path), keep_in_memory=False) if _data_files(path) else None
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{key} must be a complete dataset folder; {folder} cannot be opened: {reason}") from error
    if dataset is None:
        raise ValueError(f"{key} must hold at least one document; {folder} has none")
    missing = [name for name in MANDATORY_COLUMNS if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"{key} must have the columns {', '.join(MANDATORY_COLUMNS)}; {folder} lacks {', '.join(missing)} "
            f"(it has {', '.join(dataset.column_names) or 'none'})"
        )
    if len(dataset) == 0:
        raise ValueError(f"{key} must hold at least one document; {folder} has none")
    return dataset


def _check_is_dataset(path: Path, key: str) -> None:
    wanted = "a folder written by `python -m verl_ext.tokenize` or by datasets' save_to_disk"
    if not path.exists():
        raise ValueError(f"{key} must be {wanted}; {path} does not exist")
    if not path.is_dir():
        raise ValueError(f"{key} must be {wanted}; {path} is a file")
    if not any(path.iterdir()):
        raise ValueError(f"{key} must be {wanted}; {path} is empty")
    if (path / "dataset_dict.json").exists():
        splits = _splits(path)
        example = path / (splits[0] if splits else "train")
        raise ValueError(
            f"{key} must be one split; {path} is a DatasetDict of {', '.join(splits) or 'no splits'}: give {example}"
        )
    if not (path / "state.json").exists() or not (path / "dataset_info.json").exists():
        raise ValueError(f"{key} must be {wanted}; {path} has no state.json and dataset_info.json")


def _data_files(path: Path) -> list[Any]:
    return json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]


def _splits(path: Path) -> list[str]:
    """The splits of a DatasetDict, `train` first."""
    try:
        names = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, KeyError):
        names = [entry.name for entry in path.iterdir() if entry.is_dir()]
    return sorted(names, key=lambda name: (name != "train", name))
