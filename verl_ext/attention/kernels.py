"""Kernels for attention inside the documents of a pack.

| backend      | needs                         | kernel                                            |
|--------------|-------------------------------|---------------------------------------------------|
| `flash_attn` | CUDA, package flash-attn 2    | `flash_attn_varlen_func`                          |
| `fa3`        | Hopper, `flash_attn_interface`| `varlen` with FlashAttention-3 inside             |
| `fa4`        | Blackwell, `flash_attn.cute`  | `varlen` with FlashAttention-4 inside             |
| `varlen`     | CUDA, no dropout              | `torch.nn.attention.varlen.varlen_attn`, built in |
| `sdpa`       | nothing                       | `scaled_dot_product_attention`, per document      |

All but the last need an Ampere GPU or a newer one, half precision and a head size that :func:`flash_limit` admits.
Each takes and returns ``[T, heads, E]``. A document may have more keys than queries; its queries are its last tokens.

Legend: T tokens of a micro-batch with padding, H query heads, K key/value heads (H a multiple of K: grouped-query
attention), E head size.
"""

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from verl_ext.attention.sinks import FLASH, attention_by_blocks, flash_arguments, flash_with_sinks
from verl_ext.options import Options, check_choice, first_line, option
from verl_ext.parallel.key_exchange import LseKernel
from verl_ext.parallel.shards import DocumentLayout, KernelFunction

PACKED_ATTENTION = "verl_ext_packed"  # its name in `model.override_config.attn_implementation`


class KernelOptions(NamedTuple):
    """The arguments of a kernel beside its tensors."""

    scale: float | None = None  # factor on the logits; None: 1/√E
    window: int | None = None  # tokens that a token sees, itself included, as in transformers; None: all
    dropout: float = 0.0  # dropout of attention weights
    softcap: float | None = None  # bound of the logits; None: no bound
    sinks: torch.Tensor | None = None  # [H], a logit of each query head that takes a part of the softmax

    def of_heads(self, first: int, size: int) -> "KernelOptions":
        """Return the options of `size` query heads from the `first` on."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[first : first + size])

    @property
    def flash_window(self) -> tuple[int, int]:
        """The causal window in flash attention's count: (left, right) tokens."""
        return (-1 if self.window is None else self.window - 1, 0)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """Attend causally in documents from ``query[T, H, E]`` to ``[S, K, E]``."""
    outputs: list[torch.Tensor] = []
    documents = query.split(layout.lengths), *(x.split(layout.keys.lengths) for x in (key, value))
    for q, k, v in zip(*documents, strict=True):
        is_windowed = options.window is not None and options.window < len(k)
        if is_windowed or options.softcap is not None or options.sinks is not None:
            outputs += attention_by_blocks(q, k, v, options)
        else:
            outputs.append(_causal(q, k, v, options))
    return torch.cat(outputs)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: KernelOptions) -> torch.Tensor:
    is_square = len(query) == len(key)
    mask: Any = None if is_square else causal_lower_right(len(query), len(key))
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, ·, E]
    settings: dict[str, Any] = {"dropout_p": options.dropout, "scale": options.scale, "enable_gqa": True}
    output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_square, **settings)
    return output.squeeze(0).transpose(0, 1)


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """Run torch's flash attention, or the kernel given to torch; half precision."""
    from torch.nn.attention.varlen import varlen_attn

    assert not options.dropout, "choose_backend refuses it"
    assert options.softcap is None, "choose_backend refuses it"
    if options.sinks is not None:
        return flash_with_sinks(query, key, value, layout, options)
    # An early varlen_attn (torch 2.11) takes grouped heads without being told, as its kernel does.
    is_told = query.size(1) > key.size(1) and "enable_gqa" in signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if is_told else {}
    padded, lengths = flash_arguments(query, value, layout)
    window = options.flash_window
    output = varlen_attn(query, key, padded, *lengths, scale=options.scale, window_size=window, **grouped)
    assert isinstance(output, torch.Tensor)
    return output[..., : value.size(-1)]


def flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """Run the varlen kernel of the package flash-attn; half precision on CUDA."""
    from flash_attn import flash_attn_varlen_func

    if options.sinks is not None:  # the package's function gives no log-sum-exp to its backward
        return flash_with_sinks(query, key, value, layout, options)
    padded, lengths = flash_arguments(query, value, layout)
    output = flash_attn_varlen_func(
        *(query, key, padded, *lengths),
        dropout_p=options.dropout,
        softmax_scale=options.scale,
        causal=True,
        window_size=options.flash_window,
        **({} if options.softcap is None else {"softcap": options.softcap}),  # flash-attn 2.6 and later accept it
        deterministic=os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1",  # set by engine.full_determinism
    )
    return output[..., : value.size(-1)]


class Kernel(NamedTuple):
    """A kernel of packs.

    Attributes:
        whole: returns ``[T, H, E]`` for (query, key, value, layout, options).
        lse: the same with its log-sum-exp, for keys that arrive in parts; None: it returns none, or accepts none.
    """

    whole: KernelFunction
    lse: LseKernel | None = None

    def __call__(self, *inputs: Any) -> torch.Tensor:
        """Attend if all keys are present."""
        return self.whole(*inputs)


KERNELS: dict[str, Kernel] = {
    "flash_attn": Kernel(flash_attn),  # the package's own backward takes no log-sum-exp
    "fa3": Kernel(varlen, FLASH),  # `unusable` has given torch the kernels
    "fa4": Kernel(varlen, FLASH),
    "varlen": Kernel(varlen, FLASH),
    "sdpa": Kernel(sdpa),
}
BACKENDS = tuple(KERNELS)
KERNEL_NAMES = {"varlen": "varlen (FA2)", "fa3": "varlen (FA3)", "fa4": "varlen (FA4)"}  # else the backend's name


class _TorchKernels(NamedTuple):
    """A kernel for torch's varlen attention: name, module, GPUs, widest head.

    exact_head_size: the widest head of a backward pass that adds in one order.
    """

    name: str
    module: str
    capability: tuple[int, int]
    head_size: int
    exact_head_size: int

    def widest(self, needs: "AttentionNeeds") -> int:
        """Return the size of the widest head that it computes."""
        return self.exact_head_size if needs.deterministic else self.head_size


_TORCH_KERNELS = {
    "fa3": _TorchKernels("FA3", "flash_attn_interface", (9, 0), 256, 192),
    "fa4": _TorchKernels("FA4", "flash_attn.cute", (10, 0), 128, 128),
}


@dataclass(frozen=True)
class AttentionOptions(Options):
    """The options of the kernel for attention inside a pack's documents."""

    prefix: ClassVar[str] = "attention"

    backend: str = option("auto", "attention kernel; auto: the fastest one that runs", choices=("auto", *BACKENDS))


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to autocast's type if on: norms and rotations give fp32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model and a run need of a kernel."""

    dtype: torch.dtype = torch.bfloat16  # of queries, keys and values
    head_size: int = 128  # of queries and keys
    dropout: float = 0.0  # of attention weights
    softcap: float | None = None  # bound of the logits
    has_sinks: bool = False  # a learnt logit of each head
    deterministic: bool = False  # backward passes add in one order (`engine.full_determinism`)

    @property
    def changes_weights(self) -> bool:
        """Whether there is what torch's own flash attention has not."""
        return bool(self.dropout or self.softcap)


@dataclass(frozen=True)
class KernelDevice:
    """The device of a kernel."""

    type: str  # torch's name: "cpu", "cuda"
    capability: tuple[int, int] | None = None  # of a GPU; None: not known

    @property
    def nearest_capability(self) -> tuple[int, int] | None:
        """The capability, or where it is not known that of this machine."""
        return self.capability or gpu_capability()


def flash_limit(needs: AttentionNeeds, device: KernelDevice) -> str | None:
    """Return the unmet requirement of flash kernels; None if they run.

    An unknown capability is taken to be enough.
    """
    if needs.has_sinks and needs.changes_weights:
        return "a model with sinks to have neither attention dropout nor a soft cap"
    if device.capability is not None and device.capability < (8, 0):
        return f"a GPU of compute capability 8.0 (Ampere) or newer; got {_dotted(device.capability)}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"half precision (engine.mixed_precision.param_dtype); got {needs.dtype}"
    if needs.head_size > 256 or needs.head_size % 8:
        return f"a head size that is a multiple of 8 up to 256; the model's is {needs.head_size}"
    return None


def choose_backend(requested: str, needs: AttentionNeeds, device: KernelDevice) -> str:
    """Return `attention.backend`, with ``auto`` as the fastest one here.

    Raises ValueError if there is no backend of that name, or it cannot run here.
    """
    check_choice("attention.backend", requested, ("auto", *BACKENDS))
    if requested == "auto":
        if device.type != "cuda" or flash_limit(needs, device):
            return "sdpa"
        # A package is imported only where it would be used: an import takes seconds and may fail.
        usable = (name for name in _of_packages(needs, device) if not unusable(name))
        return next(usable, "sdpa" if needs.changes_weights else "varlen")
    if requested == "sdpa":
        return requested
    if device.type != "cuda":
        raise ValueError(f"attention.backend={requested} needs a CUDA GPU; this run is on {device.type}")
    # A backend asked for by name is refused before weights are loaded, never replaced in silence.
    if limit := _limit_of(requested, needs, device):
        raise ValueError(f"attention.backend={requested} needs {limit}; attention.backend=auto uses one that runs")
    if why := unusable(requested):
        kernels = _TORCH_KERNELS.get(requested)
        package = f"{kernels.module} ({kernels.name})" if kernels else "flash-attn"
        raise ValueError(
            f"attention.backend={requested} needs the package {package}, built for torch {torch.__version__}; got "
            f"'{why}'; attention.backend=auto uses torch's own varlen attention without it"
        )
    return requested


def _limit_of(backend: str, needs: AttentionNeeds, device: KernelDevice) -> str | None:
    """Return the unmet requirement of a flash backend; None if it runs."""
    kernels = _TORCH_KERNELS.get(backend)
    if kernels and device.nearest_capability not in (None, kernels.capability):
        return f"a GPU of compute capability {_dotted(kernels.capability)}; got {_dotted(device.nearest_capability)}"
    if limit := flash_limit(needs, device):
        return limit
    if backend != "flash_attn" and needs.dropout:
        return f"a model without attention dropout; the model's is {needs.dropout}"
    if backend != "flash_attn" and needs.softcap:
        return f"a model without a soft cap of its attention; the model's is {needs.softcap}"
    if kernels and needs.head_size > (widest := kernels.widest(needs)):
        exact = " with engine.full_determinism=true" * (widest < kernels.head_size)
        return f"a head size of at most {widest}{exact}; the model's is {needs.head_size}"
    return None


def fallback_notices(chosen: str, needs: AttentionNeeds, device: KernelDevice) -> list[str]:
    """Name installed packages that ``auto`` prefers, and why they failed."""
    notices = []
    for name in _of_packages(needs, device):
        if name == chosen:
            break
        module = _TORCH_KERNELS[name].module if name in _TORCH_KERNELS else name
        is_installed = importlib.util.find_spec(module.partition(".")[0]) is not None
        if is_installed and (why := unusable(name)):
            notices.append(f"attention.backend=auto uses {chosen}: {module} is installed and cannot be used ({why})")
    return notices


def _of_packages(needs: AttentionNeeds, device: KernelDevice) -> list[str]:
    """Return packages' backends for a GPU and model, fastest first."""
    suited = [
        name
        for name, kernels in _TORCH_KERNELS.items()
        if device.nearest_capability == kernels.capability
        and needs.head_size <= kernels.widest(needs)
        and not needs.changes_weights
    ]
    return [*suited, "flash_attn"]


@lru_cache
def unusable(backend: str) -> str | None:
    """Return why a backend's package is unusable; None if it works.

    This imports the package, and gives its kernels to torch's varlen attention if they are made for that.
    """
    try:
        if backend == "flash_attn":
            from flash_attn import flash_attn_varlen_func  # noqa: F401
        elif backend in _TORCH_KERNELS:
            torch.nn.attention.activate_flash_attention_impl(_TORCH_KERNELS[backend].name)
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:  # AttributeError: an older torch
        return first_line(error)
    return None


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


@lru_cache
def gpu_capability(device: int | None = None) -> tuple[int, int] | None:
    """Return a CUDA device's compute capability; None without CUDA.

    This initialises CUDA.
    """
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
