"""Ranks, sequence-parallel groups, batches, heads and positions: whether the numbers of a run divide.

ranks = data-parallel size × sequence-parallel size
packs of a step = data-parallel size × micro-batch size × accumulation
"""

from typing import Any

from omegaconf import DictConfig

_SP = "engine.ulysses_sequence_parallel_size"


def batch_problems(config: DictConfig, world_size: int) -> list[str]:
    """Whether the ranks divide into sequence-parallel groups, and the step into micro-batches over what is left."""
    sp = config.engine.ulysses_sequence_parallel_size
    if not isinstance(sp, int) or sp < 1:
        return [f"{_SP} must be at least 1; got {sp}"]
    if world_size % sp:
        return [f"{_SP} must divide the number of ranks; got {sp} with {world_size} rank{'s' * (world_size > 1)}"]
    batch, micro = config.data.train_batch_size, config.data.micro_batch_size_per_gpu
    if not all(isinstance(size, int) and size > 0 for size in (batch, micro)):
        return []  # told by the data node
    shard = config.engine.fsdp_size
    if isinstance(shard, int) and shard > 0 and world_size % shard:
        return [f"engine.fsdp_size must divide the number of ranks or be -1; got {shard} with {world_size}"]
    dp = world_size // sp
    if batch % (dp * micro) == 0:
        return []
    return [
        "data.train_batch_size must be a multiple of the data-parallel size × data.micro_batch_size_per_gpu = "
        f"{dp} × {micro} = {dp * micro} (ranks {world_size}, {_SP} {sp}); got {batch}"
    ]


def head_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Whether Ulysses can split the model's heads: query heads divide, key/value heads divide or repeat."""
    sp = config.engine.ulysses_sequence_parallel_size
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(sp, int) or sp <= 1 or not heads:
        return []
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % sp:
        return [f"{_SP} must divide the model's {heads} attention heads; got {sp}"]
    if kv_heads % sp and sp % kv_heads:
        return [f"{_SP} must divide the model's {kv_heads} key/value heads or be a multiple of them; got {sp}"]
    return []


def model_positions(hf_config: Any) -> int | None:
    """The positions that a model was made for, its RoPE scaling included; None when its config names none.

    Some configs (Llama 3) give max_position_embeddings with the scaling included, others (YaRN for Qwen) without: the
    larger reading is taken.
    """
    text = hf_config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        return None
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]  # one for each layer type
    for rope in ropes:
        if isinstance(rope, dict) and rope.get("factor"):
            base = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", positions)
            positions = max(positions, int(rope["factor"] * base))
    return int(positions)


def check_positions(longest_document: int, max_tokens: int, hf_config: Any) -> None:
    """Raises ValueError when a document reaches positions that the model does not have.

    Positions restart with every document, so a pack may be longer than the model's positions; a document, of at most
    min(longest_document, max_tokens) tokens, may not.
    """
    positions = model_positions(hf_config)
    longest = min(longest_document, max_tokens)
    if positions is not None and longest > positions:
        raise ValueError(
            f"data.max_tokens must be at most the model's {positions} positions while a document is longer than those; "
            f"got {max_tokens} and a longest document of {longest} tokens: lower it with data.over_length=drop, "
            "truncate or split, or extend the model by model.override_config"
        )
