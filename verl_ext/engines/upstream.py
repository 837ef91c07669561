"""What the engines change in verl 0.9.1, and when each change can go.

A :class:`Patch` below replaces an attribute of verl's modules while verl's own method runs. Elsewhere our methods do
what verl's do not:

- `StepEngine.initialize` makes the gradient scaler. Verl's is CUDA's, which warns and does nothing on a CPU. To go when
  verl names the device.
- `StepEngine._build_lr_scheduler` and `StepOptimizerConfig` have schedules of ours. Verl's constant schedule ignores
  `zero_indexed_step`, and its configuration refuses other names. To go when it leaves both to the engine.
- `StepEngine.forward_step` does not wait for the device, as verl does for lengths that lie on it and for `loss.item()`.
  To go when verl's returns tensors.
- `sharded_apart` names the layers to shard. Verl shards outer layers before inner ones and tied embeddings without
  their head (RoBERTa's), which FSDP2 refuses, and stops if a class names no layers (Electra's). To go when verl shards
  from the inside out and leaves shared weights to the parent.
- `whole_shapes` and `hand_over_adapters` stand between PEFT 0.21 and packed weights, of whose bytes its adapters on
  weights take sizes and types, and to which they add their product. To go when PEFT asks such a layer for both.
- `adapt_config` prepares a model's config. Verl gives it the tokenizer's end, start and padding tokens: embeddings give
  a padding token no gradient, though documents may end with it, RoBERTa-like models count places from it, and an export
  would write them. Verl copies `attn_implementation` onto it, which plain transformers refuses; reads
  `tie_word_embeddings` of every config; and takes a model for a causal one if its architecture holds "ForCausalLM",
  which GPT2LMHeadModel lacks. To go when verl sets the tokens for generation alone, passes the second to
  from_pretrained alone, and asks transformers' own mapping of causal models.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS
from verl.utils import fsdp_utils
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp import transformer_impl

from verl_ext.layers.towers import auto_class


@dataclass(frozen=True)
class Patch:
    """An attribute of one of verl's modules that `patched` replaces.

    Attributes:
        verl: what verl 0.9.1 does there.
        harm: why that must not happen here.
        until: what verl has to do so that the patch can go.
    """

    module: ModuleType
    name: str
    verl: str
    harm: str
    until: str

    @property
    def original(self) -> Any:
        """Verl's own attribute."""
        return getattr(self.module, self.name)


MONKEY_PATCH = Patch(
    transformer_impl,
    "apply_monkey_patch",
    verl="refuses numbers of heads that Ulysses does not divide, and replaces the forward of vision models with one "
    "that ignores logits_to_keep and runs a dummy image in every step",
    harm="this engine pads heads; through the dummy's zero gradients, weight decay changes the tower",
    until="it leaves the patches to the engine",
)
LORA_CONFIG = Patch(
    transformer_impl,
    "LoraConfig",
    verl="gives PEFT rank, alpha and targets alone",
    harm="dropout, rank-stabilized factors and modules that are trained whole are options here",
    until="it gives the rest",
)
SHARD_MODULE = Patch(
    fsdp_utils,
    "fully_shard_module",
    verl="wraps a module whose class derives from ABC by assigning its __class__",
    harm="Python rejects that for PEFT's layers, so a head with adapters could not be wrapped; FSDP2 itself takes them",
    until="it calls fully_shard for them",
)
APPLY_FSDP2 = Patch(
    transformer_impl,
    "apply_fsdp2",
    verl="casts all of a layer's parameters alike",
    harm="rates of decay must stay in fp32",
    until="it takes a precision by parameter",
)
WRAP_TARGETS = Patch(
    fsdp_utils,
    "_select_fsdp2_wrap_targets",
    verl="shards PEFT's wrappers of embeddings (modules_to_save, trainable tokens) and then the embeddings in them",
    harm="FSDP2 refuses a module inside one that it has sharded",
    until="it shards the outermost modules alone",
)
CLIP_GRADIENTS = Patch(
    transformer_impl,
    "fsdp2_clip_grad_norm_",
    verl="sums squares of gradients in their own type",
    harm="the norm depends on the number of ranks",
    until="it sums in fp64",
)


@contextmanager
def patched(replacements: Mapping[Patch, Any]) -> Iterator[None]:
    """Give verl's modules these attributes inside a ``with`` block."""
    originals = {patch: patch.original for patch in replacements}
    try:
        for patch, replacement in replacements.items():
            setattr(patch.module, patch.name, replacement)
        yield
    finally:
        for patch, original in originals.items():
            setattr(patch.module, patch.name, original)


def adapt_config(model: HFModelConfig) -> None:
    """Give a model's config its own tokens again and the fields that verl expects, and take verl's own from it."""
    config = model.hf_config
    assert model.local_hf_config_path is not None, "verl has read the config"
    source = AutoConfig.from_pretrained(model.local_hf_config_path, trust_remote_code=model.trust_remote_code)
    overrides = model.override_config.get("model_config", model.override_config)  # verl reads both forms
    for key in {"bos_token_id", "eos_token_id", "pad_token_id"} - overrides.keys():
        setattr(config, key, getattr(source, key, None))
    vars(config).pop("attn_implementation", None)  # transformers keeps it elsewhere
    if not hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False  # as transformers reads it
    architecture = (config.architectures or [""])[0]
    is_causal = auto_class(config) is AutoModelForCausalLM
    if is_causal and "ForCausalLM" not in architecture and CAUSAL_MODELS.get(config.model_type) == architecture:
        config.architectures = [f"{config.model_type.upper()}ForCausalLM"]  # an export writes the class's own name
