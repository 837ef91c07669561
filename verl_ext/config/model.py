"""The kinds of model: classes named by `_target_` in conf/model/NAME.yaml.

verl builds its model node as a dataclass. Our subclasses add class methods, which the checks and the trainer call.
"""

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.workers.config import HFModelConfig

from verl_ext.attention import PACKED_ATTENTION
from verl_ext.config import support
from verl_ext.config.architecture import Architecture
from verl_ext.config.model_override import ATTENTION, OVERRIDE, override
from verl_ext.config.upstream import fixed_value_problems
from verl_ext.config.weights import ModelNode, check_weights, dequantize
from verl_ext.engines.new_rows import add_to_config
from verl_ext.layers.towers import model_class
from verl_ext.models.qwen_titans import (
    MemoryOptions,
    QwenTitansConfig,
    QwenTitansForCausalLM,
    load_memory_checkpoint,
    settings_of_today,
)
from verl_ext.options import Options, choice_problem, option, plain, refuse, spell
from verl_ext.plugin import CHUNKED, PACKED
from verl_ext.text.tokens.new_tokens import add_tokens
from verl_ext.text.tokens.tokenizer import ModelOptions, read_tokenizer

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a run's model before its weights are read.

    Attributes:
        kind: the class of the model node, which declares the needs of this kind of model.
        hf_config: the Hugging Face config that the run uses.
        backend: the attention kernel.
        head: the implementation of the output head.
        module: the model on the meta device; None for remote code.
        notices: lines about settings that are allowed but may be unintended.
        not_shared: why documents cannot share tokens, where `data.share_prefixes` leaves that open.
        source: hf_config without the rows of new tokens, as the weights have it; None: hf_config itself.
        new_tokens: the number of new tokens.
    """

    kind: "type[PackedModel]"
    hf_config: Any
    backend: str
    head: str
    module: Any
    notices: list[str]
    not_shared: str | None = None
    source: Any = None
    new_tokens: int = 0

    @property
    def new_token_facts(self) -> dict[str, dict[str, int]]:
        """The entry of new tokens in data_report.json, with the rows of embeddings and head; {} without any."""
        if not self.new_tokens:
            return {}
        rows, rows_with = (config.get_text_config().vocab_size for config in (self.source, self.hf_config))
        return {"new_tokens": {"tokens": self.new_tokens, "rows": rows, "rows_with": rows_with}}


@dataclass
class PackedModel(HFModelConfig, ModelNode):
    """A causal language model of Hugging Face, which attends within documents.

    Its fields are those of verl and of ModelOptions. :func:`override` applies `override_config` to `hf_config`.
    A kind of model declares:

    engine_vendor: the name of its engine in `verl_ext.plugin`.
    needs_positions: whether a document must not be longer than the model's positions.
    runs_longest: whether every rank computes as many tokens as the longest row of all ranks in a micro-step.
    config_options: the options of the model's own config; each class fills the node of its prefix, and null means the
    value in the folder at `model.path`.
    memory_not_predicted: the reason why the memory of a step cannot be predicted without real tensors.
    """

    _mutable_fields = HFModelConfig._mutable_fields | {"override_config"}
    engine_vendor: ClassVar[str] = PACKED
    needs_positions: ClassVar[bool] = True
    runs_longest: ClassVar[bool] = False
    config_options: ClassVar[tuple[type[Options], ...]] = ()
    memory_not_predicted: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        given = dict(self.override_config)
        self.override_config = {name: value for name, value in given.items() if name == ATTENTION}
        super().__post_init__()
        self.override_config = given
        override(self.hf_config, given)
        dequantize(self.hf_config)
        # The processor has a tokenizer of its own, which an export writes.
        self.new_pieces = new_pieces(self, self.tokenizer)
        if (of_processor := getattr(self.processor, "tokenizer", None)) is not None:
            new_pieces(self, of_processor)

    @classmethod
    def resolve_attention(cls, config: DictConfig) -> list[str]:
        """Make `override_config.attn_implementation` and `attention.backend` agree, in place.

        Returns notices. Hugging Face's flash_attention_2 becomes the backend flash_attn. Raises ValueError for any
        other implementation, because none of them keeps the documents of a pack apart.
        """
        key, backend = f"{OVERRIDE}.{ATTENTION}", config.attention.backend
        asked = OmegaConf.select(config, key)
        if asked == PACKED_ATTENTION:
            return []
        if asked is not None and (asked != "flash_attention_2" or backend not in ("auto", "flash_attn")):
            also = f" and attention.backend={backend}" if asked == "flash_attention_2" else ""
            raise ValueError(
                f"{key} must be {PACKED_ATTENTION}, which keeps documents apart: choose its kernel by "
                f"attention.backend=auto, flash_attn, varlen or sdpa; got {asked}{also}"
            )
        _set_attention(config, PACKED_ATTENTION)
        if asked is None:
            return []
        config.attention.backend = "flash_attn"
        return [f"{key}={asked} is read as attention.backend=flash_attn, which keeps the documents of a pack apart"]

    @classmethod
    def config_problems(cls, config: "RunConfig") -> Iterable[str | None]:
        """Return a line for each option forbidden to this kind of model."""
        return ()

    @classmethod
    def examine(cls, config: "RunConfig", hf_config: Any) -> ModelFacts:
        """Check the model in `model.path`, or raise ValueError, one line a mistake."""
        dequantize(hf_config)
        source, pieces = copy.deepcopy(hf_config), new_pieces(config.model_options)
        add_to_config(hf_config, pieces)
        model = Architecture(hf_config, pieces)
        refuse(support.model_support_problems(model))
        problems = list(support.option_problems(config, model))
        backend = config.attention.backend
        try:
            backend = support.chosen_backend(config, model)
        except ValueError as error:
            problems.append(str(error))
        refuse(problems)
        head = support.head_in_use(config, model)
        notices = list(support.model_notices(config, model, head))
        is_open = getattr(config.dataset, "share_prefixes", False) is None
        not_shared = next(support.sharing_problems(config, model), None) if is_open else None
        return ModelFacts(cls, hf_config, backend, head, model.module, notices, not_shared, source, len(pieces))

    @classmethod
    def check_weights(cls, config: "RunConfig", hf_config: Any) -> list[str]:
        """Compare the weights' headers with the model of ``hf_config``; return notices.

        Weights of remote code and quantized weights are left to transformers. Raises ValueError if the weights differ,
        and OSError if the Hub does not answer.
        """
        path, override = config.model_folder, dict(config.model_options.override_config)
        named = model_class(hf_config)
        if named is None or getattr(hf_config, "quantization_config", None):
            return []
        override.pop(ATTENTION, None)
        return check_weights(named, hf_config, path, config.model_options.allow_weight_mismatch, override)

    @classmethod
    def answer_problems(cls, config: "RunConfig", hf_config: Any) -> Iterable[str | None]:
        """Yield a line for each reason against answering `eval.prompts` in training."""
        yield support.answering_problem(Architecture(hf_config))

    @classmethod
    def memory_settings(cls, hf_config: Any) -> dict[str, Any] | None:
        """Return the memory's settings that its weights need; None without memory."""
        return None


@dataclass
class QwenTitansModel(PackedModel):
    """A Qwen with long-term memory, which reads rows chunk by chunk.

    `hf_config` becomes a QwenTitansConfig.
    """

    train: str = option("all", "memory: the base model's weights are not trained", resume="same")
    memory_checkpoint: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    engine_vendor: ClassVar[str] = CHUNKED
    needs_positions: ClassVar[bool] = False  # positions restart with every chunk
    runs_longest: ClassVar[bool] = True
    config_options: ClassVar[tuple[type[Options], ...]] = (MemoryOptions,)
    memory_not_predicted: ClassVar[str | None] = "model=qwen_titans chooses what it computes by the values of its masks"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hf_config = titans_config(self.hf_config, self.memory)
        self.architectures = self.hf_config.architectures

    @classmethod
    def resolve_attention(cls, config: DictConfig) -> list[str]:
        """Choose transformers' kernel, in place: within chunks, a row is one document."""
        key, backend = f"{OVERRIDE}.{ATTENTION}", config.attention.backend
        asked = OmegaConf.select(config, key)
        chosen = _CHUNK_ATTENTION.get(backend, backend)  # the checks report an unknown backend
        if asked in (None, chosen):
            _set_attention(config, chosen)
        elif backend != "auto" or asked not in _CHUNK_ATTENTION.values():
            raise ValueError(
                f"{key} must be {' or '.join(dict.fromkeys(_CHUNK_ATTENTION.values()))} with model=qwen_titans, as "
                f"attention.backend={backend} has it; got {asked}"
            )
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
            problems.append(
                "data.max_tokens (data.max_length of data=babilong) must be a multiple of model.memory.chunk_size="
                f"{chunk}; got {tokens} (nearest above: {up})"
            )
        if config.model_options.train == "memory" and not titans.memory_options.layers:
            problems.append(
                "model.memory.layers must name a layer with model.train=memory, which trains nothing else; got []"
            )
        refuse([*problems, *_memory_problems(config.model_options.memory_checkpoint, titans)])
        with torch.device("meta"):
            module = QwenTitansForCausalLM(titans)
        # Attention is transformers' own.
        return ModelFacts(cls, titans, backend="sdpa", head="targets", module=module, notices=[])

    @classmethod
    def answer_problems(cls, config: "RunConfig", hf_config: Any) -> Iterable[str | None]:
        """Refuse sampling, because a model with memory generates the most likely tokens."""
        if config.eval.temperature:
            yield f"eval.temperature must be 0 with model=qwen_titans; got {config.eval.temperature}"

    @classmethod
    def memory_settings(cls, hf_config: Any) -> dict[str, Any] | None:
        """Return the memory options on which its weights depend."""
        return {name: value for name, value in hf_config.memory.items() if name != "bptt_chunks"}


# attention.backend: the name of that kernel in transformers, for attention inside a chunk
_CHUNK_ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash_attn": "flash_attention_2"}
_ONLY_WITH_MEMORY: dict[str, tuple[Any, str]] = {  # key: (the one value it may have, why)
    "engine.ulysses_sequence_parallel_size": (1, "the memory reads a row's chunks one after the other on one rank"),
    "parallel.context_parallel_size": (1, "the memory reads a row's chunks one after the other on one rank"),
    "model.lora_rank": (0, "model.train=memory is what trains few parameters"),
    "model.lora_adapter_path": (None, "it has no adapters"),
    "model.experts": ("auto", "its Qwen has no experts"),
    "model.freeze": ([], "model.train=memory is what freezes the base"),
    "model.new_tokens": ([], "its exports have the rows of the Qwen"),
    "model.new_special_tokens": ([], "its exports have the rows of the Qwen"),
    "model.use_liger": (False, "liger does not know the model"),
    "data.share_prefixes": (False, "its memory reads every token of a document"),
    "data.strategy": ("none", "a row is one document, whose memory starts empty (data=babilong sets it)"),
    "data.pad_mode": ("right", "every rank must read equally many chunks (data=babilong sets it)"),
}


def model_kind(config: Any) -> type[PackedModel]:
    """Return the class of a model node; PackedModel for verl's own."""
    named = get_class(config["model"]["_target_"])
    return named if issubclass(named, PackedModel) else PackedModel


def new_pieces(model: Any, tokenizer: Any = None) -> dict[int, list[int]]:
    """Return {id of a new token: ids of its old pieces}.

    model: a model node. tokenizer: gets the new tokens, in place; None: that of the node's path is read, if there are
    any.
    """
    if not model.new_tokens and not model.new_special_tokens:
        return {}
    named = ModelOptions(model.path, model.tokenizer_path, bool(model.trust_remote_code))
    if tokenizer is None:
        path, key = os.path.expanduser(named.tokenizer), named.tokenizer_key
        tokenizer = read_tokenizer(path, key, trust_remote_code=named.trust_remote_code)
    return add_tokens(tokenizer, model.new_tokens, model.new_special_tokens, named.tokenizer)


def titans_config(hf_config: Any, memory: Mapping[str, Any]) -> QwenTitansConfig:
    """Return a Qwen's config with `memory`, or an exported one so updated.

    Raises:
        ValueError: If the base is not Qwen2 or Qwen3, or an option `model.memory.<name>` is not allowed.
    """
    given = {name: value for name, value in plain(memory).items() if value is not None}
    if isinstance(hf_config, QwenTitansConfig):
        hf_config, given = hf_config.base_config, {**(hf_config.memory or {}), **given}
    return QwenTitansConfig.from_base(hf_config, **given)


def _set_attention(config: DictConfig, implementation: str) -> None:
    with open_dict(config):
        config.model.override_config[ATTENTION] = implementation


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
            return [f"model.memory_checkpoint: the settings beside it must be a JSON object; got {settings}"]
        differing = [
            f"model.memory.{name} must be {spell(value)}, as in {settings}, with model.memory_checkpoint={path}; got "
            f"{spell(memory.get(name))}"
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
