"""PackOptions: how documents become packs, from keyword arguments or from a config's data node, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext.data.mixture_options import MixtureOptions
from verl_ext.packing import OVER_LENGTH_POLICIES, STRATEGIES, check_choice, whole_number
from verl_ext.packing.strategies import MOST_TOKENS

PAD_MODES = ("no_padding", "right")


@dataclass(frozen=True)
class PackOptions:
    """max_tokens: budget of a pack; padding_value: the token that fills a pack under pad_mode=right (None: unknown);
    mixture: None for every document once."""

    max_tokens: int
    padding_value: int | None = 0
    strategy: str = "best_fit"
    seed: int = 42
    over_length: str = "error"
    pad_mode: str = "no_padding"
    mixture: MixtureOptions | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            raise ValueError("data.max_tokens must be given (tokens of a pack); got nothing")
        whole_number("data.max_tokens", self.max_tokens, least=2, most=MOST_TOKENS)
        whole_number("data.seed", self.seed, least=0)
        check_choice("data.strategy", self.strategy, STRATEGIES)
        check_choice("data.over_length", self.over_length, OVER_LENGTH_POLICIES)
        check_choice("data.pad_mode", self.pad_mode, PAD_MODES)
        if self.pad_mode == "right":
            whole_number("padding_value (the tokenizer's pad_token_id)", self.padding_value, least=0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tokenizer: Any, given: Mapping[str, Any]) -> "PackOptions":
        """The keys of `config` (verl's data node or a mapping), `given` where it has none or null; the padding is the
        tokenizer's. A max_tokens that is given wins over the config's."""
        options = dict(given)
        for name in ("max_tokens", "strategy", "seed", "over_length", "pad_mode", "mixture"):
            value = config.get(name)
            if value is not None and not (name == "max_tokens" and given["max_tokens"] is not None):
                options[name] = value
        if tokenizer is not None and tokenizer.pad_token_id is not None:
            options["padding_value"] = tokenizer.pad_token_id
        if options.get("mixture") is not None:
            options["mixture"] = MixtureOptions.read(options["mixture"])
        return cls(**options)
