"""The command `verl-ext show`: an audit of data, a look at any document or pack, and the curves of runs.

Words without `=` are paths, or one of FLAGS: `verl-ext show data/train longest tokens`.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from verl_ext.commands.command_line import command, read_options
from verl_ext.files import write_json
from verl_ext.redaction import redacted
from verl_ext.show.audit import audit
from verl_ext.show.audit_tables import audit_tables
from verl_ext.show.data import Documents, open_documents
from verl_ext.show.plan import PackOptions, plan_facts
from verl_ext.show.require import broken, read_requirements
from verl_ext.text.tokenizer import ModelOptions
from verl_ext.values import DataError, option

FLAGS = ("longest", "shortest", "no_target", "cut", "tokens")
_VERBATIM = ("matches", "require")  # not in Hydra's grammar: they hold its signs
WIDTH = 100  # columns of what is written to a file or a pipe


@dataclass(frozen=True)
class ShowOptions(PackOptions):
    """What is trained on: an audit of tokenized folders or Megatron's corpora, or one of their documents.

    Without a selection it is the audit: documents, tokens and targets by category, and what goes wrong in practice.
    """

    paths: list[str] = option([], "tokenized folders, or corpora in Megatron's form; or words without =", required=True)
    model: ModelOptions = option(ModelOptions, "the tokenizer; without it that of report.json")
    val: Any = option(None, "validation data: documents that the training data holds too are found")
    scan: bool | None = option(None, "true: read all tokens for the audit; false: none; null: up to 100 million")
    require: str | None = option(None, "bounds on findings, e.g. no_target=0,duplicates<0.1%; exit code 1 if one fails")
    json: str | None = option(None, "file that gets the audit's numbers as JSON")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake that can be seen without opening the data."""
        yield from super().problems()
        if self.model.tokenizer:
            yield from self.model.tokenizer_problems()


def run(options: ShowOptions) -> str:
    """Show what the options ask for on the terminal."""
    documents = open_documents(options.paths)
    _show_audit(documents, options)
    return ""


def _show_audit(documents: Documents, options: ShowOptions) -> None:
    requirements = read_requirements(options.require) if options.require else []
    paths = [options.val] if isinstance(options.val, str) else options.val
    validation = open_documents(paths, "val") if paths else None
    found = audit(documents, validation, options.model, options.scan)
    if options.max_tokens is not None:
        found["plan"] = plan_facts(documents, options, options.paths)
    found = redacted(found)
    if options.json:
        write_json(Path(options.json), found)
    _print(audit_tables(found))
    if lines := list(broken(requirements, found)):
        raise DataError("require is not met: " + "; ".join(lines))


def _print(parts: Iterable[RenderableType]) -> None:
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", WIDTH)), highlight=False)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part)


def _read(arguments: Sequence[str]) -> ShowOptions:
    """Return the options of the words; a word that is an existing path, or has no `=`, is a path."""
    paths: list[str] = []
    words: list[str] = []
    verbatim: dict[str, str] = {}
    for word in arguments:
        key, sign, value = word.partition("=")
        if os.path.exists(word) or (not sign and word not in FLAGS):
            paths.append(word)
        elif key in _VERBATIM:
            verbatim[key] = value
        else:
            words.append(word if sign else f"{word}=true")
    return read_options(ShowOptions, words, **verbatim, **({"paths": paths} if paths else {}))


main = command("show", ShowOptions, run, example="DATA [max_tokens=131072 ranks=8]", read=_read)
