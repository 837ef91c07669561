r"""verl: command lines of its own SFT trainers.

    verl-ext migrate 'torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=$M …'

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer \
        model.path=$M
    # model.partial_pretrain (verl ≤ 0.6) is read as model.path

Words, quotes and shell variables keep their spelling.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from verl_ext.config.translation import translate
from verl_ext.options import UsageError
from verl_ext.overrides import Item
from verl_ext.tools.migrate.reading import END, WORD, ranks_of, unquoted

_TRAINER = re.compile(r"verl\.trainer\.(?:fsdp_sft_trainer|sft_trainer|sft_trainer_ray)|(?:\S*/)?fsdp_sft_trainer\.py")
_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def is_verls(text: str) -> bool:
    """Tell whether a text starts a trainer of verl's own."""
    return any(_TRAINER.fullmatch(unquoted(word)) for word in WORD.findall(text))


def only_command(script: str) -> str:
    """Return the one command of a script that starts the trainer, with its words as they are."""
    lines = re.sub(r"\\[ \t]*\n", " ", script).splitlines()
    return next((line for line in lines if is_verls(line)), script)


def migrate_verl(text: str) -> str:
    """Return the new command and its comments, or raise UsageError."""
    from verl_ext.config import schema  # imports torch and verl, which takes seconds

    def is_known(key: str) -> bool:
        return schema.is_known(key) or key in schema.groups()

    text = text.replace("\\\n", " ").strip()
    # What the pattern of words leaves over shows that this is not one command.
    if between := WORD.sub("", text).strip(" \t\r"):
        got = "several lines" if between.isspace() else "a quote that is not closed"
        raise UsageError(f"command must be one command, from torchrun to its last override; got {got}")
    words = WORD.findall(text)
    start = next((number for number, word in enumerate(words) if _TRAINER.fullmatch(unquoted(word))), None)
    if start is None:
        raise UsageError("command must start verl's fsdp_sft_trainer, sft_trainer or sft_trainer_ray; got none of them")
    end = next((number for number, word in enumerate(words) if number > start and END.fullmatch(word)), len(words))
    items, others = [], []
    for word in words[start + 1 : end]:
        # A word quoted as a whole, 'trainer.logger=[console]', becomes trainer.logger='[console]'.
        match = _OVERRIDE.fullmatch(word) or _OVERRIDE.fullmatch(re.sub(r"^(['\"])([+~]*[\w.]+=)", r"\2\1", word))
        if match:
            items.append(Item(match[1], match[2], unquoted(match[3]), match[3]))
        else:
            others.append(word)
    items, comments = _without_class(items)
    own_class = any(schema.names_own_class(item.value) for item in items if item.key == "data.custom_cls.name")
    found = translate(items, own_class, packed=True, is_known=is_known)
    lines = [_start(words, start, bool(found.sources))]
    for item in (*found.sources, *found.items):
        # A key that the schema has needs no plus.
        prefix = "" if item.prefix.startswith("+") and is_known(item.key) else item.prefix
        lines.append(str(Item(prefix, item.key, item.written or item.value)))
    if others := [*others, *words[end:]]:
        lines.append(" ".join(others))
    # A key that nothing reads stays in the command, because the user decides about it.
    unknown = [schema.unknown_key(item.key) for item in found.items if not is_known(item.key)]
    comments = [f"# {line}" for line in (*comments, *found.notices, *found.problems, *unknown)]
    return "\n".join([" \\\n    ".join(lines), *comments])


def _start(words: Sequence[str], start: int, tokenizes: bool) -> str:
    """Return the new command's first line: `verl-ext train` for raw files."""
    if tokenizes:
        before = list(takewhile(lambda word: re.fullmatch(r"\w+=.*", word, re.DOTALL), words))
        number = ranks_of(words[len(before) : start])
        return " ".join([*before, "verl-ext train", *([] if number is None else [f"nproc={number}"])])
    module = "verl_ext.fsdp_sft_trainer" + "_ray" * unquoted(words[start]).endswith("_ray")
    return " ".join([*words[:start], *([] if words[:start][-1:] == ["-m"] else ["-m"]), module])


def _without_class(items: list[Item]) -> tuple[list[Item], list[str]]:
    """Leave out data.custom_cls.* where ours has its name; return comments."""
    given = [item for item in items if item.key in ("data.custom_cls.path", "data.custom_cls.name")]
    values = {item.key: item.value or "" for item in given}
    if not given or values.get("data.custom_cls.path", "").startswith("pkg://verl_ext"):
        return items, []
    does = "packs tokenized documents by data.max_tokens"
    if values.get("data.custom_cls.name") == "SFTDataSet":
        why = f"verl_ext.data.SFTDataSet, the default, {does}; keep both if your class does more"
        return [item for item in items if item not in given], [f"{' '.join(map(str, given))} is left out: {why}"]
    return items, [f"leave data.custom_cls.* out if your class {does}, as the default does"]
