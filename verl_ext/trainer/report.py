"""The report of the data: packs, changed documents, mixtures and steps.

It is a dict of plain numbers, which rank 0 prints once (:mod:`verl_ext.trainer.report_lines`) and writes beside the
run as data_report.json.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.checkpoint.layout import REPORT
from verl_ext.files import write_json
from verl_ext.redaction import redacted
from verl_ext.trainer.step_plan import StepPlan

if TYPE_CHECKING:
    from verl_ext.config.run import RunConfig
    from verl_ext.data import PackDataset, PackFacts

Facts = dict[str, Any]


def what_runs(config: "RunConfig", backend: str, head: str) -> str:
    """Describe the run in one line.

    `8 × NVIDIA H200 · bf16 · attention varlen (FA3) · head fused · AdamW fused · rate 1e-05, cosine to 1e-06 · warm-up
    3% · decay 0.01 on all`
    """
    name = "CPU (gloo)" if config.trainer.device == "cpu" else config.machine.gpu
    kernel, head, optimizer = implementations(config, backend, head)
    ranks, dtype = config.machine.world_size, config.param_dtype
    parts = [f"{ranks} × {name}", dtype, f"attention {kernel}", f"head {head}", optimizer]
    return " · ".join([*parts, *([] if config.trainer.eval_only else _optimization(config.optim))])


def _optimization(optim: Any) -> Iterator[str]:
    """Yield a run's rate with its schedule, its warm-up and its decay."""
    floor = (optim.min_lr_ratio or 0) * optim.lr
    falls = "" if optim.lr_scheduler_type == "constant" else f" to {floor:g}"
    yield f"rate {optim.lr:g}, {optim.lr_scheduler_type}{falls}"
    steps, share = optim.lr_warmup_steps or 0, optim.lr_warmup_steps_ratio
    yield f"warm-up {steps} steps" if steps > 0 else f"warm-up {share:.3g} of the steps" if share else "no warm-up"
    yield f"decay {optim.weight_decay:g} on {optim.decay}" if optim.weight_decay else "no decay"


def implementations(config: "RunConfig", backend: str, head: str) -> tuple[str, str, str]:
    """Return the names (kernel, head, optimizer), as in :func:`what_runs`."""
    from verl_ext.attention.kernels import KERNEL_NAMES  # here, because facts of data need neither verl nor kernels
    from verl_ext.engines.optimizer import implementation

    engine = config.engine
    form = implementation(
        vars(config.optim), config.trainer.device, engine.offload_policy, config.param_dtype == "fp16"
    )
    return KERNEL_NAMES.get(backend, backend), head, f"{config.optim.optimizer} {form or ''}".strip()


def data_facts(dataset: "PackDataset") -> Facts:
    """Return a dataset's documents, tokens, targets, packs, fill and omitted documents.

    The counts of documents, tokens and target_tokens are those of the packs, as often as a mixture draws each document.
    computed_tokens: of the tokens, those that packs have, if documents share tokens.
    """
    facts, packs = dataset.facts(), len(dataset)
    computed = int(facts.tokens.sum())
    shared = {} if facts.shared is None else {"computed_tokens": computed}
    return {
        "folders": list(dataset.folders),
        "documents": int(facts.documents.sum()),
        "tokens": int(facts.document_tokens.sum()),
        **shared,
        "target_tokens": int(facts.targets.sum()),
        "packs": packs,
        "max_tokens": dataset.max_tokens,
        "fill": computed / max(packs * dataset.max_tokens, 1),
        "mixture": [vars(row) for row in facts.mixture],
        **dataset.report(),
    }


def step_facts(packs: "PackFacts", plan: StepPlan, ranks: int, micro_batch_size: int) -> Facts:
    """Return numbers about an epoch's steps on so many data-parallel ranks.

    busy is the share of an epoch in which an average rank works, by the packs' costs.
    """
    shuffled = StepPlan(plan.num_packs, plan.batch_size, plan.seed, plan.drop_last)
    left_out = plan.left_out(0)
    return {
        "steps_per_epoch": plan.steps_per_epoch,
        "epochs_of_plan": packs.epochs,
        "packs_per_step": plan.batch_size,
        "packs_in_last_step": plan.batch_size if plan.drop_last else (plan.num_packs - 1) % plan.batch_size + 1,
        "data_parallel_ranks": ranks,
        "busy": 1 / plan.cost_over_ideal(packs.costs, ranks, micro_batch_size),
        "busy_if_shuffled": 1 / shuffled.cost_over_ideal(packs.costs, ranks, micro_batch_size),
        "left_out_packs": len(left_out),
        "left_out_documents": int(packs.documents[left_out].sum()),
        "left_out_tokens": int(packs.tokens[left_out].sum()),
    }


def write_report(report: Mapping[str, Facts], folder: Path) -> None:
    """Write `report` atomically to data_report.json in `folder`."""
    write_json(folder / REPORT, redacted(report))
