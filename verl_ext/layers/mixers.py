"""The table of layers with a state, and how each computes packs.

Transformers' mixers are linear maps around one or two functions over time: a short convolution and a recurrence. Only
these are replaced, and only while a pack runs; everything else of a layer stays transformers' own code:

| time | replaced | between ranks |
|---|---|---|
| `delta` | `causal_conv1d_fn` and `chunk_gated_delta_rule` | a halo; tokens for heads |
| `state_space` | `causal_conv1d_fn` and `mamba_chunk_scan_combined` | the same |
| `convolution` | `causal_conv1d_fn`, or the forward of a convolution | a halo |
| `documents` | nothing: the layer runs once for each document | whole documents are dealt to ranks |
| `attention` | positions that transformers counts from the first token of a batch | as in all attention |
| `positions` | the same positions for embeddings; the causality flag of a class | nothing |

From transformers 5.15 on these are functions of the layer's module (:func:`_install_functions`); before, attributes of
the layer, or names in the forward for GPUs. Layer classes that carry a state and are not in the table are refused
(:func:`unknown_mixers`).
"""

import contextlib
import functools
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_ext.attention.packed import PositionNeeds
from verl_ext.layers.convolution import convolve, convolve_rows
from verl_ext.layers.documents import layer_by_document
from verl_ext.layers.pack import RunningPack
from verl_ext.layers.scans import delta_rule, state_space

# The names that transformers gives to classes that mix tokens. Sparse mixers of experts do not mix tokens.
_MIXER_NAMES = re.compile(
    r"(Mixer|MambaLayer|Mamba|ShortConv(olution)?|GatedDeltaNet|DeltaNet|DeltaAttention|LightningAttention|LinearAttention"
    r"|RecurrentBlock|RetentionLayer|SSM)$"
)
_PLAIN = ("KimiLinearAttention",)  # attention without a state, of a model called Kimi Linear
UNAWARE = ("ShortConvolution",)  # of flash-linear-attention; it convolves over the ends of documents
_OF_PACKAGES = (  # names in modeling modules, which are None where the packages are not installed
    *("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    *("FusedRMSNormGated", *UNAWARE),
)
SCANS = ("delta", "state_space")  # the values of Mixer.time for layers whose recurrence this project computes
_swapped = threading.RLock()  # the names of a modeling module are shared by all threads of the process


@dataclass(frozen=True)
class Mixer:
    """The treatment of the layers of one class in a pack.

    Attributes:
        time: a row of the module's table.
        install: puts a pack's functions into a layer.
        heads: the attribute with the number of heads that ranks exchange; "" for none.
        state: the attributes whose product is the size of the state.
        updates: operations of a token on each number of the state.
    """

    time: str
    install: Callable[[nn.Module, RunningPack], None]
    heads: str = ""
    state: tuple[str, ...] = ()
    updates: int = 4  # a product added to it, and its output

    def state_flops(self, layer: nn.Module) -> int:
        """Return a token's operations on a layer's state in a forward."""
        return self.updates * math.prod(getattr(layer, name) for name in self.state) if self.state else 0


def mixers_of(model: nn.Module) -> Iterator[tuple[nn.Module, Mixer]]:
    """Yield a model's layers that are in the table, with rows."""
    for module in model.modules():
        if (mixer := MIXERS.get(type(module).__name__)) is not None:
            yield module, mixer


def unknown_mixers(model: nn.Module) -> list[str]:
    """Return names of classes with a possible state beyond the table."""
    names = {type(module).__name__ for module in model.modules() if _carries_a_state(module)}
    return sorted(names - {*MIXERS, *_PLAIN})


def _carries_a_state(module: nn.Module) -> bool:
    name = type(module).__name__
    has_decays = "A_log" in dict(module.named_parameters(recurse=False)) and not name.endswith("Gate")
    if _MIXER_NAMES.search(name) or has_decays:
        return True
    return isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 and type(module) is not nn.Conv1d


def _in_packs(layer: Any, pack: RunningPack, name: str = "forward", alone: Any = None) -> Callable[[Any], None]:
    """Decorate what a layer's function becomes while a pack runs.

    ```
    @_in_packs(layer, pack)
    def forward(alone, *args, **kwargs): …        alone: the layer's own function, called without a pack
    ```
    """
    alone = alone or getattr(layer, name)

    def install(packed: Callable[..., Any]) -> None:
        @functools.wraps(alone)
        def call(*args: Any, **kwargs: Any) -> Any:
            return alone(*args, **kwargs) if pack.layout is None else packed(alone, *args, **kwargs)

        setattr(layer, name, call)

    return install


def _install_functions(layer: Any, pack: RunningPack) -> None:
    """Run a layer's own forward with our functions in its module."""
    scope = vars(sys.modules[type(layer).__module__])
    rules = [scope[name] for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention") if name in scope]
    rule: Any = inspect.unwrap(rules[0]) if rules else None  # torch's own code, whatever packages there are
    ours = {
        "causal_conv1d_fn": functools.partial(convolve, pack),
        "torch_chunk_gated_delta_rule": functools.partial(delta_rule, pack, rule),
        "chunk_kimi_delta_attention": functools.partial(delta_rule, pack, rule),
        "mamba2_chunk_scan": functools.partial(state_space, pack),
        "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # the whole layer in one, which ranks cannot share
    }
    names = {name: ours[name] for name in ours.keys() & scope.keys()}

    @_in_packs(layer, pack)
    def forward(alone: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _replaced(scope, names):
            return alone(hidden_states)


def _install_delta(layer: Any, pack: RunningPack) -> None:
    if not hasattr(layer, "chunk_gated_delta_rule"):
        return _install_functions(layer, pack)

    @_in_packs(layer, pack, "chunk_gated_delta_rule")
    def rule(alone: Any, *args: Any, **kwargs: Any) -> Any:
        return delta_rule(pack, alone, *args, **kwargs)

    if hasattr(layer, "causal_conv1d_fn"):  # else its convolutions are modules with their own rows

        @_in_packs(layer, pack, "causal_conv1d_fn", layer.causal_conv1d_fn or convolve_rows)
        def convolution(alone: Any, *args: Any, **kwargs: Any) -> Any:
            return convolve(pack, *args, **kwargs)


def _install_short_convolution(layer: Any, pack: RunningPack, **scan: Callable[..., Any]) -> None:
    """Run a layer's forward for GPU kernels, with our functions inside."""
    if not hasattr(layer, "cuda_kernels_forward"):
        return _install_functions(layer, pack)
    kernels_forward = type(layer).cuda_kernels_forward
    names = {"causal_conv1d_fn": functools.partial(convolve, pack), **scan}

    @_in_packs(layer, pack)
    def forward(alone: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Falcon-H1's `torch.cuda.device(…)` around its kernel must do nothing on a CPU.
        device = {} if hidden_states.is_cuda else {"device": lambda *_: contextlib.nullcontext()}
        with (
            # In training, transformers computes the whole layer in one fused function, which ranks cannot share.
            _replaced(vars(layer), {"training": False}),
            _replaced(kernels_forward.__globals__, names),
            _replaced(vars(torch.cuda), device),
        ):
            return kernels_forward(layer, hidden_states, None, None)


def _install_state_space(layer: Any, pack: RunningPack) -> None:
    _install_short_convolution(layer, pack, mamba_chunk_scan_combined=functools.partial(state_space, pack))


def _install_convolution_module(layer: Any, pack: RunningPack) -> None:
    @_in_packs(layer, pack)
    def forward(alone: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = convolve(pack, hidden_states.transpose(1, 2), layer.weight.squeeze(1), layer.bias)
        return layer.act_fn(output).transpose(1, 2), None


def _install_documents(layer: Any, pack: RunningPack, outputs: int = 1) -> None:
    caches = ("attention_mask", "cache", "cache_params", "past_key_values")

    @_in_packs(layer, pack)
    def forward(alone: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not any(isinstance(arg, torch.Tensor) for arg in args), "transformers names what it gives a mixer"
        others = {name: None if name in caches else value for name, value in kwargs.items()}
        others.pop("document_layout", None)
        output = layer_by_document(pack, alone, hidden_states, others)
        return output if outputs == 1 else (output, *[None] * (outputs - 1))


def _install_llama4(layer: Any, pack: RunningPack) -> None:
    """Count chunks and temperatures from a document's first token.

    Transformers counts both from the first token that a rank holds.
    """
    kinds = getattr(layer.config, "layer_types", None)
    is_chunked = kinds[layer.layer_idx] == "chunked_attention" if kinds else bool(layer.use_rope)
    is_tuned = bool(layer.attn_temperature_tuning) and not layer.use_rope

    def query_scale() -> torch.Tensor:
        places = pack.positions().float() + 1.0
        return torch.log1p(torch.floor(places / layer.floor_scale)) * layer.attn_scale + 1.0

    chunk = layer.config.attention_chunk_size if is_chunked else None
    layer.position_needs = PositionNeeds(chunk, query_scale if is_tuned else None)

    @_in_packs(layer, pack)
    def forward(alone: Any, *args: Any, **kwargs: Any) -> Any:
        with _replaced(vars(layer), {"attn_temperature_tuning": False}):
            return alone(*args, **kwargs)


def _install_positions(layer: Any, pack: RunningPack) -> None:
    """Give position embeddings the positions in documents, not in the batch."""
    last = layer.num_embeddings - getattr(layer, "offset", 0) - 1

    @_in_packs(layer, pack)
    def forward(alone: Any, *args: Any, **kwargs: Any) -> Any:
        # Only a pack's padding can have more tokens than there are positions.
        return alone(*args, **{**kwargs, "position_ids": pack.positions().clamp(max=last)})


def _install_padded_positions(layer: Any, pack: RunningPack) -> None:
    """Count positions from the padding index plus one, as RoBERTa does."""

    @_in_packs(layer, pack)
    def forward(alone: Any, *args: Any, **kwargs: Any) -> Any:
        return alone(*args, **{**kwargs, "position_ids": kwargs["position_ids"] + layer.padding_idx + 1})


def _install_causality(layer: Any, pack: RunningPack) -> None:
    """Mark a decoder's attention as causal, as its masks make it."""
    layer.is_causal = True


@contextlib.contextmanager
def _replaced(scope: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Replace values of a module or a layer for a while."""
    with _swapped:
        before = {name: scope.get(name) for name in values}
        scope.update(values)
        try:
            yield
        finally:
            scope.update(before)


@contextlib.contextmanager
def torch_forms(cls: Any, names: Sequence[str] = _OF_PACKAGES) -> Iterator[None]:
    """Let models be built of torch's code, without GPU packages' parts."""
    scope = {} if cls is None else vars(sys.modules[cls.__module__])  # None: code of its own
    with _replaced(scope, {name: None for name in names if name in scope}):
        yield


MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(
        (
            *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet"),
            "LaraMiniGatedDeltaNet",
        ),
        Mixer(
            "delta",
            _install_delta,
            heads="num_v_heads",
            state=("num_v_heads", "head_k_dim", "head_v_dim"),
            updates=6,  # the value that the state has for a key is read before it is replaced
        ),
    ),
    **dict.fromkeys(
        ("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"),
        Mixer("delta", _install_functions, "num_heads", ("num_heads", "head_dim", "head_dim"), updates=6),
    ),
    **dict.fromkeys(
        (
            *("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer"),
            "Zamba2MambaMixer",
        ),
        Mixer("state_space", _install_state_space, "num_heads", ("num_heads", "head_dim", "ssm_state_size")),
    ),
    **dict.fromkeys(
        ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), Mixer("convolution", _install_short_convolution)
    ),
    "OlmoHybridShortConvolution": Mixer("convolution", _install_convolution_module),
    **dict.fromkeys(
        ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"),
        Mixer("documents", _install_documents, state=("intermediate_size", "ssm_state_size")),
    ),
    "MiniMaxLightningAttention": Mixer(
        "documents",
        functools.partial(_install_documents, outputs=2),
        state=("num_attention_heads", "head_dim", "head_dim"),
    ),
    "Llama4TextAttention": Mixer("attention", _install_llama4),
    "BigBirdPegasusDecoderAttention": Mixer("positions", _install_causality),
    **{
        f"{name}PositionalEmbedding": Mixer("positions", _install_positions)
        for name in (
            *("BartLearned", "BigBirdPegasusLearned", "BlenderbotLearned", "BlenderbotSmallLearned", "MBartLearned"),
            *("MarianSinusoidal", "PLBartLearned", "PegasusSinusoidal"),
        )
    },
    **{
        f"{name}Embeddings": Mixer("positions", _install_padded_positions)
        for name in (
            "Camembert",
            "Data2VecText",
            "Roberta",
            "RobertaPreLayerNorm",
            "XLMRoberta",
            "XLMRobertaXL",
            "Xmod",
        )
    },
}


def positions_of_padding(cls: type, hf_config: Any) -> int:
    """Return the positions that RoBERTa-like models reserve for padding, or 0."""
    padded = {name for name, mixer in MIXERS.items() if mixer.install is _install_padded_positions}
    return 0 if padded.isdisjoint(vars(sys.modules[cls.__module__])) else hf_config.pad_token_id + 1


def install(model: nn.Module, pack: RunningPack) -> None:
    """Let every layer of a model in the table compute packs."""
    for layer, mixer in list(mixers_of(model)):
        mixer.install(layer, pack)
