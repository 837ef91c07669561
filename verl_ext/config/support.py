"""The support of a model's architecture for packs, sequence parallelism and kernels.

It is read from the config.json and the classes, before weights are loaded.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from verl_ext.answers.generation import generation_problem
from verl_ext.attention import AttentionNeeds, KernelDevice, choose_backend, fallback_notices, flash_limit
from verl_ext.attention.rope import same_frequencies_in_all_layers_up_to
from verl_ext.config.adapters import adapter_notices, lora_problems
from verl_ext.config.architecture import Architecture
from verl_ext.config.four_bits import nf4_notice, nf4_problems
from verl_ext.config.shared_experts import shared_experts_problems
from verl_ext.engines.head import cheapest_head
from verl_ext.engines.lora import counted_parts
from verl_ext.engines.muon import fused_parts
from verl_ext.engines.new_rows import embeddings_and_head
from verl_ext.engines.optimizer import rate_problems
from verl_ext.engines.router import asks_for_router_loss, has_router_loss
from verl_ext.engines.tiles import tileable, untileable
from verl_ext.flops import windowed_layers
from verl_ext.layers import MIXERS, SCANS, mixers_of, unknown_mixers
from verl_ext.layers.experts import experts_problem, has_experts
from verl_ext.layers.scans import kernels_problem
from verl_ext.layers.towers import auto_class, freeze, outside_text, text_parts
from verl_ext.layers.trial import isolation_problem, sharing_problem
from verl_ext.losses import HEADS, row_bytes
from verl_ext.options import first_line, must, spell
from verl_ext.parallel.experts import expert_layers
from verl_ext.parallel.ulysses import HeadPadding
from verl_ext.plugin import ARCHITECTURES

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig

SP = "engine.ulysses_sequence_parallel_size"
CP = "parallel.context_parallel_size"
_TRIED: dict[str, str | None] = {}  # the result of the trial of each config in this process
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_ELSEWHERE = {  # computed outside query, key and value, where packed attention does not see it
    "doge": "an attention mask that it computes",
    "deepseek_v4": "an attention mask that it computes",
}


def model_support_problems(model: Architecture) -> list[str]:
    """List reasons why this architecture would leak between documents, or miscompute packs.

    A small model of the same class is tried on a pack (verl_ext.layers.trial). Reasons that are known by name come
    first.
    """
    if (kind := getattr(model.hf_config, "model_type", None)) in ARCHITECTURES:
        return [f"model.path holds a {kind} model, which needs model={kind}; got another model group"]
    problems = list(_packing_problems(model))
    if model.cls is not None and hasattr(model.text, "is_decoder") and not problems:
        problems += _encoder_problems(model)
    return problems or _layer_problems(model)


def _packing_problems(model: Architecture) -> Iterator[str]:
    hf_config, text, cls = model.hf_config, model.text, model.cls
    name = f"model.path: {model.name}"
    if cls is None and not getattr(hf_config, "auto_map", None):
        yield f"{name} must be a causal language model that transformers has; it has none for this config"
    modal = [kind for kind in ("vision_config", "audio_config") if getattr(hf_config, kind, None) is not None]
    if modal and (cls is None or auto_class(hf_config) is AutoModelForCausalLM):
        known = "a text model, or one of images and text that transformers has"
        yield f"{name} must be {known}; it has {', '.join(modal)}"
    # Upstream: from 5.16 on, transformers renames these weights for the class that tells images, also in the language
    # model, which then reads none of them. To go when it renames them by class.
    is_newer = Version(transformers.__version__) >= Version("5.16")
    if is_newer and getattr(hf_config, "model_type", None) == "shieldgemma2":
        needed = "be read by transformers before 5.16, later ones find none of its language model's weights"
        yield must(name, needed, transformers.__version__)
    if text.model_type in _ELSEWHERE:
        yield f"{name} must have plain causal attention; {text.model_type} uses {_ELSEWHERE[text.model_type]}"
    if asks_for_router_loss(hf_config) and not has_router_loss(cls, text):
        why = "of which transformers computes no router loss that can be taken over packs"
        yield must("model.override_config.output_router_logits", f"be false for {model.name}, {why}", True)
    if cls is not None and "shared_kv_states" in inspect.signature(cls.forward).parameters:
        yield f"{name} must be a model of its own; a {cls.__name__} drafts for another one, whose states it needs"
    if (both := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):
        yield must(name, "have causal attention", f"use_bidirectional_attention={both}")


def _encoder_problems(model: Architecture) -> list[str]:
    """List reasons against packs in an encoder's modules (BERT-like)."""
    name, modules = f"model.path: {model.name}", dict(model.module.named_modules())
    # Decoders of encoder-decoder pairs attend to encoder states if there are any; texts alone have none.
    known = {path for path, module in modules.items() if type(module).__name__ in MIXERS}
    others = {path for path in modules.keys() - known if not path.endswith(".encoder_attn")}
    if any(getattr(modules[path], "is_causal", None) is False for path in others):
        return [must(name, "have causal attention", f"is_decoder={str(model.hf_config.is_decoder).lower()}")]
    counted = {
        path for path in others if path.endswith(".position_embeddings") and path.rpartition(".")[0] not in known
    }
    if any(getattr(modules[path], "padding_idx", None) is not None for path in counted):
        return [f"{name} must count positions from 0, as packs do; {model.cls.__name__} counts from pad_token_id + 1"]
    return []


def _layer_problems(model: Architecture) -> list[str]:
    """List what, in modules or a trial, mixes a pack's documents."""
    try:
        module = model.module
    except Exception as error:  # a class raises any error that its config causes
        cls, reason = model.cls.__name__, f"{type(error).__name__}: {first_line(error)}"
        return [must("model.path and model.override_config", f"give a config that {cls} takes", reason)]
    parts = [] if module is None else text_parts(module)
    kinds = {type(layer).__name__ for part in parts for layer in part.modules()}
    if indexers := sorted(kind for kind in kinds if kind.endswith("Indexer")):
        return [
            f"model.path: {model.name} must attend to all tokens before; {', '.join(indexers)} selects some of them"
        ]
    if unknown := sorted({name for part in parts for name in unknown_mixers(part)}):
        known = "layers whose state over time is known (verl_ext/layers/mixers.py)"
        return [must(f"model.path: {model.name}", f"have {known}", ", ".join(unknown))]
    key = f"{model.cls} {model.hf_config.to_json_string(use_diff=False)}"
    if key not in _TRIED:
        _TRIED[key] = _trial(model)
    problem = _TRIED[key]
    return [] if problem is None else [f"model.path: {model.name} must keep the documents of a pack apart; {problem}"]


def _trial(model: Architecture) -> str | None:
    """Describe how a small model mixes documents; None if it does not."""
    cls = model.cls or auto_class(model.hf_config)
    try:
        trial = model.trial()
    except Exception as error:  # small sizes do not suit the config, or the model builds its own attention
        return f"{cls.__name__} cannot be tried with packed attention: {first_line(error)}"
    try:
        return isolation_problem(trial)
    except Exception as error:  # a model's code may raise any error
        return f"a trial of {type(trial).__name__} fails: {first_line(error)}"


def answering_problem(model: Architecture, prompts: Any) -> str | None:
    """Return why a small model cannot answer prompts; None if it can, or none can be built."""
    try:
        trial = model.trial()
    except Exception:  # small sizes do not suit the config
        return None
    problem = generation_problem(trial)
    return problem and must("eval.prompts", f"be null for a {model.name}: {problem}", prompts)


def sharing_problems(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Yield a line for each reason against documents that share tokens."""
    if config.parallel.context_parallel_size > 1:
        yield must(CP, "be 1 with data.share_prefixes=true", config.parallel.context_parallel_size)
    limit = same_frequencies_in_all_layers_up_to(model.text)
    if limit is not None and config.max_tokens > limit:
        why = f"up to which the rotary frequencies of a {model.name} are the same for all documents"
        yield must("data.max_tokens", f"be at most {limit} with data.share_prefixes=true, {why}", config.max_tokens)
    try:
        problem = sharing_problem(model.trial())
    except Exception as error:  # a model's code may raise any error
        problem = first_line(error)
    if problem is not None:
        why = "which must carry nothing from token to token but attention"
        yield must("data.share_prefixes", f"be false for a {model.name}, {why}", f"true ({problem})")


def option_problems(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Yield a line for each option that this architecture cannot have."""
    block, row = config.loss.head_block_mib, -(-row_bytes(model.text.vocab_size, torch.bfloat16) // 2**20)
    if block is not None and block < row:
        rows = f"a row of the model's {model.text.vocab_size} logits"
        yield must("loss.head_block_mib", f"be at least {row}, {rows}", block)
    ulysses, heads = config.engine.ulysses_sequence_parallel_size, model.heads
    if heads is not None and ulysses > heads[0]:
        most = f"the model's {heads[0]} attention heads"
        yield must(SP, f"be at most {most}", f"{ulysses}; {CP} lets more ranks share a pack")
    if config.model_options.tile_tokens is not None and model.module is not None and not any(tileable(model.module)):
        yield untileable(f"a {model.name}", config.model_options.tile_tokens)
    checkpointing = config.model_options.enable_gradient_checkpointing
    if checkpointing and not getattr(model.cls, "supports_gradient_checkpointing", True):
        yield must("model.enable_gradient_checkpointing", f"be false for a {model.name}, which has none", True)
    if problem := experts_problem(model.module, config.model_options.experts):
        yield problem
    if config.trainer.log_experts and (model.module is None or not any(expert_layers(model.module))):
        yield must("trainer.log_experts", f"be false for a {model.name}, which has no stacked experts", True)
    if config.parallel.expert_parallel > 1:
        yield from shared_experts_problems(config, model)
    if getattr(config.dataset, "share_prefixes", False):
        yield from sharing_problems(config, model)
    yield from _freeze_problems(config, model)
    if model.module is not None and not config.model_options.lora_rank:  # else of adapters
        yield from rate_problems(model.module, config.optim.lr_of)
    yield from lora_problems(config, model)
    yield from nf4_problems(config, model)
    if getattr(config.optim, "split_fused", False) and model.module is not None and not _split_names(config, model):
        adapters = " with adapters" * bool(config.model_options.lora_rank)
        needed = f"be false for a {model.name}{adapters}"
        yield must("optim.split_fused", f"{needed}, which trains no fused projection", True)
    if has_scans(model) and config.trainer.device == "cuda":
        has_kernels = find_spec("fla") is not None
        if has_kernels and (problem := kernels_problem(config.machine.capability)):
            yield f"{problem}, for the recurrences of a {model.name}"
        if not has_kernels and config.engine.full_determinism:
            why = "torch's code of its recurrences sums in any order on a GPU (pip install '.[hybrid]' has kernels)"
            yield must("engine.full_determinism", f"be false for a {model.name}: {why}", True)


def _split_names(config: "RunConfig", model: Architecture) -> list[str]:
    """Return the names of the trained projections that `optim.split_fused` splits."""
    parts = {} if config.model_options.lora_rank else fused_parts(model.module)
    return [name for name, weight in model.module.named_parameters() if weight.requires_grad and weight in parts]


def _bias_notice(model: Architecture) -> Iterator[str]:
    """Say which correction biases of routers stay as they are, because no loss has a gradient for them."""
    buffers = {name for name, _ in model.module.named_buffers()} & model.module.state_dict().keys()
    frozen = {name for name, weight in model.module.named_parameters() if not weight.requires_grad}
    if biases := sorted(name for name in buffers | frozen if re.search(r"(correction|expert)_bias$", name)):
        counts = counted_parts(biases)
        yield f"routers keep their correction biases as model.path has them, which no loss trains: {counts}"


def _freeze_problems(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Yield a line if `model.freeze` misses, freezes all, or meets LoRA."""
    options = config.model_options
    if options.freeze and options.lora_rank:
        why = "which trains adapters alone (model.exclude_modules names modules without them)"
        yield must("model.freeze", f"be [] with model.lora_rank={options.lora_rank}, {why}", options.freeze)
    elif options.freeze == ["*"]:
        yield must("model.freeze", "leave a parameter to train", options.freeze)
    elif model.module is not None:
        try:
            freeze(model.module, options.freeze)
        except ValueError as error:
            yield str(error)
        ends = embeddings_and_head(model.module) if model.new_pieces else []
        if frozen := [name for name in ends if not model.module.get_submodule(name).weight.requires_grad]:
            yield must("model.freeze", f"leave {' and '.join(frozen)} to train with model.new_tokens", options.freeze)


def has_scans(model: Architecture) -> bool:
    """Tell whether an architecture has recurrences that this project computes."""
    return model.module is not None and any(mixer.time in SCANS for _, mixer in mixers_of(model.module))


def head_in_use(config: "RunConfig", model: Architecture) -> str:
    """Return the head of `loss.head`, or the next best one possible."""
    asked = config.loss.head
    return asked if model.module is None else max(asked, cheapest_head(model.module), key=HEADS.index)


def model_notices(config: "RunConfig", model: Architecture, head: str) -> Iterator[str]:
    """Warn about allowed but perhaps unintended settings; `head` is in use."""
    if config.trainer.device == "cuda":
        yield from _kernel_notices(config, model)
        asked = config.model_options.experts
        if has_experts(model.module) and (asked == "eager" or experts_problem(model.module, "grouped_mm")):
            yield f"model.experts={asked} runs a {model.name}'s own code over its experts, which is slow on a GPU"
    if not asks_for_router_loss(model.hf_config) and has_router_loss(model.cls, model.text):
        yield (
            f"{model.name} is trained without a router loss; model.override_config.output_router_logits=true "
            f"adds it with router_aux_loss_coef={model.text.router_aux_loss_coef}"
        )
    if model.module is not None and not config.model_options.lora_rank:
        yield from _frozen_notice(model, config.model_options.freeze)
    yield from _rounding_notice(config, model)
    yield from adapter_notices(config, model)
    yield from nf4_notice(config, model)
    if model.module is not None:
        yield from _bias_notice(model)
        if getattr(config.optim, "split_fused", False):
            yield f"Muon takes the parts of fused projections one by one: {counted_parts(_split_names(config, model))}"
    scans = has_scans(model)
    if scans and config.trainer.device == "cuda" and find_spec("fla") is None:
        kernels = "the kernels of flash-linear-attention are not installed (pip install '.[hybrid]')"
        yield f"a {model.name}'s recurrences run torch's code, document by document, which is slow: {kernels}"
    dtype = config.engine.model_dtype
    # Steps that stored weights round away raise no error, so that a notice must tell of them.
    kept = sorted(getattr(model.cls, "_keep_in_fp32_modules_strict", None) or ())
    if kept and dtype is not None and dtype not in ("fp32", "float32"):
        yield f"engine.model_dtype={dtype} rounds what a {model.name} keeps in fp32: {', '.join(kept)}; fp32 does not"
    if dtype in ("bf16", "bfloat16") and config.optim.optimizer_impl == "torch.optim":
        yield (
            f"engine.model_dtype={dtype} keeps the weights that the optimizer changes in eight bits: a step below "
            f"1/512 of a weight is lost (with optim.lr={config.optim.lr}, of weights above "
            f"{512 * (config.optim.lr or 0):.0e}); fp32 keeps all of it"
        )
    ulysses, heads = config.engine.ulysses_sequence_parallel_size, model.heads
    # The rest is about what runs otherwise than it was asked for.
    if heads and (zero := HeadPadding.from_heads(*heads, ulysses).zero_heads):
        yield (
            f"{SP}={ulysses} does not divide the model's {heads[0]} attention heads of {heads[1]} key/value heads: "
            f"{zero} zero heads are added, {zero / heads[0]:.0%} more attention"
        )
    if head != config.loss.head:
        why = f"{model.cls.__name__} has no linear head whose logits it gives as they are"
        yield f"loss.head={config.loss.head} is {head} here: {why}"
    if config.model_options.tile_tokens is not None and model.module is not None:
        tiled, layers = len(tileable(model.module)[0]), model.text.num_hidden_layers
        if tiled < layers:
            yield (
                f"model.tile_tokens={config.model_options.tile_tokens} is of {tiled} of {layers} layers: of the "
                "others, mixtures of experts say, their norms and plain MLPs alone are tiled"
            )


def _frozen_notice(model: Architecture, patterns: Sequence[str]) -> Iterator[str]:
    """Count the frozen parameters; `option_problems` froze them in the meta-device model."""
    counts = [sum(p.numel() for p in model.module.parameters() if p.requires_grad is grad) for grad in (False, True)]
    if counts[0]:
        outside, asked = ", ".join(outside_text(model.module)), f"model.freeze={spell(patterns)}"
        why = [f"a text does not reach {outside}"] * bool(outside) + [asked] * bool(patterns)
        why = why or ["as the model's class has them"]
        yield f"{counts[0]:,} of {sum(counts):,} parameters are frozen ({'; '.join(why)}), {counts[1]:,} are trained"


def _rounding_notice(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Say if checkpoints and exports hold rounded frozen weights; what is computed stays the same."""
    options, saved, dtype = config.model_options, config.checkpoint, getattr(model.hf_config, "dtype", None)
    has_base = not options.lora_rank or not saved.save_lora_only or "hf_model" in saved.save_contents
    is_frozen = options.lora_rank or (model.module and any(not p.requires_grad for p in model.module.parameters()))
    is_finer = str(dtype).removeprefix("torch.") == "float32" and config.param_dtype != "fp32"
    if options.frozen_dtype == "compute" and is_finer and is_frozen and has_base:
        yield (
            f"model.frozen_dtype=compute rounds the frozen weights of a model in fp32 to {config.param_dtype}, also in "
            "what the run saves; fp32 keeps them"
        )


def _kernel_notices(config: "RunConfig", model: Architecture) -> Iterator[str]:
    """Warn about a slow kernel, or one with quadratic memory.

    Without its flash kernel, torch's sdpa computes grouped heads with all scores ``[l, l]`` of a document in memory;
    with a window, it holds those of a block.
    """
    asked, needs = config.attention.backend, _kernel_needs(config, model)
    backend, limit = choose_backend(asked, *needs), flash_limit(*needs)
    layers, window = windowed_layers(model.text)
    has_window = window is not None and window < config.max_tokens and layers == model.text.num_hidden_layers
    if backend == "sdpa" and limit and not has_window:
        yield (
            f"attention.backend={asked} uses sdpa, whose memory may grow here with the square of a "
            f"document's length: flash attention needs {limit}"
        )
    if not limit and asked == "auto":
        yield from fallback_notices(backend, *needs)


def chosen_backend(config: "RunConfig", model: Architecture) -> str:
    """Return the attention backend; raise ValueError if the requested one cannot run."""
    return choose_backend(config.attention.backend, *_kernel_needs(config, model))


def _kernel_needs(config: "RunConfig", model: Architecture) -> tuple[AttentionNeeds, KernelDevice]:
    dtype, dropout = _DTYPES.get(config.param_dtype, torch.bfloat16), attention_dropout(model.hf_config)
    exact = bool(config.engine.full_determinism)
    needs = AttentionNeeds(dtype, model.head_size, dropout, model.softcap, model.has_sinks, exact)
    return needs, KernelDevice(config.trainer.device, config.machine.capability)


def attention_dropout(hf_config: Any) -> float:
    """Return the attention dropout in training, which configs have under several names."""
    text = hf_config.get_text_config()
    given = [getattr(text, name, None) for name in _DROPOUT]
    given.append(getattr(getattr(text, "attn_config", None), "attn_pdrop", None))  # DBRX
    return max(float(value or 0) for value in given)
