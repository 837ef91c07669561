"""MultiDocOptions: how documents become samples, from arguments or from a config's data node, checked."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from verl_ext.data.cached_folder import check_cache_dir
from verl_ext.data.document_split import check_train_ratio
from verl_ext.data.megatron import BLEND_RULES, check_weights
from verl_ext.packing import check_choice, whole_number
from verl_ext.packing.strategies import MOST_TOKENS
from verl_ext.tokenize.bad_record import ON_BAD_RECORD, SPECIAL_TOKENS_IN_TEXT

SAMPLINGS = ("random_starts", "document_stream", "in_order")
VAL_SAMPLINGS = ("in_order", "random_starts")
# What packs of whole documents can have, and samples of a stream cannot.
_FIXED = {"strategy": ("none",), "mixture": (None,), "balance": ("none",), "pad_mode": ("no_padding",)}


@dataclass(frozen=True)
class MultiDocOptions:
    """seq_len: tokens of a sample; sampling: one of SAMPLINGS, None for what suits the data;
    attend_across_documents: a sample is one document to attention; num_samples: of a document stream, None for whole
    epochs; blend_rule: in which order its sources follow each other; max_corpus_tokens: where a text is cut;
    train_ratio and seed: of the split by document; val_sampling and val_seed: of the validation set; cache_dir: where
    tokenised texts and indices are kept (None: the cache of `datasets`). conf/data/multidoc.yaml describes them."""

    seq_len: int
    sampling: str | None = None
    attend_across_documents: bool = True
    num_samples: int | None = None
    blend_rule: str = "tijdeman"
    add_eos: bool = True
    text_key: str | tuple[str, ...] = "text"
    max_corpus_tokens: int | None = None
    special_tokens_in_text: str = "encode"
    on_bad_record: str = "error"
    train_ratio: float = 1.0
    seed: int = 42
    val_sampling: str = "in_order"
    val_seed: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.seq_len is None:
            raise ValueError("data.seq_len must be given (tokens of a sample); got nothing")
        whole_number("data.seq_len", self.seq_len, least=2, most=MOST_TOKENS)
        whole_number("data.seed", self.seed, least=0, most=2**32 - 1)
        for name, least in (("num_samples", 1), ("max_corpus_tokens", 1), ("val_seed", 0)):
            if getattr(self, name) is not None:
                whole_number(f"data.{name}", getattr(self, name), least=least)
        if self.sampling is not None:
            check_choice("data.sampling", self.sampling, SAMPLINGS)
        check_choice("data.blend_rule", self.blend_rule, tuple(BLEND_RULES))
        check_choice("data.val_sampling", self.val_sampling, VAL_SAMPLINGS)
        check_choice("data.special_tokens_in_text", self.special_tokens_in_text, SPECIAL_TOKENS_IN_TEXT)
        check_choice("data.on_bad_record", self.on_bad_record, ON_BAD_RECORD)
        for name in ("attend_across_documents", "add_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"data.{name} must be true or false; got {getattr(self, name)!r}")
        check_train_ratio(self.train_ratio)
        keys = (self.text_key,) if isinstance(self.text_key, str) else self.text_key
        if not keys or not all(isinstance(name, str) and name for name in keys):
            raise ValueError(f"data.text_key must name a field of a record, or several; got {self.text_key!r}")
        check_cache_dir(self.cache_dir)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> "MultiDocOptions":
        """What is `given` and not None, else the key of `config` (verl's data node or a mapping), else the default."""
        for name, allowed in _FIXED.items():
            if config.get(name) not in (None, *allowed):
                raise ValueError(
                    f"data.{name} must be {allowed[0] or 'null'} for samples of a stream; got {config.get(name)!r}"
                )
        options: dict[str, Any] = {"seq_len": None}
        for name in (entry.name for entry in fields(cls)):
            value = config.get(name) if given.get(name) is None else given[name]
            if value is not None:
                options[name] = tuple(value) if name == "text_key" and not isinstance(value, str) else value
        made = cls(**options)
        budget = config.get("max_tokens")
        if given.get("seq_len") is None and budget is not None and budget != made.seq_len:
            raise ValueError(f"data.max_tokens must be data.seq_len={made.seq_len} for samples of it; got {budget}")
        return made


def read_blend(blend: Any) -> tuple[list[float], list[str]]:
    """(weights, paths) of [[0.7, path], [0.3, path]].

    Raises:
        ValueError: another form, a weight that is negative or not finite, no weight above 0, a path given twice.
    """
    plain: Any = OmegaConf.to_container(blend, resolve=True) if OmegaConf.is_config(blend) else blend
    is_list = isinstance(plain, Sequence) and not isinstance(plain, str) and len(plain) > 0
    if not is_list or not all(_is_pair(pair) for pair in plain):
        raise ValueError(f"data.blend must be pairs of a weight and a path, e.g. [[0.7,a],[0.3,b]]; got {plain!r}")
    weights, paths = [float(weight) for weight, _ in plain], [str(path) for _, path in plain]
    check_weights(weights)
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"data.blend must name each path once; got {twice} twice")
    return weights, paths


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, Sequence)
        and not isinstance(pair, str)
        and len(pair) == 2
        and isinstance(pair[0], (int, float))
        and not isinstance(pair[0], bool)
        and isinstance(pair[1], (str, os.PathLike))
        and bool(os.fspath(pair[1]))
    )
