"""Generation by transformers' own `generate`, of a model that trains on packs and may be sharded by FSDP2.

What training has changed is set back for the time of generation: attention is transformers' own, which keeps a cache,
and the model's generation config, with its penalties and temperatures, is out of effect. Layers that carry a state over
time compute rows as they are, since no document layout is given (verl_ext.layers.pack).

Of sharded weights a rank holds one layer at a time, gathered in every forward. All ranks therefore run equally many
forwards: until the last rank's batch is done (`synced_gpus`). Each rank has prompts of its own, also inside a group of
ranks that share packs.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from verl_ext.attention.kernels import PACKED_ATTENTION


@dataclass(frozen=True)
class Sampling:
    """How an answer is chosen, token by token, and when it ends.

    Attributes:
        max_new_tokens: the most tokens of an answer.
        stops: tokens of which each ends it.
        temperature: 0 takes the likeliest token.
        top_p: tokens are drawn among the likeliest of this probability.
        seed: of the draws.
    """

    max_new_tokens: int
    stops: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first stop."""
        ends = [place for place, token in enumerate(tokens) if token in self.stops]
        return list(tokens[: ends[0]] if ends else tokens)


def generate(module: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, device: Any) -> list[list[int]]:
    """Return the tokens that a model in eval mode continues each prompt with, stops left out.

    Collective over all ranks of the process group, if there is one. Random states are left as they were.

    Args:
        module: a causal language model; FSDP2's and PEFT's wrappers are run through.
        prompts: at least one, each of at least one token.
        sampling: how tokens are chosen.
        device: of the model's inputs.
    """
    width = max(map(len, prompts))
    pad = sampling.stops[0] if sampling.stops else 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    draws = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=bool(sampling.temperature),
        eos_token_id=list(sampling.stops) or None,
        pad_token_id=pad,
        **draws,
    )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    devices = [device] if isinstance(device, int) else []
    with torch.random.fork_rng(devices), _model_as_loaded(module, config) as model:
        torch.manual_seed(sampling.seed)
        output = model.generate(ids.to(device), attention_mask=mask.to(device), synced_gpus=ranks > 1)
    return [sampling.cut(row) for row in output[:, width:].tolist()]


@contextmanager
def _model_as_loaded(module: Any, generation_config: GenerationConfig) -> Iterator[Any]:
    """Give transformers' model inside a module as it is without packs, with a generation config of its own."""
    model = module.get_base_model() if hasattr(module, "get_base_model") else module
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    packed = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == PACKED_ATTENTION]
    own_config, own_forward = model.generation_config, vars(model).get("forward")
    for config in packed:
        config._attn_implementation_internal = _attention(model, config)
    model.generation_config = generation_config
    if module is not model:
        model.forward = _through(module, model)
    try:
        yield model
    finally:
        for config in packed:
            config._attn_implementation_internal = PACKED_ATTENTION
        model.generation_config = own_config
        if module is not model:
            del model.forward
            if own_forward is not None:
                model.forward = own_forward


def _attention(model: Any, config: Any) -> str:
    """Return transformers' attention that computes all of a model's: sdpa has no soft cap, and not every model it."""
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not softcap else "eager"


def _through(module: Any, model: Any) -> Any:
    """Return a forward of `model` that runs the module around it, with its hooks: FSDP2's root is PEFT's wrapper."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        model.forward = own
        try:
            return module(*args, **kwargs)
        finally:
            model.forward = forward

    return forward


@torch.no_grad()
def generation_problem(model: Any) -> str | None:
    """Return why a small model of an architecture cannot answer prompts in batches; None if it can.

    Prompts of two lengths are answered together, and alone: a model whose rows read their padding differs.
    """
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 190, (length,), generator=draw).tolist() for length in (17, 9)]
    sampling = Sampling(max_new_tokens=5)
    try:
        together = generate(model, prompts, sampling, "cpu")
        alone = [generate(model, [prompt], sampling, "cpu")[0] for prompt in prompts]
    except Exception as error:  # a model's code raises whatever it meets
        return f"transformers' generate fails ({type(error).__name__}: {error})"
    return None if together == alone else "padded prompts are answered otherwise than alone"
