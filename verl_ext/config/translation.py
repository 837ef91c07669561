"""Command lines of verl's SFT trainers, translated with their meaning.

    model.partial_pretrain=M                    → model.path=M
    data.max_length=512                         → data.max_tokens=512 data.strategy=none data.drop_last=true
    not given                                   → trainer.total_epochs=4 optim.betas=[0.9,0.95] …, verl's defaults
    data.train_files=/d/gsm8k/train.parquet     → data.sources.gsm8k=/d/gsm8k/train.parquet columns.prompt=q
        data.prompt_key=q                         of `verl-ext train`, which tokenizes first

Each translation is told once. An option without a translation is refused, so that no request is ignored.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath

from verl_ext.config.keys import (
    CHAT_ENDS,
    DEPRECATED,
    FOREIGN_ENGINES,
    KEYS,
    OFFLOAD,
    PAIR_ENDS,
    RATE,
    RATE_OF_OLD,
    Key,
    is_of_old,
    is_raw,
    renamed,
    row_of,
    superseded,
)
from verl_ext.options import must
from verl_ext.overrides import Item

_SPAN = "optim.lr_schedule_span"
_RATE = "optim.lr"
# Keys that say how documents become packs; a command of verl's without them batches rows.
_OF_PACKS = ("data.max_tokens", "data.strategy", "data.mixture", "recipe")
_MAX_LENGTH = "1024"  # tokens of a row, in verl
_FORWARDS = {"data.max_token_len_per_gpu": "8192", "data.micro_batch_size_per_gpu": "4"}  # tokens, or rows, in verl
_ROW_KEYS = ("data.max_length", "data.truncation", "data.use_dynamic_bsz", *_FORWARDS)
_ROWS_OF_FORWARD = "data.micro_batch_size_per_gpu"
_KWARGS = "apply_chat_template_kwargs"
_THINKING = "data.enable_thinking_default"


@dataclass(frozen=True)
class Translation:
    """Today's overrides, a notice per change, a line per untranslated override.

    sources: the words of `verl-ext train` for raw files and their records; empty without keys of those. replies: what
    of their replies is learnt otherwise.
    """

    items: list[Item] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sources: list[Item] = field(default_factory=list)
    replies: str = ""


def translate(
    items: Sequence[Item],
    own_class: bool,
    packed: bool,
    is_known: Callable[[str], bool] = lambda key: True,
    is_old: bool | None = None,
    writes_rate: bool = False,
) -> Translation:
    """Translate overrides to today's names, which win if both are given.

    own_class: whether data.custom_cls names a class, which may read any key. packed: whether the data group makes
    packs, for which even data.max_length has no meaning. is_known: whether today's configuration has a key. is_old: for
    the trainer of verl ≤ 0.6; None: the keys tell. writes_rate: whether verl's rate becomes an override, to be printed.
    """
    command, result = _Command(items, own_class, packed, is_old), Translation()
    for item in _without_foreign_engine(command, result, is_known):
        _translate(item, command, result)
    if command.batches_rows:
        _read_rows(command, result)
    elif command.is_verls and "recipe" not in command.values:
        forward = Item("", _ROWS_OF_FORWARD, _FORWARDS[_ROWS_OF_FORWARD])
        span = _read_span(command, result)
        result.items.extend(span if "trainer.total_epochs" in command.by_key else [])
        defaults = [*command.defaults, *([] if command.keys & {*_FORWARDS} else [forward])]
        if defaults := [*defaults, *(each for each in span if each not in result.items)]:
            result.notices.append(f"not given, and another default in verl: {' '.join(map(str, defaults))}")
    if command.is_verls and not {_RATE, "recipe"} & command.keys and command.values.get("optim", "fsdp") == "fsdp":
        rate = Item("", _RATE, RATE_OF_OLD if command.is_old else RATE)
        tail = ", which `verl-ext migrate` writes into the command: a run has no default"
        if writes_rate:
            from verl_ext.engines.schedule import USUAL_RATES  # imports verl, which takes seconds

            result.items.append(rate)
            tail = f"; usual: {USUAL_RATES}"
        result.notices.append(f"{_RATE} is not given: {rate.value} is verl's default{tail}")
    if command.raw:
        result = replace(result, replies=_read_raw(command, result))
    return replace(result, notices=list(dict.fromkeys([*result.notices, *filter(None, [result.replies])])))


class _Command:
    """A command's overrides, and the trainer they were written for.

    own_class, packed: as in :func:`translate`. keys: their names, of today too. read: those that were asked for.
    """

    def __init__(self, items: Sequence[Item], own_class: bool, packed: bool, is_old: bool | None) -> None:
        self.items, self.own_class, self.packed, self.program_is_old = items, own_class, packed, is_old
        self.read = {"data.train_files", "data.val_files"}
        self.by_key = {item.key: item for item in items}
        self.values = {item.key: (item.value or "").strip("'\"") for item in items}
        self.keys = {*self.by_key, *filter(None, map(renamed, self.by_key))}

    @cached_property
    def is_old(self) -> bool:
        """Whether it is for verl ≤ 0.6, by its program, its records' fields or the spelling of a key."""
        old, new = self.of_ages
        if self.program_is_old or bool(old) != bool(new):
            return bool(self.program_is_old or old)  # the later trainer does not start with fields of the earlier one
        if self.program_is_old is not None:
            return False
        return any(is_of_old(key) and not (self.own_class and key.startswith("data.")) for key in self.by_key)

    @property
    def of_ages(self) -> tuple[list[str], list[str]]:
        """The keys of records' fields that verl ≤ 0.6 alone has, and those that later versions alone have."""
        asked = [key for key in self.by_key if not (self.own_class or self.is_nothing(key))]
        return [key for key in asked if is_raw(key, "old")], [key for key in asked if is_raw(key, "new")]

    @cached_property
    def is_verls(self) -> bool:
        """Whether its program is of verl's, or it has a key that only verl's trainers read."""
        return (
            self.is_old
            or self.program_is_old is not None
            or (self.packed and not self.own_class and any(map(self._is_of_verls_data, self.by_key)))
        )

    @cached_property
    def batches_rows(self) -> bool:
        """Whether data.train_batch_size counts rows, as in verl, and not packs."""
        reads = self.packed and not self.own_class and any(map(self._is_of_verls_data, self.by_key))
        return reads and not any(map(self.has, _OF_PACKS))

    @staticmethod
    def _is_of_verls_data(key: str) -> bool:
        return key.startswith("data.") and (superseded(key) is not None or is_raw(key))

    @cached_property
    def raw(self) -> list[str]:
        """The keys of raw files that no folder of tokenized data replaces."""
        if self.own_class or "data.train_dir" in self.by_key:
            files = "data.val_files"
            needs = not self.own_class and files in self.by_key and "data.val_dir" not in self.by_key
            return [files] if needs and not self.is_nothing(files) else []
        return [key for key in self.by_key if is_raw(key) and not self.is_nothing(key)]

    @cached_property
    def defaults(self) -> list[Item]:
        """The defaults of its verl for what it leaves out."""
        rows = [row for row in KEYS if not {row.name, row.unless} & self.keys]
        old = [Item("", row.name, row.old_default) for row in rows if row.old_default and self.is_old]
        return [*(Item("", row.name, row.default) for row in rows if row.default), *old]

    def has(self, key: str) -> bool:
        """Tell whether a key or one below it is given."""
        return any(f"{other}.".startswith(f"{key}.") for other in self.by_key)

    def is_nothing(self, key: str) -> bool:
        """Tell whether a key is absent or asks for nothing."""
        if key.startswith(f"data.{_KWARGS}."):
            return False  # a template may ask whether an argument is false, or whether it is null
        nothing = ("null", "", "none", "{}", "[]", *(["false"] if key != _THINKING else []))
        return self.values.get(key, "").lower() in nothing

    def item(self, key: str, default: str, today: str | None = None) -> Item:
        """Return a key's override under today's name, or the default, which stands for null too."""
        is_default = self.value(key, "") == ""
        return replace(Item("", key, default) if is_default else self.by_key[key], prefix="", key=today or key)

    def value(self, key: str, default: str) -> str:
        """Return a key's unquoted value; the default if absent or null."""
        self.read.add(key)
        return value if (value := self.values.get(key, "null")) not in ("null", "") else default


def _without_foreign_engine(command: _Command, result: Translation, is_known: Callable[[str], bool]) -> Iterator[Item]:
    """Yield the overrides but a foreign engine's, which become one problem."""
    foreign = [item for item in command.items if item.key in ("engine", "optim") and item.value in FOREIGN_ENGINES]
    gone = [item for item in command.items if item.key.startswith(("engine.", "optim.")) and not is_known(item.key)]
    if foreign:
        also = f", and with it {', '.join(item.key for item in gone)}" if gone else ""
        got = f"{foreign[0].value}: leave it out{also}"
        result.problems.append(must(foreign[0].key, "be fsdp: packs train on verl's FSDP engine", got))
    yield from (item for item in command.items if not (foreign and item in [*foreign, *gone]))


def _translate(item: Item, command: _Command, result: Translation) -> None:
    """Add an override's translation, notice or problem to `result`."""
    key, value = item.key, command.values[item.key]
    entry, new = superseded(key), renamed(key)
    # A user's class may read any key of data, so those of verl's own datasets go on to it.
    if command.own_class and key.startswith("data.") and (entry or is_raw(key)):
        result.items.append(replace(item, prefix=item.prefix or "++"))  # it may not be a key of today
    # Rows and raw files follow from several keys together, so they are read as a whole later.
    elif key in command.raw or (command.batches_rows and key in _ROW_KEYS):
        pass
    elif is_raw(key):
        why = "it asks for nothing" if command.is_nothing(key) else "tokenized data is given"
        result.notices.append(f"{key}={value} is left out: {why}")
    elif entry and key.startswith("model.fsdp_config."):
        _read_offload(command, result)
    elif entry and (command.packed or key != "data.max_length"):
        _supersede(item, entry, command.keys, result)
    elif key == "model" and value == "hf_model":
        result.notices.append("model=hf_model is left out: the default, model=packed, is that model for packs")
    elif key == "trainer.logger" and "tracking" in re.findall(r"\w+", value):
        result.notices.append("trainer.logger: tracking, a name of verl 0.1, is read as wandb")
        result.items.append(replace(item, value=value.replace("tracking", "wandb"), written=None))
    # FSDP1 cannot run packs, and FSDP2 does its work.
    elif (new or key) == "engine.strategy" and value == "fsdp":
        result.notices.append(f"{key}=fsdp is read as engine.strategy=fsdp2: FSDP1 has no packs")
        result.items.append(Item("", "engine.strategy", "fsdp2"))
    elif new is None:
        result.items.append(item)
    # Today's name wins, so a command can be moved over key by key.
    elif new in command.by_key or (value == "null" and row_of(key).is_nullable):
        why = f"{new} is given" if new in command.by_key else "it is null"
        result.notices.append(f"{key} ({_age(key)}) is left out: {why}")
    else:
        result.notices.append(f"{key} ({_age(key)}) is read as {new}")
        result.items.append(replace(item, key=new))


def _age(key: str) -> str:
    return "deprecated in verl" if key in DEPRECATED else "verl ≤ 0.6"


def _read_offload(command: _Command, result: Translation) -> None:
    """Add engine.offload_policy if both of the old keys ask for it."""
    both = [f"model.fsdp_config.{name}" for name in ("cpu_offload", "offload_params")]
    old = " ".join(f"{key}={command.values[key]}" for key in both if key in command.by_key)
    item = Item("", "engine.offload_policy", "true")
    if item.key in command.by_key:
        result.notices.append(f"{old} is left out: {item.key} is given")
    elif not all(command.value(key, "false").lower() == "true" for key in both):
        result.notices.append(f"{old} is left out: {OFFLOAD}")
    elif item not in result.items:
        result.notices.append(f"{old} is read as {item}")
        result.items.append(item)


def _supersede(item: Item, entry: Key, keys: set[str], result: Translation) -> None:
    """Add a superseded override's translation, notice or problem to `result`."""
    old, value = str(replace(item, prefix="")), (item.value or "").strip("'\"")
    if entry.by in keys:
        result.notices.append(f"{item.key} is left out: {entry.by} is given, and {entry.why}")
    elif today := entry.read_as.get(value.lower()):
        key, _, new_value = today.partition("=")
        result.notices.append(f"{old} is read as {today}")
        result.items.append(Item(item.prefix, key, new_value))
    elif value in ("null", "") or entry.neutral is None or value.lower() in entry.neutral or item.prefix == "~":
        result.notices.append(f"{old} is left out: {entry.why}")
    else:
        instead = f"give {entry.by} instead" if entry.by else "leave it out"
        result.problems.append(f"{item.key} has no equivalent: {entry.why}; got {item.value}: {instead}")


def _read_rows(command: _Command, result: Translation) -> None:
    """Add verl's steps: rows, dropped rest, forwards, schedule, defaults."""
    length = command.item("data.max_length", _MAX_LENGTH, "data.max_tokens")
    by_tokens = not command.is_old and command.value("data.use_dynamic_bsz", "true").lower() == "true"
    read, unread = _FORWARDS if by_tokens else reversed(_FORWARDS)
    rows = [length, Item("", "data.strategy", "none"), *_over_length(command, result)]
    rows += [] if "data.drop_last" in command.by_key else [Item("", "data.drop_last", "true")]
    rows.append(command.item(read, _FORWARDS[read]))
    result.notices.append(
        f"as in verl, a step is data.train_batch_size rows of at most {length.value} tokens, and an epoch drops the "
        f"rows that fill no step: {' '.join(map(str, rows))} (give data.max_tokens for packs of documents)"
    )
    if unread in command.by_key:
        result.notices.append(f"{unread}={command.values[unread]} is left out: verl reads {read} here")
    if command.is_old:
        result.notices.append(
            "the loss is the mean over a step's target tokens, as in verl since 0.7; in verl ≤ 0.6 it was the mean of "
            "the micro-batches' means"
        )
        rows += _read_span(command, result)
    if command.defaults:
        result.notices.append(f"not given, so verl's defaults: {' '.join(map(str, command.defaults))}")
    result.items[:] = [*rows, *result.items, *command.defaults]


def _read_span(command: _Command, result: Translation) -> list[Item]:
    """Return the span of the schedule in verl ≤ 0.6, if the command ends the run by its steps."""
    if not command.is_old or _SPAN in command.by_key or "trainer.total_training_steps" not in command.by_key:
        return []
    result.notices.append(f"{_SPAN}=epochs: as in verl ≤ 0.6, trainer.total_training_steps only ends the run")
    return [Item("", _SPAN, "epochs")]


def _over_length(command: _Command, result: Translation) -> list[Item]:
    """Return data.over_length; rows without padding are cut at their end."""
    cut, pads = command.value("data.truncation", "error"), command.value("data.pad_mode", "no_padding") == "right"
    if cut == "left" and not (command.is_old or pads):
        result.notices.append("data.truncation=left is read as right: verl cuts rows without padding at their end")
        cut = "right"
    if cut not in ("error", "right"):
        _supersede(Item("", "data.truncation", cut), row_of("data.truncation"), command.keys, result)
    asks = "data.over_length" in command.by_key
    return [Item("", "data.over_length", "truncate")] if cut == "right" and not asks else []


def _read_raw(command: _Command, result: Translation) -> str:
    """Add raw files, their fields and template; return a note on how replies are learnt in verl."""
    words = result.sources
    # No command of ours reads a tokenized training set beside raw validation files.
    if command.raw == ["data.val_files"] and "data.train_dir" in command.by_key:
        result.problems.append(
            "data.val_files has no equivalent: `verl-ext tokenize` reads raw files, and data.val_dir names its "
            f"folder; got {command.values['data.val_files']}: give data.val_dir instead"
        )
        return ""
    if all(ages := command.of_ages) and command.program_is_old is None:
        old, new = ages
        needed = f"not stand beside {old[0]}, which verl ≤ 0.6 alone reads; it does not read {new[0]}"
        got = f"{command.by_key[new[0]]} and {command.by_key[old[0]]}"
        result.problems.append(must(new[0], needed, got))
    # verl's own default files stand in for missing ones, so that the command reads what it read there.
    train = command.item("data.train_files", "~/data/gsm8k/train.parquet")
    files = {} if command.has("data.sources") else {"data.sources": train}
    is_divided = "data.val_share" in command.by_key and "data.val_files" not in command.by_key
    if not (is_divided or command.has("data.val_sources") or "data.val_dir" in command.by_key):
        default = "~/data/gsm8k/test.parquet" if command.is_old else "null"
        files["data.val_sources"] = command.by_key.get("data.val_files", Item("", "data.val_files", default))
    name = _category(train.value or "")
    words += [
        replace(item, prefix="", key=f"{key}.{name}")
        for key, item in files.items()
        if item.value not in ("null", "", "[]")
    ]
    # verl ≤ 0.6 names the two fields of a question and its answer, unless it reads chats.
    pairs = command.is_old and command.is_nothing("data.multiturn.enable")
    if pairs:
        for field_name, default in (("prompt", "question"), ("response", "answer")):
            node = f"data.{field_name}"
            path = [command.value(f"{node}_key", default), command.value(f"{node}_dict_keys", "")]
            words.append(Item("", f"columns.{field_name}", ".".join(each for names in path for each in _names(names))))
        system = "data.system_prompt_key"
        words += [] if command.is_nothing(system) else [command.item(system, "", "columns.system")]
    else:
        node = "data.multiturn" if command.is_old else "data"
        words.append(command.item(f"{node}.messages_key", "messages", "columns.messages"))
        for field_name in ("tools", "enable_thinking"):
            item = command.item(f"{node}.{field_name}_key", field_name, f"columns.{field_name}")
            words += [item] if item.value != field_name else []
    # Arguments of the template go along, because they change the tokens.
    if (
        not (command.is_old or command.is_nothing(_THINKING))
        and f"data.{_KWARGS}.enable_thinking" not in command.by_key
    ):
        words.append(command.item(_THINKING, "", f"{_KWARGS}.enable_thinking"))
    if not command.is_nothing(f"data.{_KWARGS}"):
        words.append(command.item(f"data.{_KWARGS}", "", _KWARGS))
    words += [
        replace(item, prefix="", key=item.key.removeprefix("data."))
        for item in command.items
        if item.key.startswith(f"data.{_KWARGS}.")
    ]
    for key in ("data.chat_template", "model.custom_chat_template"):
        words += [] if command.is_nothing(key) else [command.item(key, "", "chat_template")]
    command.read |= {"data.multiturn.enable"} if command.is_old else set()
    for key in command.raw:
        if key == "data.multiturn":
            result.problems.append(f"{key} is read by its keys, such as {key}.enable; got {command.by_key[key]}")
        elif key not in command.read and not f"{key}.".startswith(f"data.{_KWARGS}."):
            reader = (
                f"verl {'≤ 0.6' if command.is_old else 'since 0.7'}, which reads {'pairs' if pairs else 'chats'} here"
            )
            result.notices.append(f"{command.by_key[key]} is left out: {reader}, does not read it")
    return PAIR_ENDS if pairs else CHAT_ENDS


def _names(value: str) -> list[str]:
    """Return the names in an override's list, or the one name."""
    return [name for part in value.strip("[] ").split(",") if (name := part.strip(" '\""))]


def _category(files: str) -> str:
    """Return a category for files: the folder's name, else the file's; `data` if both hold variables."""
    path = PurePosixPath(next(iter(_names(files)), ""))
    names = (path.parent.name, path.name.partition(".")[0], "data")
    return next(name.replace("-", "_") for name in names if re.fullmatch(r"[A-Za-z][\w-]*", name))
