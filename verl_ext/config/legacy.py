"""The option names of verl ≤ 0.6's fsdp_sft_trainer, and their names of today.

verl 0.7 removed that trainer and its sft_trainer.yaml. Its scripts still start here, and each translation is printed
once. An option without a translation is refused, so that no request is ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

RENAMED = {
    "model.partial_pretrain": "model.path",
    "model.mlp_tile_tokens": "model.tile_tokens",  # in this project's first versions
    "model.strategy": "engine.strategy",
    "model.fsdp_config.cpu_offload": "engine.offload_policy",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "use_remove_padding": "model.use_remove_padding",
    "data.micro_batch_size": "data.micro_batch_size_per_gpu",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "trainer.resume_path": "trainer.resume_from_path",
}
RENAMED_NODES = {"model.fsdp_config": "engine", "trainer.checkpoint": "checkpoint"}
# Defaults of its sft_trainer.yaml that differ from today's: (key, value, the key that replaces it).
DEFAULTS = (
    ("optim.lr", "1e-5", None),
    ("optim.betas", "[0.9,0.95]", None),
    ("optim.lr_scheduler_type", "cosine", None),
    ("optim.lr_warmup_steps_ratio", "0.1", "optim.lr_warmup_steps"),
    ("trainer.total_epochs", "4", "trainer.total_training_steps"),
)


@dataclass(frozen=True)
class Superseded:
    """A key without a new name, because its work is done in another way today.

    by: the key that does the work; if it is given too, this key is left out. neutral: the values that request nothing,
    or today's behaviour. read_as: today's override for values that have one.
    """

    why: str
    by: str | None = None
    neutral: tuple[str, ...] = ()
    read_as: Mapping[str, str] = field(default_factory=dict)


_TOKENIZED = "the data is tokenized beforehand by `verl-ext tokenize`, and {} names the folder"
# Keys of verl's own dataset, which reads raw files.
_RAW = (
    "prompt_key response_key prompt_dict_keys response_dict_keys system_prompt_key multiturn chat_template train_files "
    "messages_key tools_key apply_chat_template_kwargs "
    "ignore_input_ids_mismatch"
)
_THINKING = "a record's enable_thinking is read, and columns={enable_thinking: NAME} names another column"
_BUDGET = "data.max_tokens is the budget of a pack"
_BY_COST = "packs are cut to data.max_tokens, and data.balance shares those of like cost among ranks"
_TEST_FREQ = "trainer.test_freq says when to validate: a number of steps or after_each_epoch"
_OVER_LENGTH = "data.over_length says what happens to documents longer than data.max_tokens"
_OFFLOAD = "engine.offload_policy offloads parameters, gradients and optimizer together"
SUPERSEDED = {
    **{
        f"data.{name}": Superseded(_TOKENIZED.format("data.train_dir"), "data.train_dir", ("false", "none", "{}"))
        for name in _RAW.split()
    },
    **{
        f"data.{name}": Superseded(f"{_TOKENIZED.format('data.train_dir')}; {why}", "data.train_dir", ("none",))
        for name, why in {
            "multiturn.enable_thinking_key": _THINKING,
            "enable_thinking_key": _THINKING,
            "enable_thinking_default": "apply_chat_template_kwargs={enable_thinking: …} holds for records without one",
        }.items()
    },
    "data.val_files": Superseded(_TOKENIZED.format("data.val_dir"), "data.val_dir"),
    "data.max_length": Superseded(f"{_BUDGET}, and data.train_batch_size counts packs", "data.max_tokens"),
    "data.max_token_len_per_gpu": Superseded(_BUDGET, "data.max_tokens"),
    "data.truncation": Superseded(
        _OVER_LENGTH,
        "data.over_length",
        read_as={"error": "data.over_length=error", "right": "data.over_length=truncate"},
    ),
    "data.balance_dp_token": Superseded(_BY_COST, "data.balance", ("true", "false")),
    "data.use_dynamic_bsz": Superseded(_BY_COST, "data.balance", ("true", "false")),
    "data.use_shm": Superseded("tokenized folders are read where they are, memory-mapped", neutral=("false",)),
    "model.fsdp_config.offload_params": Superseded(_OFFLOAD, "engine.offload_policy", ("false",)),
    "trainer.val_freq": Superseded(_TEST_FREQ, "trainer.test_freq"),
    "trainer.validate_before_training": Superseded(_TEST_FREQ, neutral=("false",)),
}


@dataclass(frozen=True)
class Item:
    """An override of the command line, `<prefix><key>=<value>`, with the prefix "", "+", "++" or "~".

    value: the value for Hydra. written: its spelling in a shell script, if it comes from one.
    """

    prefix: str
    key: str
    value: str | None
    written: str | None = None

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


@dataclass(frozen=True)
class Translation:
    """The overrides with today's names, a notice per change, and a line per override without a translation."""

    items: list[Item]
    notices: list[str]
    problems: list[str]


def renamed(key: str) -> str | None:
    """Return today's name of a key of verl ≤ 0.6, or None for any other key."""
    if key in SUPERSEDED:
        return None
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED_NODES.items():
        if key.startswith(old + "."):
            return new + key[len(old) :]
    return None


def translate(items: Sequence[Item], own_class: bool, packed: bool) -> Translation:
    """Translate overrides to today's names; today's name wins if both are given.

    own_class: whether data.custom_cls names a user's class, which may read any key. packed: whether the data group
    makes packs, for which even data.max_length has no meaning.
    """
    given = {item.key for item in items}
    to_be_given = given | {new for item in items if (new := renamed(item.key))}
    found = Translation([], [], [])
    for item in items:
        new = renamed(item.key)
        parts = item.key.split(".")
        nodes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))  # the key, then the nodes above it
        entry = next((SUPERSEDED[node] for node in nodes if node in SUPERSEDED), None)
        if entry and own_class and item.key.startswith("data."):
            found.items.append(replace(item, prefix=item.prefix or "++"))  # it may not be a key of today
            continue
        if entry and (packed or item.key != "data.max_length"):
            _supersede(item, entry, to_be_given, found)
            continue
        if new and (new in given or item.value == "null"):
            why = f"{new} is given" if new in given else "it is null"
            found.notices.append(f"{item.key} (verl ≤ 0.6) is left out: {why}")
            continue
        if new:
            found.notices.append(f"{item.key} (verl ≤ 0.6) is read as {new}")
            item = replace(item, key=new)
        found.items.append(item)
    if "recipe" not in given and any(map(renamed, given)):
        missing = [f"{key}={value}" for key, value, other in DEFAULTS if not {key, other} & to_be_given]
        if missing:
            found.notices.append(f"not given, and another default in verl ≤ 0.6: {' '.join(missing)}")
    return replace(found, notices=list(dict.fromkeys(found.notices)))


def _supersede(item: Item, entry: Superseded, given: set[str], found: Translation) -> None:
    """Add a superseded override to `found` as a translation, a notice, or a problem."""
    said, value = str(replace(item, prefix="")), (item.value or "").strip("'\"")
    if entry.by in given:
        found.notices.append(f"{item.key} is left out: {entry.by} is given, and {entry.why}")
    elif today := entry.read_as.get(value):
        key, _, new_value = today.partition("=")
        found.notices.append(f"{said} is read as {today}")
        found.items.append(Item(item.prefix, key, new_value))
    elif value in ("null", "") or value.lower() in entry.neutral or item.prefix == "~":
        found.notices.append(f"{said} is left out: {entry.why}")
    else:
        instead = f"give {entry.by} instead" if entry.by else "leave it out"
        found.problems.append(f"{item.key} has no equivalent: {entry.why}; got {item.value}: {instead}")
