"""The architecture of a run's model, by its config and its classes alone."""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from verl_ext.layers import torch_forms
from verl_ext.layers.towers import auto_class, model_class
from verl_ext.layers.trial import trial_model
from verl_ext.options import first_line, must


class Architecture:
    """A causal language model, by its Hugging Face config and its classes.

    Attributes:
        hf_config: the config.
        text: the part of the config that describes the language model.
        new_pieces: {the id of a new token: the ids of its old pieces}.
    """

    def __init__(self, hf_config: Any, new_pieces: Mapping[int, list[int]] | None = None) -> None:
        self.hf_config, self.text, self.new_pieces = hf_config, hf_config.get_text_config(), new_pieces or {}

    @property
    def name(self) -> str:
        """The name of the config's class."""
        return type(self.hf_config).__name__

    @cached_property
    def cls(self) -> Any:
        """The model's class in transformers; None for remote code or unknown configs."""
        try:
            return model_class(self.hf_config)
        except ImportError as error:  # of a package that is installed and that the class would use, which comes first
            got = f"torch {torch.__version__} ({first_line(error.__cause__ or error)})"
            raise ValueError(must(f"model.path: the class of a {self.name}", "be importable", got)) from error

    @cached_property
    def module(self) -> Any:
        """The model on the meta device; None without a class."""
        if self.cls is None:
            return None
        with torch.device("meta"), torch_forms(self.cls):
            return self.cls(copy.deepcopy(self.hf_config))

    def trial(self) -> Any:
        """Return a small model of this architecture; its class raises any error for a config that it refuses."""
        return trial_model(self.hf_config, self.cls or auto_class(self.hf_config))

    @property
    def heads(self) -> tuple[int, int] | None:
        """(query heads, key/value heads); None if the config names none."""
        heads = getattr(self.text, "num_attention_heads", None)
        return (heads, getattr(self.text, "num_key_value_heads", None) or heads) if heads else None

    @property
    def head_size(self) -> int:
        """The size per head of queries and keys, which latent attention splits."""
        if rotated := getattr(self.text, "qk_rope_head_dim", None):
            return self.text.qk_nope_head_dim + rotated
        if self.heads is None:
            return 128  # for a model without attention
        return getattr(self.text, "head_dim", None) or self.text.hidden_size // self.heads[0]

    @property
    def softcap(self) -> float | None:
        """The soft cap of the attention logits; None without one."""
        return getattr(self.text, "attn_logit_softcapping", None)

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks, one learned logit per head (GPT-OSS)."""
        return self.module is not None and any(name.endswith(".sinks") for name, _ in self.module.named_parameters())
