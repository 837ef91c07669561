r"""verl: command lines of its own SFT trainers.

    verl-ext migrate 'torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=$M …'

    torchrun --nproc_per_node=8 -m verl_ext.fsdp_sft_trainer \
        model.path=$M
    # model.partial_pretrain (verl ≤ 0.6) is read as model.path

Words, quotes and shell variables keep their spelling.
"""

import re

from verl_ext.config.translation import translate
from verl_ext.options import UsageError, must
from verl_ext.overrides import Item
from verl_ext.tools.migrate.line import shell_word, written_run
from verl_ext.tools.migrate.reading import WORD, end_of, settings_of, topology_of, unquoted
from verl_ext.tools.migrate.script import Script

_TRAINER = re.compile(r"verl\.trainer\.(?:fsdp_sft_trainer|sft_trainer|sft_trainer_ray)|(?:\S*/)?fsdp_sft_trainer\.py")
_PATH = "data.custom_cls.path"
_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def is_verls(text: str) -> bool:
    """Tell whether a text starts a trainer of verl's own."""
    return any(_TRAINER.fullmatch(unquoted(word)) for word in WORD.findall(text))


def migrate_script(text: str, to: str | None = None) -> str | None:
    """Return the new command for the first of a script's that starts the trainer, or None without one.

    to: as in :func:`migrate_verl`.
    """
    script = Script(text)
    commands = [line for words, _ in script.commands if is_verls(line := " ".join(words))]
    if not commands:
        return None
    unread = [
        f"# {condition}: whether it holds is not known here, so the variables that its branches set are not read"
        for condition in script.undecided
    ]
    more = [f"# the first of {len(commands)} commands that train is translated"] * (len(commands) > 1)
    return "\n".join([migrate_verl(commands[0], to), *unread, *more])


def migrate_verl(text: str, to: str | None = None) -> str:
    """Return the new command and its comments, or raise UsageError.

    to: the file of the run to write, which the command then names.
    """
    from verl_ext.config import schema  # imports torch and verl, which takes seconds

    def is_known(key: str) -> bool:
        return schema.is_known(key) or key in schema.groups()

    text = text.replace("\\\n", " ").strip()
    # What the pattern of words leaves over shows that this is not one command.
    if between := WORD.sub("", text).strip(" \t\r"):
        got = "several lines" if between.isspace() else "a quote that is not closed"
        raise UsageError(must("command", "be one command, from torchrun to its last override", got))
    words = WORD.findall(text)
    start = next((number for number, word in enumerate(words) if _TRAINER.fullmatch(unquoted(word))), None)
    if start is None:
        raise UsageError("command must start verl's fsdp_sft_trainer, sft_trainer or sft_trainer_ray; got none of them")
    end = end_of(words, start + 1)
    settings = settings_of(words)
    topology = topology_of(words[len(settings) : start])
    ranks, nodes = topology.get("per_node", topology.get("ranks")), topology.get("nodes", "1")
    items, others = [], []
    for word in words[start + 1 : end]:
        # A word quoted as a whole, 'trainer.logger=[console]', becomes trainer.logger='[console]'.
        match = _OVERRIDE.fullmatch(word) or _OVERRIDE.fullmatch(re.sub(r"^(['\"])([+~]*[\w.]+=)", r"\2\1", word))
        if match:
            items.append(Item(match[1], match[2], unquoted(match[3]), match[3]))
        else:
            others.append(word)
    values = {item.key: item.value for item in items}
    # The file of a user's class is where the command will run.
    own_class = bool(values.get("data.custom_cls.name")) and "pkg://verl_ext" not in str(values.get(_PATH))
    does = "packs tokenized documents by data.max_tokens, as the default does"
    comments = [f"leave data.custom_cls.* out if your class {does}"] * own_class
    is_old = "fsdp_sft_trainer" in words[start]
    found = translate(items, own_class, packed=True, is_known=is_known, is_old=is_old, writes_rate=True)
    # Raw files are tokenized first, by a command that starts the ranks itself.
    starts = [*settings, "verl-ext train", *([] if ranks is None else [f"nproc={ranks}"])]
    if found.sources and nodes != "1":
        comments.append(f"{nodes} nodes there: this command runs on one machine; verl-ext launch starts a node of them")
    if not found.sources:
        module = "verl_ext.fsdp_sft_trainer" + "_ray" * unquoted(words[start]).endswith("_ray")
        starts = [*words[:start], *([] if words[:start][-1:] == ["-m"] else ["-m"]), module]
    lines = [" ".join(starts)]
    for item in (*found.sources, *found.items):
        # A key that the schema has needs no plus.
        prefix = "" if item.prefix.startswith("+") and is_known(item.key) else item.prefix
        word = str(Item(prefix, item.key, item.written or item.value))
        lines.append(shell_word(word) if item.written is None and " " in word else word)
    if others := [*others, *words[end:]]:
        lines.append(" ".join(others))
    unread = [word for word in words[start + 1 : end] if word in others and "$" in word]
    comments += [f"{word} stays as it is: what it holds is not read" for word in unread]
    if flags := [word for word in others if word.startswith(("--config", "-c"))]:
        comments.append(f"{' '.join(flags)}: the file that it names is not read: give its keys as overrides")
    # A key that nothing reads stays in the command, because the user decides about it.
    unknown = [schema.unknown_key(item.key) for item in found.items if not is_known(item.key)]
    comments = [*comments, *found.notices, *found.problems, *unknown]
    if to is not None:
        if others:
            comments.append(f"not in the file, because it is not an override: {' '.join(others)}")
        new = [str(Item(item.prefix, item.key, item.value)) for item in (*found.sources, *found.items)]
        return written_run(to, new, ranks, comments)
    return "\n".join([" \\\n    ".join(lines), *(f"# {line}" for line in comments)])
