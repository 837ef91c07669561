"""The text model beside the towers of a multimodal checkpoint.

    model.vision_tower, model.visual, …   the towers                    frozen, whole in checkpoints and exports
    model.multi_modal_projector, …        the projectors to the text    the same
    model.language_model, lm_head         the text model                trained, unless model.freeze names a part of it

Packs contain text alone, which reaches neither towers nor projectors.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from verl_ext.options import Options, must, nearest_hint, option


@dataclass  # not frozen: a base of verl's own dataclass of the model node
class FreezeOptions(Options):
    """Keys of the model node about parameters that stay frozen."""

    prefix: ClassVar[str] = "model"

    freeze: list[str] = option(
        [],
        "globs of modules and parameters that are not trained, by their names or ends of their names (embed_tokens, "
        "layers.[0-3]); after a ! what alone is trained (!layers.-1: the last layer); the parts that a text does "
        "not reach, such as vision towers, are always frozen",
        resume="same",
    )
    frozen_dtype: str = option(
        "compute",
        "type in memory of parameters that are not trained; compute: "
        "engine.mixed_precision.param_dtype, which the forward pass uses anyway; fp32: as the trained ones",
        choices=("compute", "fp32"),
    )


def auto_class(hf_config: Any) -> Any:
    """Return transformers' Auto class for a config, as verl 0.9.1 does.

    That of images and text if there is one.
    """
    remote = getattr(hf_config, "auto_map", None) or {}
    of_images = "AutoModelForImageTextToText" in remote if remote else type(hf_config) in _IMAGE_TEXT
    return AutoModelForImageTextToText if of_images else AutoModelForCausalLM


def without_code(hf_config: Any, trusted: bool) -> Any:
    """Return a config, in place, whose code may run; without consent it names none, and transformers' class counts."""
    if not trusted:
        vars(hf_config).pop("auto_map", None)
    return hf_config


def model_class(hf_config: Any) -> Any:
    """Return a config's class in transformers; None for remote or unknown."""
    if getattr(hf_config, "auto_map", None):
        return None
    try:
        cls = auto_class(hf_config)._model_mapping[type(hf_config)]  # type: ignore[attr-defined]
    except KeyError:
        return None
    return cls[0] if isinstance(cls, tuple) else cls


_IMAGE_TEXT: Any = AutoModelForImageTextToText._model_mapping  # type: ignore[attr-defined]


def text_parts(model: Any) -> list[nn.Module]:
    """Return the text model, whole or as parts beside towers.

    The parts are the inner models whose config is of the text config's class, the embeddings and the head.
    """
    text = type(model.config.get_text_config())
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    parts: list[nn.Module] = [part for part in models if type(part.config) is text]
    if model in parts or not parts:
        return [model]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # None in a class that leaves them to a part
    return [*parts, *(end for end in ends if end is not None)]


def outside_text(model: Any) -> list[str]:
    """Return the outermost names of modules and parameters outside the text."""
    parts = set(text_parts(model))
    with_text = {module for module in model.modules() if not parts.isdisjoint(module.modules())}

    def names(module: nn.Module, prefix: str) -> Iterator[str]:
        if module in parts:
            return
        yield from (prefix + name for name, _ in module.named_parameters(recurse=False))
        for name, child in module.named_children():
            if child in with_text:
                yield from names(child, f"{prefix}{name}.")
            elif next(child.parameters(), None) is not None:
                yield prefix + name

    return list(names(model, ""))


def text_alone(model: Any, excluded: Any) -> Any:
    """Return PEFT's `exclude_modules`: `excluded`, and everything outside the text."""
    outside = "|".join(map(re.escape, outside_text(model)))
    if not outside:
        return excluded
    if excluded is not None and not isinstance(excluded, str):
        excluded = "|".join(rf"(.*\.)?{re.escape(name)}" for name in excluded)  # as PEFT reads a list of names
    return rf"({outside})(\..*)?" + (f"|{excluded}" if excluded else "")


def is_named(name: str, pattern: str) -> bool:
    """Tell whether a glob names a parameter or a module that holds it, by its end."""
    parts = name.split(".")
    holders = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(holder, end) for holder in holders for end in (pattern, f"*.{pattern}"))


def name_hint(pattern: str, names: Iterable[str]) -> str:
    """Return the nearest part of parameters' names as a hint."""
    return nearest_hint(pattern, {part for name in names for part in (name, *name.split("."))})


def freeze(model: Any, patterns: Iterable[str]) -> None:
    """Freeze everything outside the text, and what `patterns` name; a lone `*` freezes all of a reference.

    Raises ValueError if a pattern names nothing, or if others leave nothing to train.
    """
    patterns = list(patterns)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    frozen, trained, config = outside_text(model), set[str](), model.config.get_text_config()
    for pattern in patterns:
        glob = re.sub(
            r"(?<=\.)-(\d+)", lambda match: str(config.num_hidden_layers - int(match[1])), pattern.removeprefix("!")
        )
        named = [name for name in parameters if is_named(name, glob)]
        if not named:
            needed = f"name modules or parameters of a {type(model).__name__}"
            raise ValueError(must("model.freeze", needed, pattern) + name_hint(pattern, parameters))
        if pattern.startswith("!"):
            trained.update(named)
        else:
            frozen += named
    if trained:  # a weight that is tied has several names, of which one is enough
        kept = {id(parameters[name]) for name in trained}
        frozen += [name for name, parameter in parameters.items() if id(parameter) not in kept]
    for name in frozen:
        (modules[name] if name in modules else parameters[name]).requires_grad_(False)
    if patterns != ["*"] and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(must("model.freeze", "leave a parameter to train", patterns))
