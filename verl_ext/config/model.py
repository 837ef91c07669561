"""The kinds of model: classes named by `_target_` in conf/model/NAME.yaml.

verl builds its model node as a dataclass. Our subclasses add class methods, which the checks and the trainer call.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from verl.workers.config import HFModelConfig

from verl_ext.attention import PACKED_ATTENTION
from verl_ext.config import support
from verl_ext.config.architecture import Architecture
from verl_ext.config.model_override import ATTENTION, OVERRIDE, override
from verl_ext.config.quantized import dequantize
from verl_ext.config.weights import ModelNode, check_weights
from verl_ext.engines.new_rows import add_to_config
from verl_ext.layers.towers import auto_class, model_class, without_code
from verl_ext.options import Options, first_line, must, refuse
from verl_ext.plugin import PACKED
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

    engine_vendor: the vendor under which its engine is registered.
    engine_module: the module that registers the engine.
    hooks: more hooks of the training loop, as `trainer.hooks` names them.
    needs_positions: whether a document must not be longer than the model's positions.
    runs_longest: whether every rank computes as many tokens as the longest row of all ranks in a micro-step.
    config_options: the options of the model's own config; each class fills the node of its prefix, and null means the
    value in the folder at `model.path`.
    memory_not_predicted: the reason why the memory of a step cannot be predicted without real tensors.
    """

    _mutable_fields = HFModelConfig._mutable_fields | {"override_config"}
    engine_vendor: ClassVar[str] = PACKED
    engine_module: ClassVar[str] = "verl_ext.engines.packed"
    hooks: ClassVar[tuple[str, ...]] = ()
    needs_positions: ClassVar[bool] = True
    runs_longest: ClassVar[bool] = False
    config_options: ClassVar[tuple[type[Options], ...]] = ()
    memory_not_predicted: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        given = dict(self.override_config)
        self.override_config = {name: value for name, value in given.items() if name == ATTENTION}
        super().__post_init__()
        self.override_config = given
        override(without_code(self.hf_config, self.trust_remote_code), given)
        dequantize(self.hf_config)
        # The processor has a tokenizer of its own, which an export writes.
        self.new_pieces = new_pieces(self, self.tokenizer)
        if (of_processor := getattr(self.processor, "tokenizer", None)) is not None:
            new_pieces(self, of_processor)

    def config_with(self, values: Mapping[str, Any]) -> Any:
        """Return the config in `model.path` with some of `override_config`, and none of verl's changes."""
        path: Any = self.local_hf_config_path  # which verl has set
        config = AutoConfig.from_pretrained(path, trust_remote_code=self.trust_remote_code)
        override(without_code(config, self.trust_remote_code), values)
        return config

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
            hint = "choose its kernel by attention.backend=auto, flash_attn, varlen or sdpa"
            needed = f"be {PACKED_ATTENTION}, which keeps documents apart: {hint}"
            raise ValueError(must(key, needed, f"{asked}{also}"))
        set_attention(config, PACKED_ATTENTION)
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
    def check_weights(cls, config: "RunConfig", hf_config: Any, key: str = "model.path") -> list[str]:
        """Compare the weights' headers with the model of ``hf_config``; return notices.

        key: the option that names the weights; `reference.path` has those of a reference. Raises ValueError if the
        weights differ, and OSError if the Hub does not answer.
        """
        options, path = config.model_options, config.model_folder
        overrides = {name: value for name, value in options.override_config.items() if name != ATTENTION}
        if key != "model.path":
            path = str(config.reference.path)
            override(hf_config, overrides)
            dequantize(hf_config)
        remote = (getattr(hf_config, "auto_map", None) or {}).get(auto_class(hf_config).__name__)
        named = get_class_from_dynamic_module(remote, path) if remote else model_class(hf_config)
        if named is None:
            return []
        try:
            return check_weights(named, hf_config, path, options.allow_weight_mismatch, overrides, key)
        except Exception as error:
            if not remote or isinstance(error, (ValueError, OSError)):
                raise
            why = f"its code fails on tensors without storage ({first_line(error)})"
            return [f"{key}: the weights of {path} are not compared with its model: {why}"]

    @classmethod
    def answer_problems(cls, config: "RunConfig", hf_config: Any) -> Iterable[str | None]:
        """Yield a line for each reason against answering `eval.prompts` in training."""
        yield support.answering_problem(Architecture(hf_config), config.eval.prompts)

    @classmethod
    def identity(cls, hf_config: Any, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of the model's config that a resumed run must share, out of all of them."""
        return facts

    @classmethod
    def identity_of_today(cls, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the facts of a checkpoint as this version would write them; raise ValueError if it cannot."""
        return facts


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


def set_attention(config: DictConfig, implementation: str) -> None:
    """Write `model.override_config.attn_implementation`, in place."""
    with open_dict(config):
        config.model.override_config[ATTENTION] = implementation
