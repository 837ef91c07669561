"""Option names and defaults of verl's own SFT trainers.

verl 0.7 removed the fsdp_sft_trainer of verl ≤ 0.6 and its sft_trainer.yaml; its trainer of today reads raw files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

RENAMED = {
    "model.partial_pretrain": "model.path",
    "model.mlp_tile_tokens": "model.tile_tokens",  # in this project's first versions
    "model.strategy": "engine.strategy",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "use_remove_padding": "model.use_remove_padding",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "trainer.resume_path": "trainer.resume_from_path",
}
RENAMED_NODES = {"model.fsdp_config": "engine", "trainer.checkpoint": "checkpoint"}
# Old names that verl's dataclasses of today still have, and apply after all checks.
DEPRECATED = {"optim.grad_clip": "optim.clip_grad", "optim.warmup_style": "optim.lr_scheduler_type"}
# The old names of which null asks for nothing.
NULLABLE = ("model.partial_pretrain", "model.mlp_tile_tokens", "trainer.resume_path", *DEPRECATED)

# Keys of raw files and their records, which verl's own datasets read: of verl ≤ 0.6 alone, and of all versions.
RAW_OF_OLD = (
    *("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys"),
    *("data.system_prompt_key", "data.multiturn", "data.chat_template"),
)
RAW = (
    *("data.train_files", "data.val_files", *RAW_OF_OLD, "data.messages_key", "data.tools_key"),
    *("data.enable_thinking_key", "data.enable_thinking_default", "data.apply_chat_template_kwargs"),
)
# verl's defaults that differ from today's (key, value, a key that replaces it): of all versions, and of verl ≤ 0.6.
DEFAULTS = (("data.train_batch_size", "256", None), ("trainer.total_epochs", "4", None))
DEFAULTS_OF_OLD = (
    ("optim.lr", "1e-5", None),
    ("optim.betas", "[0.9,0.95]", None),
    ("optim.lr_scheduler_type", "cosine", None),
    ("optim.lr_warmup_steps_ratio", "0.1", "optim.lr_warmup_steps"),
)
FOREIGN_ENGINES = ("automodel", "megatron", "mindspeed", "torchtitan", "veomni")
MAX_LENGTH = "1024"  # tokens of a row
FORWARDS = {"data.max_token_len_per_gpu": "8192", "data.micro_batch_size_per_gpu": "4"}  # tokens, or rows


@dataclass(frozen=True)
class Superseded:
    """A key whose work is done in another way today.

    by: the key that does the work; if it is given too, this key is left out. neutral: the values that request nothing,
    or today's behaviour; None: all of them. read_as: today's override for values that have one.
    """

    why: str
    by: str | None = None
    neutral: tuple[str, ...] | None = ()
    read_as: Mapping[str, str] = field(default_factory=dict)


_FLAGS = ("true", "false")
_BY_COST = "packs are cut to data.max_tokens, and data.balance shares those of like cost among ranks"
_TEST_FREQ = "trainer.test_freq says when to validate: a number of steps or after_each_epoch"
_OVER_LENGTH = "data.over_length says what happens to documents longer than data.max_tokens"
_SHM = "files are read where they are, memory-mapped"
_PLAN = "`verl-ext plan` plans a run: the same overrides, plan.gpu=… and plan.world_size=…"
_MEMORY = "a memory is of networks that learn, and memory tokens are only in earlier versions"
OFFLOAD = "verl ≤ 0.6 offloads if cpu_offload and offload_params are both true"
SUPERSEDED = {
    "data.max_length": Superseded(
        "data.max_tokens is the budget of a pack, and data.train_batch_size counts packs", "data.max_tokens"
    ),
    "data.micro_batch_size": Superseded(
        "verl 0.2 to 0.6 did not read it; data.micro_batch_size_per_gpu says what a forward holds", neutral=None
    ),
    "data.truncation": Superseded(
        _OVER_LENGTH,
        "data.over_length",
        read_as={"error": "data.over_length=error", "right": "data.over_length=truncate"},
    ),
    "data.balance_dp_token": Superseded(
        "it chose the ranks whose tokens divide a micro-batch's loss; the loss here is the mean over all target tokens "
        "of a step",
        neutral=_FLAGS,
    ),
    "data.use_dynamic_bsz": Superseded(_BY_COST, "data.balance", _FLAGS),
    "data.ignore_input_ids_mismatch": Superseded("chats are rendered and tokenized whole", neutral=_FLAGS),
    "data.val_batch_size": Superseded("data.micro_batch_size_per_gpu is that of validation too", neutral=None),
    "data.use_shm": Superseded(_SHM, neutral=None),
    "model.use_shm": Superseded(_SHM, neutral=None),
    "model.fsdp_config.cpu_offload": Superseded(OFFLOAD, "engine.offload_policy", _FLAGS),
    "model.fsdp_config.offload_params": Superseded(OFFLOAD, "engine.offload_policy", _FLAGS),
    "trainer.val_freq": Superseded(_TEST_FREQ, "trainer.test_freq"),
    "trainer.validate_before_training": Superseded(
        "trainer.val_before_train validates before step 1",
        "trainer.val_before_train",
        read_as={flag: f"trainer.val_before_train={flag}" for flag in _FLAGS},
    ),
    "trainer.val_only": Superseded(
        "trainer.eval_only measures and trains nothing",
        "trainer.eval_only",
        ("false",),
        {"true": "trainer.eval_only=true"},
    ),
    "trainer.allow_pickled_checkpoints": Superseded(
        "checkpoints hold tensors and plain values, and no other pickle is read", neutral=("false",)
    ),
    "trainer.plan_only": Superseded(_PLAN, neutral=("false",)),
    "plan": Superseded(_PLAN),
    "model.memory.kind": Superseded(_MEMORY, neutral=("titans",)),
    "model.memory.tokens": Superseded(_MEMORY, neutral=None),
    "trainer.hub": Superseded("nothing is uploaded; `verl-ext export` writes a folder for the Hub", neutral=("false",)),
}


def superseded(key: str) -> Superseded | None:
    """Return the entry of a key, or of a node above it."""
    return next((SUPERSEDED[node] for node in _nodes(key) if node in SUPERSEDED), None)


def is_raw(key: str) -> bool:
    """Tell whether a key is one of raw files and their records."""
    return any(node in RAW for node in _nodes(key))


def renamed(key: str) -> str | None:
    """Return today's name of an old key; None for others."""
    if superseded(key):
        return None
    for old, new in {**RENAMED, **DEPRECATED}.items():
        if key == old:
            return new
    for old, new in RENAMED_NODES.items():
        if key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def is_name_of_verl(key: str) -> bool:
    """Tell whether a key is verl's, read otherwise or not at all."""
    return is_raw(key) or superseded(key) is not None or renamed(key) is not None


def is_of_old(key: str) -> bool:
    """Tell whether only verl ≤ 0.6 has a key."""
    node = key.startswith(tuple(f"{old}." for old in RENAMED_NODES))
    names = (*RENAMED, *RAW_OF_OLD, "data.micro_batch_size")
    return node or (key != "model.mlp_tile_tokens" and any(above in names for above in _nodes(key)))


def _nodes(key: str) -> Iterator[str]:
    """Yield the key, then the nodes above it."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))
