"""Data sets of other trainers as sources: their places, parts and fields."""

import re
from collections.abc import Mapping
from typing import Any

from verl_ext.text.records.message_names import MESSAGE_FIELDS
from verl_ext.text.records.messages import ROLES
from verl_ext.tools.migrate.line import Moved, is_on


def put_source(moved: Moved, node: str, name: str, source: Any) -> str:
    """Name a source by a category that no other of the node has; return the category."""
    path = re.sub(r"[#:].*", "", re.sub(r"^\w+://", "", name)).rstrip("/").rpartition("/")[2].partition(".")[0]
    word = re.sub(r"\W+", "_", path.replace("-", "_")).strip("_") or "data"
    word = word if word[0].isalpha() else f"d_{word}"
    names = (word, *(f"{word}_{number}" for number in range(2, len(moved.words) + 3)))
    category = next(each for each in names if f"{node}.{each}" not in moved.words)
    moved.put(f"{node}.{category}", source)
    return category


def put_data(
    moved: Moved, key: str, node: str, place: Any, subset: Any = None, split: Any = None, name: str = ""
) -> str:
    """Name a Hub dataset, of whose split a slice may be taken, or files; return the category."""
    is_hub = isinstance(place, str) and not is_file(place) and "://" not in place
    name = name or str(place)
    category = put_source(moved, node, name, hub(place, subset, split or "train") if is_hub else place)
    if "[" in str(split) and not is_hub:
        moved.lack(key, f"{name}: the split {split} is a part of files; sample draws a part of a source")
    if "+" in str(split):
        moved.lack(key, f"{name}: a source has one split; got {split}")
    if is_on(subset) and not is_hub:
        moved.lack(key, f"{name}: files have no configuration {subset}")
    return category


def put_columns(moved: Moved, key: str, name: str, columns: Mapping[str, Any]) -> None:
    """Name the fields of a data set, {our name: theirs}, which are those of all."""
    for ours, theirs in columns.items():
        if theirs and theirs != moved.words.get(f"columns.{ours}", ours):
            if f"columns.{ours}" in moved.words:
                moved.lack(key, f"{name}: columns names one field {ours} for all sources")
            moved.put(f"columns.{ours}", theirs)


def put_message_names(
    moved: Moved, key: str, name: str, columns: Mapping[str, Any], roles: Mapping[str, str] | None = None
) -> None:
    """Name fields of messages, {ours: theirs}, and roles, {theirs: ours}.

    They are those of all data sets.
    """
    usual = {"role": ("role", "from"), "content": ("content", "value")}
    columns = {ours: own for ours, own in columns.items() if own and own not in usual.get(ours, (ours,))}
    if other := {ours: own for ours, own in columns.items() if ours not in MESSAGE_FIELDS}:
        moved.lack(key, f"{name}: messages have no field {', '.join(other)}")
    columns = {ours: own for ours, own in columns.items() if ours in MESSAGE_FIELDS}
    roles = {own: ours for own, ours in (roles or {}).items() if own.lower() not in ROLES}
    for option, names in (("message_columns", columns), ("roles", roles)):
        before = moved.words.get(option, {})
        if any(before.get(each, value) != value for each, value in names.items()):
            moved.lack(key, f"{name}: {option} has one name of each for all sources")
        if names:
            moved.put(option, {**before, **names})


def differ_by_model(moved: Moved, key: str) -> None:
    """Say what a model's name tells: quantized weights, or images beside the text."""
    name = str(moved.values.get(key, ""))
    if re.search(r"(?i)[-_.](awq|gptq|aqlm|hqq|int[48]|bnb|nvfp4|[248]-?bit)\b", name):
        moved.lack(key, "its name is that of quantized weights, which are not trained: name those they are made of")
    elif re.search(r"(?i)(vl\d*|vision|omni|audio|ocr|llava|pixtral|voxtral|internvl\S*)([-_.\d]|$)", name):
        moved.differ(f"{name} reads more than texts: a record with images is refused here; media=drop keeps its text")


def put_rope(moved: Moved, length: Any) -> None:
    """Translate a rotary scaling: a dict, or a type that reaches a length."""
    scaling = moved.get("rope_scaling")
    if isinstance(scaling, Mapping):
        moved.put("model.override_config", {"rope_scaling": dict(scaling)})
    elif scaling in ("linear", "dynamic", "yarn") and length is not None:
        reached = {"max_position_embeddings": length, "rope_parameters": {"rope_type": scaling}}
        moved.put("model.override_config", reached)
    elif is_on(scaling):
        moved.lack("rope_scaling", "model.override_config={rope_parameters: {…}} has the factor, as in config.json")


def hub(name: str, subset: Any = None, split: Any = None) -> str:
    """Return a Hub dataset's address as a source."""
    parts = [f"hf://datasets/{name}", *([str(subset)] if is_on(subset) else [])]
    return ":".join([*parts, str(split)] if is_on(split) and (is_on(subset) or split != "train") else parts)


def is_file(name: str) -> bool:
    """Tell whether a dataset's name is a path."""
    return bool(re.match(r"[./~$]", name) or re.search(r"\.(jsonl?|csv|tsv|parquet|txt|ndjson)(\.\w+)?$", name))
