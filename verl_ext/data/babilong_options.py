"""BABILongOptions: how a BABILong record becomes a row, from arguments or from a config's data node, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_ext.data.cached_folder import check_cache_dir
from verl_ext.data.document_split import check_train_ratio
from verl_ext.packing import check_choice, whole_number
from verl_ext.packing.strategies import MOST_TOKENS

TRUNCATE = ("context", "right")


@dataclass(frozen=True)
class BABILongOptions:
    """max_length: tokens of every row; answer_reserve_tokens: of these, kept free of the prompt; truncate: what a
    prompt that is too long loses, the end of its `input` (context) or its own end, question and all (right);
    append_eos: the EOS token after the answer is a target too; train_ratio and seed: of the split into train and val;
    cache_dir: where the tokenised data is kept (None: the cache of `datasets`)."""

    max_length: int
    answer_reserve_tokens: int = 64
    truncate: str = "context"
    append_eos: bool = False
    train_ratio: float = 0.9
    seed: int = 42
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is None:
            raise ValueError("data.max_length must be given (tokens of a row); got nothing")
        whole_number("data.max_length", self.max_length, least=2, most=MOST_TOKENS)
        whole_number("data.answer_reserve_tokens", self.answer_reserve_tokens, least=1)
        if self.max_length <= self.answer_reserve_tokens:
            raise ValueError(
                f"data.max_length must be above data.answer_reserve_tokens={self.answer_reserve_tokens}; "
                f"got {self.max_length}"
            )
        check_choice("data.truncate", self.truncate, TRUNCATE)
        if not isinstance(self.append_eos, bool):
            raise ValueError(f"data.append_eos must be true or false; got {self.append_eos!r}")
        check_train_ratio(self.train_ratio)
        whole_number("data.seed", self.seed, least=0)
        check_cache_dir(self.cache_dir)

    @property
    def prompt_tokens(self) -> int:
        """The most tokens that a prompt may have."""
        return self.max_length - self.answer_reserve_tokens

    @classmethod
    def from_config(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> "BABILongOptions":
        """What is `given` and not None, else the key of `config` (verl's data node or a mapping), else the default."""
        _refuse_packing(config)
        options: dict[str, Any] = {"max_length": None}
        for name in (entry.name for entry in fields(cls)):
            value = config.get(name) if given.get(name) is None else given[name]
            if value is not None:
                options[name] = value
        made = cls(**options)
        budget = config.get("max_tokens")
        if given.get("max_length") is None and budget is not None and budget != made.max_length:
            raise ValueError(f"data.max_tokens must be data.max_length={made.max_length} for BABILong; got {budget}")
        return made


def _refuse_packing(config: Mapping[str, Any]) -> None:
    """A row is one sample: what would put several into one, or draw them, has no meaning here."""
    if config.get("mixture") is not None:
        raise ValueError("data.mixture must be null for BABILong, whose rows are one sample each; got a mixture")
    if config.get("strategy") not in (None, "none"):
        raise ValueError(f"data.strategy must be none for BABILong; got {config.get('strategy')!r}")
