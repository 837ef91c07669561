"""The list of an Arrow folder's shards, its state.json."""

from pathlib import Path
from typing import NamedTuple

from verl_ext.files import is_inside
from verl_ext.text.read.json_records import parse_json

STATE = "state.json"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # of record batches


class Shard(NamedTuple):
    """A file of record batches, with its size and checksum if recorded."""

    name: str
    bytes: int | None = None
    xxh3_128: str | None = None


def parse_shards(content: str) -> tuple[Shard, ...]:
    """Return the shards that the content of a state.json names.

    Names come with the data, so a name that leads out of the folder is refused. Raises ValueError if the content cannot
    be used, with a message that is to follow the folder's name.
    """
    state = parse_json(content)
    files = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise ValueError(f"its {STATE} names no files")
    if state.get("_indices_data_files"):
        raise ValueError("its rows are in an order of their own: save it again")
    shards = []
    for file in files:
        name, size, checksum = file.get("filename"), file.get("bytes"), file.get("xxh3_128")
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\0" in name:
            raise ValueError(f"its {STATE} names files of other folders, or none: {str(name)[:80]!r}")
        is_recorded = type(size) is int and isinstance(checksum, str)
        shards.append(Shard(name, size, checksum) if is_recorded else Shard(name))
    if len({shard.name for shard in shards}) != len(shards):
        raise ValueError(f"its {STATE} names a file twice")
    return tuple(shards)


def read_shards(folder: Path) -> tuple[Shard, ...]:
    """Return a folder's shards like `parse_shards`; refuse links out of it."""
    shards = parse_shards((folder / STATE).read_text(encoding="utf-8"))
    for shard in shards:
        if not is_inside(folder / shard.name, folder):
            raise ValueError(f"its {shard.name} is a link out of the folder")
    return shards
