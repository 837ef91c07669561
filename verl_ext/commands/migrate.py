r"""The command `verl-ext migrate`, which translates commands of verl ≤ 0.6's fsdp_sft_trainer.

    verl-ext migrate 'torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=$M …'

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer \
        model.path=$M
    # model.partial_pretrain (verl ≤ 0.6) is read as model.path

Words, quotes and shell variables keep their spelling.
"""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from verl_ext.commands.command_line import command, read_options
from verl_ext.values import REQUIRED, Options, UsageError, option

# A word of a shell command: plain characters, escapes, '…', "…", `…` and $(…) with two levels of parentheses inside
_WORD = re.compile(
    r"""(?:\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|[^\s'"\\`]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""", re.DOTALL
)
_END = re.compile(r"[|;]|&&|&|\|\||\d*[<>].*", re.DOTALL)  # the first word that is not an argument of the command
_TRAINER = re.compile(r"verl\.trainer\.(?:fsdp_)?sft_trainer|(?:\S*/)?fsdp_sft_trainer\.py")
_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class MigrateOptions(Options):
    """Translate a command of verl ≤ 0.6's fsdp_sft_trainer, with a comment for each key that changed.

    A key without an equivalent is left out, and a comment says what to use instead. A command without such keys also
    runs unchanged, because the trainer reads the old names.
    """

    command: str = option(REQUIRED, "the old command, as it stands in a shell script", required=True)


def run(options: MigrateOptions) -> str:
    """Return the new command and its comments. Raises `UsageError` if the command is not of that trainer."""
    from verl_ext.config import schema  # imports torch and verl, which takes seconds
    from verl_ext.config.legacy import Item, translate

    def is_known(key: str) -> bool:
        return schema.is_known(key) or key in schema.groups()

    text = options.command.replace("\\\n", " ").strip()
    if between := _WORD.sub("", text).strip(" \t\r"):
        got = "several lines" if between.isspace() else "a quote that is not closed"
        raise UsageError(f"command must be one command, from torchrun to its last override; got {got}")
    words = _WORD.findall(text)
    start = next((number for number, word in enumerate(words) if _TRAINER.fullmatch(_unquoted(word))), None)
    if start is None:
        raise UsageError("command must start verl.trainer.fsdp_sft_trainer, or fsdp_sft_trainer.py; got neither")
    end = next((number for number, word in enumerate(words) if number > start and _END.fullmatch(word)), len(words))
    items, others = [], []
    for word in words[start + 1 : end]:
        # A word quoted as a whole, 'trainer.logger=[console]', becomes trainer.logger='[console]'.
        match = _OVERRIDE.fullmatch(word) or _OVERRIDE.fullmatch(re.sub(r"^(['\"])([+~]*[\w.]+=)", r"\2\1", word))
        if match:
            items.append(Item(match[1], match[2], _unquoted(match[3]), match[3]))
        else:
            others.append(word)
    own_class = any(schema.names_own_class(item.value) for item in items if item.key == "data.custom_cls.name")
    found = translate(items, own_class, packed=True)
    lines = [" ".join([*words[:start], *([] if words[:start][-1:] == ["-m"] else ["-m"]), "verl_ext.fsdp_sft_trainer"])]
    for item in found.items:
        prefix = "" if item.prefix.startswith("+") and is_known(item.key) else item.prefix
        lines.append(str(Item(prefix, item.key, item.written or item.value)))
    if others := [*others, *words[end:]]:
        lines.append(" ".join(others))
    unknown = [schema.unknown_key(item.key) for item in found.items if not is_known(item.key)]
    comments = [f"# {line}" for line in (*found.notices, *found.problems, *unknown)]
    return "\n".join([" \\\n    ".join(lines), *comments])


def _unquoted(word: str) -> str:
    """Return a word as the shell would pass it on, with its variables unexpanded."""
    with suppress(ValueError):
        word = "".join(shlex.split(word))
    return word


def _read(words: Sequence[str]) -> MigrateOptions:
    """Return the options; the old command is one word, or all words after `verl-ext migrate`."""
    if words[0].startswith("command="):
        return read_options(MigrateOptions, words)
    return MigrateOptions(words[0] if len(words) == 1 else shlex.join(words))


main = command("migrate", MigrateOptions, run, "'torchrun … -m verl.trainer.fsdp_sft_trainer …'", _read)
