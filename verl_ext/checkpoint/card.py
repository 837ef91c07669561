"""The model card of an export, from the files of its run.

It has what the run wrote (data_report.json, metrics.jsonl, run.json) and nothing else: a part whose file is missing is
left out, nothing was evaluated for the card, and the license is the user's. Secrets are masked, and of paths on the
machine only the last name is shown.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import try_to_load_from_cache
from omegaconf import OmegaConf

from verl_ext.checkpoint.curves import Curve, read_curves, read_facts
from verl_ext.checkpoint.layout import METRICS, REPORT, RUN
from verl_ext.config.compose import compose
from verl_ext.options import leaves, one_line, spell
from verl_ext.redaction import redacted_text

CARD = "README.md"
_LOSS = re.compile(r"(train|val)/(.+_)?loss")
# Options of the machine and of the folder, which change nothing that was learnt.
_OF_MACHINE = re.compile(r"trainer\.(default_|resume_|logger|project_|experiment_|overwrite)|ray\.|data\.cache_dir")


def model_card(run: Path, step: int, form: str, size: str, license_name: str | None) -> str:
    """Return the card's text.

    Args:
        run: the run's folder.
        step: the step of the exported checkpoint.
        form: merged or adapter.
        size: the number and type of the exported parameters, in words.
        license_name: the license, for the Hub's header; None for none.
    """
    facts, report = read_facts(run / RUN), read_facts(run / REPORT)
    config = facts.get("config") or {}
    base = (config.get("model") or {}).get("path")
    header: dict[str, Any] = {"library_name": "peft" if form == "adapter" else "transformers"}
    if isinstance(base, str) and _is_on_hub(base):
        header |= {"base_model": base, "base_model_relation": "adapter" if form == "adapter" else "finetune"}
    header |= {"license": license_name} if license_name else {}
    parts = [f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n", "# Model card\n"]
    # One line says what the folder holds; what the files of the run do not say is not claimed.
    whole = f" of {facts['total_steps']:,}" if "total_steps" in facts else ""
    parts.append(
        f"{'Adapters' if form == 'adapter' else 'Weights'} after step {step:,}{whole} of a run of "
        f"verl-ext: {size}"
        + (f", trained from `{_shown(base)}`" if base else "")
        + (f", on {facts['runs_on']}" if facts.get("runs_on") else "")
        + ".\n"
    )
    if not license_name:
        parts.append("No license is stated: it depends on the base model and on the data.\n")
    curves: dict[str, Curve] = {}
    with suppress(ValueError):  # without metrics, as of a run that logged none
        curves, _ = read_curves(run / METRICS)
    for title, lines in {
        "Data": _data(report.get("train") or {}),
        "Losses": _losses(curves, step),
        "Options": _options(config),
        "Versions": _table(["package", "version"], (facts.get("versions") or {}).items()),
    }.items():
        if text := "\n".join(lines):
            parts.append(f"## {title}\n\n{text}\n")
    return redacted_text("\n".join(parts))


def _data(train: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the run read, and what it left out."""
    words = {"documents": "documents", "tokens": "tokens", "target_tokens": "tokens to learn", "packs": "packs"}
    if counts := [f"{train[key]:,} {what}" for key, what in words.items() if train.get(key) is not None]:
        yield f"{', '.join(counts)} an epoch.\n"
    rows = [[use["source"], use["documents"], use["tokens"], f"{use['share']:.1%}"] for use in train.get("use") or ()]
    yield from _table(["source", "documents", "tokens", "share"], rows)
    omitted = train.get("omitted_documents") or ()
    yield from ["", "Left out, cut, or without a target:", ""] * bool(omitted)
    names = ["category", "reason", "documents", "tokens", "tokens_removed"]
    yield from _table(names, ([row.get(name, "") for name in names] for row in omitted))


def _losses(curves: Mapping[str, Curve], step: int) -> Iterator[str]:
    """Yield the last losses up to the step."""
    rows = []
    for name in filter(_LOSS.fullmatch, curves):
        points = zip(curves[name].steps, curves[name].values, strict=True)
        if last := next(reversed([point for point in points if point[0] <= step]), None):
            rows.append([name, last[0], "not finite" if last[1] is None else f"{last[1]:.4f}"])
    if rows:
        yield "As the run measured them: `train/` is the mean over that step alone, `val/` over its validation data.\n"
    yield from _table(["metric", "step", "value"], rows)


def _options(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a recipe of the options that differ from the defaults."""
    if not config:
        return
    defaults = dict(leaves(OmegaConf.to_container(compose([]), resolve=True)))  # type: ignore[arg-type]
    own_class = (config.get("data") or {}).get("custom_cls", {}).get("name")  # it has defaults of its own
    recipe: dict[str, Any] = {}
    for key, value in leaves(config):
        is_changed = defaults.get(key, "-") != value or (own_class and key.startswith("data."))
        if is_changed and not _OF_MACHINE.match(key):
            *above, last = key.split(".")
            node = recipe
            for name in above:
                node = node.setdefault(name, {})
            node[last] = _shown(value)
    yield "What differs from the defaults of this version; of paths, the last names:\n"
    yield f"```yaml\n# @package _global_\n{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)}```"


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yield the lines of a table, none without rows."""
    lines = [[f"{c:,}" if type(c) is int else one_line(spell(c)).replace("|", "\\|") for c in row] for row in rows]
    if lines:
        header = [*columns]
        yield from (f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


def _is_on_hub(path: str) -> bool:
    """Tell whether a path names a repository in the Hub's cache here."""
    if os.path.exists(path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return False
    return isinstance(try_to_load_from_cache(path, "config.json"), str)


def _shown(value: Any) -> Any:
    """Return a value without the folders of this machine."""
    if isinstance(value, Mapping):
        return {key: _shown(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_shown(below) for below in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~", "file:"))
    return os.path.basename(value.rstrip("/")) if is_path else value
