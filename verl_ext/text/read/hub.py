"""Read Hub datasets as `datasets` streams them, by their names.

hf://datasets/owner/name@revision:config:split    owner/name    owner/name:split[:1000]    owner/name:split[10%:]
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from verl_ext.options import DataError, UsageError, first_line, must

HUB_HINT = "owner/name[:config][:split][[:1000]]"
HUB_PREFIX = "hf://datasets/"
HUB = re.compile(
    rf"(?P<prefix>{HUB_PREFIX})?(?P<name>\w[\w.-]*/[\w.-]+)(@(?P<revision>[^@:/]+))?(:(?P<config>[^:/]+))??"
    r"(:(?P<split>[^:/\[\]]+))?(?P<slice>\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?"
)


@contextlib.contextmanager
def host_errors(url: str, what: str = "") -> Iterator[None]:
    """Raise `DataError` for errors of the body, whatever its file system."""
    try:
        yield
    except (DataError, UsageError):
        raise
    except Exception as error:
        hint = ": `hdfs dfs -get` copies it to a folder, which can be read" if url.startswith("hdfs://") else ""
        raise DataError(f"{url}: cannot be read{what}: {first_line(error)}{hint}") from error


def hub_version(match: re.Match[str]) -> str:
    """Return the commit that the Hub has under a dataset's name."""
    from huggingface_hub import dataset_info

    return str(dataset_info(match["name"], revision=match["revision"]).sha)


def hub_split(url: str, key: str) -> tuple[str, str, int | None]:
    """Return a Hub dataset's URL with split (default `train`), kind and bytes."""
    builder, splits, match = _hub_dataset(url)
    split = match["split"] or "train"
    if split not in splits:
        raise UsageError(must(key, f"name a split, as in {HUB_HINT}", f"{url}, which has {', '.join(splits)}"))
    info = (builder.info.splits or {}).get(split)
    num_bytes = (info.num_bytes if info else None) or None
    if match["slice"]:
        first, last = _hub_rows(match, info and info.num_examples, key)
        size = (info and info.num_examples) or None
        num_bytes = num_bytes and size and num_bytes * max(min(size, size if last is None else last) - first, 0) // size
    given = [("@", match["revision"]), (":", match["config"]), (":", split), ("", match["slice"])]
    named = "".join(f"{sign}{part}" for sign, part in given if part)
    return f"{HUB_PREFIX}{match['name']}{named}", "hub", num_bytes


def _hub_rows(match: re.Match[str], size: int | None, key: str) -> tuple[int, int | None]:
    """Return a slice's first row and the one after the last."""
    bounds: list[int | None] = []
    for text in (match["first"], match["last"]):
        value = None if text is None else int(text.rstrip("%"))
        if text is not None and value is not None and (text.endswith("%") or value < 0):
            if not size:
                needed = "count rows from the first one, as in [:1000]: the Hub does not tell the size of the split"
                raise UsageError(must(key, needed, match[0]))
            value = round(value * size / 100) if text.endswith("%") else value
            value = max(value + size, 0) if value < 0 else value
        bounds.append(value)
    first, last = bounds[0] or 0, bounds[1]
    if last is not None and last <= first:
        raise UsageError(must(key, "have a slice with rows, as in [:1000]", match[0]))
    return first, last


def hub_tables(url: str, rows: int, num_bytes: int) -> Iterator[Any]:
    """Yield a Hub dataset's tables, of `find_source_files`, while they download.

    They have at most `rows` rows and, if the dataset's size is known, about `num_bytes`.
    """
    builder, splits, match = _hub_dataset(url)
    stream = splits[match["split"]]
    info = (builder.info.splits or {}).get(match["split"])
    if info and info.num_bytes and info.num_examples:
        rows = min(max(num_bytes * info.num_examples // info.num_bytes, 1), rows)
    if match["slice"]:
        first, last = _hub_rows(match, info and info.num_examples, "sources")
        stream = stream.skip(first) if first else stream
        stream = stream if last is None else stream.take(last - first)
    with host_errors(url):
        yield from stream.with_format("arrow").iter(batch_size=rows)


def _hub_dataset(url: str) -> tuple[Any, dict[str, Any], re.Match[str]]:
    """Return (builder, streams by split, the name's parts) of a Hub dataset."""
    import datasets

    match = HUB.fullmatch(url)
    assert match is not None, "is_hub_name has seen it"
    what = f" as a Hub dataset, {HUB_HINT}" if match["prefix"] else f" here as a file, nor as a Hub dataset, {HUB_HINT}"
    with host_errors(url, what):
        name = f"{HUB_PREFIX}{match['name']}"
        builder = datasets.load_dataset_builder(name, match["config"], revision=match["revision"])
        return builder, dict(builder.as_streaming_dataset()), match
