"""The time of a step on absent GPUs, from FLOPs and bytes.

    micro-step    the computation of its most expensive pack, or FSDP's traffic if that takes longer
                  + the exchange of heads, keys and values, and of tokens of experts, which no computation hides

The FLOPs are those of every pack of the epoch in its order over the ranks. The bytes are those of the heaviest packs on
the fake GPU: parameters count for each micro-step, gradients for each step, the others for each token of a pack.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from verl_ext.config.run import RunConfig
from verl_ext.flops import peak_flops
from verl_ext.packing import micro_step_costs
from verl_ext.tools.plan.options import PlanOptions, num_bytes
from verl_ext.tools.plan.run import Job, Prediction
from verl_ext.tools.plan.traffic import EXCHANGES, GATHERED, MATRICES_OF_STEP, REDUCED, TOKENS, Received
from verl_ext.trainer.run import Opened

LINK_SHARE = 0.75  # the share of a link's rate that collectives of large tensors reach


def not_hidden(traffic: Any, computing: Any, layers: float = math.inf) -> Any:
    """Return the seconds of traffic that computation does not hide.

    They are at least those of one of `layers`, which nothing hides.
    """
    return np.maximum(traffic - computing * (1 - 1 / layers), traffic / layers)


def time_facts(run: Opened, config: RunConfig, plan: PlanOptions, job: Job, prediction: Prediction) -> dict[str, Any]:
    """Return the times of a mean step and of the run.

    They are plain values; `failed` is a line with the reason for none.

    Args:
        run: the planned run.
        config: the config of the run, or one with another number of ranks that share a pack.
        plan: the GPUs, with the properties of `plan.gpu`.
        job: the steps that ran under that config.
        prediction: the prediction for these steps.
    """
    if prediction.flops is None or prediction.computed is None:
        return {"failed": "the FLOPs of the model are not known: of its experts, or attention in chunks"}
    data, ranks = config.data, config.machine.world_size
    peak = config.trainer.gpu_peak_tflops
    peak = peak * 1e12 if peak else peak_flops(str(plan.gpu))
    assert peak is not None, "the options are checked"
    groups, micro_batch = config.data_parallel_size, data.micro_batch_size_per_gpu
    steps = replace(run.plan, group_size=data.balance_group or groups)

    def of_epoch(values: np.ndarray) -> np.ndarray:
        return values[steps.order(0)]

    def slowest(values: np.ndarray) -> np.ndarray:
        return micro_step_costs(of_epoch(values), groups, data.train_batch_size, micro_batch)

    # A micro-step lasts as long as its most expensive pack on any rank, so costs are per micro-step, not per rank.
    tokens, flops, computed = (
        run.packs.tokens.astype(float),
        run.train_set.facts(prediction.flops).costs,
        run.train_set.facts(prediction.computed).costs,
    )
    speed = plan.efficiency * peak * config.sequence_parallel_size
    computing = slowest(computed) / speed
    micro_steps = computing.size
    received, seconds = _traffic(config, plan, job, prediction)
    reduced_a_step = 1 if config.engine.use_no_sync_for_gradient_accumulation else computing.shape[1]
    fsdp = np.full(computing.shape, seconds[GATHERED])
    fsdp[:, -reduced_a_step:] += seconds[REDUCED]
    exchange = slowest(tokens) * sum(seconds[name] for name in EXCHANGES)
    of_experts = slowest(tokens) * seconds[TOKENS]
    # FSDP's traffic runs beside the computation: only what takes longer than it costs time.
    shown = not_hidden(fsdp, computing)
    count = len(computing)
    ideal = of_epoch(computed).sum() / (groups * speed)
    step_seconds = float((computing + shown + exchange).sum()) / count
    model_flops, step_tokens = float(of_epoch(flops).sum()) / count, float(of_epoch(tokens).sum()) / count
    hours = step_seconds * run.total_steps / 3600
    # Passes beside those of the steps' packs, which only losses of preferences need.
    passes = ["the reference's pass over the data"] * run.objective.has_reference
    passes += ["a step's forward pass of mismatched answers"] * (run.objective.mismatched is not None)
    return {
        "gpu": str(plan.gpu),
        "peak_flops": peak,
        "efficiency": plan.efficiency,
        "tokens": step_tokens,
        "model_flops": model_flops,
        "computed_flops": float(of_epoch(computed).sum()) / count,
        "received": {
            GATHERED: received[GATHERED] * micro_steps / count,
            REDUCED: received[REDUCED] * reduced_a_step,
            **{name: received[name] * step_tokens / groups for name in EXCHANGES},
            MATRICES_OF_STEP: received[MATRICES_OF_STEP],
        },
        "seconds": {
            "computing": float(ideal) / count,
            "waiting for the slowest rank": float(computing.sum() - ideal) / count,
            "FSDP's traffic that no computation hides": float(shown.sum()) / count,
            "exchanging heads, keys and values": float((exchange - of_experts).sum()) / count,
            f"exchanging {TOKENS}": float(of_experts.sum()) / count,
        },
        "step_seconds": step_seconds,
        "tokens_per_second": step_tokens / step_seconds / ranks,
        "mfu": model_flops / step_seconds / (ranks * peak),
        "steps": run.total_steps,
        "hours": hours,
        "gpu_hours": hours * ranks,
        "left_out": passes,
    }


def _traffic(
    config: RunConfig, plan: PlanOptions, job: Job, prediction: Prediction
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a rank receives, and their seconds, by kind.

    They are those of a micro-step for parameters, of a reduction for gradients, of a step for Muon's matrices, and of a
    token for the exchanges: the heaviest packs ran, not the mean ones, so their bytes are divided by what each kind
    grows with.
    """
    link, network = (LINK_SHARE * (num_bytes(rate) or 0) for rate in (plan.link, plan.network))
    batches = [batch for step in job.steps for batch in step]
    reductions = len(job.steps) if config.engine.use_no_sync_for_gradient_accumulation else len(batches)
    units = {GATHERED: len(batches), REDUCED: reductions, MATRICES_OF_STEP: len(job.steps)}
    units |= dict.fromkeys(EXCHANGES, sum(len(batch.input_ids) for batch in batches))
    got = {name: prediction.received.get(name, Received()) for name in units}
    seconds = {name: max(each.bytes / link, each.remote / network) / units[name] for name, each in got.items()}
    return {name: each.bytes / units[name] for name, each in got.items()}, seconds
