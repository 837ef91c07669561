"""A mixture's expert products: one grouped product, or a loop.

Transformers has both for classes that keep the weights of a layer's experts in one tensor, and uses the grouped product
(torch.nn.functional.grouped_mm) by default. Other classes run code of their own.
"""

from typing import Any

from torch import nn

from verl_ext.options import must

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # as configs name them


def has_experts(model: Any) -> bool:
    """Tell whether a model is a mixture of experts; False for None."""
    text = None if model is None else model.config.get_text_config()
    return any(getattr(text, name, None) for name in _COUNTS)


def experts_problem(model: Any, asked: str) -> str | None:
    """Return the unmet requirement of `model.experts`; None if all are met."""
    if asked == "auto" or model is None:
        return None
    name = type(model).__name__
    if not has_experts(model):
        return must("model.experts", f"be auto for a {name}, which has no experts", asked)
    try:
        choose_experts(model, asked)
    except ValueError:
        needed = f"be auto or eager for a {name}, of whose experts transformers has no grouped products"
        return must("model.experts", needed, asked)
    return None


def choose_experts(model: nn.Module, asked: str) -> None:
    """Let a model compute experts as asked; raise ValueError if impossible."""
    if asked != "auto":
        model.set_experts_implementation(asked)  # type: ignore[operator]
