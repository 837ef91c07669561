"""A task's prompts, ours or the user's, in the text's language."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_ext.cache import fingerprint
from verl_ext.options import UsageError, first_line, must, reason_of, unknown

LANGUAGES = ("en", "zh")
PUBLISHED = "published"  # in place of a file: the form of the paper, for tasks that have one
_MAY_LACK = ("write_alone", "select", "grounded")  # a user's file without these has ours
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PromptTexts:
    """One language's prompts by dotted name, and their common version."""

    texts: Mapping[str, str]
    version: str

    def filled(self, name: str, **values: str) -> str:
        """Return a prompt with placeholders replaced, but not braces in values."""
        return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), self.texts[name])

    def below(self, name: str) -> list[str]:
        """Return the names that stand directly below a name, in their order."""
        return [text.removeprefix(f"{name}.") for text in self.texts if text.startswith(f"{name}.")]


def load_prompts(path: str | None, task: str) -> dict[str, PromptTexts]:
    """Return a task's prompts by language: ours, published ones or a file's.

    Raises `UsageError` if the file lacks one of our prompts or placeholders, or has an unknown prompt.
    """
    folder = resources.files("verl_ext.tools.synthesis") / "prompts"
    ours = {name: _texts(yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8"))[task]) for name in LANGUAGES}
    if path == PUBLISHED:
        found = yaml.safe_load((folder / f"{PUBLISHED}.yaml").read_text("utf-8"))
        if task not in found["en"]:
            raise UsageError(f"prompts=published is of longalign; got task={task}")
        ours = {name: _texts(found[name][task]) for name in LANGUAGES}
    if path is None or path == PUBLISHED:
        return {name: PromptTexts(texts, fingerprint(texts, digits=8)) for name, texts in ours.items()}
    try:
        found = yaml.safe_load(Path(path).read_text("utf-8"))
        texts = _texts(found[task])  # type: ignore[arg-type]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        why = reason_of(error) if isinstance(error, OSError) else first_line(error)
        raise UsageError(must("prompts", f"be a YAML file with the prompts of {task}", f"{path}: {why}")) from error
    for name, own in ours["en"].items():
        if name not in texts and name in _MAY_LACK:
            texts[name] = own
        elif name not in texts:
            raise UsageError(must("prompts", f"have {task}.{name}", f"{path}, which has {', '.join(texts)}"))
        if missing := set(_PLACEHOLDER.findall(own)) - set(_PLACEHOLDER.findall(texts[name])):
            raise UsageError(must(f"prompts: {task}.{name}", f"contain {{{sorted(missing)[0]}}}", path))
    for name in sorted(set(texts) - set(ours["en"])):
        raise UsageError(unknown(name, ours["en"], node=task, owner=f"prompts={path}"))
    return dict.fromkeys(LANGUAGES, PromptTexts(texts, fingerprint(texts, digits=8)))


def _texts(node: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {dotted name: prompt}; raise ValueError unless every prompt is text."""
    found: dict[str, str] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            found |= _texts(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value.strip():
            found[f"{prefix}{name}"] = value
        else:
            raise ValueError(must(f"{prefix}{name}", "be a text", value))
    return found
