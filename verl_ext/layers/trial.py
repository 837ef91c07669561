"""A trial that an architecture keeps a pack's documents apart.

Two documents go through a small random model of the same class. A token of the first changes: the logits of the second
must stay equal to the last bit (of a mixture of experts, except rounding: an expert's product has rows of both), and
equal those that it has alone, in packed attention as in the model's own. The trial covers all that a model does across
tokens: attention that is not dispatched, masks without positions, biases that the model's own attention adds, remote
code, layers of a new release.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group

from verl_ext.attention.packed import PACKED_ATTENTION
from verl_ext.layers.experts import has_experts
from verl_ext.layers.mixers import install, torch_forms
from verl_ext.layers.pack import RunningPack, attach
from verl_ext.parallel.shards import DocumentLayout, document_layout
from verl_ext.parallel.trees import tree_layout

_LENGTHS = (21, 18)  # longer than the windows and chunks of a shrunk config
_MOST_PARAMETERS = 50_000_000  # of a trial model; a config whose names of sizes are not in the table stays large
_TOLERANCE = 1e-4  # relative to the largest logit; matrices of other sizes round differently
_ROUNDING = 1e-6  # of products of experts, 1e-7 by MKL with two threads; a leak is above 1e-2


def _by_name(names_of_sizes: dict[int, str]) -> dict[str, Any]:
    return {name: size for size, names in names_of_sizes.items() for name in names.split()}


# Sizes of the small config by their names in transformers. Names that a config lacks are left out.
_SIZES = _by_name(
    {
        256: "vocab_size vocab_size_per_layer_input",
        64: "hidden_size d_model n_embd word_embed_proj_dim embedding_size dim lru_width",
        96: "intermediate_size intermediate_size_mlp ffn_dim n_inner decoder_ffn_dim ffn_hidden_size dim_ff",
        # Heads times their size is the hidden size in Mamba 2 (expand 1), and twice that in Zamba (128 = 4 · 32).
        128: "mamba_d_ssm attention_hidden_size",
        32: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size attention_head_dim",
        24: "q_lora_rank",
        16: "head_dim global_head_dim swa_head_dim qk_head_dim index_head_dim mamba_d_head mamba_head_dim "
        "mamba_headdim kv_lora_rank mamba_chunk_size chunk_size",
        12: "v_head_dim",
        # Windows and chunks are shorter than the documents of the trial.
        8: "sliding_window attention_window_size attention_chunk_size qk_rope_head_dim qk_nope_head_dim index_topk "
        "linear_head_dim linear_key_head_dim linear_value_head_dim linear_num_value_heads mamba_d_state mamba_n_heads "
        "mamba_num_heads n_mamba_heads ssm_state_size state_size block_size hidden_size_per_layer_input laurel_rank",
        4: "num_attention_heads n_head n_heads decoder_attention_heads num_heads index_n_heads linear_num_heads "
        "linear_num_key_heads num_experts num_local_experts n_routed_experts moe_num_experts mamba_dt_rank "
        "time_step_rank floor_scale",
        2: "num_key_value_heads n_head_kv num_kv_heads num_global_key_value_heads kv_n_heads num_experts_per_tok moe_k "
        "moe_topk moe_top_k top_k_experts num_experts_per_token mamba_n_groups mamba_ngroups n_groups mamba_expand "
        "altup_num_inputs",
        1: "n_group num_expert_group topk_group n_shared_experts moe_num_shared_experts zero_expert_num "
        "first_k_dense_replace num_dense_layers expand",
        0: "num_nextn_predict_layers num_kv_shared_layers",
        512: "max_position_embeddings n_positions seq_length n_ctx max_sequence_length",
    }
)
_TOWER_SIZES = {  # of vision and audio towers, which text does not reach
    **_by_name(
        {
            64: "out_hidden_size vision_output_dim projector_input_dim projector_output_dim projector_dim output_dim",
            48: "intermediate_size encoder_ffn_dim",
            32: "hidden_size hidden_sizes embed_dim d_model",
            16: "head_dim global_head_dim num_position_embeddings position_embedding_size downsample_hidden_size",
            8: "image_size window_size",
            4: "patch_size default_output_length num_soft_tokens",
            2: "num_hidden_layers depth num_attention_heads num_heads num_key_value_heads spatial_merge_size "
            "temporal_patch_size pooling_kernel_size encoder_layers encoder_attention_heads",
        }
    ),
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "layer_types": None},
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_KINDS = ("layer_types", "layers_block_type", "block_types", "no_rope_layers")
_INDICES = ("hybrid_layer_ids", "moe_layers", "attn_layer_indices", "full_attn_idxs", "mlp_only_layers")
_OF_LAYERS = ("attn_config", "ffn_config")  # DBRX's
_MOST_LAYERS = 12


def trial_model(config: Any, cls: Any, **sizes: Any) -> nn.Module:
    """Return a small random model of a class, for CPU packs.

    cls is transformers' Auto class for remote code; `sizes` override those of the small config. Raises ValueError if
    the small config's model is still too large to be tried.
    """
    small = shrunk(config, **sizes)
    with torch.random.fork_rng(devices=[]), torch_forms(cls):
        torch.manual_seed(0)
        attention: dict[str, Any] = {"attn_implementation": PACKED_ATTENTION}
        if hasattr(cls, "_from_config"):
            make = functools.partial(cls._from_config, small, **attention)
        else:  # an Auto class; the config of remote code was read with the user's consent
            make = functools.partial(cls.from_config, small, trust_remote_code=True, **attention)
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in make().parameters())
        if parameters > _MOST_PARAMETERS:
            raise ValueError(f"its smallest form has {parameters:,} parameters")
        model = make().float()
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and not name.endswith("A_log"):  # so large that attention is far from uniform
                nn.init.normal_(weight, std=0.5 if "embed" in name else weight[0].numel() ** -0.5)
            else:
                weight.data += 0.1 * torch.randn_like(weight)
    pack = RunningPack()
    attach(model, pack)
    install(model, pack)
    return model.eval()


@contextmanager
def _on_one_rank() -> Iterator[None]:
    """Keep an engine's exchange of heads out of a trial."""
    no_group: Any = None
    group: Any = get_ulysses_sequence_parallel_group()
    set_ulysses_sequence_parallel_group(no_group)
    try:
        yield
    finally:
        set_ulysses_sequence_parallel_group(group)


@torch.no_grad()
@_on_one_rank()
def isolation_problem(model: nn.Module) -> str | None:
    """Return how a model of :func:`trial_model` mixes documents, or None."""
    ids = _random_ids(sum(_LENGTHS))
    changed = ids.clone()
    changed[_LENGTHS[0] // 2] += 1
    first, second = _LENGTHS
    together, other = (_logits(model, x, _LENGTHS)[first:] for x in (ids, changed))
    alone = _logits(model, ids[first:], (second,))
    if not (_agree(together, other, _ROUNDING) if has_experts(model) else torch.equal(together, other)):
        return "another document's tokens change a document's logits"
    if not _agree(together, alone):
        return "a document's logits in a pack differ from those that it has alone"
    # Let the model use its own attention from here on; its other layers still compute packs.
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == PACKED_ATTENTION:
            config._attn_implementation_internal = "eager"  # type: ignore[union-attr]
    # Packed attention alone reads a module's `position_needs`; without a layout, the module itself computes them.
    has_needs = any(hasattr(module, "position_needs") for module in model.modules())
    if not _agree(alone, _logits(model, ids[first:], (second,), has_layout=not has_needs)):
        return "its own attention (attn_implementation=eager) gives a document other logits than packed attention"
    return None


@torch.no_grad()
@_on_one_rank()
def sharing_problem(model: nn.Module) -> str | None:
    """Return how a model of :func:`trial_model` computes shared tokens otherwise than each document's, or None."""
    first, *others = (part.clone() for part in _random_ids(sum(_LENGTHS)).split([_LENGTHS[0], 7, 11]))
    begins = 0, 13, 4
    texts = [first, *(torch.cat([first[: begin + 1], other]) for begin, other in zip(begins[1:], others, strict=True))]
    positions = torch.cat([torch.arange(begin, len(text)) for begin, text in zip(begins, texts, strict=True)])
    own = torch.cat([text[begin:] for begin, text in zip(begins, texts, strict=True)])
    together = _run(model, own, positions, tree_layout(positions, "cpu"))
    alone = torch.cat([_logits(model, text, (len(text),))[begin:] for begin, text in zip(begins, texts, strict=True)])
    return None if _agree(together, alone) else "their logits differ from those that a document has alone"


def _random_ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 190, (tokens,), generator=torch.Generator().manual_seed(0))


def _agree(logits: torch.Tensor, others: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    return bool((logits - others).abs().max() <= tolerance * others.abs().max())


def _logits(model: nn.Module, ids: torch.Tensor, lengths: tuple[int, ...], has_layout: bool = True) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return _run(model, ids, positions, document_layout(positions) if has_layout else None)


def _run(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, layout: DocumentLayout | None) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None}
    return model(**inputs, document_layout=layout, use_cache=False).logits[0]


def shrunk(config: Any, **sizes: Any) -> Any:
    """Return a small config with the first layers of each kind.

    Args:
        config: a Hugging Face config, which is not changed.
        sizes: values of the new config by name, which override the table's; those of a nested text config are a dict
            under its name.
    """
    # Nested configs become small by themselves: the text model's, those of towers and of DBRX's layers.
    values = copy.deepcopy(config.to_dict())
    parts = {name: getattr(config, name, None) for name in values if name.endswith("_config")}
    parts = {name: part for name, part in parts.items() if hasattr(part, "to_dict")}
    text = config.get_text_config()
    inner = {
        name: (shrunk(part, **sizes.pop(name, {})) if part is text else _small_tower(part)).to_dict()
        for name, part in parts.items()
        if name not in _OF_LAYERS
    }
    if text is not config:
        return type(config).from_dict({**values, **inner, **_small_ids(values), **sizes})
    values |= inner | {name: _small_layer(part) for name, part in parts.items() if name in _OF_LAYERS}
    # Sizes, and lists with a value or an index for each layer, are those of the first layers.
    small = {name: size for name, size in _SIZES.items() if values.get(name) is not None}
    small |= {name: [size] * len(values[name]) for name, size in small.items() if isinstance(values[name], list)}
    layers = _layers_of_each_kind(values)
    for name in _LAYERS:
        if name in values:
            small[name] = layers
    most = next((values[name] for name in _LAYERS if name in values), layers)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == most and (most > layers or name in _KINDS):
            small[name] = (value * layers)[:layers]  # a config may have fewer layers than the trial
        elif name in _INDICES and isinstance(value, list):
            small[name] = [index for index in value if index < layers]
    if isinstance(of_layers := values.get("per_layer_config"), dict):  # by index: what differs from the config's own
        first = {index: parts for index, parts in of_layers.items() if int(index) < layers}
        small["per_layer_config"] = {
            index: {name: _SIZES.get(name, value) for name, value in parts.items()} for index, parts in first.items()
        }
    # Sizes that follow from others, and rotary parameters.
    if "kv_lora_rank" in small or "attention_hidden_size" in small:  # these do not share key heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # latent attention rotates a part of each head
    ropes = [name for name in ("rope_parameters", "rope_scaling") if isinstance(values.get(name), dict)]
    small |= {name: _unscaled(values[name], small.get("head_dim", 16)) for name in ropes}
    return _rebuilt(config, {**values, **small, **_small_ids(values), **sizes})


def _small_layer(config: Any) -> Any:
    """Return a small copy of a layer part's config, names unchanged."""
    small = copy.deepcopy(config)
    for name, size in _SIZES.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, size)
    return small


def _small_tower(config: Any) -> Any:
    """Return a small config of a tower that fits `_SIZES`."""
    values = config.to_dict()
    small = {name: size for name, size in _TOWER_SIZES.items() if values.get(name) is not None}
    lists = [name for name, size in small.items() if isinstance(values[name], list) and isinstance(size, int)]
    pairs = {name: [small[name]] * 2 for name in lists}
    layers = values.get("num_hidden_layers")  # a list with a value for each has those of the first two
    firsts = {name: [*value[:2]] for name, value in values.items() if isinstance(value, list) and len(value) == layers}
    return _rebuilt(config, {**values, **firsts, **small, **pairs})


def _rebuilt(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a config of the same class, with defaults for None."""
    return type(config).from_dict({name: value for name, value in values.items() if value is not None})


def _small_ids(values: Mapping[str, Any]) -> dict[str, int]:
    """Return distinct ids of special tokens inside the small vocabulary."""
    ids = [name for name in values if name.endswith(("token_id", "token_index")) and isinstance(values[name], int)]
    return {name: 200 + place for place, name in enumerate(ids)}


def _layers_of_each_kind(values: Mapping[str, Any]) -> int:
    """Return how many first layers have every kind, at least 2."""
    layers = 2
    for name in _KINDS:
        kinds: Sequence[Any] = values.get(name) or ()
        layers = max([layers, *(kinds.index(kind) + 1 for kind in set(kinds))])
        shared = [place for place, kind in enumerate(kinds) if kind == "hybrid"]  # Zamba's, two of which tie weights
        layers = max([layers, *(place + 1 for place in shared[:2])])
    for name in _INDICES:
        layers = max([layers, *(values.get(name) or ())[:1]]) if isinstance(values.get(name), list) else layers
    return min(layers, _MOST_LAYERS)


def _unscaled(rope: dict[str, Any], head_size: int) -> dict[str, Any]:
    """Return rotary parameters without their scaling, whose lengths suit other sizes."""
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        return {kind: _unscaled(value, head_size) if isinstance(value, dict) else value for kind, value in rope.items()}
    small: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10_000.0}
    if (part := rope.get("partial_rotary_factor")) is not None:
        small["partial_rotary_factor"] = part
    if "llama_4_scaling_beta" in rope:  # a factor on the queries that grows by place beyond the original positions
        small |= {"llama_4_scaling_beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": 8}
    if "mrope_section" in rope:  # pairs of time, height and width; texts have the same position in all three
        pairs = int(head_size * (part or 1)) // 2
        small["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        if rope["mrope_section"][0] == rope["mrope_section"][1]:  # Ernie's, of height, width and time
            small["mrope_section"].reverse()
    return small
