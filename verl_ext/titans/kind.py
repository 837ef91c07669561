"""The kind of model that `model=qwen_titans` names: its needs, its checks and its facts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from omegaconf import DictConfig, OmegaConf

from verl_ext.config.keys import Key, keys
from verl_ext.config.model import ModelFacts, PackedModel, set_attention
from verl_ext.config.model_override import ATTENTION, OVERRIDE
from verl_ext.config.upstream import fixed_value_problems
from verl_ext.options import Options, choice_problem, must, option, plain, refuse, spell
from verl_ext.titans import (
    MemoryOptions,
    QwenTitansConfig,
    QwenTitansForCausalLM,
    load_memory_checkpoint,
    settings_of_today,
)
from verl_ext.titans.configuration import settings_of_weights

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig


@dataclass
class QwenTitansModel(PackedModel):
    """A Qwen with long-term memory, which reads rows chunk by chunk.

    `hf_config` becomes a QwenTitansConfig.
    """

    train: str = option("all", "memory: the base model's weights are not trained", resume="same")
    memory_checkpoint: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    engine_vendor: ClassVar[str] = "verl_ext_chunked"
    engine_module: ClassVar[str] = "verl_ext.titans.engine"
    hooks: ClassVar[tuple[str, ...]] = ("verl_ext.titans.hook:MemoryHook",)
    needs_positions: ClassVar[bool] = False  # positions restart with every chunk
    runs_longest: ClassVar[bool] = True
    config_options: ClassVar[tuple[type[Options], ...]] = (MemoryOptions,)
    memory_not_predicted: ClassVar[str | None] = "model=qwen_titans chooses what it computes by the values of its masks"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hf_config = titans_config(self.hf_config, self.memory)
        self.architectures = self.hf_config.architectures

    def config_with(self, values: Mapping[str, Any]) -> Any:
        """Return the config of the Qwen in `model.path` with the memory around it."""
        return titans_config(super().config_with(values), self.memory)

    @classmethod
    def resolve_attention(cls, config: DictConfig) -> list[str]:
        """Choose transformers' kernel, in place: within chunks, a row is one document."""
        key, backend = f"{OVERRIDE}.{ATTENTION}", config.attention.backend
        asked = OmegaConf.select(config, key)
        chosen = _CHUNK_ATTENTION.get(backend, backend)  # the checks report an unknown backend
        if asked in (None, chosen):
            set_attention(config, chosen)
        elif backend != "auto" or asked not in _CHUNK_ATTENTION.values():
            kernels = " or ".join(dict.fromkeys(_CHUNK_ATTENTION.values()))
            needed = f"be {kernels} with model=qwen_titans, as attention.backend={backend} has it"
            raise ValueError(must(key, needed, asked))
        return []

    @classmethod
    def config_problems(cls, config: "RunConfig") -> Iterable[str | None]:
        """Yield a line for each option that the memory does not allow."""
        yield choice_problem("model.train", config.model_options.train, ("all", "memory"))
        yield choice_problem("attention.backend", config.attention.backend, _CHUNK_ATTENTION)
        yield from fixed_value_problems(config.values, _ONLY_WITH_MEMORY, " with model=qwen_titans")

    @classmethod
    def examine(cls, config: "RunConfig", hf_config: Any) -> ModelFacts:
        """Check the Qwen in `model.path` with the configured memory around it."""
        titans = titans_config(hf_config, config.model_options.memory)
        problems = []
        tokens, chunk = config.max_tokens, titans.chunk_size
        if tokens % chunk:
            up = -(-tokens // chunk) * chunk
            key, needed = (
                "data.max_tokens (data.max_length of data=babilong)",
                "be a multiple of model.memory.chunk_size",
            )
            problems.append(must(key, f"{needed}={chunk}", f"{tokens} (nearest above: {up})"))
        if config.model_options.train == "memory" and not titans.memory_options.layers:
            needed = "name a layer with model.train=memory, which trains nothing else"
            problems.append(must("model.memory.layers", needed, []))
        refuse([*problems, *_memory_problems(config.model_options.memory_checkpoint, titans)])
        with torch.device("meta"):
            module = QwenTitansForCausalLM(titans)
        # Attention is transformers' own.
        return ModelFacts(cls, titans, backend="sdpa", head="targets", module=module, notices=[])

    @classmethod
    def answer_problems(cls, config: "RunConfig", hf_config: Any) -> Iterable[str | None]:
        """Refuse sampling, because a model with memory generates the most likely tokens."""
        if config.eval.temperature:
            yield must("eval.temperature", "be 0 with model=qwen_titans", config.eval.temperature)

    @classmethod
    def identity(cls, hf_config: Any, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts with those settings of the memory that every run of its weights must share."""
        facts = {key: value for key, value in facts.items() if key != "model.config.memory"}
        return {**facts, MemoryOptions.prefix: settings_of_weights(hf_config)}

    @classmethod
    def identity_of_today(cls, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the facts with the memory's settings by today's keys."""
        key = MemoryOptions.prefix
        return {**facts, key: settings_of_today(facts[key])} if isinstance(facts.get(key), dict) else facts


# attention.backend: the name of that kernel in transformers, for attention inside a chunk
_CHUNK_ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash_attn": "flash_attention_2"}
_ONE_RANK = (1, "the memory reads a row's chunks one after the other on one rank")
_ONLY_WITH_MEMORY = (
    *(Key(f"{name}_parallel_size", fixed=_ONE_RANK) for name in ("engine.ulysses_sequence", "parallel.context")),
    Key("parallel.expert_parallel", fixed=(1, "its Qwen has no experts")),
    Key("model.lora_rank", fixed=(0, "model.train=memory is what trains few parameters")),
    Key("model.lora_adapter_path", fixed=(None, "it has no adapters")),
    Key("model.experts", fixed=("auto", "its Qwen has no experts")),
    Key("model.freeze", fixed=([], "model.train=memory is what freezes the base")),
    *keys("model", "new_tokens new_special_tokens", fixed=([], "its exports have the rows of the Qwen")),
    Key("model.quantization", fixed=(None, "model.train=memory is what trains few parameters")),
    Key("model.use_liger", fixed=(False, "liger does not know the model")),
    Key("data.share_prefixes", fixed=(False, "its memory reads every token of a document")),
    Key("data.strategy", fixed=("none", "a row is one document, whose memory starts empty (data=babilong sets it)")),
    Key("data.pad_mode", fixed=("right", "every rank must read equally many chunks (data=babilong sets it)")),
)


def titans_config(hf_config: Any, memory: Mapping[str, Any]) -> QwenTitansConfig:
    """Return a Qwen's config with `memory`, or an exported one so updated.

    Raises:
        ValueError: If the base is not Qwen2 or Qwen3, or an option `model.memory.<name>` is not allowed.
    """
    given = {name: value for name, value in plain(memory).items() if value is not None}
    if isinstance(hf_config, QwenTitansConfig):
        hf_config, given = hf_config.base_config, {**(hf_config.memory or {}), **given}
    return QwenTitansConfig.from_base(hf_config, **given)


def _memory_problems(path: str | None, titans: QwenTitansConfig) -> list[str]:
    """List the misfits of `model.memory_checkpoint`, by settings or a meta-device model."""
    if path is None:
        return []
    settings, memory = Path(path).with_suffix(".json"), titans.memory or {}
    if settings.is_file():
        try:
            trained = json.loads(settings.read_text(encoding="utf-8"))
        except ValueError:
            trained = None
        if not isinstance(trained, dict):
            return [must("model.memory_checkpoint: the settings beside it", "be a JSON object", settings)]
        beside = f"with model.memory_checkpoint={path}"
        differing = [
            must(f"model.memory.{name}", f"be {spell(value)}, as in {settings}, {beside}", memory.get(name))
            for name, value in settings_of_today(trained).items()
            if memory.get(name) != value
        ]
        if differing:
            return differing
    with torch.device("meta"):
        model = QwenTitansForCausalLM(titans)
    try:
        load_memory_checkpoint(model, path)
    except ValueError as error:
        return [f"model.memory_checkpoint: {error}"]
    return []
