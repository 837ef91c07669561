"""Dropout of a built model, which a loss that compares documents does without."""

from torch import nn


def switch_dropout_off(module: nn.Module) -> list[str]:
    """Set every probability of dropout to 0; return the names of those that were above.

    These are modules of torch, of adapters too, and numbers that layers pass to functions (`attention_dropout`).
    """
    found: dict[str, None] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            found[path.rpartition(".")[2]] = None
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and value > 0 and ("dropout" in name or name.endswith("pdrop")):
                found[name] = None
                setattr(part, name, 0.0)
    return list(found)
