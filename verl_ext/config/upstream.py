"""The keys of verl's nodes that a run of packs reads, and the values that verl takes and packs cannot have.

verl's own YAML files have the defaults, and verl builds its dataclasses without looking at the values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar

from hydra.utils import get_class

from verl_ext.config.weights import ModelOptions
from verl_ext.engines.activations import NEEDS_CHECKPOINTS
from verl_ext.values import REQUIRED, Options, choice_problem, option, show, type_problems

NODES = ("model", "engine", "optim", "checkpoint")
CONTENTS = ("model", "optimizer", "extra", "hf_model")
_DTYPES = ("fp32", "bf16", "fp16")
_PACKS_SET_IT = "data.max_tokens and data.micro_batch_size_per_gpu decide what a forward holds"
# key: (the one value it may have, why)
REFUSED: dict[str, tuple[Any, str]] = {
    "model.use_remove_padding": (True, "packs have no padding to keep"),
    "model.use_fused_kernels": (False, "verl 0.9.1's fused head fails under FSDP2"),
    "model.model_type": ("language_model", "packs train language models"),
    "model.mtp.enable": (False, "packs train the next token alone"),
    "model.tiled_mlp.enabled": (False, "verl's SFT engine does not apply it; model.tile_tokens is what works here"),
    "model.enable_activation_offload": (
        False,
        "verl's computes the head and its logits twice; model.activation_offload=true is what works here",
    ),
    "model.lora.rank": (0, "it is Megatron's; model.lora_rank is the one that works here"),
    "engine.forward_only": (False, "it would not train"),
    "engine.qat.enable": (False, "it was never run with packs"),
    "engine.use_dynamic_bsz": (True, _PACKS_SET_IT),
    "engine.micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.max_token_len_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_max_token_len_per_gpu": (None, _PACKS_SET_IT),
}


@dataclass  # not frozen: its base is one of verl's dataclass of the model node too
class ModelNode(ModelOptions):
    """The keys of the model node, of all kinds of model."""

    path: str = option(REQUIRED, "a folder or hub name of a model")
    hf_config_path: str | None = option(None, "another folder with its config.json")
    tokenizer_path: str | None = option(None, "another folder or hub name with its tokenizer")
    trust_remote_code: bool = option(REQUIRED, "run code that stands beside the weights")
    enable_gradient_checkpointing: bool = option(REQUIRED, "compute activations again in the backward pass")
    use_liger: bool = option(REQUIRED, "liger's kernels")
    lora_rank: int = option(REQUIRED, "rank of adapters; 0: none", least=0)
    lora_adapter_path: str | None = option(None, "a folder with adapters to begin with")
    target_modules: Any = option(REQUIRED, "modules that have an adapter")
    exclude_modules: Any = option(None, "modules that have none")
    override_config: dict[str, Any] = field(default_factory=dict)
    train: str | None = option(None, "of model=qwen_titans: what is trained")
    memory_checkpoint: str | None = option(None, "of model=qwen_titans: a memory to begin with")
    memory: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterable[str | None]:
        if self.lora_adapter_path and not self.lora_rank:
            given = f"model.lora_adapter_path={self.lora_adapter_path}"
            yield f"model.lora_rank must be at least 1 with {given}; got 0"
        if self.activation_offload and self.enable_gradient_checkpointing is False:
            yield NEEDS_CHECKPOINTS


@dataclass(frozen=True)
class EngineNode(Options):
    """The keys of the engine node."""

    prefix: ClassVar[str] = "engine"

    strategy: str = option(REQUIRED, "how parameters are sharded", choices=("fsdp", "fsdp2"))
    ulysses_sequence_parallel_size: int = option(REQUIRED, "ranks that share the heads of a pack", least=1)
    fsdp_size: int = option(REQUIRED, "ranks that share the parameters; -1: all")
    offload_policy: bool = option(REQUIRED, "parameters and optimizer stay on the host")
    full_determinism: bool = option(REQUIRED, "kernels that sum in one order")
    mixed_precision: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterable[str | None]:
        for name, dtype in self.mixed_precision.items():
            if dtype is not None:
                yield choice_problem(f"engine.mixed_precision.{name}", dtype, _DTYPES)

    @property
    def param_dtype(self) -> str:
        """What the parameters of a forward pass are: fp32, bf16 or fp16."""
        return self.mixed_precision["param_dtype"]


@dataclass(frozen=True)
class OptimNode(Options):
    """The keys of the optim node."""

    prefix: ClassVar[str] = "optim"

    optimizer: str = option(REQUIRED, "the name of the optimizer")
    optimizer_impl: str = option(REQUIRED, "the module that has it")
    override_optimizer_config: Any = option(None, "further options of it")
    lr: float = option(REQUIRED, "the learning rate", above=0)
    betas: list[float] = option(REQUIRED, "of Adam and its kin")
    clip_grad: float = option(REQUIRED, "the norm that gradients are clipped to", above=0)
    lr_scheduler_type: str = option(REQUIRED, "the schedule of the learning rate", choices=("constant", "cosine"))
    lr_warmup_steps_ratio: float = option(REQUIRED, "share of the steps that warm up", least=0, most=1)
    min_lr_ratio: float | None = option(None, "the last learning rate over the highest", least=0, most=1)

    def problems(self) -> Iterable[str | None]:
        betas = self.betas
        if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            yield f"optim.betas must be two numbers from 0 to below 1; got {show(betas)}"


@dataclass(frozen=True)
class CheckpointNode(Options):
    """The keys of the checkpoint node."""

    prefix: ClassVar[str] = "checkpoint"

    save_contents: Any = option(REQUIRED, "what a checkpoint holds")
    load_contents: Any = option(REQUIRED, "what is read of it")

    def problems(self) -> Iterable[str | None]:
        for key, contents in (("save_contents", self.save_contents), ("load_contents", self.load_contents)):
            if key == "load_contents" and contents == self.save_contents:
                continue  # its default, reported already
            if isinstance(contents, str) or contents is None:
                yield f"checkpoint.{key} must be a list of {', '.join(CONTENTS)}; got {show(contents)}"
                continue
            for name in contents:
                yield choice_problem(f"checkpoint.{key}", name, CONTENTS)


def upstream_type_problems(values: Mapping[str, Any]) -> list[str]:
    """List numbers and flags of verl's nodes that are of another type than the fields of its dataclasses."""
    problems = []
    for name in NODES:
        cls = get_class(values[name]["_target_"])
        if is_dataclass(cls):
            problems += type_problems(cls, {key: value for key, value in values[name].items() if value != "???"}, name)
    return problems


def fixed_value_problems(values: Mapping[str, Any], fixed: Mapping[str, tuple[Any, str]] = REFUSED) -> Iterable[str]:
    """Give a line for each option that has another value than the one it may have here, with the reason."""
    for key, (allowed, why) in fixed.items():
        node: Any = values
        for name in key.split("."):
            node = node.get(name, allowed) if isinstance(node, Mapping) else node
        if node != allowed:
            yield f"{key} must be {show(allowed)}: {why}; got {show(node)}"
