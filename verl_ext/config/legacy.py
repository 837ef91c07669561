"""Names of verl's SFT trainers, of today and of verl ≤ 0.6, by the rows of :mod:`verl_ext.config.keys`."""

from collections.abc import Iterator

from verl_ext.config.keys import KEYS, Key

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
_ROWS = {key.name: key for key in KEYS}


def row_of(key: str) -> Key:
    """Return the row of a key, without facts if it has none."""
    return _ROWS.get(key) or Key(key)


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
