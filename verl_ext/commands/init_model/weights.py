"""Random weights, drawn once and saved."""

import math
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from verl_ext.commands.init_model.architecture import meta_model
from verl_ext.progress import progress_bar

SHARD_BYTES = 5 * 10**9  # of one file of weights


def random_model(config: Any, seed: int, dtype: str) -> Any:
    """The model of `config` with the weights of its architecture's own initialisation, on the CPU.

    The draw depends on the config and the seed, not on `dtype`: bfloat16 weights are the float32 ones, rounded. The
    memory is that of the float32 weights, and of a head that is tied to the embedding a second time until it is.
    """
    parameters = meta_model(config).named_parameters(remove_duplicate=False)
    drawn = 2 * sum(weight.numel() for _, weight in parameters if weight.dim() > 1)
    with torch.random.fork_rng(devices=[]), progress_bar("random weights", drawn, unit_scale=True) as bar:
        torch.manual_seed(seed)
        with _DrawnNumbers(bar):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _draw_residual_outputs(model)
        bar.update(drawn - bar.n)
    return model.to(getattr(torch, dtype))


def _draw_residual_outputs(model: Any) -> None:
    """GPT-2's layers write to the residual stream with a spread of ``initializer_range / √(2·layers)``, so that its
    own does not grow with depth (https://openai.com/blog/better-language-models).

    transformers means to do so and looks for parameters named ``c_proj.weight``, which from where it looks none is.
    """
    config = model.config
    if config.model_type != "gpt2":
        return
    for name, weight in model.named_parameters():
        if name.endswith("c_proj.weight"):
            torch.nn.init.normal_(weight, std=config.initializer_range / math.sqrt(2 * config.n_layer))


class _DrawnNumbers(TorchFunctionMode):
    """Counts on a bar the numbers that torch's initialisers draw: each weight's by its module, then by the model."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self.bar = bar

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"):
            self.bar.update(min(result.numel(), self.bar.total - self.bar.n))
        return result


def count_parameters(model: Any) -> tuple[int, int]:
    """Parameters in all, tied ones once, and those outside embeddings and the output head."""
    head = model.get_output_embeddings()
    outside = {id(weight) for weight in model.parameters()}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) or module is head:
            outside -= {id(weight) for weight in module.parameters()}
    sizes = {id(weight): weight.numel() for weight in model.parameters()}
    return sum(sizes.values()), sum(sizes[weight] for weight in outside)


def save_model(model: Any, folder: Path) -> None:
    """Write config.json, generation_config.json and safetensors, which copies no weight. A bar counts several files."""
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    quiet = num_bytes <= SHARD_BYTES and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    finally:
        if quiet:
            logging.enable_progress_bar()
