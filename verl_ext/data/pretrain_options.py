"""PreTrainOptions: how text becomes rows, from arguments or from a config's data node, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_ext.data.cached_folder import check_cache_dir
from verl_ext.data.document_split import check_train_ratio
from verl_ext.packing import check_choice, whole_number
from verl_ext.packing.strategies import MOST_TOKENS
from verl_ext.tokenize.bad_record import ON_BAD_RECORD, SPECIAL_TOKENS_IN_TEXT

ROWS = ("packed", "padded")
ADDED = 2  # tokens of max_length that are not text: BOS and EOS


@dataclass(frozen=True)
class PreTrainOptions:
    """max_length: tokens of a document, BOS and EOS included; text_key: the field that holds the text; rows: `packed`
    (whole documents, up to max_tokens together) or `padded` (one document, filled up to max_length);
    special_tokens_in_text: what becomes of their names in a text; on_bad_record: what a record without a text does;
    train_ratio and seed: of the split into train and val; cache_dir: where the tokenised data is kept (None: the cache
    of `datasets`).

    max_tokens (None: max_length), strategy, over_length and pad_mode are those of packs; padded rows have their own.
    """

    max_length: int = 512
    text_key: str = "text"
    rows: str = "packed"
    special_tokens_in_text: str = "encode"
    on_bad_record: str = "error"
    train_ratio: float = 1.0
    seed: int = 42
    cache_dir: str | None = None
    max_tokens: int | None = None
    strategy: str = "best_fit"
    over_length: str = "error"
    pad_mode: str = "no_padding"

    def __post_init__(self) -> None:
        whole_number("data.max_length", self.max_length, least=ADDED + 1, most=MOST_TOKENS)
        if not isinstance(self.text_key, str) or not self.text_key:
            raise ValueError(f"data.text_key must name a field of the records; got {self.text_key!r}")
        check_choice("data.rows", self.rows, ROWS)
        check_choice("data.special_tokens_in_text", self.special_tokens_in_text, SPECIAL_TOKENS_IN_TEXT)
        check_choice("data.on_bad_record", self.on_bad_record, ON_BAD_RECORD)
        check_train_ratio(self.train_ratio)
        whole_number("data.seed", self.seed, least=0)
        check_cache_dir(self.cache_dir)

    @property
    def text_tokens(self) -> int:
        """The most tokens of its text that a document keeps, whether the tokenizer has a BOS or not."""
        return self.max_length - ADDED

    @property
    def packs(self) -> dict[str, Any]:
        """max_tokens, strategy and pad_mode of the rows."""
        if self.rows == "padded":
            return {"max_tokens": self.max_length, "strategy": "none", "pad_mode": "right"}
        budget = self.max_length if self.max_tokens is None else self.max_tokens
        return {"max_tokens": budget, "strategy": self.strategy, "pad_mode": self.pad_mode}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> "PreTrainOptions":
        """What is `given` and not None, else the key of `config` (verl's data node or a mapping), else the default."""
        if config.get("mixture") is not None:
            raise ValueError("data.mixture must be null for data=pretrain, which reads text; got a mixture")
        options: dict[str, Any] = {}
        for name in (entry.name for entry in fields(cls)):
            value = config.get(name) if given.get(name) is None else given[name]
            if value is not None:
                options[name] = value
        return cls(**options)
