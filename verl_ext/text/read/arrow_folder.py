"""Read the shards of an Arrow folder from its state.json.

    {"_fingerprint": "7c1e…", "_data_files": [{"filename": "data-00000-of-00001.arrow",
        "bytes": 81023, "xxh3_128": "52d0…"}], …}      size and checksum, only if verl-ext wrote the shard

Names come with the data, so a name that leads out of the folder is refused. `datasets` reads the same file and drops
the additional fields when it saves the folder again.
"""

from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.files import is_inside
from verl_ext.text.read.json_records import parse_json

STATE = "state.json"


class Shard(NamedTuple):
    """A file of record batches, with its size and checksum (:func:`verl_ext.files.checksum`) if they were recorded."""

    name: str
    bytes: int | None = None
    xxh3_128: str | None = None


def parse_shards(content: str) -> tuple[Shard, ...]:
    """Return the shards that the content of a state.json names.

    Raises ValueError if it cannot be used, with a message that is to follow the folder's name.
    """
    state = parse_json(content)
    files = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise ValueError(f"its {STATE} names no files")
    if state.get("_indices_data_files"):
        raise ValueError("its rows are in an order of their own: save it anew")
    shards = tuple(_shard(file) for file in files)
    if len({shard.name for shard in shards}) != len(shards):
        raise ValueError(f"its {STATE} names a file twice")
    return shards


def read_shards(folder: Path) -> tuple[Shard, ...]:
    """Return the shards of a local folder. Raises ValueError like `parse_shards`, or if a link leads out of it."""
    shards = parse_shards((folder / STATE).read_text(encoding="utf-8"))
    for shard in shards:
        if not is_inside(folder / shard.name, folder):
            raise ValueError(f"its {shard.name} is a link out of the folder")
    return shards


def _shard(file: dict[str, Any]) -> Shard:
    name, size, checksum = file.get("filename"), file.get("bytes"), file.get("xxh3_128")
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\0" in name:
        raise ValueError(f"its {STATE} names files of other folders, or none: {str(name)[:80]!r}")
    if type(size) is not int or not isinstance(checksum, str):
        return Shard(name)
    return Shard(name, size, checksum)
