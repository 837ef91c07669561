"""What is known of verl's keys, also of earlier versions: one row a key, which checks, schema and translation ask.

A key without a row needs no care: a dataclass tells its type. Options of ours have rows only for their paths.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """The facts about one key, or node; an old key has its name of today, or the reason why it has none."""

    name: str
    holds: Callable[[Any], bool] | None = None  # a test of a value whose type is right
    requires: str = ""  # what it tests, in words
    choices: tuple[str, ...] = ()  # the allowed values, or those of a list's entries
    is_list: bool = False
    takes_null: bool = False  # beside the choices
    fixed: tuple[Any, str] | None = None  # the only allowed value, and why
    is_typed: bool = True  # whether verl's dataclass has the type of what verl takes
    is_free: bool = False  # whether any keys may stand below it
    is_derived: bool = False  # whether verl fills it itself, and would silently overwrite a value
    # What its path leads to: tokenized "data", a "corpus", verl's "raw" files; a "source" or a "model", which may also
    # be on the Hub; files of the "run", or files only "placed" beside the run's own file; a "template", which may also
    # be the text itself; or an "object", file.py:name.
    path: str | None = None
    is_resumed: bool = False  # whether a resumed run must have its checkpoint's value
    default: str | None = None  # verl's, where another one stands here
    old_default: str | None = None  # that of verl ≤ 0.6
    unless: str | None = None  # the key beside which this one needs no default
    # The verl that has the key: "old": ≤ 0.6 alone, "new": later ones alone, "deprecated": all, but it applies the key
    # after all checks; None: all, or the first versions of this package.
    age: str | None = None
    today: str | None = None  # the name of an old key today, or of the node that held it
    is_nullable: bool = False  # whether null asks for nothing in an old key
    is_raw: bool = False  # whether verl reads it for raw files and their records
    why: str | None = None  # how its work is done in another way today
    by: str | None = None  # the key that does it
    neutral: tuple[str, ...] | None = ()  # the values that request nothing, or today's behaviour; None: all of them
    read_as: Mapping[str, str] = field(default_factory=dict)  # today's override for a value that has one


def keys(node: str, names: str, **facts: Any) -> list[Key]:
    """Return a row for each name below a node, with the same facts."""
    return [Key(f"{node}.{name}", **facts) for name in names.split()]


def with_fact(fact: str) -> dict[str, Any]:
    """Return {name: the fact} of the keys that have it."""
    return {key.name: value for key in KEYS if (value := getattr(key, fact))}


def paths(*kinds: str) -> tuple[str, ...]:
    """Return the names of the keys whose paths are of these kinds."""
    return tuple(key.name for key in KEYS if key.path in kinds)


def _are_betas(betas: Any) -> bool:
    return isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas)


def _is_share(share: Any) -> bool:
    return 0 <= share <= 1


_DTYPES = ("fp32", "bf16", "fp16")
_MODEL_DTYPES = (*_DTYPES, "float32", "bfloat16", "float16")
_CONTENTS = ("model", "optimizer", "extra", "hf_model")
_FLAGS = ("true", "false")
_STEPS, _BEFORE, _EVAL = "optim.lr_warmup_steps", "trainer.val_before_train", "trainer.eval_only"
_NOT_APPLIED = "verl's SFT engine does not apply it; model.tile_tokens is what works here"
_TWICE = "verl's computes the head and its logits twice; model.activation_offload=true is what works here"
_COMPILED = "verl's compiles the entropy alone, which SFT never computes; no layer is"
_PACKS_SET_IT = "data.max_tokens and data.micro_batch_size_per_gpu decide what a forward holds"
_BUDGET = "data.max_tokens is the budget of a pack, and data.train_batch_size counts packs"
_UNREAD = "verl 0.2 to 0.6 did not read it; data.micro_batch_size_per_gpu says what a forward holds"
_OVER_LENGTH = "data.over_length says what happens to documents longer than data.max_tokens"
_CUT = {"error": "data.over_length=error", "right": "data.over_length=truncate"}
_OF_A_STEP = (
    "it chose the ranks whose tokens divide a micro-batch's loss; the loss here is the mean over all target tokens of "
    "a step"
)
_BY_COST = "packs are cut to data.max_tokens, and data.balance shares those of like cost among ranks"
_WHOLE = (
    "chats are rendered and tokenized whole, as at inference; verl joins messages that are rendered one by one, whose "
    "tokens are others where a template prints earlier turns in another way (Qwen3's thinking blocks)"
)
_SHM = "files are read where they are, memory-mapped"
OFFLOAD = "verl ≤ 0.6 offloads if cpu_offload and offload_params are both true"
_TEST_FREQ = "trainer.test_freq says when to validate: a number of steps or after_each_epoch"
_FIRST = "trainer.val_before_train validates before step 1"
_MEASURES = "trainer.eval_only measures and trains nothing"
_NO_PICKLE = "checkpoints hold tensors and plain values, and no other pickle is read"
_PLAN = "`verl-ext plan` plans a run: the same overrides, plan.gpu=… and plan.world_size=…"
_SERVED = "`verl-ext judge task=prompts` scores a model behind a server"
_MEMORY = "a memory is of networks that learn, and memory tokens are only in earlier versions"

KEYS: tuple[Key, ...] = (
    Key("model.path", is_typed=False, path="model"),
    *keys("model", "hf_config_path tokenizer_path lora_adapter_path", path="model"),
    Key("reference.path", path="model"),
    Key("model.memory_checkpoint", path="run"),
    Key("model.lora_rank", lambda rank: rank >= 0, "at least 0", is_resumed=True),
    *keys("model", "lora_alpha target_modules target_parameters", is_resumed=True),
    Key("model.exclude_modules", is_typed=False, is_resumed=True),
    Key("model.override_config", is_typed=False, is_free=True),
    *keys("model", "fused_kernel_options lora", is_free=True),
    Key("model.lora.rank", fixed=(0, "it is Megatron's; model.lora_rank is the one that works here")),
    Key("model.use_fused_kernels", fixed=(False, "verl 0.9.1's fused head fails under FSDP2")),
    Key("model.model_type", fixed=("language_model", "packs train language models")),
    Key("model.mtp.enable", fixed=(False, "packs train the next token alone")),
    Key("model.tiled_mlp.enabled", fixed=(False, _NOT_APPLIED)),
    Key("model.enable_activation_offload", fixed=(False, _TWICE)),
    # HFModelConfig computes these from the folder at model.path.
    *keys("model", "architectures generation_config hf_config local_hf_config_path local_path", is_derived=True),
    *keys("model", "local_tokenizer_path processor tokenizer", is_derived=True),
    Key("engine.strategy", choices=("fsdp2",), is_typed=False),
    Key("engine.ulysses_sequence_parallel_size", lambda size: size >= 1, "at least 1"),
    Key("engine.model_dtype", choices=_MODEL_DTYPES, takes_null=True, is_typed=False, is_resumed=True),
    Key("engine.mixed_precision", is_typed=False, is_resumed=True),
    # verl reads these by name from that dict (workers/engine/fsdp/transformer_impl.py).
    *keys("engine.mixed_precision", "param_dtype reduce_dtype buffer_dtype", choices=_DTYPES, takes_null=True),
    *keys("engine", "turbo_config wrap_policy", is_free=True),
    Key("engine.forward_only", fixed=(False, "it would not train")),
    Key("engine.use_torch_compile", fixed=(False, _COMPILED)),
    Key("engine.qat.enable", fixed=(False, "it was never run with packs")),
    Key("engine.use_dynamic_bsz", fixed=(True, _PACKS_SET_IT)),
    *keys("engine", "micro_batch_size_per_gpu max_token_len_per_gpu", fixed=(None, _PACKS_SET_IT)),
    *keys("engine", "infer_micro_batch_size_per_gpu infer_max_token_len_per_gpu", fixed=(None, _PACKS_SET_IT)),
    *keys("optim", "optimizer optimizer_impl", is_typed=False, is_resumed=True),
    Key("optim.override_optimizer_config", is_typed=False, is_free=True, is_resumed=True),
    Key("optim.lr", is_typed=False),  # an option of ours, without a default
    Key("optim.betas", _are_betas, "two numbers from 0 to below 1", is_resumed=True, old_default="[0.9,0.95]"),
    Key("optim.weight_decay", lambda decay: 0 <= decay < math.inf, "at least 0 and finite", is_resumed=True),
    Key("optim.clip_grad", lambda norm: norm > 0, "above 0", is_resumed=True),
    Key("optim.lr_scheduler_type", is_typed=False, old_default="cosine"),
    Key(_STEPS, is_resumed=True),
    Key("optim.lr_warmup_steps_ratio", _is_share, "from 0 to 1", is_resumed=True, old_default="0.1", unless=_STEPS),
    Key("optim.min_lr_ratio", _is_share, "from 0 to 1", is_resumed=True),
    Key("optim.num_cycles", lambda cycles: 0 <= cycles < math.inf, "at least 0 and finite", is_resumed=True),
    Key("optim.zero_indexed_step", is_resumed=True),
    *keys("checkpoint", "save_contents load_contents", choices=_CONTENTS, is_list=True, is_typed=False),
    *keys("profiler", "global_tool_config tool_config", is_free=True),
    Key("hydra", is_free=True),
    *keys("data", "train_dir val_dir", path="data", is_free=True),
    *keys("data", "sources val_sources", path="source"),
    Key("data.blend", path="corpus"),
    Key("eval.prompts", path="source", is_free=True),
    *keys("data", "mixture category_names", is_free=True),
    *keys("data", "cache_dir custom_cls.path", path="run"),
    Key("loss.custom_cls.path", path="run"),
    *keys("trainer", "default_local_dir resume_from_path", path="run"),
    *(Key(name, path="placed") for name in ("chat_templates", "profiler.save_path", "trainer.default_hdfs_dir")),
    *(Key(name, path="template") for name in ("chat_template", "eval.chat_template", "model.custom_chat_template")),
    *(Key(name, path="object") for name in ("eval.score", "trainer.hooks")),
    Key("data.train_batch_size", default="256"),
    Key("trainer.total_epochs", default="4"),
    # Names of verl ≤ 0.6, whose fsdp_sft_trainer verl 0.7 removed, and of this project's first versions.
    Key("model.partial_pretrain", today="model.path", age="old", is_nullable=True),
    Key("model.mlp_tile_tokens", today="model.tile_tokens", is_nullable=True),
    Key("model.strategy", today="engine.strategy", age="old"),
    Key("ulysses_sequence_parallel_size", today="engine.ulysses_sequence_parallel_size", age="old"),
    Key("use_remove_padding", today="model.use_remove_padding", age="old"),
    Key("optim.warmup_steps_ratio", today="optim.lr_warmup_steps_ratio", age="old"),
    Key("optim.lr_scheduler", today="optim.lr_scheduler_type", age="old"),
    Key("trainer.resume_path", today="trainer.resume_from_path", age="old", is_nullable=True),
    Key("model.fsdp_config", today="engine", age="old"),
    Key("trainer.checkpoint", today="checkpoint", age="old"),
    Key("optim.grad_clip", today="optim.clip_grad", age="deprecated", is_nullable=True),
    Key("optim.warmup_style", today="optim.lr_scheduler_type", age="deprecated", is_nullable=True),
    # Raw files and their records, which verl's own datasets read.
    *keys("data", "train_files val_files", is_raw=True, path="raw"),
    *keys("data", "prompt_key response_key prompt_dict_keys response_dict_keys", is_raw=True, age="old"),
    *keys("data", "system_prompt_key multiturn chat_template", is_raw=True, age="old"),
    *keys("data", "messages_key tools_key enable_thinking_key enable_thinking_default", is_raw=True, age="new"),
    Key("data.apply_chat_template_kwargs", is_free=True, is_raw=True),
    # What is done in another way today.
    Key("data.max_length", why=_BUDGET, by="data.max_tokens"),
    Key("data.micro_batch_size", why=_UNREAD, neutral=None, age="old"),
    Key("data.truncation", why=_OVER_LENGTH, by="data.over_length", read_as=_CUT),
    Key("data.balance_dp_token", why=_OF_A_STEP, neutral=_FLAGS),
    Key("data.use_dynamic_bsz", why=_BY_COST, by="data.balance", neutral=_FLAGS),
    Key("data.ignore_input_ids_mismatch", why=_WHOLE, neutral=_FLAGS),
    Key("data.val_batch_size", why="data.micro_batch_size_per_gpu is that of validation too", neutral=None),
    Key("data.use_shm", why=_SHM, neutral=None),
    Key("model.use_shm", why=_SHM, neutral=None),
    *keys("model.fsdp_config", "cpu_offload offload_params", why=OFFLOAD, by="engine.offload_policy", neutral=_FLAGS),
    Key("trainer.val_freq", why=_TEST_FREQ, by="trainer.test_freq"),
    Key(
        "trainer.validate_before_training",
        why=_FIRST,
        by=_BEFORE,
        read_as={flag: f"{_BEFORE}={flag}" for flag in _FLAGS},
    ),
    Key("trainer.val_only", why=_MEASURES, by=_EVAL, neutral=("false",), read_as={"true": f"{_EVAL}=true"}),
    Key("trainer.allow_pickled_checkpoints", why=_NO_PICKLE, neutral=("false",)),
    Key("trainer.plan_only", why=_PLAN, neutral=("false",)),
    Key("plan", why=_PLAN),
    *keys("eval", "base_url model", why=_SERVED),
    Key("model.memory.kind", why=_MEMORY, neutral=("titans",)),
    Key("model.memory.tokens", why=_MEMORY, neutral=None),
    Key("trainer.hub", why="nothing is uploaded; `verl-ext export` writes a folder for the Hub", neutral=("false",)),
)

_ROWS = {key.name: key for key in KEYS}
_TODAY = {key.name: key.today for key in KEYS if key.today}
# Old names that verl's dataclasses of today still have, and apply after all checks.
DEPRECATED = {key.name: key.today for key in KEYS if key.today and key.age == "deprecated"}
RENAMED_NODES = {old: new for old, new in _TODAY.items() if "." not in new}
RENAMED = {old: new for old, new in _TODAY.items() if old not in RENAMED_NODES and old not in DEPRECATED}
# What is learnt of a reply, in verl and here, and the words that give verl's.
PAIR_ENDS = (
    "a reply of verl ≤ 0.6 is the response and the tokenizer's eos_token, right after the generation prompt (0.6 and "
    "0.7.0 learn the prompt's last token and no eos_token); here it is the chat template's turn. "
    "drop_empty_reasoning=1 leaves out the empty thinking block that Qwen3's prints; where another token ends the turn "
    "(Gemma, DeepSeek-Coder), chat_template=FILE with turns of {{ message.content }}{{ eos_token }} gives verl's"
)
CHAT_ENDS = (
    "verl learns the line end after a turn too, and a thinking block without words that the template prints: "
    "end_of_turn=$'<|im_end|>\\n' (the end as the template writes it) and empty_reasoning=learn give verl's"
)
RATE, RATE_OF_OLD = "0.001", "1e-5"  # of optim.lr, which no run here has by default
FOREIGN_ENGINES = ("automodel", "megatron", "mindspeed", "torchtitan", "veomni")


def row_of(key: str) -> Key:
    """Return the row of a key, without facts if it has none."""
    return _ROWS.get(key) or Key(key)


def path_kind(key: str) -> str | None:
    """Return the kind of path that a key, or a node above it, holds; None for keys without paths."""
    if key.startswith("data.mixture.") and key.endswith(".train_dir"):
        return "data"
    return next((row.path for row in map(row_of, _nodes(key)) if row.path), None)


def superseded(key: str) -> Key | None:
    """Return the row that says what does the work of a key, or of a node above it, today."""
    return next((_ROWS[node] for node in _nodes(key) if node in _ROWS and _ROWS[node].why), None)


def is_raw(key: str, age: str | None = None) -> bool:
    """Tell whether a key is one of raw files and their records, or below one; age: as in :class:`Key`."""
    return any(row.is_raw and age in (None, row.age) for row in map(row_of, _nodes(key)))


def renamed(key: str) -> str | None:
    """Return today's name of an old key; None for others."""
    if superseded(key):
        return None
    node = next((old for old in RENAMED_NODES if key.startswith(f"{old}.")), None)
    return RENAMED_NODES[node] + key[len(node) :] if node else {**RENAMED, **DEPRECATED}.get(key)


def is_name_of_verl(key: str) -> bool:
    """Tell whether a key is verl's, read otherwise or not at all."""
    return is_raw(key) or superseded(key) is not None or renamed(key) is not None


def is_of_old(key: str) -> bool:
    """Tell whether only verl ≤ 0.6 has a key."""
    return any(row_of(node).age == "old" for node in _nodes(key))


def _nodes(key: str) -> Iterator[str]:
    """Yield the key, then the nodes above it."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))
