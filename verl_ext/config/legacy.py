"""Names of verl ≤ 0.6's fsdp_sft_trainer and what they are called today.

That trainer and its sft_trainer.yaml are gone since verl 0.7; scripts written for it still start here, and each
translation is said once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

RENAMED = {
    "model.partial_pretrain": "model.path",
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

_TOKENIZED = "the data is tokenized beforehand by `verl-ext tokenize`"
# Gone from verl: the key is dropped.
GONE = {
    "data.prompt_key": _TOKENIZED,
    "data.response_key": _TOKENIZED,
    "data.prompt_dict_keys": _TOKENIZED,
    "data.response_dict_keys": _TOKENIZED,
    "data.system_prompt_key": _TOKENIZED,
    "data.multiturn": _TOKENIZED,
    "data.chat_template": "the chat template is the tokenizer's, applied by `verl-ext tokenize`",
    "model.fsdp_config.offload_params": "engine.offload_policy offloads parameters, gradients and optimizer together",
    "trainer.val_freq": "trainer.test_freq says when to validate: a number of steps or after_each_epoch",
    "trainer.validate_before_training": "trainer.test_freq says when to validate",
}
# Still verl's keys, read by its own datasets alone: kept, for a class of the user's that reads them.
WITHOUT_EFFECT = {
    "data.train_files": "data.train_dir names the folder of the tokenized dataset",
    "data.val_files": "data.val_dir names the folder of the tokenized dataset",
    "data.max_length": "data.max_tokens is the budget of a pack",
    "data.truncation": "data.over_length says what happens to documents longer than data.max_tokens",
    "data.balance_dp_token": "packs are cut to data.max_tokens",
    "data.use_dynamic_bsz": "packs are cut to data.max_tokens",
    "data.max_token_len_per_gpu": "data.max_tokens is the budget of a pack",
    "data.messages_key": _TOKENIZED,
    "data.tools_key": _TOKENIZED,
    "data.enable_thinking_key": _TOKENIZED,
    "data.enable_thinking_default": _TOKENIZED,
    "data.apply_chat_template_kwargs": _TOKENIZED,
    "data.ignore_input_ids_mismatch": _TOKENIZED,
}


@dataclass(frozen=True)
class Item:
    """One override of the command line: `<prefix><key>=<value>`, prefix "", "+", "++" or "~"; value as written."""

    prefix: str
    key: str
    value: str | None

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


def renamed(key: str) -> str | None:
    """Today's name of a key of verl ≤ 0.6, None when it is none."""
    if key in GONE:
        return None
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED_NODES.items():
        if key.startswith(old + "."):
            return new + key[len(old) :]
    return None


def gone(key: str) -> str | None:
    """What replaces a key of verl ≤ 0.6 that has no counterpart, None when it is none."""
    for old, reason in GONE.items():
        if key == old or key.startswith(old + "."):
            return reason
    return None


def translate(items: Sequence[Item], own_class: bool, packed: bool) -> tuple[list[Item], list[str]]:
    """Overrides with today's names, and a notice for each translation. Today's name wins where both are given.

    own_class: data.custom_cls names a class of the user's, which may read any key. packed: the data group makes packs,
    on which even data.max_length has no effect.
    """
    given = {item.key for item in items}
    kept: list[Item] = []
    notices: list[str] = []
    for item in items:
        new = renamed(item.key)
        if reason := gone(item.key):
            notices.append(f"{item.key} (verl ≤ 0.6) has no effect: {reason}")
            continue
        if new and (new in given or item.value == "null"):
            why = f"{new} is given" if new in given else "it is null"
            notices.append(f"{item.key} (verl ≤ 0.6) is left out: {why}")
            continue
        if new:
            notices.append(f"{item.key} (verl ≤ 0.6) is read as {new}")
            item = replace(item, key=new)
        elif item.key in WITHOUT_EFFECT and not own_class and (packed or item.key != "data.max_length"):
            notices.append(f"{item.key} has no effect on packs: {WITHOUT_EFFECT[item.key]}")
        kept.append(item)
    return kept, list(dict.fromkeys(notices))
