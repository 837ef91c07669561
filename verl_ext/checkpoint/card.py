"""The model card of an export: huggingface_hub's, with a table of the losses that its run measured.

It has what the run wrote (data_report.json, metrics.jsonl, run.json) and nothing else: a part whose file is missing is
left out, nothing was evaluated for the card, and the license is the user's. Secrets are masked, and of the base on this
machine only the last name is shown.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from verl_ext.checkpoint.curves import Curve, read_curves, read_facts
from verl_ext.checkpoint.layout import METRICS, REPORT, RUN
from verl_ext.options import one_line
from verl_ext.redaction import redacted_text

CARD = "README.md"
_LOSS = re.compile(r"(train|val)/(.+_)?loss")
_COUNTS = {"documents": "documents", "tokens": "tokens", "target_tokens": "tokens to learn", "packs": "packs"}


def model_card(run: Path, step: int, form: str, size: str, license_name: str | None) -> str:
    """Return the card's text.

    Args:
        run: the run's folder.
        step: the step of the exported checkpoint.
        form: merged or adapter.
        size: the number and type of the exported parameters, in words.
        license_name: the license, for the Hub's header; None for none.
    """
    facts, train = read_facts(run / RUN), read_facts(run / REPORT).get("train") or {}
    is_adapter, base = form == "adapter", ((facts.get("config") or {}).get("model") or {}).get("path")
    of_hub: dict[str, Any] = {}
    if isinstance(base, str) and _is_on_hub(base):
        of_hub = {"base_model": base, "base_model_relation": "adapter" if is_adapter else "finetune"}
    header = ModelCardData(library_name="peft" if is_adapter else "transformers", license=license_name, **of_hub)
    # One line says what the folder holds; what the files of the run do not say is not claimed.
    whole = f" of {facts['total_steps']:,}" if "total_steps" in facts else ""
    name = os.path.basename(base.rstrip("/")) if base and base.startswith(("/", "~", "file:")) else base
    parts = [
        f"---\n{header.to_yaml()}\n---\n\n# Model card\n",
        f"{'Adapters' if is_adapter else 'Weights'} after step {step:,}{whole} of a run of verl-ext: {size}"
        + (f", trained from `{name}`" if name else "")
        + (f", on {facts['runs_on']}" if facts.get("runs_on") else "")
        + ".\n",
    ]
    if not license_name:
        parts.append("No license is stated: it depends on the base model and on the data.\n")
    if counts := [f"{train[key]:,} {what}" for key, what in _COUNTS.items() if train.get(key) is not None]:
        parts.append(f"Data: {', '.join(counts)} an epoch.\n")
    if rows := [*_losses(run / METRICS, step)]:
        about = "As the run measured them: `train/` is the mean over that step alone, `val/` over its validation data."
        parts.append(
            "\n".join(["## Losses", "", about, "", "| metric | step | value |", "| --- | --- | --- |", *rows, ""])
        )
    return redacted_text(ModelCard("\n".join(parts)).content)


def _losses(file: Path, step: int) -> Iterator[str]:
    """Yield the rows of the last losses up to the step; none for a run that logged none."""
    curves: dict[str, Curve] = {}
    with suppress(ValueError):
        curves, _ = read_curves(file)
    for name in filter(_LOSS.fullmatch, curves):
        points = zip(curves[name].steps, curves[name].values, strict=True)
        if last := next(reversed([point for point in points if point[0] <= step]), None):
            value = "not finite" if last[1] is None else f"{last[1]:.4f}"
            cells = one_line(name).replace("|", "\\|"), f"{last[0]:,}", value
            yield f"| {' | '.join(cells)} |"


def _is_on_hub(path: str) -> bool:
    """Tell whether a path names a repository in the Hub's cache here."""
    if os.path.exists(path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return False
    return isinstance(try_to_load_from_cache(path, "config.json"), str)
