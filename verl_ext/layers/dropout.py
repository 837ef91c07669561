"""Dropout of a built model, which a loss that compares documents does without."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def switch_dropout_off(module: nn.Module) -> list[str]:
    """Set every probability of dropout to 0; return the names of those that were above.

    These are modules of torch, of adapters too, and numbers that layers pass to functions (`attention_dropout`), some
    of them as their config has it. The model's own config, which an export writes, keeps its numbers.
    """
    found: dict[str, None] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            found[path.rpartition(".")[2]] = None
            part.p = 0.0
        for name in _probabilities(vars(part)):
            found[name] = None
            setattr(part, name, 0.0)
        config: Any = getattr(part, "config", None)
        is_own = isinstance(config, PreTrainedConfig) and not isinstance(part, PreTrainedModel)
        if is_own and (names := _probabilities(vars(config))):
            config = copy.copy(config)
            vars(config).update(dict.fromkeys(names, 0.0))
            part.config = config
    return list(found)


def _probabilities(values: Mapping[str, Any]) -> list[str]:
    """Return the names of probabilities of dropout above 0."""
    numbers = (name for name, value in values.items() if isinstance(value, float) and value > 0)
    return [name for name in numbers if "dropout" in name or name.endswith("pdrop")]
