"""Sources that are not on this machine: files behind a URL, read through fsspec, and datasets of the Hugging Face Hub.

    https://host/a.jsonl.gz   s3://bucket/folder/   gs://bucket/*.parquet    any URL that fsspec has a file system for
    hf://datasets/owner/name/data/a.parquet                                  a file of a Hub repository, likewise
    hf://datasets/owner/name[@revision][:config][:split]                     a Hub dataset, as `datasets` loads it

Credentials and hosts are fsspec's own matter, read from the environment and its configuration files. Nothing is
downloaded as a whole. fsspec and `datasets` are imported where they are used, since a command that reads local files
starts without them.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from verl_ext.values import DataError, UsageError, first_line

_URL = re.compile(r"[A-Za-z][\w+.-]*://")
_HUB = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^@:/]+))?(:(?P<config>[^:/]+))??(:(?P<split>[^:/]+))?"
)
HUB_HINT = "hf://datasets/owner/name[:config][:split]"


def is_url(path: str) -> bool:
    """Whether a path is a URL, and not a local file's, whose `file://` `local_path` removes."""
    return bool(_URL.match(path)) and not path.startswith("file://")


def local_path(path: str) -> str:
    """A path less `file://`."""
    return path.removeprefix("file://")


def absolute_path(path: str | os.PathLike[str]) -> str:
    """A local path from the root, without `~`; a URL as it stands."""
    plain = local_path(os.fspath(path))
    return plain if is_url(plain) else os.path.abspath(os.path.expanduser(plain))


def is_hub_dataset(url: str) -> bool:
    """Whether a URL is a Hub dataset and not a file of its repository."""
    return bool(_HUB.fullmatch(url))


def remote_files(url: str, key: str) -> list[tuple[str, int | None]]:
    """(URL, bytes where they are known) of a file, of what a glob matches, or of everything below a folder, sorted.

    Only `*` and `[…]` are a glob's, since `?` begins a web address's query. Raises `UsageError`, which names `key`, for
    what does not exist or needs a package that is missing; `DataError` for a host that does not answer.
    """
    system, path = _file_system(url, key)
    try:
        if "*" in path or "[" in path:
            found = {name: info for name, info in system.glob(path, detail=True).items() if info["type"] == "file"}
        elif system.info(path)["type"] == "directory" or path.endswith("/"):
            found = system.find(path, detail=True)
        else:
            return [(url, system.info(path).get("size"))]
        sizes = {name: info.get("size") or system.info(name).get("size") for name, info in found.items()}
    except FileNotFoundError:
        sizes = {}
    except Exception as error:  # of the network, of credentials: every file system has its own
        raise DataError(f"{url}: cannot be read: {first_line(error)}") from error
    if not sizes:
        raise UsageError(f"{key} must name files that exist; {url} has none")
    return [(system.unstrip_protocol(name), sizes[name]) for name in sorted(sizes, key=lambda name: name.split("/"))]


def open_remote(url: str) -> BinaryIO:
    """A file behind a URL, read in ranges where the server has them. Raises whatever its file system does."""
    system, path = _file_system(url, "sources")
    return system.open(path, "rb")


def remote_facts(url: str) -> Any:
    """What changes when a file or a Hub dataset does, as far as its host tells: size, version, time of change."""
    try:
        if match := _HUB.fullmatch(url):
            from huggingface_hub import dataset_info

            return [url, dataset_info(match["name"], revision=match["revision"]).sha]
        system, path = _file_system(url, "sources")
        return [url, *(f"{name}={value}" for name, value in sorted(system.info(path).items()))]
    except (DataError, UsageError):
        raise
    except Exception as error:  # see remote_files
        raise DataError(f"{url}: cannot be read: {first_line(error)}") from error


def _file_system(url: str, key: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    if "::" in url:
        raise UsageError(f"{key} must be URLs without '::'; got {url}")
    try:
        return url_to_fs(url)
    except ImportError as error:
        raise UsageError(
            f"{key} needs a package for {url}: {first_line(error)}; pip install 'verl-ext[remote]' brings those of"
            " s3:// and gs://"
        ) from error
    except ValueError as error:
        raise UsageError(f"{key} must be a URL that fsspec knows; got {url}: {first_line(error)}") from error
    except Exception as error:  # of credentials
        raise DataError(f"{url}: cannot be read: {first_line(error)}") from error


def hub_split(url: str, key: str) -> tuple[str, int | None]:
    """A Hub dataset's URL with its split, by default `train`, and the bytes of its tables where they are known."""
    builder, splits, split = _hub_dataset(url)
    if split not in splits:
        raise UsageError(f"{key} must name a split, as in {HUB_HINT}; got {url}, which has {', '.join(splits)}")
    info = (builder.info.splits or {}).get(split)
    named = _HUB.fullmatch(url)
    assert named is not None
    return (url if named["split"] else f"{url}:{split}"), (info.num_bytes if info else None) or None


def hub_tables(url: str, rows: int) -> Iterator[Any]:
    """The tables of a split that `hub_split` named, of up to so many rows, as they are downloaded."""
    _, splits, split = _hub_dataset(url)
    try:
        yield from splits[split].with_format("arrow").iter(batch_size=rows)
    except Exception as error:  # of the network, and of the files' formats
        raise DataError(f"{url}: cannot be read: {first_line(error)}") from error


def _hub_dataset(url: str) -> tuple[Any, dict[str, Any], str]:
    """(builder, streams by split, the split asked for) of a Hub dataset."""
    import datasets

    match = _HUB.fullmatch(url)
    assert match is not None
    name, config = f"hf://datasets/{match['name']}", match["config"]
    try:
        builder = datasets.load_dataset_builder(name, config, revision=match["revision"])
        return builder, dict(builder.as_streaming_dataset()), match["split"] or "train"
    except Exception as error:  # of the network, of a dataset that does not exist or needs its config named
        raise DataError(f"{url}: cannot be read as a Hub dataset, {HUB_HINT}: {first_line(error)}") from error
