"""A run prepared for a plan's GPUs, which may not be here."""

import sys
from dataclasses import replace

import torch
from omegaconf import DictConfig

from verl_ext.attention import unusable
from verl_ext.config.keys import RATE
from verl_ext.config.run import Machine
from verl_ext.layers import mixers_of
from verl_ext.options import must
from verl_ext.tools.plan.options import PlanOptions, num_bytes
from verl_ext.trainer.distributed import print_on_rank0, user_errors_end_the_run
from verl_ext.trainer.inputs import open_data
from verl_ext.trainer.run import Opened
from verl_ext.trainer.setup import check, this_machine


def planned_run(composed: DictConfig, plan: PlanOptions) -> tuple[Opened, PlanOptions]:
    """Prepare a run on the planned machine.

    Returns it, and the plan with the properties of its GPU. Liger's kernels, and attention packages that are not
    installed here, are turned off in `composed`. A mistake ends the process.
    """
    with user_errors_end_the_run():
        trainer = composed.trainer
        for name in ("gpu", "gpu_memory"):
            if (value := getattr(plan, name)) is not None and trainer.device == "cpu":
                raise ValueError(must(f"plan.{name}", "be null with trainer.device=cpu (parallel=cpu)", value))
        plan = plan.with_values_of_gpu(trainer.gpu_peak_tflops)
        if plan.gpu_memory is None:
            machine = replace(this_machine(), world_size=plan.world_size)
        else:
            machine = Machine(plan.world_size, "cuda", gpu=plan.gpu or f"GPU of {plan.gpu_memory}")
            if composed.model.use_liger is True:
                composed.model.use_liger = False
                less = "note: model.use_liger=true is planned without Liger's kernels, which need less memory"
                print_on_rank0([less], sys.stderr)
            if unusable(composed.attention.backend):
                composed.attention.backend = "auto"  # torch's own flash attention, which needs the same memory
        if composed.optim.lr is None:  # of which neither memory nor time depends
            composed.optim.lr = float(RATE)
            print_on_rank0([f"note: optim.lr is not given, and read as {RATE} here; the run must have one"], sys.stderr)
    checked = check(composed, machine)
    model = checked.model
    with user_errors_end_the_run():
        mixers = () if plan.gpu_memory is None or model.module is None else mixers_of(model.module)
        states = {type(layer).__name__ for layer, mixer in mixers if mixer.time not in ("attention", "positions")}
        if states:  # a plan would measure torch's code, which needs other memory
            why = f"the GPU kernels of {', '.join(sorted(states))} run on no fake GPU"
            needed = f"be null for a {type(model.hf_config).__name__}"
            raise ValueError(must("plan.gpu_memory", f"{needed}: {why}", plan.gpu_memory))
    run = open_data(checked)
    print_on_rank0((f"note: {notice}" for notice in run.notices), sys.stderr)
    return run, plan


def gpu_memory(run: Opened, plan: PlanOptions) -> int | None:
    """Return the bytes of a planned or visible GPU; None without."""
    if plan.gpu_memory is not None:
        return num_bytes(plan.gpu_memory)
    if run.config.trainer.device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory
