"""When rows of tokens are fewer bytes than the weights of experts that ranks need not gather.

    weights      P · (4 + 4/m)     P of a layer's experts in bf16, gathered twice, and reduced in fp32 once in m
                                   micro-batches
    a token      4 · H · k · p     rows in bf16, to the experts and back in each of p passes

Sharing among N ranks saves the former and moves the latter, both times 1 - 1/N: N has no part in it.

Legend: H hidden size, k experts a token.
"""

from typing import Any

from verl_ext.config.architecture import Architecture
from verl_ext.flops import chosen_experts
from verl_ext.parallel.experts import expert_layers
from verl_ext.trainer.run import Opened


def break_even(run: Opened, micro_batch_tokens: int) -> dict[str, Any]:
    """Return a rank's `tokens` in a micro-batch, and the number `even_at` at which both are equal."""
    config, model = run.config, Architecture(run.model.hf_config)
    largest = max(sum(p.numel() for p in layer.parameters() if p.ndim == 3) for layer in expert_layers(model.module))
    micro_batches = config.data.train_batch_size // config.data.micro_batch_size_per_gpu // config.data_parallel_size
    reductions = 1 if config.engine.use_no_sync_for_gradient_accumulation else micro_batches
    of_weights = largest * (4 + 4 * reductions / micro_batches)
    passes = 3 if config.model_options.enable_gradient_checkpointing else 2
    of_token = 4 * model.text.hidden_size * (chosen_experts(model.text) or 1) * passes
    return {"tokens": micro_batch_tokens // config.sequence_parallel_size, "even_at": round(of_weights / of_token)}
