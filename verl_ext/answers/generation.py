"""Generation with transformers' own `generate` by a model in training.

The changes that training made are undone meanwhile: attention is transformers' own, which keeps a cache, and the
model's own generation config, with its penalties and temperatures, has no effect. Layers that carry a state over time
take each row as one document, because no document layout is given (verl_ext.layers.pack).

If weights are sharded by FSDP2, every forward gathers them layer by layer. So all ranks must run equally many forwards:
each continues until the last rank's batch is done (`synced_gpus`). Each rank has prompts of its own, even in a group of
ranks that share packs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, StoppingCriteria

from verl_ext.attention.kernels import PACKED_ATTENTION


@dataclass(frozen=True)
class Sampling:
    """The rules that choose an answer's tokens and its end.

    Attributes:
        max_new_tokens: the most tokens of an answer.
        stops: the tokens that end an answer.
        temperature: 0 takes the most likely token.
        top_p: tokens are drawn from the most likely ones with this total probability.
        seed: the seed of the draws.
        is_stopped: tells after each token whether nobody waits for the answers any more.
    """

    max_new_tokens: int
    stops: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    is_stopped: Callable[[], bool] | None = None

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first stop."""
        ends = [place for place, token in enumerate(tokens) if token in self.stops]
        return list(tokens[: ends[0]] if ends else tokens)


def end_tokens(tokenizer: Any, ends: Sequence[str], *others: int | None) -> tuple[int, ...]:
    """Return the tokens that end an answer, in ascending order.

    Args:
        tokenizer: its EOS is one of them.
        ends: `ChatTemplate.turn_ends`. The last one ends a chat, if it is one token. An earlier one also ends parts
            of a turn, such as gpt-oss's reasoning.
        others: further tokens, such as those of a generation config or of data.
    """
    encoded = (tokenizer(end, add_special_tokens=False)["input_ids"] for end in ends[-1:])
    tokens = {tokenizer.eos_token_id, *others, *(ids[0] for ids in encoded if len(ids) == 1)}
    return tuple(sorted(token for token in tokens if token is not None))


def generate(module: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, device: Any) -> list[list[int]]:
    """Return each prompt's continuation by a model in eval mode.

    It is without the stop token. This is a collective over all ranks of the process group, if there is one. Random
    states stay as they were.

    Args:
        module: a causal language model; its wrappers by FSDP2 and PEFT run as well.
        prompts: at least one, each of at least one token.
        sampling: the rules by which tokens are chosen.
        device: the device of the model's inputs.
    """
    # Pad on the left: every row then continues at the same column.
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
    # Draw on a fork of the random states, because training goes on with its own.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    devices = [device] if isinstance(device, int) else []
    with torch.random.fork_rng(devices), _model_as_loaded(module, config) as model:
        torch.manual_seed(sampling.seed)
        stopping = {} if sampling.is_stopped is None else {"stopping_criteria": [_Stop(sampling.is_stopped)]}
        output = model.generate(ids.to(device), attention_mask=mask.to(device), synced_gpus=ranks > 1, **stopping)
    return [sampling.cut(row) for row in output[:, width:].tolist()]


class _Stop(StoppingCriteria):
    """The end of all rows at once, when a function says so."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return for each row whether it ends."""
        return torch.full((len(input_ids),), self._is_stopped(), device=input_ids.device)


@contextmanager
def _model_as_loaded(module: Any, generation_config: GenerationConfig) -> Iterator[Any]:
    """Yield the model with transformers' attention and this generation config."""
    model = module.get_base_model() if hasattr(module, "get_base_model") else module
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    packed = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == PACKED_ATTENTION]
    # The router loss of a batch: its mask and its routers' tokens do not fit together while a cache is read.
    routed = [c for c in configs.values() if getattr(c, "output_router_logits", False)]
    before, forward = model.generation_config, vars(model).get("forward")
    for config in packed:
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # which sdpa does not apply
        has_sdpa = getattr(model, "_supports_sdpa", False) and not softcap
        config._attn_implementation_internal = "sdpa" if has_sdpa else "eager"
    for config in routed:
        config.output_router_logits = False
    model.generation_config = generation_config
    if module is not model:
        model.forward = _through(module, model)
    try:
        yield model
    finally:
        for config in packed:
            config._attn_implementation_internal = PACKED_ATTENTION
        for config in routed:
            config.output_router_logits = True
        model.generation_config = before
        if module is not model:
            del model.forward
            if forward is not None:
                model.forward = forward


def _through(module: Any, model: Any) -> Any:
    """Return a forward of `model` that runs the module around it.

    FSDP2's root, whose hooks must run, is PEFT's wrapper.
    """
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        model.forward = plain
        try:
            return module(*args, **kwargs)
        finally:
            model.forward = forward

    return forward


@torch.no_grad()
def generation_problem(model: Any) -> str | None:
    """Return why a model cannot answer in batches; None if it can.

    The model, a small one of its architecture, answers prompts of two lengths together and alone; its answers differ if
    rows read their padding.
    """
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 190, (length,), generator=draw).tolist() for length in (17, 9)]
    sampling = Sampling(max_new_tokens=5)
    try:
        together = generate(model, prompts, sampling, "cpu")
        alone = [generate(model, [prompt], sampling, "cpu")[0] for prompt in prompts]
    except Exception as error:  # a model's code can raise any exception
        return f"transformers' generate fails ({type(error).__name__}: {error})"
    return None if together == alone else "padded prompts are answered otherwise than alone"
