"""The command `verl-ext migrate`: a training command of verl ≤ 0.6's fsdp_sft_trainer as one of today.

    verl-ext migrate 'torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=$M …'

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer \\
        model.path=$M
    # model.partial_pretrain (verl ≤ 0.6) is read as model.path

Words, quotes and shell variables stay as they were written.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ext.commands.command_line import command
from verl_ext.values import REQUIRED, Options, UsageError, option

if TYPE_CHECKING:
    from verl_ext.config.legacy import Item

TRAINER = "verl_ext.fsdp_sft_trainer"
# A word of a shell command: plain characters, escapes, '…', "…", `…` and $(…) with two levels of parentheses inside
_WORD = re.compile(
    r"""(?:\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|[^\s'"\\`]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""", re.DOTALL
)
_ENDS = re.compile(r"[|;]|&&|&|\|\||\d*[<>].*", re.DOTALL)  # words from which on a command has no overrides
_TRAINERS = re.compile(r"verl\.trainer\.(?:fsdp_)?sft_trainer|(?:\S*/)?fsdp_sft_trainer\.py")
_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class MigrateOptions(Options):
    """Print the command of today for one of verl ≤ 0.6's fsdp_sft_trainer, with a comment for each key that changed.

    What has no equivalent is left out of the command and named, with what to give in its place. A command without such
    keys may also be run as it is: the trainer reads the old names."""

    command: str = option(REQUIRED, "the old command, as it stands in a shell script", required=True)


def run(options: MigrateOptions) -> str:
    """The new command and its comments. Raises `UsageError` where the words are no command of that trainer."""
    from verl_ext.config import schema  # here: it takes torch and verl, seconds that --help need not wait
    from verl_ext.config.legacy import Item, translate

    text = options.command.replace("\\\n", " ").strip()
    if between := _WORD.sub("", text).strip(" \t\r"):
        what = "several lines" if between.isspace() else "a quote that is not closed"
        raise UsageError(f"command must be one command, from torchrun to its last override; got {what}")
    words = _WORD.findall(text)
    starts = [number for number, word in enumerate(words) if _TRAINERS.fullmatch(_plain(word))]
    if not starts:
        raise UsageError("command must start verl.trainer.fsdp_sft_trainer, or fsdp_sft_trainer.py; got neither")
    start = starts[0]
    head = words[:start] if words[start - 1 : start] == ["-m"] else [*words[:start], "-m"]
    lines = [" ".join([*head, TRAINER])]
    items, others = _overrides(words[start + 1 :])
    names = [item.value for item in items if item.key == "data.custom_cls.name"]
    found = translate(items, any(map(schema.names_own_class, names)), packed=True)
    lines += [str(Item(_prefix(item), item.key, item.written or item.value)) for item in found.items]
    lines += [" ".join(others)] if others else []
    unknown = [schema.unknown_key(item.key) for item in found.items if not _is_known(item)]
    comments = [f"# {line}" for line in (*found.notices, *found.problems, *unknown)]
    return "\n".join([" \\\n    ".join(lines), *comments])


def _overrides(words: Sequence[str]) -> "tuple[list[Item], list[str]]":
    """(the overrides among the words, the other words: flags, "$@", redirections and what follows them)."""
    from verl_ext.config.legacy import Item

    items, others = [], []
    end = next((number for number, word in enumerate(words) if _ENDS.fullmatch(word)), len(words))
    for word in words[:end]:
        # quoted as a whole: 'trainer.logger=[console]' is trainer.logger='[console]'
        match = _OVERRIDE.fullmatch(word) or _OVERRIDE.fullmatch(re.sub(r"^(['\"])([+~]*[\w.]+=)", r"\2\1", word))
        if match:
            items.append(Item(match[1], match[2], _plain(match[3]), match[3]))
        else:
            others.append(word)
    return items, [*others, *words[end:]]


def _plain(word: str) -> str:
    """A word as the shell hands it on, but for its variables."""
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word


def _prefix(item: "Item") -> str:
    """Without a + that the key does not need."""
    return "" if item.prefix.startswith("+") and _is_known(item) else item.prefix


def _is_known(item: "Item") -> bool:
    from verl_ext.config import schema

    return schema.is_known(item.key) or item.key in schema.groups()


def main(arguments: Sequence[str]) -> int:
    """The old command may be one argument, or the words after `verl-ext migrate`."""
    if not arguments or {"-h", "--help"} & set(arguments) or arguments[0].startswith("command="):
        return _main(arguments)
    text = arguments[0] if len(arguments) == 1 else shlex.join(arguments)
    # in OmegaConf's grammar ${…}, and in Hydra's a quote, is escaped, and so are backslashes in front of them
    plain = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), plain)
    return _main([f"command='{quoted}'"])


_main = command("migrate", MigrateOptions, run, example="'torchrun … -m verl.trainer.fsdp_sft_trainer …'")
